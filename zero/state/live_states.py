"""``optimizer.state``: a live view of the parts of each parameter's states that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..core.bits import strided
from ..parameters.storage import ParameterStorage
from ..runtime.compiled_calls import untraced_methods


class ParameterStates(dict[str, Any]):
    """The states of a parameter by name. ``why_missing`` returns the reason why a name is missing."""

    def __init__(self, why_missing: Callable[[], str]) -> None:
        super().__init__()
        self._why_missing = why_missing

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name!r}: {self._why_missing()}")


@untraced_methods
class States(Mapping[Tensor, dict[str, Any]]):
    """``optimizer.state``: maps each parameter to the states that this rank holds, live.

    A state is 1-D if the rank holds a piece of the parameter. If it holds all of it, the state has the parameter's
    shape.
    """

    def __init__(self, storage: ParameterStorage) -> None:
        self._storage = storage
        self._closed = False

    def close(self) -> None:
        """Have no states from now on: the optimizer is closed."""
        self._closed = True

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        if parameter in self._storage.replicated:
            return {}
        if self._closed:
            return ParameterStates(lambda: "this optimizer is closed")
        index = self._storage.index(parameter)
        bucket, slot = self._storage.place(index)
        spec, states = bucket.specs[slot], bucket.states
        number = states.piece_of(slot)
        found = ParameterStates(lambda: self._absence(index, spec.name, here=number is not None))
        state = None if number is None else states.state_of(number)
        if number is None or state is None:
            return found
        states.wait_for_copies()
        piece = states.pieces[number]
        found.update(state.scalars)
        for name in state.elementwise:
            flat = states.flat[name].piece(piece)
            whole = piece.numel == bucket.spec.slots[slot].numel
            found[name] = strided(flat, 0, spec.shape, spec.stride) if whole else flat
        return found

    def _absence(self, index: int, name: str, *, here: bool) -> str:
        if here:
            return f"{name!r} has no such state"
        owners = ", ".join(map(str, self._storage.owners(index)))
        return (
            f"this rank holds no part of the states of {name!r}, which are on rank {owners}: "
            "optimizer.consolidate_state_dict(to=rank) brings all to one"
        )

    def __iter__(self) -> Iterator[Tensor]:
        return (p for p in self._storage.parameters if self[p])

    def __len__(self) -> int:
        return sum(1 for _ in self)
