"""Mutants of uses of released parameters: conversion, differentiation, and methods that read them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .mutant import Edit, Mutant, Wrap

HABITS = "parameters/test_stage3_habits.py"


def wrapping(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of a method's replacement that keeps the method as `functools.wraps` does."""

    def made(self: Any, module: Any, name: str, *hooks: Any) -> None:
        plain = getattr(module, name)
        init(self, module, name, *hooks)
        functools.update_wrapper(self, plain)

    return made


MUTANTS = (
    Mutant(
        "a-backward-for-parameters-shows-stand-ins",
        ("L2",),
        "In `backward(inputs=parameters)` released parameters are ordinary tensors: hooks of the user's read NaN.",
        (
            Edit(
                "zero.parameters.released._accumulated",
                "    return func(tensors, inputs=_edges(inputs), **options)\n",
                "    with as_plain():\n        return func(tensors, inputs=inputs, **options)\n",
            ),
        ),
        (f"{HABITS}::test_a_hook_inside_a_backward_for_parameters_never_sees_their_stand_ins[backward]",),
    ),
    Mutant(
        "a-conversion-of-a-released-parameter-is-nothing",
        ("L2",),
        "Any `to()` of a released parameter gives the parameter itself, also one that would change it or copy it.",
        (
            Edit(
                "zero.parameters.released._converted",
                "    return parameter if same else NotImplemented\n",
                "    return parameter if same or spec.shape else NotImplemented\n",
            ),
        ),
        (
            "parameters/test_released.py::test_a_released_parameter_gives_no_value_and_harms_nothing_at_any_moment[p.to(float64)]",
        ),
    ),
    Mutant(
        "what-was-refused-ends-the-forward-around-it",
        ("L3",),
        "A forward that was refused before it began ends another one of the same module, inside which it was called.",
        (
            Edit(
                "zero.parameters.unit_hooks.UnitHooks.entered",
                "            self._enter(forward)  # before what may raise: `left` will find it\n",
                "            pass\n",
            ),
            Edit(
                "zero.parameters.unit_hooks.UnitHooks.entered",
                "        if not inner:\n            self._begin",
                "        if inner:\n            self._enter(forward)\n        else:\n            self._begin",
            ),
        ),
        (f"{HABITS}::test_a_transform_that_was_refused_inside_a_forward_ends_no_other",),
    ),
    Mutant(
        "a-method-that-raises-never-ends",
        ("L3",),
        "An exception in a registered method leaves its unit gathered, and saved-tensor hooks in place.",
        (
            Edit(
                "zero.parameters.module_hooks.ForwardMethod.__call__",
                "        try:\n            self._before(module)\n"
                "            output = self._plain(module)(*args, **kwargs)\n        finally:\n"
                "            self._after(module, None, output)\n",
                "        self._before(module)\n        output = self._plain(module)(*args, **kwargs)\n"
                "        self._after(module, None, output)\n",
            ),
        ),
        ("parameters/test_forward_methods.py::test_close_takes_them_away_and_nothing_stays_gathered_before[1]",),
    ),
    Mutant(
        "a-registered-method-holds-its-module",
        ("L5",),
        "A registered method has the plain one as `__wrapped__`, so a module with one waits for the garbage collector.",
        (Wrap("zero.parameters.module_hooks.ForwardMethod.__init__", wrapping),),
        ("parameters/test_forward_methods.py::test_a_registered_method_looks_like_the_plain_one",),
    ),
    Mutant(
        "a-method-inside-a-forward-begins-the-order-anew",
        ("L6",),
        "A registered method of the model that its forward calls forgets which units come next: none is fetched ahead.",
        (
            Edit(
                "zero.parameters.unit_hooks.UnitHooks.entered",
                "if hooks.is_root and all(hooks is not other.hooks for other in self._running[:-1]) and",
                "if hooks.is_root and",
            ),
        ),
        ("parameters/test_forward_methods.py::test_methods_inside_a_forward_begin_no_order_of_their_own",),
    ),
)
