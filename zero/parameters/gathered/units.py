"""Units that are gathered from the ranks that share a copy: the shard, which is always here, and the whole.

    SHARDED --unshard--> GATHERING --wait--> UNSHARDED    installed there alone: parameters are views of the buffers
       ^                                         |          else: each parameter's data is one NaN
       +---------------- reshard ----------------+

A buffer lives as long as its storage is referenced. If something outside of this package references it (a view that a
module cached, an array that shares the memory), the next gather writes into the same buffer, so that the view follows
the parameter as it would in a plain loop. If a step changes the parameter in between, the buffer is filled with NaN.

A unit that is gathered, and its buckets: the gathered buffer while there is one, and the ``data`` of parameters.

What a graph keeps of gathered parameters: places in units, by hooks for saved tensors and an index of memory.

    pack     a tensor in a gathered buffer    -> a PackedParam
             any other                        -> the result of the hooks pushed before, or the tensor itself
    unpack   a PackedParam                    -> gather and install the unit, then a view of its buffer

Autograd checks the tensors that it saves itself for edits in place, but not those that a hook keeps. These are checked
here.

Knows: shards, gathered buffers, the tensor in each parameter's ``data``, autograd's hooks for saved tensors. Does not
know: modules, or when a unit is needed: its caller unshards, installs, uninstalls and reshards.
"""

from __future__ import annotations

import bisect
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from collectives import Choice, Collective, Kind, Tag, Transport, Work, all_gather_from
from collectives.pool import Pool, holders
from collectives.torch_internals import top_saved_tensors_hooks

from ...core.layout import BucketSpec, Cuts
from ...core.parameter_specs import as_plain
from ...runtime.compiled_calls import untraced
from ...runtime.flat_buffer import FlatBuffer, usable_later
from ...runtime.joining import Joining
from ...runtime.offload import CopyStream
from ...runtime.profiler_ranges import ProfilerRange
from ..edit_detector import EditDetector, UnitBuffer


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


_MOST_KNOWN = 1 << 12  # views of a buffer; a program that makes ever new ones would fill the memory otherwise


@dataclass(frozen=True, eq=False)
class ParamView:
    """The place of a tensor in a buffer's whole."""

    home: object  # identifies the index
    unit: int
    buffer: GatheredBuffer
    slot: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class PackedParam(NamedTuple):
    """A tensor as a graph keeps it: a place instead of memory, and how often its parameter had changed."""

    place: ParamView
    version: int


@dataclass(eq=False)
class _Span:
    """The memory of a buffer: addresses ``[begin, end)``, the unit, and the places found in the buffer so far."""

    begin: int
    end: int
    unit: int
    buffer: GatheredBuffer
    places: dict[tuple[object, ...], ParamView]  # by offset in bytes, dtype, shape and strides


class SavedTensorIndex:
    """The buffers of gathered units, and resharded ones with external references."""

    def __init__(self) -> None:
        self.home = object()
        self._spans: dict[int, _Span] = {}  # by address
        self._begins: list[int] = []  # the addresses, ascending
        self._places: dict[GatheredBuffer, dict[tuple[object, ...], ParamView]] = {}  # whatever a buffer's address

    def remember(self, unit: int, buffer: GatheredBuffer, whole: Tensor) -> None:
        """Register the memory of a unit's buffer."""
        address = _address(whole)
        if not address:  # a tensor without elements has no memory
            return
        if buffer.address != address or address not in self._spans:  # share_memory() may have moved a storage
            self.forget(buffer)
            buffer.address = address
            end, places = address + whole.untyped_storage().nbytes(), self._places.setdefault(buffer, {})
            self._spans[address] = _Span(address, end, unit, buffer, places)
            self._begins = sorted(self._spans)

    def forget(self, buffer: GatheredBuffer) -> None:
        """Unregister a buffer's memory: its address may be used by other tensors."""
        if self._spans.pop(buffer.address, None) is not None:
            self._begins = sorted(self._spans)
        buffer.address = 0

    def remove(self, buffer: GatheredBuffer) -> None:
        """Unregister a buffer that is gathered no more."""
        self.forget(buffer)
        self._places.pop(buffer, None)

    def find(self, tensor: Tensor) -> PackedParam | None:
        """The place of a tensor in a gathered buffer; None for any other tensor."""
        try:
            begin = tensor.data_ptr()
            if not begin:  # a tensor without elements, which may lie in a buffer
                span = self._spans.get(_address(tensor))
            else:
                begins = self._begins
                after = bisect.bisect_right(begins, begin)
                span = self._spans.get(begins[after - 1]) if after else None
            if span is None or begin >= span.end:
                return None
            key = (begin - span.begin, tensor.dtype, tensor.shape, tensor.stride())
            place = span.places.get(key) or self._find(tensor, span, key)
        except (RuntimeError, NotImplementedError):  # a tensor without a storage: sparse, or a tracer's
            return None
        if place is None or tensor.is_conj() or tensor.is_neg() or not self._is_there(place.buffer):
            return None
        return PackedParam(place, place.buffer.versions[place.slot])

    def _find(self, tensor: Tensor, span: _Span, key: tuple[object, ...]) -> ParamView | None:
        """Return the place of a tensor, which may have a storage of its own over the buffer's memory."""
        address = tensor.data_ptr() or _address(tensor) + int(tensor.storage_offset()) * tensor.itemsize
        offset, rest = divmod(address - span.begin, tensor.itemsize)
        if rest or not 0 <= offset * tensor.itemsize <= span.end - span.begin:
            return None
        buffer = span.buffer
        slot = buffer.slot_at(offset * tensor.itemsize // buffer.shard.itemsize)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        place = ParamView(self.home, span.unit, buffer, slot, tensor.dtype, offset, shape, stride)
        if tensor.data_ptr():
            if len(span.places) >= _MOST_KNOWN:
                span.places.clear()
            span.places[key] = place
        return place

    def _is_there(self, buffer: GatheredBuffer) -> bool:
        """False after share_memory(): a buffer's address may be used by other tensors."""
        whole = buffer.externally_held if buffer.unsharded is None else buffer.unsharded
        return whole is not None and whole.data_ptr() == buffer.address

    def restore(self, saved: PackedParam) -> Tensor:
        """Return the tensor at a place. Its unit must be gathered."""
        place, buffer = saved.place, saved.place.buffer
        if buffer.versions[place.slot] != saved.version:
            raise RuntimeError(
                f"{buffer.name(place.slot)!r}, which this backward needs, was changed by a step or an edit after the "
                "forward that used it: run the backward before, or the forward again"
            )
        if buffer.unsharded is None:
            raise RuntimeError(
                f"{buffer.name(place.slot)!r}, which this backward needs, was laid out anew (by add_param_group() or "
                "close()) after the forward that used it: run the forward again"
            )
        if place.dtype is buffer.unsharded.dtype:
            return buffer.unsharded.as_strided(place.size, place.stride, place.offset)
        made = torch.empty(0, dtype=place.dtype, device=buffer.unsharded.device)
        return made.set_(buffer.unsharded.untyped_storage(), place.offset, place.size, place.stride)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Any]]


class SavedTensorListener(Protocol):
    """Is told that a backward needs units."""

    def needed_again(self, *units: int) -> None:
        """Gather units whose tensors are about to be restored."""


class SavedTensorHooks:
    """The hooks of one optimizer, which hold the listener weakly. torch has one stack of saved-tensor hooks per
    thread."""

    def __init__(self, index: SavedTensorIndex, listener: SavedTensorListener) -> None:
        self._home = index.home
        self._index, self._listener = weakref.ref(index), weakref.ref(listener)
        self._alone = saved_tensors_hooks(*self._hooks(None))  # without others below, as almost always

    def push(self) -> bool:
        """Push these hooks on this thread's stack. Return True if the caller must `pop` them; False if they are on top
        already."""
        before = top_saved_tensors_hooks(False)
        if before is not None and self._are_ours(before[0]):
            return False
        (self._alone if before is None else saved_tensors_hooks(*self._hooks(before))).__enter__()
        return True

    def _are_ours(self, pack: Any) -> bool:
        defaults = getattr(pack, "__defaults__", None)
        return defaults is not None and len(defaults) == 1 and defaults[0] is self._home

    def pop(self) -> None:
        self._alone.__exit__()  # pops the hooks that were pushed last, whichever they are

    def _hooks(self, before: _Pair | None) -> _Pair:
        known, listener, home = self._index, self._listener, self._home  # weakly: a graph may outlive the optimizer

        @untraced
        def pack(tensor: Tensor, _owner: object = home) -> Any:  # the default identifies the function in `push`
            index = known()
            if index is not None and (saved := index.find(tensor)) is not None:
                return saved
            if before is not None:
                return before[0](tensor)
            kept = tensor.detach()  # not itself: an output that its own graph holds would never be freed
            return kept, kept._version

        @untraced
        def unpack(kept: Any) -> Any:
            if isinstance(kept, PackedParam) and kept.place.home is home:
                index, units = known(), listener()
                if index is None or units is None:
                    raise RuntimeError("this graph belongs to an optimizer that is gone: its parameters are, too")
                units.needed_again(kept.place.unit)
                return index.restore(kept)
            if before is not None:
                return before[1](kept)
            tensor, version = kept
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}; expected version {version} "
                    "instead"
                )
            return tensor

        return pack, unpack


class GatheredUnits:
    """The policy of units that are gathered."""

    def __init__(
        self,
        shard_group: Transport,
        collective: Collective,
        post_forward_group: Choice | None,
        edits: EditDetector,
        joining: Joining,
    ) -> None:
        """``post_forward_group``: the ranks that share the shards kept between a forward and its backward."""
        self._rank, self._edits, self._joining = shard_group.rank, edits, joining
        self._collective, self._post_forward_group = collective, post_forward_group
        self.pool = Pool(exact=True)
        self.saved_tensors = SavedTensorIndex()
        self._externally_held: list[GatheredBuffer] = []
        self._copies: dict[torch.device, CopyStream] = {}  # of shards in the host's memory

    def add_buffer(self, unit: GatheredUnit, buffer: GatheredBuffer) -> None:
        """Add a buffer. Its parameters lose their own memory."""
        unit.buffers.append(buffer)
        buffer.put_nans()

    def remove_buffer(self, unit: GatheredUnit, buffer: GatheredBuffer) -> None:
        """Remove a buffer, whose parameters have other memory now."""
        unit.buffers.remove(buffer)
        buffer.unsharded = None
        buffer.end_gather()
        self.saved_tensors.remove(buffer)

    # -- unshard and reshard --------------------------------------------------------------------------------------

    def unshard(self, unit: GatheredUnit) -> None:
        """Launch the all-gathers of a unit that is sharded. Collective."""
        if unit.state is not State.SHARDED:
            return
        if not self._joining.gathers_are_broadcast:
            self._unshard(unit)
        else:
            with self._joining.broadcast("gather", unit=unit.number):
                self._unshard(unit)
                self.wait(unit)  # a rank that gathers only for others waits until all have read its shards

    def _unshard(self, unit: GatheredUnit) -> None:
        with unit.unsharding():
            with usable_later():
                self._sweep()
                for buffer in unit.buffers:
                    unit.work.append(self._gather(unit, buffer))
                    assert buffer.unsharded is not None
                    self.saved_tensors.remember(unit.number, buffer, buffer.unsharded)
            unit.state = State.GATHERING

    def _gather(self, unit: GatheredUnit, buffer: GatheredBuffer) -> Work:
        if buffer.externally_held is not None:
            self._externally_held.remove(buffer)
            buffer.unsharded, buffer.externally_held = buffer.externally_held, None
        else:
            buffer.unsharded = self._room(buffer, buffer.bucket.numel)
        return self._start(unit, buffer, buffer.unsharded.data)  # with a version counter of its own: this is no edit

    def _room(self, buffer: GatheredBuffer, numel: int) -> Tensor:
        bucket = buffer.bucket
        return self.pool.take(numel, bucket.dtypes.param_dtype, torch.device(bucket.device))

    def _start(self, unit: GatheredUnit, buffer: GatheredBuffer, target: Tensor) -> Work:
        """Launch the all-gather of a bucket into ``target``, in the post-forward group if its shard was kept."""
        bucket, (kept, buffer.post_forward_shard) = buffer.bucket, (buffer.post_forward_shard, None)
        buffer.begin_gather(partial(self._room, buffer))
        if kept is not None and self._post_forward_group is not None:
            with self._copying(buffer):
                buffer.copy_kept()
            cuts, (low, high) = self._kept(self._post_forward_group, bucket)
            target[low:high].copy_(kept)
            return self._post_forward_group.collective.all_gather(target, cuts, tag=_tag(unit, buffer))
        if buffer.kept is not None:  # nothing else writes into its copy, so it can be read until the wait
            with self._copying(buffer):
                buffer.copy_kept()
                return all_gather_from(self._collective, buffer.shard, target, bucket.cuts, tag=_tag(unit, buffer))
        low, high = bucket.owned(self._rank)
        target[low:high].copy_(buffer.shard)
        return self._collective.all_gather(target, bucket.cuts, tag=_tag(unit, buffer))

    @contextmanager
    def _copying(self, buffer: GatheredBuffer) -> Iterator[None]:
        """Launch the work of the block beside the current stream if it copies from the host; `wait` orders its end."""
        if not buffer.bucket.offloaded:
            yield
            return
        device = torch.device(buffer.bucket.device)
        copies = self._copies.setdefault(device, CopyStream(device))
        try:
            with copies.beside():
                yield
        finally:
            buffer.copied = copies.event()

    def _kept(self, group: Choice, bucket: BucketSpec) -> tuple[Cuts, tuple[int, int]]:
        """Return the cuts of a whole bucket in the post-forward group, and the interval that this rank keeps."""
        cuts = bucket.even_cuts(group.shard_group.world_size)
        return cuts, cuts.owned(group.shard_group.rank)

    def wait(self, unit: GatheredUnit) -> None:
        """Wait for the all-gathers under way."""
        if unit.state is State.GATHERING:
            with unit.waiting():
                for buffer in unit.buffers:
                    buffer.await_copy()
                while unit.work:
                    unit.work[0].wait()
                    unit.work.pop(0)
            unit.state = State.UNSHARDED

    def reshard(self, unit: GatheredUnit, after_forward: bool) -> None:
        """Free the buffers of a unit that is unsharded and not installed. ``after_forward``: a backward will need it;
        the shards of the ``post_forward_group`` are kept."""
        unit.state = State.SHARDED
        for buffer in unit.buffers:
            if after_forward and self._post_forward_group and not self._joining.gathers_are_broadcast:
                assert buffer.unsharded is not None
                _, (low, high) = self._kept(self._post_forward_group, buffer.bucket)
                buffer.post_forward_shard = self._room(buffer, high - low).copy_(buffer.unsharded.data[low:high])
            buffer.externally_held, buffer.unsharded = buffer.unsharded, None
            buffer.end_gather()
            self._externally_held.append(buffer)
        self._sweep()

    def free_post_forward_shards(self, unit: GatheredUnit) -> None:
        """Free the shards that were kept for a backward."""
        for buffer in unit.buffers:
            buffer.post_forward_shard = None

    def abandon(self, unit: GatheredUnit) -> None:
        """Abandon the all-gathers under way, after a failure of the ranks' communication."""
        unit.work = []
        if unit.state is State.GATHERING:
            unit.state = State.UNSHARDED

    def _sweep(self) -> None:
        """Reclaim the resharded buffers that have no external references any more."""
        for buffer in list(self._externally_held):
            if buffer.externally_held is not None and holders(buffer.externally_held) == 0:
                self.saved_tensors.forget(buffer)
                buffer.externally_held = None
                self._externally_held.remove(buffer)

    # -- install and uninstall ------------------------------------------------------------------------------------

    def install(self, unit: GatheredUnit) -> None:
        """Give the parameters of a whole unit, which are released, their own classes, and make them views of its
        buffers."""
        with usable_later():
            for buffer in unit.buffers:
                with as_plain():
                    edited = buffer.edited()
                for slot in edited:
                    self._edits.note_released(buffer, slot)
                    buffer.renew_nan(slot)
                buffer.set_classes(buffer.bases)
                buffer.put_unsharded()

    def uninstall(self, unit: GatheredUnit) -> None:
        """Release the parameters of a unit, and put a NaN into each. Edits are noted."""
        for buffer in unit.buffers:
            for slot in buffer.edited():
                self._edits.note_slot(buffer, slot)
            buffer.put_nans()
            buffer.set_classes(buffer.released)
            if buffer.unsharded is not None:
                self._edits.compare(buffer, buffer.unsharded)

    # -- changes --------------------------------------------------------------------------------------------------

    def changed(self, buffer: GatheredBuffer, slots: Sequence[int]) -> None:
        """Note that the values of these slots change: saved tensors and external references are out of date."""
        buffer.post_forward_shard = None
        for slot in slots:
            buffer.versions[slot] += 1
        self._sweep()
        if buffer.unsharded is not None:
            torch.autograd.graph.increment_version(buffer.unsharded)
        if buffer.externally_held is not None:
            buffer.externally_held.fill_(float("nan"))

    def commit(self, buffer: GatheredBuffer, slots: Sequence[int]) -> None:
        """Copy the values of these slots, which are whole and equal on all ranks, into this rank's shard."""
        assert buffer.unsharded is not None
        buffer.commit(slots, buffer.unsharded, self._rank)

    def undo_edits(self, unit: GatheredUnit) -> None:
        """Undo the edits of an installed unit."""
        for buffer in unit.buffers:
            buffer.note()
            if buffer.unsharded is not None:
                low, high = buffer.bucket.owned(self._rank)
                buffer.unsharded.data[low:high].copy_(buffer.shard)


def _tag(unit: GatheredUnit, buffer: GatheredBuffer) -> Tag:
    digest = zlib.crc32(f"{unit.name} {buffer.updated}".encode())  # the label may be cut
    return Tag(Kind.ALL_GATHER, f"gather of unit {unit.name!r}", index=buffer.bucket.index, digest=digest)
