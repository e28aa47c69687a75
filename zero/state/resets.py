"""Forgets the states of parameters, at their owners.

Knows: which rank has which piece. Does not know: when ranks may do so, torch.optim's dicts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import Tensor

from ..gradients.reducer import Reducer
from ..parameters.storage import ParameterStorage
from ..runtime.flat_states import Options
from ..step.classes import UserOptimizers


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

    The class begins with them as if no step had used them. One that makes its states in the constructor makes them now.
    """
    chosen = set(indices)
    for bucket in storage.buckets:
        states, number = bucket.states, bucket.specs[0].optimizer_class
        gone = bytes([bucket.spec.slots[piece.slot].parameter in chosen for piece in states.pieces])
        if 1 not in gone:
            continue
        states.wait_for_copies()
        states.snapshot()
        for piece, is_gone in enumerate(gone):
            if is_gone:
                states.set_state(piece, None)
        if all(states.state_of(piece) is None for piece in range(len(gone))):
            states.flat.clear()
        user_optimizers[number].create_states(states, user_optimizers.groups_of(number, groups), gone)
        states.evict()
