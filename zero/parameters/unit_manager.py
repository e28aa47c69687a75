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

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from collectives import Choice, Collective, Kind, Tag, Transport, Work
from collectives.pool import Pool
from collectives.torch_internals import TransformType, get_interpreter_stack

from ..core.layout import ParameterSpec
from ..events import Event
from .edit_detector import Edits
from .released import SpecOf, as_plain, released_class
from .saved_tensor_index import Places
from .unit_buffer import Shelf

_NOTHING: AbstractContextManager[Any] = nullcontext()


class State(Enum):
    """Where a unit's whole parameters are."""

    SHARDED = "nowhere: each rank has its slices"
    COMING = "on their way"
    WHOLE = "in buffers"
    SHOWN = "in the parameters"


@dataclass(eq=False)
class _Unit:
    name: str
    rank: InitVar[str]
    shelves: list[Shelf] = field(default_factory=list)
    state: State = State.SHARDED
    runs: int = 0  # forwards under way that need it
    pins: int = 0  # blocks of `gathered` that need it
    work: list[Work] = field(default_factory=list)

    def __post_init__(self, rank: str) -> None:
        self.unsharding = Event(f"unshard unit {self.name}", rank)
        self.waiting = Event(f"wait_for_unshard unit {self.name}", rank)
        self.installing = Event(f"install unit {self.name}", rank)
        self.uninstalling = Event(f"uninstall unit {self.name}", rank)
        self.resharding = Event(f"reshard unit {self.name}", rank)

    @property
    def held(self) -> bool:
        return bool(self.runs or self.pins)


class Residency:
    """The parameters of all units of one optimizer on one rank. A unit is known by its number."""

    def __init__(
        self,
        shards: Transport,
        collective: Collective,
        names: Sequence[str],
        nearby: Choice | None = None,
        at_rest: Callable[[Tensor], None] | None = None,
    ) -> None:
        """``nearby``: some of the ranks, who share what is kept for a backward; ``at_rest``: is told of a slice that
        will not be needed for a while."""
        self._at_rest: Callable[[Tensor], None] = at_rest or _nothing
        self._shards, self._collective, self._nearby = shards, collective, nearby
        self._alone = shards.world_size == 1  # then the shard is the whole
        self.units = [_Unit(name, shards.rank_label) for name in names]
        self.pool = Pool(exact=True)
        self.places = Places(alone=self._alone)
        self.lasting: str | None = None  # what cannot be mended; told at every agreement
        self._edits = Edits(shards.rank)
        self._lenders: list[Shelf] = []
        self._classes: dict[type[Tensor], type[Tensor]] = {}
        self._written: Work | None = None  # that every rank has written its slices of common memory
        self.telling: Callable[..., AbstractContextManager[None]] | None = None  # around a gather, inside `join`

    # -- what is where --------------------------------------------------------------------------------------------

    def put(self, unit: int, shelf: Shelf) -> None:
        """Take up a shelf. Its parameters have memory of their own, which they lose: from now on they are released."""
        self.units[unit].shelves.append(shelf)
        for base in shelf.bases:
            if base not in self._classes:
                self._classes[base] = released_class(base, _weak_spec(self))
        self._release(shelf)
        if self._alone:
            self.places.remember(unit, shelf, shelf.shard)
        self._edits.add(shelf)

    def part(self, number: int, shelf: Shelf) -> None:
        """Give the parameters of a shelf, whose unit is shown, memory of their own, and forget the shelf."""
        for parameter in shelf.parameters:
            parameter.data = parameter.detach().clone()
        self.units[number].shelves.remove(shelf)
        shelf.whole = None
        self.places.forget(shelf)
        self._edits.remove(shelf)

    @property
    def broken(self) -> bool:
        """True after a failure of the ranks' communication: nothing can be gathered any more."""
        return self._shards.broken

    @property
    def called(self) -> str:
        """What errors call this rank."""
        return self._shards.rank_label

    def check_process(self) -> None:
        """Raise `CollectiveError` in a process that was forked from the rank's: values there are of no known step."""
        self._shards.check_process()

    def shelves(self) -> Iterator[Shelf]:
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

    def hold(self, number: int) -> None:
        """A forward needs a unit: it is not dropped until `let_go`."""
        self.units[number].runs += 1

    def let_go(self, number: int) -> None:
        self.units[number].runs -= 1

    def let_all_go(self) -> None:
        """No forward is under way, whatever an interrupt left."""
        for unit in self.units:
            unit.runs = 0

    def shows(self, number: int) -> bool:
        """True where a unit's parameters have their values."""
        return self.units[number].state is State.SHOWN

    def fetch(self, number: int) -> None:
        """Start to gather a unit, where it is not here. Collective."""
        unit = self.units[number]
        if unit.state is not State.SHARDED:
            return
        if self.telling is None:
            self._fetch(number)
        else:
            with self.telling("gather", unit=number):
                self._fetch(number)
                self._arrive(unit)  # who gathers for others alone waits here, until all have read

    def _fetch(self, number: int) -> None:
        unit = self.units[number]
        with unit.unsharding():
            with _usable_later():
                self._sweep()
                if self._lenders:
                    self._edits.find()  # who holds a dropped buffer may have written beside it
                for shelf in unit.shelves:
                    unit.work.append(self._gather(unit, shelf))
                    assert shelf.whole is not None
                    self.places.remember(number, shelf, shelf.whole)
            unit.state = State.COMING

    def _gather(self, unit: _Unit, shelf: Shelf) -> Work:
        bucket, lent = shelf.bucket, shelf.lent
        if lent is not None:
            self._lenders.remove(shelf)
            shelf.lent = None
        if shelf.common is not None:
            shelf.whole = shelf.in_common() if lent is None else lent
            assert self._written is not None, "whoever wrote there has said so"
            return self._written
        if self._alone:
            shelf.whole = shelf.shard
            target = shelf.whole
        else:
            if lent is None:
                lent = self.pool.take(bucket.numel, bucket.dtypes.compute, torch.device(bucket.device))
            shelf.whole = lent
            target = shelf.whole.data  # with a version counter of its own: to gather again is no edit
            kept, shelf.kept = shelf.kept, None
            if kept is not None and self._nearby is not None:
                place, bounds = self._nearby.shards.rank, bucket.cut(self._nearby.shards.world_size)
                target[bounds[place] : bounds[place + 1]].copy_(kept)
                return self._nearby.collective.all_gather(target, bounds, tag=_tag(unit, shelf))
            low, high = bucket.owned(self._shards.rank)
            target[low:high].copy_(shelf.shard)
            self._at_rest(shelf.shard)
        return self._collective.all_gather(target, bucket.bounds, tag=_tag(unit, shelf))

    def _arrive(self, unit: _Unit) -> None:
        if unit.state is State.COMING:
            with unit.waiting():
                while unit.work:
                    unit.work[0].wait()
                    unit.work.pop(0)
            for shelf in unit.shelves:
                shelf.accepted.clear()  # its owners, too, have written it
                if shelf.estranged and shelf.common is not None:
                    shelf.common.restore(shelf)  # of a NaN, or what a stranger wrote
                shelf.estranged = False
                if shelf.moved and shelf.whole is not None and shelf.common is not None:
                    shelf.whole.data.copy_(shelf.common.whole(shelf.begin, shelf.begin + shelf.bucket.numel))
            unit.state = State.WHOLE

    def show(self, number: int) -> None:
        """Give a unit's parameters their values. Collective where the unit was not fetched yet."""
        unit = self.units[number]
        if unit.state is State.SHOWN:
            return
        refuse_transforms(unit.name)
        self.fetch(number)
        self._arrive(unit)
        with unit.installing():
            with _usable_later():
                for shelf in unit.shelves:
                    self._show(shelf)
            unit.state = State.SHOWN

    def _show(self, shelf: Shelf) -> None:
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

    def _tell_swapped(self, shelf: Shelf, released: Sequence[type[Tensor]]) -> None:
        for slot, (parameter, known) in enumerate(zip(shelf.parameters, released, strict=True)):
            if parameter.__class__ is not known:
                self.lasting = f"{shelf.name(slot)!r} was swapped for another tensor: build a new model and optimizer"

    def hide(self, number: int) -> None:
        """Release a unit's parameters, unless somebody holds it; its buffers stay. One rank alone keeps edits."""
        unit = self.units[number]
        if unit.state is State.SHOWN and not unit.held:
            with unit.uninstalling():
                self._hide(unit)

    def _hide(self, unit: _Unit) -> None:
        unit.state, self._edits.looked = State.WHOLE, False
        for shelf in unit.shelves:
            for slot in shelf.edited():
                if not (self._alone and shelf.owns(slot)):
                    self._edits.note_slot(shelf, slot)
            self._release(shelf)
            if not self._alone and (shelf.common is None or shelf.moved):
                self._edits.compare(shelf)
                self._at_rest(shelf.shard)

    def _release(self, shelf: Shelf) -> None:
        shelf.shown = False
        shelf.put_nans()
        for parameter, base in zip(shelf.parameters, shelf.bases, strict=True):
            parameter.__class__ = self._classes[base]

    def drop(self, number: int, *, for_now: bool = False) -> None:
        """Give a unit's memory back, unless somebody holds it. Waits for what is under way. ``for_now``: a backward
        will ask for it; what ranks nearby share of it stays."""
        unit = self.units[number]
        if unit.held or unit.state is State.SHARDED:
            return
        with unit.resharding():
            self._drop(unit, for_now)

    def _drop(self, unit: _Unit, for_now: bool) -> None:
        self._arrive(unit)
        if unit.state is State.SHOWN:
            self._hide(unit)
        unit.state = State.SHARDED
        for shelf in unit.shelves:
            if for_now and self._nearby is not None and self.telling is None and shelf.common is None:
                shelf.kept = self._kept(shelf, self._nearby.shards)
            if self._alone:
                self._at_rest(shelf.shard)
            else:
                shelf.lent = shelf.whole
                self._lenders.append(shelf)
            shelf.whole = None
        self._sweep()

    def _kept(self, shelf: Shelf, nearby: Transport) -> Tensor:
        assert shelf.whole is not None
        low, high = shelf.bucket.cut(nearby.world_size)[nearby.rank :][:2]
        kept = self.pool.take(high - low, shelf.bucket.dtypes.compute, shelf.whole.device)
        return kept.copy_(shelf.whole.data[low:high])

    def forget_kept(self) -> None:
        """No backward will ask any more."""
        for shelf in self.shelves():
            shelf.kept = None

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

    def _sweep(self) -> None:
        """Take back the buffers that strangers have let go since. What a stranger wrote while the unit was shown is
        looked for as soon as one is seen, and what he wrote later is forgotten as soon as he is gone."""
        changed = []
        for shelf in list(self._lenders):
            if shelf.lent is not None and shelf.strangers(shelf.lent) == 0:
                self._reclaim(shelf)
                changed += [shelf] if shelf.estranged else []
            elif not shelf.estranged:
                shelf.estranged = True
                changed.append(shelf)
        for common in dict.fromkeys(shelf.common for shelf in changed if shelf.common is not None):
            self._edits.find_in(common)

    def _reclaim(self, shelf: Shelf) -> None:
        if shelf.common is None or not shelf.is_in_common(shelf.lent):
            self.places.forget(shelf)  # common memory stays where it is
        shelf.lent = None
        self._lenders.remove(shelf)

    # -- edits ----------------------------------------------------------------------------------------------------

    def edits(self) -> str | None:
        """What was edited since this was last asked, and would be lost; None where all is well."""
        self.look()
        return self._edits.take()

    def look(self) -> None:
        """Look for edits, where there may be some."""
        if not self._edits.looked or self._lenders:
            self._edits.find()

    def _keeps_edit(self, shelf: Shelf, slot: int) -> bool:
        """True where an edit of a released parameter was made through a view of the shard, which is the whole."""
        if not (self._alone and shelf.owns(slot)):
            return False
        return bool(shelf.nans[slot].isnan().all())  # host synchronisation: only after such an edit

    def accept(self, shelf: Shelf, slots: Sequence[int]) -> None:
        """The values of these slots, which are shown, are equal on all ranks: they are the parameters' own from now."""
        low, high = shelf.bucket.owned(self._shards.rank)
        shelf.accepted.update(slots)
        if not self._alone and shelf.whole is not None:
            for piece in shelf.bucket.pieces(low, high):
                if piece.slot in slots:
                    shelf.shard[piece.begin - low : piece.end - low].copy_(shelf.whole[piece.begin : piece.end])
            self._at_rest(shelf.shard)
        self.changed(shelf, slots)

    def _undo_edits(self, number: int) -> None:
        """An exception left a block, and tells enough: what was edited in it is not told again. Where another block is
        around it, what was edited there is that one's."""
        unit = self.units[number]
        if unit.state is State.SHOWN and unit.pins == 1:
            for shelf in unit.shelves:
                for slot in range(len(shelf.parameters)):
                    shelf.note(slot)
                if shelf.common is not None and not shelf.moved:
                    shelf.common.restore(shelf)
                elif not self._alone and shelf.whole is not None:
                    low, high = shelf.bucket.owned(self._shards.rank)
                    shelf.whole.data[low:high].copy_(shelf.shard)
                    self._at_rest(shelf.shard)

    # -- changes --------------------------------------------------------------------------------------------------

    def changed(self, shelf: Shelf, slots: Sequence[int]) -> None:
        """The values of these slots are others now: what a graph or a stranger holds of them is out of date."""
        if not slots:
            return
        shelf.kept = None
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

    def announce(self) -> None:
        """Say that this rank has written its slices of common memory, since it last said so. Collective; the next
        gather waits for the others' word, and nothing else travels then."""
        if self._edits.common:
            if self._written is not None:
                self._written.wait()
            self._written = self._shards.announce(Tag(Kind.ALL_GATHER, "slices of units in common memory"))

    @contextmanager
    def gathered(self, numbers: Sequence[int]) -> Iterator[None]:
        """Units, whole, inside the block. Collective."""
        for number in numbers:
            self.units[number].pins += 1
        try:
            self._edits.find()  # what is written from now on is this block's
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


def refuse_transforms(name: str) -> None:
    """Raise `RuntimeError` inside a transform of `torch.func` that differentiates: what is put into a parameter there
    would be a wrapper that ends with the transform."""
    under_way = get_interpreter_stack()
    if under_way is None:
        return
    deriving = (TransformType.Grad, TransformType.Jvp)
    if any(transform.key() in deriving for transform in under_way):
        raise RuntimeError(
            f"unit {name!r} inside a transform of torch.func: at stage 3 grad, vjp, jvp, jacrev, jacfwd and hessian "
            "cannot go through the model; torch.autograd.grad, torch.autograd.functional, torch.autograd.forward_ad "
            "and torch.func.vmap can, and every transform goes through a copy of the model, made by "
            "copy.deepcopy(model) inside 'with optimizer.gathered():'"
        )


def _nothing(_: Tensor) -> None:
    return None


def _usable_later() -> AbstractContextManager[Any]:
    """Memory that is made in inference mode cannot serve a backward later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


def _tag(unit: _Unit, shelf: Shelf) -> Tag:
    digest = zlib.crc32(f"{unit.name} {shelf.updated}".encode())  # the label may be cut
    return Tag(Kind.ALL_GATHER, f"gather of unit {unit.name!r}", index=shelf.bucket.index, digest=digest)


def _weak_spec(residency: Residency) -> SpecOf:
    reference = weakref.ref(residency)

    def spec_of(parameter: Tensor) -> ParameterSpec | None:
        known = reference()
        return None if known is None else known.spec_of(parameter)

    return spec_of
