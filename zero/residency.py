"""Units' parameters on one rank: the shard that is always here, and the whole that comes and goes.

Knows: shards, gathered buffers, what stands in each parameter's ``data``. Does not know: modules, autograd, or when a
unit is needed; it is told to fetch, show, hide and drop.

    SHARDED --fetch--> COMING --wait--> WHOLE --show--> SHOWN        fetch: the all-gathers are under way
       ^                                 |  ^             |          show:  parameters are views of the buffers
       +------------- drop --------------+  +--- hide ----+          hide:  parameters are released, buffers stay

A buffer lives as long as somebody holds its storage. Where that is somebody else (a view that a module cached, an array
that shares the memory), the next gather writes into the same buffer, so that the view follows the parameter as it
would in a plain loop; when a step changes the parameter in between, the buffer is filled with NaN.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from collectives import Collective, Kind, Tag, Transport, Work
from collectives.memory import Pool, holders

from .released import as_plain, is_released, released_class
from .shelf import Saved, Shelf, nan_like
from .stages import same_bits


class State(Enum):
    """Where a unit's whole parameters are."""

    SHARDED = "nowhere: each rank has its slices"
    COMING = "on their way"
    WHOLE = "in buffers"
    SHOWN = "in the parameters"


@dataclass(eq=False)
class _Unit:
    name: str
    shelves: list[Shelf] = field(default_factory=list)
    state: State = State.SHARDED
    runs: int = 0  # forwards under way that need it
    pins: int = 0  # blocks of `gathered` that need it
    work: list[Work] = field(default_factory=list)

    @property
    def held(self) -> bool:
        return bool(self.runs or self.pins)


class Residency:
    """The parameters of all units of one optimizer on one rank. A unit is known by its number."""

    def __init__(self, transport: Transport, collective: Collective, names: Sequence[str]) -> None:
        self._transport, self._collective = transport, collective
        self.units = [_Unit(name) for name in names]
        self.pool = Pool(slack=1.0, spare=1.0)
        self.problem: str | None = None  # an edit that was found and would be lost; told at the next agreement
        self.lasting: str | None = None  # what cannot be mended; told at every agreement
        self._places: dict[int, tuple[int, Shelf]] = {}  # address of a buffer -> what lies there
        self._lenders: list[Shelf] = []
        self._classes: dict[type[Tensor], type[Tensor]] = {}
        self.home = object()  # whose places these are
        self._alone = transport.world_size == 1  # then the shard is the whole

    # -- what is where --------------------------------------------------------------------------------------------

    def put(self, unit: int, shelf: Shelf) -> None:
        """Take up a shelf. Its parameters have memory of their own, which they lose: from now on they are released."""
        self.units[unit].shelves.append(shelf)
        for slot in range(len(shelf.parameters)):
            self._release(shelf, slot)
        if self._alone:
            shelf.address = _address(shelf.shard)
            self._places[shelf.address] = (unit, shelf)

    def part(self, number: int, shelf: Shelf) -> None:
        """Give the parameters of a shelf, whose unit is shown, memory of their own, and forget the shelf."""
        unit = self.units[number]
        for parameter in shelf.parameters:
            parameter.data = parameter.detach().clone()
        unit.shelves.remove(shelf)
        shelf.whole = None
        self._forget(shelf)

    @property
    def broken(self) -> bool:
        """True after a failure of the ranks' communication: nothing can be gathered any more."""
        return self._transport.broken

    def shelves(self) -> Iterator[Shelf]:
        for unit in self.units:
            yield from unit.shelves

    def name_of(self, parameter: Tensor) -> str | None:
        """The name of a parameter; for errors."""
        for shelf in self.shelves():
            for slot, known in enumerate(shelf.parameters):
                if known is parameter:
                    return shelf.name(slot)
        return None

    # -- coming and going -----------------------------------------------------------------------------------------

    def hold(self, number: int) -> None:
        """A forward needs a unit: it is not dropped until `let_go`."""
        self.units[number].runs += 1

    def let_go(self, number: int) -> None:
        self.units[number].runs -= 1

    def let_all_go(self) -> None:
        """No forward is under way, whatever an interrupt left."""
        for unit in self.units:
            unit.runs = 0

    @torch.inference_mode(False)  # memory that is made in inference mode cannot serve a backward later
    def fetch(self, number: int) -> None:
        """Start to gather a unit, where it is not here. Collective."""
        unit = self.units[number]
        if unit.state is not State.SHARDED:
            return
        self._sweep()
        for shelf in unit.shelves:
            unit.work.append(self._gather(unit, shelf))
            assert shelf.whole is not None
            self._forget(shelf)  # share_memory() may have moved a storage
            shelf.address = _address(shelf.whole)
            self._places[shelf.address] = (number, shelf)
        unit.state = State.COMING

    def _gather(self, unit: _Unit, shelf: Shelf) -> Work:
        bucket, lent = shelf.bucket, shelf.lent
        if lent is not None:
            self._lenders.remove(shelf)
            shelf.lent = None
        digest = zlib.crc32(f"{unit.name} {shelf.updated}".encode())  # the label may be cut
        tag = Tag(Kind.ALL_GATHER, f"gather of unit {unit.name!r}", index=bucket.index, digest=digest)
        if shelf.region is not None:
            if lent is not None:
                shelf.region.refresh()  # of a NaN, or what a stranger wrote
            shelf.whole = shelf.region.whole().view(shelf.shard.dtype) if lent is None else lent
            return self._transport.announce(tag)  # nothing travels but that everybody has written
        if self._alone:
            shelf.whole = shelf.shard
            target = shelf.whole
        else:
            if lent is None:
                lent = self.pool.take(bucket.numel, bucket.dtypes.compute, torch.device(bucket.device))
            shelf.whole = lent
            target = shelf.whole.data  # with a version counter of its own: to gather again is no edit
            low, high = bucket.owned(self._transport.rank)
            target[low:high].copy_(shelf.shard)
        return self._collective.all_gather(target, bucket.bounds, tag=tag)

    def _arrive(self, unit: _Unit) -> None:
        if unit.state is State.COMING:
            while unit.work:
                unit.work[0].wait()
                unit.work.pop(0)
            for shelf in unit.shelves:
                if shelf.moved and shelf.whole is not None and shelf.region is not None:
                    shelf.whole.data.copy_(shelf.region.whole().view(shelf.shard.dtype))
            unit.state = State.WHOLE

    @torch.inference_mode(False)
    def show(self, number: int) -> None:
        """Give a unit's parameters their values. Collective where the unit was not fetched yet."""
        self.fetch(number)
        unit = self.units[number]
        self._arrive(unit)
        if unit.state is State.SHOWN:
            return
        for shelf in unit.shelves:
            assert shelf.whole is not None
            for slot, view in enumerate(shelf.views(shelf.whole)):
                parameter = shelf.parameters[slot]
                if not is_released(parameter):
                    self.lasting = (
                        f"{shelf.name(slot)!r} was swapped for another tensor: build a new model and optimizer"
                    )
                parameter.__class__ = shelf.bases[slot]
                if not shelf.is_untouched(slot) and not self._keeps_edit(shelf, slot):
                    self._tell(f"{shelf.name(slot)!r} was edited while it was released")
                    shelf.nans[slot] = nan_like(shelf.nans[slot])
                parameter.data = view
                shelf.note(slot)
        unit.state = State.SHOWN

    def hide(self, number: int) -> None:
        """Release a unit's parameters, unless somebody holds it; its buffers stay. One rank alone keeps edits."""
        unit = self.units[number]
        if unit.state is not State.SHOWN or unit.held:
            return
        unit.state = State.WHOLE
        for shelf in unit.shelves:
            for slot in range(len(shelf.parameters)):
                if not shelf.is_untouched(slot) and not (self._alone and shelf.owns(slot)):
                    self._tell_edited(shelf, slot)
                self._release(shelf, slot)
            if not self._alone:
                self._compare(shelf)

    def _keeps_edit(self, shelf: Shelf, slot: int) -> bool:
        """True where an edit of a released parameter was made through a view of the shard, which is the whole."""
        return self._alone and shelf.owns(slot) and bool(shelf.nans[slot].isnan().all())

    def _compare(self, shelf: Shelf) -> None:
        """Find an edit that left no trace in a version: in common memory where this rank has written, else by what
        became of its own slice."""
        assert shelf.whole is not None
        region, itemsize = shelf.region, shelf.shard.itemsize
        if region is None:
            low, high = shelf.bucket.owned(self._transport.rank)
            self._compare_slice(shelf, low, high, shelf.shard)
            return
        written = [(0, shelf.whole.numel() * itemsize)] if shelf.moved else region.written()
        for begin, end in written:
            low, high = begin // itemsize, end // itemsize
            self._compare_slice(shelf, low, high, region.own(begin, end).view(shelf.shard.dtype))
        shelf.accepted.clear()
        if written:
            region.refresh()

    def _compare_slice(self, shelf: Shelf, low: int, high: int, kept: Tensor) -> None:
        assert shelf.whole is not None
        if not same_bits(shelf.whole[low:high], kept):
            for piece in shelf.bucket.pieces(low, high):
                if piece.slot in shelf.accepted:  # its owners are writing what is here
                    continue
                if not same_bits(shelf.whole[piece.begin : piece.end], kept[piece.begin - low : piece.end - low]):
                    self._tell_edited(shelf, piece.slot)

    def _tell_edited(self, shelf: Shelf, slot: int) -> None:
        self._tell(
            f"{shelf.name(slot)!r} was edited while its unit was gathered (as an Embedding with max_norm does in its "
            "forward), which the other ranks cannot see"
        )

    def accept(self, shelf: Shelf, slots: Sequence[int]) -> None:
        """The values of these slots, which are shown, are equal on all ranks: they are the parameters' own from now."""
        low, high = shelf.bucket.owned(self._transport.rank)
        shelf.accepted.update(slots)
        if not self._alone and shelf.whole is not None:
            for piece in shelf.bucket.pieces(low, high):
                if piece.slot in slots:
                    shelf.shard[piece.begin - low : piece.end - low].copy_(shelf.whole[piece.begin : piece.end])
        self.changed(shelf, slots)

    def _undo_edits(self, number: int) -> None:
        """An exception left a block, and tells enough: what was edited in it is not told again."""
        if self.units[number].state is State.SHOWN:
            for shelf in self.units[number].shelves:
                for slot in range(len(shelf.parameters)):
                    shelf.note(slot)
                if shelf.region is not None:
                    shelf.region.refresh()
                elif not self._alone and shelf.whole is not None:
                    low, high = shelf.bucket.owned(self._transport.rank)
                    shelf.whole.data[low:high].copy_(shelf.shard)

    def _tell(self, problem: str) -> None:
        self.problem = self.problem or f"{problem}: edit it inside gathered(write=True)"

    def drop(self, number: int) -> None:
        """Give a unit's memory back, unless somebody holds it. Waits for what is under way."""
        unit = self.units[number]
        if unit.held:
            return
        self._arrive(unit)
        self.hide(number)
        if unit.state is State.SHARDED:
            return
        unit.state = State.SHARDED
        for shelf in unit.shelves:
            if not self._alone:
                shelf.lent = shelf.whole
                self._lenders.append(shelf)
            shelf.whole = None
        self._sweep()

    def drop_all(self) -> None:
        """Drop every unit that nobody holds."""
        for number in range(len(self.units)):
            self.drop(number)

    def abandon(self) -> None:
        """After a failure that no wait can end well: forget what is under way, and release everything."""
        for number, unit in enumerate(self.units):
            runs, pins = unit.runs, unit.pins
            unit.runs, unit.pins, unit.work = 0, 0, []
            if unit.state is State.COMING:
                unit.state = State.WHOLE
            self.drop(number)
            unit.runs, unit.pins = runs, pins

    def _release(self, shelf: Shelf, slot: int) -> None:
        parameter, base = shelf.parameters[slot], shelf.bases[slot]
        parameter.data = shelf.nans[slot]
        shelf.note(slot)
        if base not in self._classes:
            self._classes[base] = released_class(base, _weak_name(self))
        parameter.__class__ = self._classes[base]

    def _sweep(self) -> None:
        """Take back the buffers that strangers have let go since."""
        for shelf in list(self._lenders):
            if shelf.lent is not None and holders(shelf.lent) == 0:
                self._reclaim(shelf)
            else:
                shelf.estranged = True

    def _reclaim(self, shelf: Shelf) -> None:
        if shelf.lent is not None:
            self._forget(shelf)
            shelf.lent = None
            self._lenders.remove(shelf)
            if shelf.region is not None and shelf.estranged:
                shelf.region.refresh()
            shelf.estranged = False

    def _forget(self, shelf: Shelf) -> None:
        """What lies at a buffer's address from now on is somebody else's."""
        self._places.pop(shelf.address, None)
        shelf.address = 0

    # -- what a graph keeps ---------------------------------------------------------------------------------------

    def place(self, tensor: Tensor) -> Saved | None:
        """Where a tensor lies in a gathered buffer; None for any other."""
        try:
            found = self._places.get(_address(tensor))
        except (RuntimeError, NotImplementedError):  # a tensor without a storage: sparse, or a tracer's
            return None
        if found is None or tensor.is_conj() or tensor.is_neg():
            return None
        unit, shelf = found
        offset = int(tensor.storage_offset())
        slot = shelf.slot_at(offset * tensor.itemsize // shelf.shard.itemsize)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return Saved(self.home, unit, shelf, slot, self._version(shelf, slot), tensor.dtype, offset, shape, stride)

    def _version(self, shelf: Shelf, slot: int) -> int:
        """How often a parameter's values were changed; edits count where they are kept."""
        return shelf.versions[slot] + (shelf.parameters[slot]._version if self._alone else 0)

    def restore(self, saved: Saved) -> Tensor:
        """The tensor at a place; its unit is here."""
        shelf = saved.shelf
        if self._version(shelf, saved.slot) != saved.version:
            raise RuntimeError(
                f"{shelf.name(saved.slot)!r}, which this backward needs, was changed by a step or an edit after the "
                "forward that used it: run the backward before, or the forward again"
            )
        if shelf.whole is None:
            raise RuntimeError(
                f"{shelf.name(saved.slot)!r}, which this backward needs, was laid out anew (by add_param_group() or "
                "close()) after the forward that used it: run the forward again"
            )
        if saved.dtype is shelf.whole.dtype:
            return shelf.whole.as_strided(saved.size, saved.stride, saved.offset)
        made = torch.empty(0, dtype=saved.dtype, device=shelf.whole.device)
        return made.set_(shelf.whole.untyped_storage(), saved.offset, saved.size, saved.stride)

    # -- changes --------------------------------------------------------------------------------------------------

    def changed(self, shelf: Shelf, slots: Sequence[int]) -> None:
        """The values of these slots are others now: what a graph or a stranger holds of them is out of date."""
        if not slots:
            return
        for slot in slots:
            shelf.versions[slot] += 1
        with as_plain():  # as an edit in place does, also of what autograd itself has saved
            torch.autograd.graph.increment_version([shelf.parameters[slot] for slot in slots])
            for slot in slots:
                shelf.note(slot)
        self._sweep()
        if shelf.whole is not None:
            torch.autograd.graph.increment_version(shelf.whole)
        if shelf.lent is not None:
            shelf.lent.fill_(float("nan"))

    @contextmanager
    def gathered(self, numbers: Sequence[int]) -> Iterator[None]:
        """Units, whole, inside the block. Collective."""
        for number in numbers:
            self.units[number].pins += 1
        try:
            for number in numbers:
                self.fetch(number)
            for number in numbers:
                self.show(number)
            yield
        except BaseException:
            for number in numbers:
                self._undo_edits(number)
            raise
        finally:
            for number in numbers:
                self.units[number].pins -= 1
            if self.broken:
                self.abandon()
            else:
                for number in numbers:
                    self.drop(number)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _weak_name(residency: Residency) -> Callable[[Tensor], str | None]:
    reference = weakref.ref(residency)

    def name_of(parameter: Tensor) -> str | None:
        known = reference()
        return None if known is None else known.name_of(parameter)

    return name_of
