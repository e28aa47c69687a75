"""Mutants of stage 3 with compiled models and checkpointed blocks."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from .mutant import Edit, Mutant, Wrap

NAMES = "core/test_names.py"
STEPS = "contract/test_compiled_steps.py"
TESTS = "parameters/test_units_compile.py"
GRAPHS = f"{TESTS}::test_a_compiled_unit_has_the_graphs_of_the_plain_model"


def undecorated(_: Any) -> Callable[[type], type]:
    """Leave the methods of each class to Dynamo."""
    return lambda cls: cls


def traced(function: FunctionType) -> FunctionType:
    """Return the same function with code that Dynamo does not know."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)


def torchs_own_names(_: Any) -> Callable[..., Any]:
    """Name parts as `named_modules` does, with what wrappers put into the names."""
    return lambda module, *, remove_duplicate=True: module.named_modules(remove_duplicate=remove_duplicate)


def names_as_they_are(_: Any) -> Callable[..., Any]:
    """Understand no name that has a wrapper in it."""
    return lambda values, known: dict(values)


MUTANTS = (
    Mutant(
        "a-compiled-model-has-names-of-its-own",
        ("P31", "P33"),
        "Names in a checkpoint of `torch.compile(model)` begin with `_orig_mod.`: it does not fit the plain model.",
        (Wrap("zero.core.names.named_parts", torchs_own_names),),
        (f"{NAMES}::test_parts_and_tensors_of_a_wrapped_model_have_the_names_of_the_plain_one[both]",),
    ),
    Mutant(
        "old-names-of-a-compiled-model-fit-no-model",
        ("P32",),
        "A checkpoint that has `_orig_mod.` inside its names is taken for that of another model.",
        (Wrap("zero.core.names.by_known_name", names_as_they_are),),
        (f"{NAMES}::test_a_name_with_wrappers_is_that_of_the_model_unless_the_model_has_both",),
    ),
    Mutant(
        "a-compiled-step-is-traced",
        ("L1",),
        "`torch.compile(optimizer.step)` traces into the library: other bits than the eager step, or an error.",
        (Wrap("zero.runtime.compiled_calls.untraced_methods", undecorated),),
        (f"{STEPS}::test_a_compiled_step_has_the_eager_bits_and_is_compiled_once[step-1]",),
    ),
    Mutant(
        "a-hook-of-a-graph-is-traced",
        ("L1",),
        "A backward inside what is compiled has Dynamo trace the hook that installs a unit: graphs of our own code.",
        (Wrap("zero.parameters.module_hooks.ModuleHooks._reached", traced),),
        (f"{STEPS}::test_a_compiled_step_has_the_eager_bits_and_is_compiled_once[function-3]",),
    ),
    Mutant(
        "hooks-lie-inside-a-compiled-unit",
        ("L1",),
        "The hooks of a unit break the graph that `module.compile()` made: it is another one than in the plain loop.",
        (
            Edit(
                "zero.parameters.module_hooks.ModuleHooks.arrange",
                "if module._compiled_call_impl is not self._surrounded:\n            self._surround(module)",
                "if module._compiled_call_impl is self._compiled is not None:\n            self._surround(module)",
            ),
        ),
        (f"{GRAPHS}[Linear-module.compile()]",),
    ),
    Mutant(
        "a-unit-lies-inside-what-compiles-it",
        ("L1",),
        "The unit is what lies inside `torch.compile(module)`: its hooks break the graph.",
        (Edit("zero.core.units._has_forward", "getattr(module.forward,", "getattr(type(module).forward,"),),
        (f"{GRAPHS}[Linear-torch.compile(module)]",),
    ),
    Mutant(
        "what-a-graph-keeps-is-compiled",
        ("L1",),
        "Dynamo traces the hooks for saved tensors where it passes over a forward: other graphs, of our own code.",
        (
            Edit(
                "zero.parameters.gathered.saved_tensor_hooks.SavedTensorHooks._hooks.pack",
                "        @untraced\n        def pack",
                "        def pack",
            ),
        ),
        (f"{TESTS}::test_a_compiled_unit_that_travels_has_the_graphs_of_the_plain_model[Sequential]",),
    ),
    Mutant(
        "a-checkpoint-keeps-parameters",
        ("L3",),
        "Torch's composable checkpoint saves parameters in the forward that are ours when it recomputes: an error.",
        (
            Edit(
                "zero.parameters.module_hooks.ModuleHooks.arrange",
                "if owner is not None and owner.needs_gather and self._surrounded is None:\n",
                "if owner is not None and owner.needs_gather and self._surrounded is not None:\n",
            ),
        ),
        (
            "parameters/test_units_checkpoints.py::test_units_are_recomputed_with_the_bits_of_the_plain_loop[every_unit-before-2]",
        ),
    ),
    Mutant(
        "a-broken-graph-is-not-said",
        ("L2",),
        "A whole compiled model trains other bits than the same compiled plain loop, and nothing says so.",
        (
            Edit(
                "zero.parameters.module_hooks._run",
                "hook.act(inside_compiled_call(), arguments)",
                "hook.act(False, arguments)",
            ),
        ),
        (f"{TESTS}::test_a_graph_that_is_broken_at_units_is_said_once[after-model.compile()]",),
    ),
)
