"""The p.grad of parameters: which tensor was put there, and how the user has changed it since.

Knows: the tensor that was put into each p.grad: a mean that this rank holds whole, a placeholder, or None. If there is
another one, the user has put it there. Does not know: when gradients are reduced, or by whom.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..core.layout import ParameterSpec
from ..core.parameter_specs import as_plain
from .hooks import Listener, ShardedGradient


@dataclass
class Changes:
    """The user's changes of p.grad. ``cleared``: set to None; ``replaced``: tensors in the place of means;
    ``foreign_grad``: the name of a parameter to whose p.grad the user assigned a tensor in no mean's place."""

    cleared: list[int]
    replaced: list[tuple[int, Tensor]]
    foreign_grad: str | None


class GradSlots:
    """The p.grad of each parameter, by its index in the layout."""

    def __init__(self, listener: Listener) -> None:
        self._listener = weakref.ref(listener)
        self._parameters: list[Tensor] = []
        self._specs: list[ParameterSpec] = []
        self._held: list[Tensor | None] = []
        self._placeholders: list[ShardedGradient | None] = []

    def extend(self, parameters: Sequence[Tensor], specs: Sequence[ParameterSpec]) -> None:
        """Register further parameters."""
        self._parameters += parameters
        self._specs += specs
        self._held += [None] * len(parameters)
        self._placeholders += [None] * len(parameters)

    def put(self, index: int, gradient: Tensor | None) -> RuntimeError | None:
        """Put ``gradient`` into p.grad. If torch refuses it, since the parameter was cast or moved, put None and return
        the error."""
        if self._held[index] is not gradient or self._parameters[index].grad is not gradient:
            return self._give(index, gradient)
        return None

    def _give(self, index: int, gradient: Tensor | None) -> RuntimeError | None:
        try:
            self._parameters[index].grad = self._held[index] = gradient
        except RuntimeError as refused:
            self._parameters[index].grad = self._held[index] = None
            return refused
        return None

    def put_placeholder(self, index: int) -> RuntimeError | None:
        """`put` the parameter's placeholder."""
        made = self._placeholders[index]
        if made is None:
            made = ShardedGradient(self._specs[index], index, self._listener)
            self._placeholders[index] = made
        return self._give(index, made)

    def withdraw(self) -> None:
        """Put placeholders in the place of means, so that autograd does not add to these."""
        for index, held in enumerate(self._held):
            if held is not None:
                self.put_placeholder(index)

    def shows_mean(self, index: int) -> bool:
        """Return True if the mean itself was put into p.grad, where the user may edit or replace it."""
        held = self._held[index]
        return held is not None and not isinstance(held, ShardedGradient)

    def mean(self, index: int) -> Tensor | None:
        """Return the mean that was put into p.grad; None if none was."""
        return self._held[index] if self.shows_mean(index) else None

    def held(self) -> Iterator[int]:
        """Yield the indices of the parameters into whose p.grad a tensor was put."""
        return (index for index, held in enumerate(self._held) if held is not None)

    def detect_changes(self) -> Changes:
        """Return the user's changes since tensors were put. Cleared gradients are reported once."""
        with as_plain():  # a released parameter would be asked in Python
            found = [
                (index, parameter.grad, held)
                for index, (parameter, held) in enumerate(zip(self._parameters, self._held, strict=True))
                if parameter.grad is not held
            ]
        changes = Changes([], [], None)
        for index, gradient, held in found:
            if gradient is None:
                changes.cleared.append(index)
                self._held[index] = None
            elif held is not None and self.shows_mean(index):
                changes.replaced.append((index, gradient))
            elif changes.foreign_grad is None:
                changes.foreign_grad = self._specs[index].name
        return changes

    def put_placeholders(self, indices: Sequence[bool]) -> None:
        """Put placeholders where ``indices`` is true and p.grad is None or the user's."""
        with as_plain():
            bare = [
                index
                for index, (parameter, held) in enumerate(zip(self._parameters, self._held, strict=True))
                if held is None or parameter.grad is not held
            ]
        for index in bare:
            if indices[index]:
                self.put_placeholder(index)

    def clear(self) -> None:
        """Set every p.grad to None."""
        with as_plain():
            for parameter in self._parameters:
                parameter.grad = None
        self._held = [None] * len(self._parameters)

    def release(self) -> None:
        """Make p.grad the user's own: a copy of a mean, or None."""
        for index, held in enumerate(self._held):
            if held is not None and self._parameters[index].grad is held:
                self._parameters[index].grad = held.clone() if self.shows_mean(index) else None
