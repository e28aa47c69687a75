"""A unit that is gathered, and its buckets: the gathered buffer while there is one, and the ``data`` of parameters.

Knows: views of the buffer, the NaN in its place. Does not know: when, or why, a unit changes its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum

import torch
from torch import Tensor

from collectives import Work

from ...runtime.flat_buffer import FlatBuffer
from ...runtime.profiler_ranges import ProfilerRange
from ..unit_buffer import UnitBuffer


@dataclass(eq=False)
class GatheredBuffer(UnitBuffer):
    """A bucket, or the part of one that belongs to a unit, whose shards are gathered from the ranks.

    ``kept``: this rank's shard, if it keeps master weights alone or keeps it in the host's memory. ``shard`` is then
    the copy that was gathered last, as long as the whole is here, and empty otherwise. None: `shard` is kept.
    """

    kept: FlatBuffer | None = None
    unsharded: Tensor | None = None
    post_forward_shard: Tensor | None = None  # shard of the whole, between a forward and its backward, for the group
    externally_held: Tensor | None = None  # a resharded buffer with external references
    copied: torch.Event | None = None  # the end of the copy under way, and of what reads it, on a stream of its own
    address: int = 0  # of the memory of the whole, or of the externally held buffer, when it was gathered

    def __post_init__(self) -> None:
        super().__post_init__()
        self.versions = [0] * len(self.parameters)  # of each slot: how often its values were changed
        dtype = self.bucket.dtypes.param_dtype
        self._nans = [nan_like(parameter, dtype) for parameter in self.parameters]
        self._nothing = self.shard.new_empty(0, device=self.bucket.device)
        self.end_gather()

    def begin_gather(self, room: Callable[[int], Tensor]) -> None:
        """Make `shard` the memory of this rank's part of a gather that begins. ``room`` returns memory for so many
        elements."""
        if self.kept is not None:
            self.end_gather()
            self.shard = room(self.kept.source.numel())

    def copy_kept(self) -> None:
        """Launch the copy of this rank's part."""
        if self.kept is not None:
            source = self.kept.source
            if source.dtype is not self.bucket.dtypes.param_dtype:  # a copy from the host would round there, and wait
                source = source.to(self.bucket.device, non_blocking=True)
            self.shard.copy_(source, non_blocking=True)

    def await_copy(self) -> None:
        """Make the current stream wait for the copy, if it is on a stream of its own."""
        copied, self.copied = self.copied, None
        if copied is not None:
            torch.accelerator.current_stream(torch.device(self.bucket.device)).wait_event(copied)

    def end_gather(self) -> None:
        """Free the copy, if there is one, when the whole is not here any more."""
        if self.kept is not None:
            self.await_copy()  # of a gather that failed, too: the memory is used again
            self.shard = self._nothing

    def commit(self, slots: Sequence[int], flat: Tensor, rank: int) -> None:
        super().commit(slots, flat, rank)
        if self.kept is not None:
            self._write(self.kept.data, slots, flat, rank)

    def put_unsharded(self) -> None:
        """Make the parameters, which must have their own classes, views of the whole. This counts as no edit."""
        assert self.unsharded is not None
        self.set_data(self.views(self.unsharded))

    def put_nans(self) -> None:
        """Put a NaN into the data of each parameter, which must have its own class."""
        self.set_data(self._nans)

    def renew_nan(self, slot: int) -> None:
        """Put another NaN in the place of one that was edited."""
        self._nans[slot] = nan_like(self._nans[slot], self._nans[slot].dtype)


def nan_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    nan = torch.full((1,), float("nan"), dtype=dtype, device=parameter.device)
    return nan.expand(parameter.shape) if parameter.dim() else nan.view(())


class State(Enum):
    """Where the whole of a unit is."""

    SHARDED = "nowhere: each rank has its shards"
    GATHERING = "on its way"
    UNSHARDED = "in buffers"


@dataclass(eq=False)
class GatheredUnit:
    """The buckets of one unit that are gathered."""

    number: int
    name: str
    rank: InitVar[str]
    buffers: list[GatheredBuffer] = field(default_factory=list)
    state: State = State.SHARDED
    work: list[Work] = field(default_factory=list)  # the all-gathers under way

    def __post_init__(self, rank: str) -> None:
        self.unsharding = ProfilerRange(f"unshard unit {self.name}", rank)
        self.waiting = ProfilerRange(f"wait_for_unshard unit {self.name}", rank)
        self.resharding = ProfilerRange(f"reshard unit {self.name}", rank)
