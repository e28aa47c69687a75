"""``optimizer.state``: a live view of the parts of each parameter's states that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..core.bits import strided
from ..parameters.storage import ParameterStorage
from ..runtime.flat_states import BucketStates
from ..step.inner import InnerOptimizer


class ParameterStates(dict[str, Any]):
    """The states of a parameter by name. ``why_missing`` returns the reason why a name is missing."""

    def __init__(self, why_missing: Callable[[], str]) -> None:
        super().__init__()
        self._why_missing = why_missing

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name!r}: {self._why_missing()}")


class States(Mapping[Tensor, dict[str, Any]]):
    """``optimizer.state``: maps each parameter to the states that this rank holds, live.

    A state is 1-D if the rank holds a piece of the parameter. If it holds all of it, the state has the parameter's
    shape.
    """

    def __init__(self, storage: ParameterStorage, inner: InnerOptimizer) -> None:
        self._storage, self._inner = storage, inner
        self._pieces: dict[int, list[tuple[BucketStates, int]]] = {}  # by parameter, in the buckets seen so far
        self._seen = 0

    def forget(self) -> None:
        """Drop all references to states, because the optimizer is closed."""
        self._pieces, self._seen = {}, 0

    def _pieces_of(self, index: int) -> list[tuple[BucketStates, int]]:
        for states in self._inner.states[self._seen :]:
            for number, piece in enumerate(states.pieces):
                self._pieces.setdefault(states.bucket.slots[piece.slot].parameter, []).append((states, number))
        self._seen = len(self._inner.states)
        return self._pieces.get(index, [])

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        if parameter in self._storage.replicated:
            return {}
        index = self._storage.index(parameter)
        spec = self._storage.layout.parameters[index]
        pieces = self._pieces_of(index)
        found = ParameterStates(lambda: self._absence(index, spec.name, here=bool(pieces)))
        for states, number in pieces:
            state = self._inner.state_of(states.bucket.index, number)
            if state is None:
                continue
            states.wait_for_copies()
            piece = states.pieces[number]
            found.update(state.scalars)
            for name in state.elementwise:
                flat = states.flat[name].piece(piece)
                whole = piece.numel == states.bucket.slots[piece.slot].numel
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
