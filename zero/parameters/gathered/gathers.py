"""The all-gathers of units: among the ranks that share a copy, or in the post-forward group.

Knows: a bucket's slices and the buffers into which they are gathered. Does not know: when a unit is needed.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from collectives import Choice, Collective, Kind, Tag, Work
from collectives.pool import Pool

from .buffers import GatheredBuffer, GatheredUnit


class UnitGathers:
    """The all-gathers of units: among the ranks that share a copy, or in the post-forward group."""

    def __init__(
        self,
        rank: int,
        collective: Collective,
        post_forward_group: Choice | None,
        pool: Pool,
    ) -> None:
        """``rank``: among those that share a copy."""
        self.post_forward_group = post_forward_group
        self._rank, self._collective, self._pool = rank, collective, pool

    def room(self, buffer: GatheredBuffer) -> Tensor:
        """A buffer for the whole of a bucket."""
        bucket = buffer.bucket
        return self._pool.take(bucket.numel, bucket.dtypes.param_dtype, torch.device(bucket.device))

    def start(self, unit: GatheredUnit, buffer: GatheredBuffer, target: Tensor) -> Work:
        """Start to gather a bucket into ``target``. Collective."""
        bucket, (post_forward_shard, buffer.post_forward_shard) = buffer.bucket, (buffer.post_forward_shard, None)
        if post_forward_shard is not None and self.post_forward_group is not None:
            group = self.post_forward_group.shards
            cuts = bucket.even_cuts(group.world_size)
            low, high = cuts.owned(group.rank)
            target[low:high].copy_(post_forward_shard)
            return self.post_forward_group.collective.all_gather(target, cuts, tag=_tag(unit, buffer))
        low, high = bucket.owned(self._rank)
        target[low:high].copy_(buffer.shard)
        return self._collective.all_gather(target, bucket.cuts, tag=_tag(unit, buffer))

    def keep(self, buffer: GatheredBuffer) -> Tensor:
        """A copy of the slice of a whole bucket that this rank keeps for the post-forward group."""
        assert buffer.whole is not None
        assert self.post_forward_group is not None
        group = self.post_forward_group.shards
        low, high = buffer.bucket.even_cuts(group.world_size).owned(group.rank)
        post_forward_shard = self._pool.take(high - low, buffer.bucket.dtypes.param_dtype, buffer.whole.device)
        return post_forward_shard.copy_(buffer.whole.data[low:high])


def _tag(unit: GatheredUnit, buffer: GatheredBuffer) -> Tag:
    digest = zlib.crc32(f"{unit.name} {buffer.updated}".encode())  # the label may be cut
    return Tag(Kind.ALL_GATHER, f"gather of unit {unit.name!r}", index=buffer.bucket.index, digest=digest)
