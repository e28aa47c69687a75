"""Classes that exchange the weights between training and evaluation: the public calls, and a check of forwards.

Knows: the mode of an optimizer beside that of its module. Does not know: what a class exchanges, when ranks may.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..runtime.compiled_calls import untraced_methods

WRONG_MODE = (
    "a forward in {module} mode with the weights of the optimizer's {optimizer} mode: call optimizer.{module}() on all "
    "ranks where model.{module}() is called"
)


@untraced_methods
class WithModes:
    """The calls of a `ZeroOptimizer` whose class has `train` and `eval`. Without such a class it has neither."""

    _engine: Any
    _user_optimizers: Any
    param_groups: Any

    @property
    def train(self) -> Callable[[], None]:
        """Exchange the weights for those with which steps are taken, by the class's ``train()``. All ranks.

        Call it before the first step and after each evaluation. Like `eval`, it is called between a backward and a step
        or between steps, outside of `join` and `gathered`. All ranks raise the same `RuntimeError` otherwise, and if a
        parameter was cast, moved or replaced. A call in that mode does nothing and sends nothing. With
        `mixed_precision` the class exchanges master weights, which are then rounded. Without a class that has both
        methods, this attribute is an `AttributeError`.
        """
        return self._call_of("train")

    @property
    def eval(self) -> Callable[[], None]:
        """Exchange the weights for those that are evaluated, by the class's ``eval()``. All ranks. See `train`."""
        return self._call_of("eval")

    def _call_of(self, mode: str) -> Callable[[], None]:
        if not self._user_optimizers.with_modes():
            raise AttributeError(
                f"{self._user_optimizers.names()} has no train() and eval(), and trains and evaluates the same "
                f"weights: leave out optimizer.{mode}()"
            )

        def call() -> None:
            self._engine.set_mode(self.param_groups, mode)

        call.__qualname__ = f"ZeroOptimizer.{mode}"  # torch's modules have train(False), which is refused by this name
        return call


class ModeCheck:
    """A forward-pre hook that warns once if a module runs with the weights of the other mode.

    It does nothing once the engine is gone. A copy of the module has one that does nothing. A compiler leaves it out.
    """

    def __init__(self, engine: Any = None) -> None:
        """``engine``: has ``wrong_mode``, which returns the mode of the weights if it is not the one given."""
        self._engine = None if engine is None else weakref.ref(engine)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self._engine is None:
            return
        engine = self._engine()
        wanted = "train" if module.training else "eval"
        wrong = None if engine is None else engine.wrong_mode(wanted)
        if wrong is not None:
            self._engine = None
            warnings.warn(WRONG_MODE.format(module=wanted, optimizer=wrong), RuntimeWarning, stacklevel=5)
