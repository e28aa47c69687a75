"""What the ranks tell each other when gradients are settled, and what must be equal in it.

Knows: the fields of a record and how they compare. Does not know: how records travel, or what is done with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """One rank's word. ``pending``: buckets of which this rank has something that was not reduced. ``used`` and
    ``trainable`` have a byte, 0 or 1, for each parameter in the layout's order. ``scale``: the loss scale, where
    it is being taken out of gradients. ``options``: a digest for each of the param groups', where a step will use them.
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
    """Raise, on every rank alike, what one rank found or what differs; ``name``: of a parameter by its index."""
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
