"""Units' parameters on one rank: the shard that is always here, and the whole that comes and goes.

Knows: shards, gathered buffers, what stands in each parameter's ``data``. Does not know: modules, autograd, how an edit
is found, or when a unit is needed; it is told to fetch, show, hide and drop.

    SHARDED --fetch--> COMING --wait--> WHOLE --show--> SHOWN        fetch: the all-gathers are under way
       ^                                 |  ^             |          show:  parameters are views of the buffers
       +------------- drop --------------+  +--- hide ----+          hide:  parameters are released, buffers stay

A buffer lives as long as somebody holds its storage. Where that is somebody else (a view that a module cached, an array
that shares the memory), the next gather writes into the same buffer, so that the view follows the parameter as it
would in a plain loop; when a step changes the parameter in between, the buffer is filled with NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from collectives import Choice, Collective, Kind, Tag, Transport, Work
from collectives.pool import Pool

from ..core.layout import ParameterSpec
from ..core.parameter_specs import as_plain
from .edit_detector import EditDetector
from .released import refuse_transforms, released_class, weakly
from .saved_tensor_index import SavedTensorIndex
from .unit_buffer import State, Unit, UnitBuffer, UnitGathers

_NOTHING: AbstractContextManager[Any] = nullcontext()


class UnitManager:
    """The parameters of all units of one optimizer on one rank. A unit is known by its number."""

    def __init__(
        self,
        shards: Transport,
        collective: Collective,
        names: Sequence[str],
        nearby: Choice | None = None,
        on_idle: Callable[[Tensor], None] | None = None,
    ) -> None:
        """``nearby``: some of the ranks, who share what is kept for a backward; ``on_idle``: is told of a slice that
        will not be needed for a while."""
        self._on_idle: Callable[[Tensor], None] = on_idle or _nothing
        self.shards = shards
        self._alone = shards.world_size == 1  # then the shard is the whole
        self.units = [Unit(name, shards.called) for name in names]
        self.pool = Pool(exact=True)
        self._gathers = UnitGathers(shards.rank, collective, nearby, self.pool, self._on_idle)
        self.places = SavedTensorIndex(alone=self._alone)
        self.lasting: str | None = None  # what cannot be mended; told at every agreement
        self._edits = EditDetector(shards.rank)
        self._externally_held: list[UnitBuffer] = []
        self._classes: dict[type[Tensor], type[Tensor]] = {}
        self._written: Work | None = None  # that every rank has written its slices of common memory
        self.join_announcer: Callable[..., AbstractContextManager[None]] | None = None  # around a gather, inside `join`

    # -- what is where --------------------------------------------------------------------------------------------

    def put(self, unit: int, shelf: UnitBuffer) -> None:
        """Take up a shelf. Its parameters have memory of their own, which they lose: from now on they are released."""
        self.units[unit].shelves.append(shelf)
        for base in shelf.bases:
            if base not in self._classes:
                self._classes[base] = released_class(base, weakly(self.spec_of))
        self._release(shelf)
        if self._alone:
            self.places.remember(unit, shelf, shelf.shard)
        self._edits.add(shelf)

    def part(self, number: int, shelf: UnitBuffer) -> None:
        """Give the parameters of a shelf, whose unit is shown, memory of their own, and forget the shelf."""
        for parameter in shelf.parameters:
            parameter.data = parameter.detach().clone()
        self.units[number].shelves.remove(shelf)
        shelf.whole = None
        self.places.forget(shelf)
        self._edits.remove(shelf)

    def shelves(self) -> Iterator[UnitBuffer]:
        for unit in self.units:
            yield from unit.shelves

    def spec_of(self, parameter: Tensor) -> ParameterSpec | None:
        """What is known of a parameter; for errors, and for what can be said of it without values."""
        for shelf in self.shelves():
            for slot, known in enumerate(shelf.parameters):
                if known is parameter:
                    return shelf.spec(slot)
        return None

    # -- coming and going -----------------------------------------------------------------------------------------

    def acquire(self, number: int) -> None:
        """A forward needs a unit: it is not dropped until `release`."""
        self.units[number].forward_refs += 1

    def release(self, number: int) -> None:
        self.units[number].forward_refs -= 1

    def release_all(self) -> None:
        """No forward is under way, whatever an interrupt left."""
        for unit in self.units:
            unit.forward_refs = 0

    def is_installed(self, number: int) -> bool:
        """True where a unit's parameters have their values."""
        return self.units[number].state is State.INSTALLED

    def unshard(self, number: int) -> None:
        """Start to gather a unit, where it is not here. Collective."""
        unit = self.units[number]
        if unit.state is not State.SHARDED:
            return
        if self.join_announcer is None:
            self._unshard(number)
        else:
            with self.join_announcer("gather", unit=number):
                self._unshard(number)
                self._wait(unit)  # who gathers for others alone waits here, until all have read

    def _unshard(self, number: int) -> None:
        unit = self.units[number]
        with unit.unsharding():
            with _usable_later():
                self._sweep()
                if self._externally_held:
                    self._edits.find()  # who holds a dropped buffer may have written beside it
                for shelf in unit.shelves:
                    unit.work.append(self._gather(unit, shelf))
                    assert shelf.whole is not None
                    self.places.remember(number, shelf, shelf.whole)
            unit.state = State.GATHERING

    def _gather(self, unit: Unit, shelf: UnitBuffer) -> Work:
        externally_held = shelf.externally_held
        if externally_held is not None:
            self._externally_held.remove(shelf)
            shelf.externally_held = None
        if shelf.common is not None:
            shelf.whole = shelf.in_common() if externally_held is None else externally_held
            assert self._written is not None, "whoever wrote there has said so"
            return self._written
        if self._alone:
            shelf.whole = shelf.shard
            target = shelf.whole
        else:
            shelf.whole = externally_held if externally_held is not None else self._gathers.room(shelf)
            target = shelf.whole.data  # with a version counter of its own: to gather again is no edit
        return self._gathers.start(unit, shelf, target)

    def _wait(self, unit: Unit) -> None:
        if unit.state is State.GATHERING:
            with unit.waiting():
                while unit.work:
                    unit.work[0].wait()
                    unit.work.pop(0)
            for shelf in unit.shelves:
                shelf.committed.clear()  # its owners, too, have written it
                if shelf.maybe_dirty and shelf.common is not None:
                    shelf.common.restore(shelf)  # of a NaN, or what a stranger wrote
                shelf.maybe_dirty = False
                if shelf.moved and shelf.whole is not None and shelf.common is not None:
                    shelf.whole.data.copy_(shelf.common.whole(shelf.begin, shelf.begin + shelf.bucket.numel))
            unit.state = State.WHOLE

    def install(self, number: int) -> None:
        """Give a unit's parameters their values. Collective where the unit was not fetched yet."""
        unit = self.units[number]
        if unit.state is State.INSTALLED:
            return
        refuse_transforms(unit.name)
        self.unshard(number)
        self._wait(unit)
        with unit.installing():
            with _usable_later():
                for shelf in unit.shelves:
                    self._install(shelf)
            unit.state = State.INSTALLED

    def _install(self, shelf: UnitBuffer) -> None:
        shelf.shown = shelf.unchecked = True
        released = [self._classes[base] for base in shelf.bases]
        if [parameter.__class__ for parameter in shelf.parameters] != released:
            self._tell_swapped(shelf, released)
        for parameter, base in zip(shelf.parameters, shelf.bases, strict=True):
            parameter.__class__ = base
        for slot in shelf.edited():
            if not self._keeps_edit(shelf, slot):
                self._edits.note(f"{shelf.name(slot)!r} was edited while it was released")
                shelf.renew(slot)
        shelf.put_whole()

    def _tell_swapped(self, shelf: UnitBuffer, released: Sequence[type[Tensor]]) -> None:
        for slot, (parameter, known) in enumerate(zip(shelf.parameters, released, strict=True)):
            if parameter.__class__ is not known:
                self.lasting = f"{shelf.name(slot)!r} was swapped for another tensor: build a new model and optimizer"

    def uninstall(self, number: int) -> None:
        """Release a unit's parameters, unless somebody holds it; its buffers stay. One rank alone keeps edits."""
        unit = self.units[number]
        if unit.state is State.INSTALLED and not unit.held:
            with unit.uninstalling():
                self._uninstall(unit)

    def _uninstall(self, unit: Unit) -> None:
        unit.state, self._edits.is_checked = State.WHOLE, False
        for shelf in unit.shelves:
            for slot in shelf.edited():
                if not (self._alone and shelf.owns(slot)):
                    self._edits.note_slot(shelf, slot)
            self._release(shelf)
            if not self._alone and (shelf.common is None or shelf.moved):
                self._edits.compare(shelf)
                self._on_idle(shelf.shard)

    def _release(self, shelf: UnitBuffer) -> None:
        shelf.shown = False
        shelf.put_nans()
        for parameter, base in zip(shelf.parameters, shelf.bases, strict=True):
            parameter.__class__ = self._classes[base]

    def reshard(self, number: int, *, for_now: bool = False) -> None:
        """Give a unit's memory back, unless somebody holds it. Waits for what is under way. ``for_now``: a backward
        will ask for it; what ranks nearby share of it stays."""
        unit = self.units[number]
        if unit.held or unit.state is State.SHARDED:
            return
        with unit.resharding():
            self._reshard(unit, for_now)

    def _reshard(self, unit: Unit, for_now: bool) -> None:
        self._wait(unit)
        if unit.state is State.INSTALLED:
            self._uninstall(unit)
        unit.state = State.SHARDED
        for shelf in unit.shelves:
            if for_now and self._gathers.nearby and self.join_announcer is None and shelf.common is None:
                shelf.post_forward_shard = self._gathers.keep(shelf)
            if self._alone:
                self._on_idle(shelf.shard)
            else:
                shelf.externally_held = shelf.whole
                self._externally_held.append(shelf)
            shelf.whole = None
        self._sweep()

    def free_post_forward_shards(self) -> None:
        """No backward will ask any more."""
        for shelf in self.shelves():
            shelf.post_forward_shard = None

    def reshard_all(self) -> None:
        """Drop every unit that nobody holds."""
        for number in range(len(self.units)):
            self.reshard(number)

    def abandon(self) -> None:
        """After a failure that no wait can end well: forget what is under way, and release everything."""
        for number, unit in enumerate(self.units):
            forward_refs, gather_refs = unit.forward_refs, unit.gather_refs
            unit.forward_refs, unit.gather_refs, unit.work = 0, 0, []
            if unit.state is State.GATHERING:
                unit.state = State.WHOLE
            self.reshard(number)
            unit.forward_refs, unit.gather_refs = forward_refs, gather_refs

    def _sweep(self) -> None:
        """Take back the buffers that strangers have let go since. What a stranger wrote while the unit was shown is
        looked for as soon as one is seen, and what he wrote later is forgotten as soon as he is gone."""
        changed = []
        for shelf in list(self._externally_held):
            if shelf.externally_held is not None and shelf.external_refs(shelf.externally_held) == 0:
                self._reclaim(shelf)
                changed += [shelf] if shelf.maybe_dirty else []
            elif not shelf.maybe_dirty:
                shelf.maybe_dirty = True
                changed.append(shelf)
        for common in dict.fromkeys(shelf.common for shelf in changed if shelf.common is not None):
            self._edits.find_in(common)

    def _reclaim(self, shelf: UnitBuffer) -> None:
        if shelf.common is None or not shelf.is_in_common(shelf.externally_held):
            self.places.forget(shelf)  # common memory stays where it is
        shelf.externally_held = None
        self._externally_held.remove(shelf)

    # -- edits ----------------------------------------------------------------------------------------------------

    def edits(self) -> str | None:
        """What was edited since this was last asked, and would be lost; None where all is well."""
        self.find_edits()
        return self._edits.take()

    def find_edits(self) -> None:
        """Look for edits, where there may be some."""
        if not self._edits.is_checked or self._externally_held:
            self._edits.find()

    def _keeps_edit(self, shelf: UnitBuffer, slot: int) -> bool:
        """True where an edit of a released parameter was made through a view of the shard, which is the whole."""
        if not (self._alone and shelf.owns(slot)):
            return False
        return bool(shelf.nans[slot].isnan().all())  # host synchronisation: only after such an edit

    def commit(self, shelf: UnitBuffer, slots: Sequence[int]) -> None:
        """The values of these slots, which are shown, are equal on all ranks: they are the parameters' own from now."""
        low, high = shelf.bucket.owned(self.shards.rank)
        shelf.committed.update(slots)
        if not self._alone and shelf.whole is not None:
            for piece in shelf.bucket.pieces(low, high):
                if piece.slot in slots:
                    shelf.shard[piece.begin - low : piece.end - low].copy_(shelf.whole[piece.begin : piece.end])
            self._on_idle(shelf.shard)
        self.changed(shelf, slots)

    def _undo_edits(self, number: int) -> None:
        """An exception left a block, and tells enough: what was edited in it is not told again. Where another block is
        around it, what was edited there is that one's."""
        unit = self.units[number]
        if unit.state is State.INSTALLED and unit.gather_refs == 1:
            for shelf in unit.shelves:
                for slot in range(len(shelf.parameters)):
                    shelf.note(slot)
                if shelf.common is not None and not shelf.moved:
                    shelf.common.restore(shelf)
                elif not self._alone and shelf.whole is not None:
                    low, high = shelf.bucket.owned(self.shards.rank)
                    shelf.whole.data[low:high].copy_(shelf.shard)
                    self._on_idle(shelf.shard)

    # -- changes --------------------------------------------------------------------------------------------------

    def changed(self, shelf: UnitBuffer, slots: Sequence[int]) -> None:
        """The values of these slots are others now: what a graph or a stranger holds of them is out of date."""
        if not slots:
            return
        shelf.post_forward_shard = None
        for slot in slots:
            shelf.versions[slot] += 1
        with as_plain():  # as an edit in place does, also of what autograd itself has saved
            torch.autograd.graph.increment_version([shelf.parameters[slot] for slot in slots])
            for slot in slots:
                shelf.note(slot)
        self._sweep()
        if shelf.whole is not None:
            torch.autograd.graph.increment_version(shelf.whole)
        if shelf.externally_held is not None:
            shelf.externally_held.fill_(float("nan"))

    def announce(self) -> None:
        """Say that this rank has written its slices of common memory, since it last said so. Collective; the next
        gather waits for the others' word, and nothing else travels then."""
        if self._edits.common:
            if self._written is not None:
                self._written.wait()
            self._written = self.shards.announce(Tag(Kind.ALL_GATHER, "slices of units in common memory"))

    @contextmanager
    def gathered(self, numbers: Sequence[int]) -> Iterator[None]:
        """Units, whole, inside the block. Collective."""
        for number in numbers:
            self.units[number].gather_refs += 1
        try:
            self._edits.find()  # what is written from now on is this block's
            for number in numbers:
                self.unshard(number)
            for number in numbers:
                self.install(number)
            yield
        except BaseException:
            for number in numbers:
                self._undo_edits(number)
            raise
        finally:
            for number in numbers:
                self.units[number].gather_refs -= 1
            if self.shards.broken:
                self.abandon()
            else:
                for number in numbers:
                    self.reshard(number)


def _nothing(_: Tensor) -> None:
    return None


def _usable_later() -> AbstractContextManager[Any]:
    """Memory that is made in inference mode cannot serve a backward later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING
