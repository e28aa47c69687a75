"""A bucket of a unit on one rank, and the ``data`` of its parameters.

Knows: the slots, this rank's slice, the gathered buffer while there is one. Does not know: when, or why, a unit changes
its state.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum

import torch
from torch import Tensor

from collectives import Region, Work
from collectives.pool import holders

from ..core.bits import same_bits
from ..core.layout import BucketSpec, Layout, ParameterSpec, Piece
from ..events import Event

_MOST_RESTORED = 1 << 10  # views; a program that makes ever new ones would fill the memory otherwise


@dataclass(eq=False)
class UnitBuffer:
    """A bucket on this rank, or the part of one that belongs to a unit: its parameters by slot, this rank's slice, and
    the whole while it is here."""

    bucket: BucketSpec
    layout: Layout
    parameters: list[Tensor]
    shard: Tensor
    updated: bool  # by the optimizer
    common: SharedBucketMemory | None = None  # memory in which every rank sees every slice; None if slices must be sent
    begin: int = 0  # in the shared memory, in elements
    whole: Tensor | None = None
    post_forward_shard: Tensor | None = (
        None  # slice of the whole, between a forward and its backward, for the post-forward group
    )
    externally_held: Tensor | None = None  # a resharded buffer with external references
    maybe_dirty: bool = False  # an external reference may have written into that buffer
    installed: bool = False  # in the parameters
    unchecked: bool = False  # it was installed since the last check for edits
    address: int = 0  # of the memory of the whole, or of the externally held buffer, when it was gathered

    def __post_init__(self) -> None:
        self.committed: set[int] = set()  # slots whose values in the whole were made equal on all ranks
        self._noted_versions = [p._version for p in self.parameters]  # of each slot, when its data was installed
        self._noted_addresses = [0] * len(self.parameters)
        self.offsets = [slot.offset for slot in self.bucket.slots]
        specs = [self.layout.parameters[slot.parameter] for slot in self.bucket.slots]
        self._geometry = [
            (offset, tuple(spec.shape), tuple(spec.stride)) for offset, spec in zip(self.offsets, specs, strict=True)
        ]
        self.versions = [0] * len(self.parameters)  # of each slot: how often its values were changed
        self.bases = [type(parameter) for parameter in self.parameters]
        dtype = self.bucket.dtypes.param_dtype
        self.nans = [nan_like(parameter, dtype) for parameter in self.parameters]
        self._nan_addresses = [nan.data_ptr() for nan in self.nans]
        self._dtypes = [nan.dtype for nan in self.nans]
        self._common_whole: Tensor | None = None
        self.common_address = 0  # of the whole in shared memory, since it was first needed
        self._common_views: list[Tensor] = []
        self._common_addresses: list[int] = []
        self._restored: dict[tuple[object, ...], Tensor] = {}  # further views of it, by geometry
        self._own_holders = 0  # of the memory of all these

    def name(self, slot: int) -> str:
        return self.spec(slot).name

    def spec(self, slot: int) -> ParameterSpec:
        return self.layout.parameters[self.bucket.slots[slot].parameter]

    @property
    def in_use(self) -> bool:
        """True while the values of the whole must stay: it is in use, or its owners may still have to write it."""
        return self.installed or (bool(self.committed) and self.whole is not None)

    def slot_at(self, element: int) -> int:
        """The slot in which an element of the bucket lies."""
        return bisect.bisect_right(self.offsets, element) - 1

    # -- a parameter's data ---------------------------------------------------------------------------------------

    def owns(self, slot: int) -> bool:
        """Return False if a parameter's memory is not the one that was installed there."""
        parameter, nan = self.parameters[slot], self.nans[slot]
        same = parameter.dtype is nan.dtype and parameter.device == nan.device
        return same and parameter.data_ptr() == self._noted_addresses[slot]

    def renew(self, slot: int) -> None:
        """Put another NaN in the place of one that was edited."""
        self.nans[slot] = nan_like(self.nans[slot], self.nans[slot].dtype)
        self._nan_addresses[slot] = self.nans[slot].data_ptr()

    def displaced(self) -> Sequence[int]:
        """Return the slots whose memory was replaced since it was installed. If none was, this is cheap."""
        same_memory = [parameter.data_ptr() for parameter in self.parameters] == self._noted_addresses
        if same_memory and [parameter.dtype for parameter in self.parameters] == self._dtypes:
            return ()
        return [slot for slot in range(len(self.parameters)) if not self.owns(slot)]

    def note(self, slot: int) -> None:
        """Note the version and the address of a parameter's data."""
        parameter = self.parameters[slot]
        self._noted_versions[slot], self._noted_addresses[slot] = parameter._version, parameter.data_ptr()

    def edited(self) -> list[int]:
        """Slots whose parameter's data was edited or replaced since the last call."""
        versions = [parameter._version for parameter in self.parameters]
        addresses = [parameter.data_ptr() for parameter in self.parameters]
        known, self._noted_versions = self._noted_versions, versions
        if versions == known and addresses == self._noted_addresses:
            return []
        pairs = zip(versions, known, addresses, self._noted_addresses, strict=True)
        return [slot for slot, (now, then, here, there) in enumerate(pairs) if now != then or here != there]

    def put_whole(self) -> None:
        """Make the parameters, which must have their own classes, views of the whole. This counts as no edit."""
        assert self.whole is not None
        in_common = self.is_in_common(self.whole)
        views = self._common_views if in_common else list(self._views(self.whole))
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self._noted_addresses = self._common_addresses.copy() if in_common else [view.data_ptr() for view in views]

    def put_nans(self) -> None:
        """Put a NaN into the data of each parameter, which must have its own class."""
        for parameter, nan in zip(self.parameters, self.nans, strict=True):
            parameter.data = nan
        self._noted_addresses = self._nan_addresses.copy()

    # -- the whole ------------------------------------------------------------------------------------------------

    @property
    def moved(self) -> bool:
        """True if the whole lies in shared memory no more: `share_memory_` moves a storage."""
        return self.common is not None and self.whole is not None and self.whole.data_ptr() != self.common_address

    def in_common(self) -> Tensor:
        """The whole in shared memory, the same tensor each time, unless that was moved elsewhere."""
        assert self.common is not None
        made = self._common_whole
        if made is None or made.data_ptr() != self.common_address:
            self._common_whole = made = self.common.whole(self.begin, self.begin + self.bucket.numel)
            self.common_address = made.data_ptr()
            self._common_views, self._restored = list(self._views(made)), {}
            self._common_addresses = [view.data_ptr() for view in self._common_views]
            self._own_holders = holders(made)
        return made

    def is_in_common(self, whole: Tensor | None) -> bool:
        """True for the tensor of `in_common`, as long as it was not moved."""
        return whole is not None and whole is self._common_whole and whole.data_ptr() == self.common_address

    def external_refs(self, whole: Tensor) -> int:
        """The number of external references to the memory of a buffer that was resharded."""
        return holders(whole) - (self._own_holders if whole is self._common_whole else 0)

    def view(self, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
        """A view of the whole. In shared memory it is made from a cached one, which takes a third of the time."""
        assert self.whole is not None
        if self.whole is not self._common_whole:
            return self.whole.as_strided(size, stride, offset)
        key = (size, stride, offset)
        found = self._restored.get(key)
        if found is None:
            if len(self._restored) >= _MOST_RESTORED:
                self._own_holders -= len(self._restored)
                self._restored.clear()
            found = self._restored[key] = self.whole.as_strided(size, stride, offset)
            self._own_holders += 1
        return found.detach()  # a tensor of its own: its attributes stay apart, and its references are counted

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        begin = flat.storage_offset()
        for offset, shape, stride in self._geometry:
            yield flat.as_strided(shape, stride, begin + offset)


class SharedBucketMemory:
    """A bucket in memory that all ranks share, and its unit buffers."""

    def __init__(self, region: Region, dtype: torch.dtype) -> None:
        self._region, self._dtype = region, dtype
        self.buffers: list[UnitBuffer] = []

    def whole(self, begin: int, end: int) -> Tensor:
        """Return these elements as all ranks wrote them, 1-D."""
        return self._region.whole(begin * self._dtype.itemsize, end * self._dtype.itemsize).view(self._dtype)

    def own(self, begin: int, end: int) -> Tensor:
        """Return these elements of the memory in which this rank writes for all, 1-D."""
        return self._region.own(begin * self._dtype.itemsize, end * self._dtype.itemsize).view(self._dtype)

    def edited(self) -> tuple[list[tuple[UnitBuffer, int]], bool]:
        """Find slots whose private pages differ from the shared values. Return them, and whether all pages were
        checked: a page with a buffer in use is skipped. Private pages are discarded, except those that lie only in
        resharded buffers with external references."""
        found: list[tuple[UnitBuffer, int]] = []
        skipped: set[UnitBuffer] = set()
        for begin, end in self._written():
            there = self._on(begin, end)
            if any(buffer.in_use for buffer in there):
                skipped.update(there)
                continue
            for buffer in there:
                if buffer.unchecked:  # in any other buffer, a page may have been copied before all ranks had written
                    found += [(buffer, piece.slot) for piece in self._differing(buffer, begin, end)]
            if any(buffer.externally_held is None for buffer in there):
                self._forget(begin, end)
        for buffer in self.buffers:
            if buffer not in skipped and not buffer.in_use:
                buffer.unchecked = False
                buffer.committed.clear()
        return found, not skipped

    def restore(self, buffer: UnitBuffer) -> None:
        """Undo this rank's writes into a buffer's whole, except to committed slots, and none beside it. Every rank must
        have written its slices."""
        for begin, end in self._written():
            there = self._on(begin, end)
            if there == [buffer] and not buffer.committed:
                self._forget(begin, end)
            elif buffer in there:
                for piece in self._differing(buffer, begin, end):
                    place = buffer.begin + piece.begin, buffer.begin + piece.end
                    self.whole(*place).copy_(self.own(*place))

    def _on(self, begin: int, end: int) -> list[UnitBuffer]:
        """The buffers that contain some of these elements."""
        return [buffer for buffer in self.buffers if buffer.begin < end and begin < buffer.begin + buffer.bucket.numel]

    def _written(self) -> list[tuple[int, int]]:
        """Return the intervals of the whole, in elements, whose pages this rank has written."""
        size = self._dtype.itemsize
        return [(low // size, high // size) for low, high in self._region.written()]

    def _forget(self, begin: int, end: int) -> None:
        self._region.refresh(begin * self._dtype.itemsize, end * self._dtype.itemsize)

    def _differing(self, buffer: UnitBuffer, begin: int, end: int) -> Iterator[Piece]:
        low, high = max(begin - buffer.begin, 0), min(end - buffer.begin, buffer.bucket.numel)
        for piece in buffer.bucket.pieces(low, high):
            place = buffer.begin + piece.begin, buffer.begin + piece.end
            if piece.slot not in buffer.committed and not same_bits(self.whole(*place), self.own(*place)):
                yield piece  # committed slots are left out: their owners are writing the values that are here


def nan_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    nan = torch.full((1,), float("nan"), dtype=dtype, device=parameter.device)
    return nan.expand(parameter.shape) if parameter.dim() else nan.view(())


class State(Enum):
    """The state of a unit's whole parameters."""

    SHARDED = "nowhere: each rank has its slices"
    GATHERING = "on their way"
    WHOLE = "in buffers"
    INSTALLED = "in the parameters"


@dataclass(eq=False)
class Unit:
    name: str
    rank: InitVar[str]
    buffers: list[UnitBuffer] = field(default_factory=list)
    state: State = State.SHARDED
    forward_refs: int = 0  # forwards under way that need it
    gather_refs: int = 0  # blocks of `gathered` that need it
    work: list[Work] = field(default_factory=list)

    def __post_init__(self, rank: str) -> None:
        self.unsharding = Event(f"unshard unit {self.name}", rank)
        self.waiting = Event(f"wait_for_unshard unit {self.name}", rank)
        self.installing = Event(f"install unit {self.name}", rank)
        self.uninstalling = Event(f"uninstall unit {self.name}", rank)
        self.resharding = Event(f"reshard unit {self.name}", rank)

    @property
    def held(self) -> bool:
        return bool(self.forward_refs or self.gather_refs)
