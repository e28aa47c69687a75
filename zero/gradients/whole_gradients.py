"""The whole mean gradient of one parameter: read, or replaced, by a call of all ranks.

Knows: what ranks agree on for one gradient. Does not know: how sums become means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collectives import Collective, Kind, Tag, Transport

from ..consistency import broadcast
from ..core.bits import in_stride_order
from ..runtime.bucket import Bucket
from ..runtime.flat_buffer import gather_slot
from .agreement import Record, check_usable
from .reducer import Reducer

_VALUE, _NONE = b"gradient", b"None"  # what a rank gives


class WholeGradients:
    """The whole mean gradients of one optimizer. Every method is collective."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        reducer: Reducer,
        transport: Transport,
        shard_group: Transport,
        collective: Collective,
    ) -> None:
        """``buckets``: the list itself, which may grow; ``transport``: of all ranks; ``shard_group``: of the owners."""
        self._buckets, self._reducer, self._transport = buckets, reducer, transport
        self._shard_group, self._collective = shard_group, collective

    def read(self, bucket: Bucket, number: int) -> Tensor | None:
        """Return the whole mean gradient of a slot's parameter; None if no rank used it."""
        spec, slot, schedule = bucket.specs[number], bucket.spec.slots[number], self._reducer.schedule
        purpose = f"full_grad of {spec.name!r}"
        records = self._reducer.check_consistency(purpose)
        check_usable(purpose, records)
        if any(record.pending for record in records):
            raise RuntimeError(
                f"{purpose}: gradients of a backward inside no_sync(), or the zeros of zero_grad(set_to_none=False), "
                "are not reduced yet. First run a backward outside no_sync(), or clip"
            )
        flag = sum(len(before.used) for before in self._buckets[: bucket.spec.index]) + number
        if not any(record.used[flag] for record in records):
            return None
        if self._reducer.publisher.means_are_true:
            whole = bucket.grad.mean_view(number).as_strided((slot.numel,), (1,)).clone()
        else:
            total = bucket.grad.running_sum()
            assert total is not None  # used by some rank, and nothing is pending
            tag = Tag(Kind.ALL_GATHER, purpose, schedule.number, bucket.spec.index)
            whole = gather_slot(total, slot, bucket.spec, self._shard_group.rank, self._collective, tag)
            if schedule.is_open:
                whole.div_(schedule.divisor)
        return whole.as_strided(spec.shape, spec.stride)

    @torch.no_grad()
    def replace(self, bucket: Bucket, number: int, gradient: Tensor | None, *, given: bool) -> None:
        """Replace the mean gradient of a slot's parameter; None: it has none. Sums become means, as for a clip.

        The first rank that gives a gradient decides. ``given``: this rank gives one, or None; else it has run out of
        batches, inside `join`.
        """
        spec, slot = bucket.specs[number], bucket.spec.slots[number]
        purpose = f"set_full_grad of {spec.name!r}"
        self._reducer.check_synchronised(purpose)
        problem = None if gradient is None else self._problem(bucket, number, gradient)
        message = (_NONE if gradient is None else _VALUE) if given else b""
        records = self._reducer.check_consistency(
            purpose, None if problem is None else f"{purpose}: {problem}", message=message
        )
        source = _source(records, purpose)
        self._reducer.finalize_agreed(purpose, records)
        if source is None:
            self._reducer.publisher.remove(bucket, number)
        else:
            dtype, device = bucket.spec.dtypes.accumulate_dtype, torch.device(bucket.spec.device)
            if gradient is None or self._transport.rank != source:
                flat = torch.empty(slot.numel, dtype=dtype, device=device)
            else:
                flat = in_stride_order(gradient.detach().to(device), spec.stride)
            broadcast(self._transport, [flat], source)
            final = bucket.grad.open_means()
            for piece in bucket.spec.pieces(final.begin, final.end):
                if piece.slot == number:
                    final.piece(piece).copy_(flat[bucket.spec.within(piece)])
            self._reducer.schedule.replaced(bucket, number, purpose)
        self._reducer.publisher.publish()

    def _problem(self, bucket: Bucket, number: int, gradient: Any) -> str | None:
        """Return why what a user gave cannot be the gradient of a slot's parameter; None if it can."""
        spec, dtype = bucket.specs[number], bucket.spec.dtypes.accumulate_dtype
        if not isinstance(gradient, Tensor):
            return f"the gradient is a {type(gradient).__name__}: give a tensor, or None"
        if not bucket.parameters[number].requires_grad:
            return "the parameter is frozen: unfreeze it, or give None"
        if gradient.layout is not torch.strided:
            return f"the gradient is {gradient.layout}: give a dense one"
        if tuple(gradient.shape) != tuple(spec.shape):
            shapes = f"the gradient has shape {tuple(gradient.shape)}, the parameter {tuple(spec.shape)}"
            return f"{shapes}: give a whole gradient, as full_grad returns it"
        if gradient.dtype is not dtype:
            return f"the gradient is {gradient.dtype}, and full_grad returns {dtype}: give gradient.to({dtype})"
        return None


def _source(records: Sequence[Record], purpose: str) -> int | None:
    """Return the first rank that gives a gradient; None if ranks give None. Raises `ValueError` on every rank if some
    give one, and others None."""
    by_rank = {rank: record.attachment for rank, record in enumerate(records) if record.attachment}
    first, kind = next(iter(by_rank.items()))
    for rank, other in by_rank.items():
        if other != kind:
            raise ValueError(
                f"{purpose}: rank {first} gives {'None' if kind == _NONE else 'a gradient'}, and rank {rank} "
                f"{'None' if other == _NONE else 'a gradient'}: give the same on every rank"
            )
    return first if kind == _VALUE else None
