"""The record that ranks exchange when gradients are finalized, and the check that they agree.

Knows: the fields of a record and how they compare. Does not know: how records are sent, or what follows from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """The record of one rank.

    Attributes:
        divisor: of the sums.
        scale: the loss scale, if gradients are being unscaled.
        options: a digest of each option of the param groups, if a step will use them.
        phase: the phase of the gradients, see `GradPhase`.
        pending: indices of the buckets for which this rank has a contribution that was not reduced.
        error: an error that this rank found; every rank raises it.
        used: one byte, 0 or 1, per parameter in the layout's order: whether it was used.
        trainable: likewise, whether it is trainable.
    """

    divisor: float
    scale: float | None
    options: dict[str, int]
    phase: str
    pending: tuple[int, ...]
    error: str | None
    used: bytes
    trainable: bytes

    def pack(self) -> bytes:
        head = {
            "divisor": float(self.divisor).hex(),
            "scale": self.scale,
            "options": self.options,
            "phase": self.phase,
            "pending": self.pending,
            "error": self.error,
        }
        return json.dumps(head).encode() + b"\0" + self.used + self.trainable

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        head, _, masks = data.partition(b"\0")
        fields = json.loads(head)
        half = len(masks) // 2
        return cls(
            float.fromhex(fields["divisor"]),
            fields["scale"],
            fields["options"],
            fields["phase"],
            tuple(fields["pending"]),
            fields["error"],
            masks[:half],
            masks[half:],
        )


def check(records: Sequence[Record], purpose: str, name: Callable[[int], str]) -> None:
    """Raise the error that a rank found, or `ValueError` or `RuntimeError` if the records differ.

    ``records`` are those of all ranks, in rank order, so that every rank raises the same error. ``purpose``: the call
    that errors name. ``name``: returns the name of a parameter by its index. ``pending`` and ``used`` may differ.
    """
    for rank, record in enumerate(records):
        if record.error is not None:
            raise RuntimeError(f"rank {rank}: {record.error}")
    first = records[0]
    for rank, record in enumerate(records):
        if record.divisor != first.divisor:
            raise ValueError(
                f"{purpose}: optimizer.divisor is {first.divisor:g} on rank 0, but {record.divisor:g} on rank {rank}: "
                "it must be equal on all ranks"
            )
        if record.scale != first.scale:
            raise ValueError(
                f"{purpose}: the loss scale is {first.scale} on rank 0, but {record.scale} on rank {rank}: give every "
                "rank's GradScaler the same arguments, and update it on every rank alike"
            )
        for key, ours in first.options.items():
            if record.options.get(key, ours) != ours:
                raise ValueError(
                    f"{purpose}: {key!r} of the param groups is not on rank {rank} what it is on rank 0: change "
                    "options, and step schedulers, on every rank alike"
                )
        if record.phase != first.phase:
            raise RuntimeError(
                f"{purpose}: the gradients of rank 0 are {first.phase}, those of rank {rank} {record.phase}: clip, "
                "step and clear gradients on every rank alike"
            )
        if record.trainable != first.trainable:
            pairs = enumerate(zip(record.trainable, first.trainable, strict=True))
            index = next(i for i, (theirs, ours) in pairs if theirs != ours)
            state = ("frozen", "trainable")
            raise RuntimeError(
                f"{purpose}: {name(index)} is {state[first.trainable[index]]} on rank 0, but "
                f"{state[record.trainable[index]]} on rank {rank}: freeze and unfreeze on every rank alike"
            )
