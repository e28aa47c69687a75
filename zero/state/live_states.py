"""``optimizer.state``: a live view of the parts of each parameter's states that this rank holds.

Tensors may be edited in place. Nothing else can be written: what a rank would assign or delete is a part of a state,
whose other parts are on other ranks. `reset_states` forgets states on all of them.

Knows: pieces of states, and which rank has which. Does not know: how a class steps with them, when ranks may change
them, torch.optim's dicts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from ..core.bits import strided
from ..core.layout import Piece
from ..gradients.reducer import Reducer
from ..parameters.storage import ParameterStorage
from ..runtime.compiled_calls import untraced_methods
from ..runtime.flat_states import Options
from ..runtime.streams import Streams
from ..step.classes import UserOptimizers
from ..step.update import UpdateListener


def refuse(*_: Any, **__: Any) -> NoReturn:
    """Raise `TypeError`: states were assigned or deleted."""
    raise TypeError(
        "optimizer.state is for reading, and for edits of its tensors in place, as "
        "optimizer.state[p]['exp_avg'].zero_(): states lie in pieces on several ranks. optimizer.reset_states(params), "
        "called by all ranks, forgets them, as deleting them does in torch; load_state_dict() replaces them"
    )


class ParameterStates(dict[str, Any]):
    """The states of a parameter by name. ``why_missing`` returns the reason why a name is missing."""

    def __init__(self, states: Mapping[str, Any], why_missing: Callable[[], str]) -> None:
        super().__init__(states)
        self._why_missing = why_missing

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name!r}: {self._why_missing()}")

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self or self[name] is not value:  # state["exp_avg"] *= 0.5 assigns the tensor that it has edited
            refuse()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy, which has nothing to do with the optimizer

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = refuse


@untraced_methods
class States(Mapping[Tensor, dict[str, Any]]):
    """``optimizer.state``: maps each parameter to the states that this rank holds, live.

    A state is 1-D if the rank holds a piece of the parameter. If it holds all of it, the state has the parameter's
    shape. Of a parameter with blocks, all but floating-point states as large as any block are lists, with one for each
    block here.
    """

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = refuse

    def __init__(self, storage: ParameterStorage, watchers: Sequence[UpdateListener], streams: Streams) -> None:
        """``watchers``: the live list of listeners, which are told before a user may edit states; ``streams``: on which
        states are written."""
        self._storage, self._watchers, self._streams = storage, watchers, streams
        self._closed, self._process = False, os.getpid()

    def close(self) -> None:
        """Have no states from now on: the optimizer is closed."""
        self._closed = True

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        if parameter in self._storage.replicated:
            return ParameterStates({}, lambda: "the parameter is frozen")
        if self._closed:
            return ParameterStates({}, lambda: "this optimizer is closed")
        self._streams.check_allowed()
        index = self._storage.index(parameter)
        bucket, slot = self._storage.slot_of(index)
        spec, states = bucket.specs[slot], bucket.states
        numbers, found = states.pieces_of(slot), dict[str, Any]()
        of_pieces = [state for state in map(states.own_state, numbers) if state is not None]
        if of_pieces:
            states.wait_for_copies()
            for watcher in self._watchers if os.getpid() == self._process else ():  # no thread lives on in a fork
                watcher.before_update(bucket.spec.index)
            piece = Piece(slot, states.pieces[numbers[0]].begin, states.pieces[numbers[-1]].end)
            for name in of_pieces[0].scalars:
                values = [state.scalars[name] for state in of_pieces]
                found[name] = values if spec.grain.stack else values[0]
            for name in of_pieces[0].elementwise:
                flat = states.flat[name].piece(piece)
                whole = piece.numel == bucket.spec.slots[slot].numel
                found[name] = strided(flat, 0, spec.shape, spec.stride) if whole else flat
        return ParameterStates(found, lambda: self._absence(index, spec.name, here=bool(numbers)))

    def _absence(self, index: int, name: str, *, here: bool) -> str:
        if here:
            return f"{name!r} has no such state"
        owners = ", ".join(map(str, self._storage.owners(index)))
        return (
            f"this rank holds no part of the states of {name!r}, which are on rank {owners}: "
            "optimizer.consolidate_state_dict(to=rank) brings all to one"
        )

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for index, parameter in enumerate(self._storage.parameters) if self._has_states(index))

    def _has_states(self, index: int) -> bool:
        if self._closed:
            return False
        bucket, slot = self._storage.slot_of(index)
        return any(bucket.states.state_of(number) is not None for number in bucket.states.pieces_of(slot))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> Any:
        return dict, ({parameter: dict(states) for parameter, states in self.items()},)  # a copy of what is here


def chosen_by(params: Any, call: str) -> list[Tensor] | None:
    """Return the parameters that a user gave to a ``call``, one or several; None: all. Raises `TypeError` otherwise."""
    if params is None or isinstance(params, Tensor):
        return None if params is None else [params]
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise TypeError(f"{call} takes parameters, as module.parameters() returns them, not a {type(params).__name__}")
    return list(params)


def agree_to_forget(
    reducer: Reducer, storage: ParameterStorage, chosen: Sequence[Tensor] | None, problem: str | None
) -> list[int]:
    """Return the places in the layout of ``chosen`` parameters (None: of all) if all ranks may forget their states.
    Collective.

    ``problem``: an error that this rank found. Raises the same error on every rank if one found one, or if the ranks
    chose different parameters.
    """
    indices: list[int] = []
    try:
        laid_out = storage.parameters if chosen is None else [p for p in chosen if p not in storage.replicated]
        indices = sorted({storage.index(parameter) for parameter in laid_out})
    except ValueError as error:
        problem = problem or f"reset_states(): {error}"
    records = reducer.check_consistency("reset_states()", problem, message=json.dumps(indices).encode())
    for rank, record in enumerate(records):
        if record.attachment != records[0].attachment:
            index = min(set(json.loads(record.attachment)) ^ set(json.loads(records[0].attachment)))
            raise ValueError(
                f"reset_states(): rank 0 and rank {rank} chose different parameters, of which the first is "
                f"{storage.layout.parameters[index].name!r}: choose the same on every rank"
            )
    return indices


def forget_states(
    storage: ParameterStorage, user_optimizers: UserOptimizers, groups: Sequence[Options], indices: Sequence[int]
) -> None:
    """Forget the states of the parameters at these places in the layout. Local.

    The class begins with them as if no step had used them. One whose step makes no states makes them now.
    """
    chosen = set(indices)
    for bucket in storage.buckets:
        states, number = bucket.states, bucket.specs[0].optimizer_class
        gone = bytes([bucket.spec.slots[piece.slot].parameter in chosen for piece in states.pieces])
        if 1 not in gone:
            continue
        with states.writing():
            for piece, is_gone in enumerate(gone):
                if is_gone:
                    states.set_state(piece, None)
            if all(states.state_of(piece) is None for piece in range(len(gone))):
                states.flat.clear()
            user_optimizers[number].create_states(states, user_optimizers.groups_of(number, groups), gone, later=True)
