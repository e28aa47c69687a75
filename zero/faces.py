"""What stands in p.grad, and what the user did to it.

Knows: the tensor that was put into each p.grad: a mean that this rank holds whole, a placeholder, or nothing. Another
tensor there, or None, is the user's doing. Does not know: when anything is reduced, or by whom.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from torch import Tensor

from .hooks import Listener, ShardedGradient
from .layout import ParameterSpec


class Faces:
    """The p.grad of each parameter, by its index in the layout."""

    def __init__(self, listener: Listener) -> None:
        self._listener = weakref.ref(listener)
        self._parameters: list[Tensor] = []
        self._specs: list[ParameterSpec] = []
        self._held: list[Tensor | None] = []
        self._placeholders: list[ShardedGradient | None] = []

    def extend(self, parameters: Sequence[Tensor], specs: Sequence[ParameterSpec]) -> None:
        """Take up further parameters."""
        self._parameters += parameters
        self._specs += specs
        self._held += [None] * len(parameters)
        self._placeholders += [None] * len(parameters)

    def put(self, index: int, gradient: Tensor | None) -> None:
        """Put ``gradient`` into p.grad."""
        if self._held[index] is not gradient or self._parameters[index].grad is not gradient:
            self._parameters[index].grad = gradient
            self._held[index] = gradient

    def put_placeholder(self, index: int) -> None:
        """Put the parameter's placeholder into p.grad."""
        made = self._placeholders[index]
        if made is None:
            made = ShardedGradient(self._specs[index], index, self._listener)
            self._placeholders[index] = made
        self.put(index, made)

    def hide(self) -> None:
        """Put placeholders where the means are, so that autograd does not add to these."""
        for index, held in enumerate(self._held):
            if held is not None:
                self.put_placeholder(index)

    def shows_mean(self, index: int) -> bool:
        """True when the mean itself was put into p.grad, which the user may edit or replace."""
        held = self._held[index]
        return held is not None and not isinstance(held, ShardedGradient)

    def mean(self, index: int) -> Tensor | None:
        """The mean that was put into p.grad, if it was."""
        return self._held[index] if self.shows_mean(index) else None

    def held(self) -> Iterator[int]:
        """Indices of the parameters into whose p.grad something was put."""
        return (index for index, held in enumerate(self._held) if held is not None)

    def cleared(self) -> list[int]:
        """Indices of the gradients that the user set to None since they were put; they count as cleared from now."""
        found = [i for i, held in enumerate(self._held) if held is not None and self._parameters[i].grad is None]
        for index in found:
            self._held[index] = None
        return found

    def replaced(self) -> list[tuple[int, Tensor]]:
        """Tensors that the user put in the place of means."""
        return [
            (index, gradient)
            for index, parameter in enumerate(self._parameters)
            if self.shows_mean(index) and (gradient := parameter.grad) is not None and gradient is not self._held[index]
        ]

    def stranger(self) -> str | None:
        """The name of a parameter whose p.grad came neither from here nor in the place of a mean."""
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is not None and gradient is not self._held[index] and not self.shows_mean(index):
                return self._specs[index].name
        return None

    def release(self) -> None:
        """Make p.grad the user's own: a copy of a mean, or None."""
        for index, held in enumerate(self._held):
            if held is not None and self._parameters[index].grad is held:
                self._parameters[index].grad = held.clone() if self.shows_mean(index) else None
