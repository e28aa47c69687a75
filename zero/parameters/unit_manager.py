"""Units' parameters on one rank: the shard, which is always here, and the whole, which is gathered and resharded.

Knows: shards, gathered buffers, the tensor in each parameter's ``data``. Does not know: modules, autograd, how an edit
is found, or when a unit is needed: its callers unshard, install, uninstall and reshard.

    SHARDED --unshard--> GATHERING --wait--> WHOLE --install--> INSTALLED    unshard:   launch the all-gathers
       ^                                      |  ^                 |         install:   parameters are views of buffers
       +--------------- reshard --------------+  +---- uninstall --+         uninstall: parameters are released

A buffer lives as long as its storage is referenced. If something outside of this package references it (a view that a
module cached, an array that shares the memory), the next gather writes into the same buffer, so that the view follows
the parameter as it would in a plain loop. If a step changes the parameter in between, the buffer is filled with NaN.
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
from .gathered.gathers import UnitGathers
from .gathered.saved_tensor_index import SavedTensorIndex
from .released import refuse_transforms, released_class, weakly
from .unit_buffer import State, Unit, UnitBuffer

_NOTHING: AbstractContextManager[Any] = nullcontext()


class UnitManager:
    """The parameters of all units of one optimizer on one rank. A unit is known by its number."""

    def __init__(
        self,
        shards: Transport,
        collective: Collective,
        names: Sequence[str],
        post_forward_group: Choice | None = None,
        on_idle: Callable[[Tensor], None] | None = None,
    ) -> None:
        """``post_forward_group``: the ranks that share the slices kept between a forward and its backward; ``on_idle``:
        is called with a shard that will not be needed for a while."""
        self._on_idle: Callable[[Tensor], None] = on_idle or _nothing
        self.shards = shards
        self._alone = shards.world_size == 1  # then the shard is the whole
        self.units = [Unit(name, shards.rank_label) for name in names]
        self.pool = Pool(exact=True)
        self._gathers = UnitGathers(shards.rank, collective, post_forward_group, self.pool, self._on_idle)
        self.saved_tensors = SavedTensorIndex(alone=self._alone)
        self.lasting: str | None = None  # an error that cannot be undone; reported at every agreement
        self._edits = EditDetector(shards.rank)
        self._externally_held: list[UnitBuffer] = []
        self._classes: dict[type[Tensor], type[Tensor]] = {}
        self._written: Work | None = None  # done when every rank has written its slices of shared memory
        self.join_announcer: Callable[..., AbstractContextManager[None]] | None = None  # around a gather, inside `join`

    # -- units and buffers ----------------------------------------------------------------------------------------

    def put(self, unit: int, buffer: UnitBuffer) -> None:
        """Add a buffer to a unit. Its parameters lose their own memory: from now on they are released."""
        self.units[unit].buffers.append(buffer)
        for base in buffer.bases:
            if base not in self._classes:
                self._classes[base] = released_class(base, weakly(self.spec_of))
        self._release(buffer)
        if self._alone:
            self.saved_tensors.remember(unit, buffer, buffer.shard)
        self._edits.add(buffer)

    def part(self, number: int, buffer: UnitBuffer) -> None:
        """Give the parameters of a buffer, whose unit is installed, memory of their own, and remove the buffer."""
        for parameter in buffer.parameters:
            parameter.data = parameter.detach().clone()
        self.units[number].buffers.remove(buffer)
        buffer.whole = None
        self.saved_tensors.forget(buffer)
        self._edits.remove(buffer)

    def buffers(self) -> Iterator[UnitBuffer]:
        for unit in self.units:
            yield from unit.buffers

    def spec_of(self, parameter: Tensor) -> ParameterSpec | None:
        """Return the spec of a parameter, for errors and for operations without values; None if it is in no unit."""
        for buffer in self.buffers():
            for slot, known in enumerate(buffer.parameters):
                if known is parameter:
                    return buffer.spec(slot)
        return None

    # -- unshard, install, uninstall, reshard ---------------------------------------------------------------------

    def acquire(self, number: int) -> None:
        """Keep a unit for a forward: it is not resharded until `release`."""
        self.units[number].forward_refs += 1

    def release(self, number: int) -> None:
        self.units[number].forward_refs -= 1

    def release_all(self) -> None:
        """Release all forwards' references, also those that an interrupt left."""
        for unit in self.units:
            unit.forward_refs = 0

    def is_installed(self, number: int) -> bool:
        """Return True if a unit's parameters have their values."""
        return self.units[number].state is State.INSTALLED

    def unshard(self, number: int) -> None:
        """Launch the all-gathers of a unit that is sharded. Collective."""
        unit = self.units[number]
        if unit.state is not State.SHARDED:
            return
        if self.join_announcer is None:
            self._unshard(number)
        else:
            with self.join_announcer("gather", unit=number):
                self._unshard(number)
                self._wait(unit)  # a rank that gathers only for others waits until all have read its slices

    def _unshard(self, number: int) -> None:
        unit = self.units[number]
        with unit.unsharding():
            with _usable_later():
                self._sweep()
                if self._externally_held:
                    self._edits.find()  # the holder of a resharded buffer may have written into its pages
                for buffer in unit.buffers:
                    unit.work.append(self._gather(unit, buffer))
                    assert buffer.whole is not None
                    self.saved_tensors.remember(number, buffer, buffer.whole)
            unit.state = State.GATHERING

    def _gather(self, unit: Unit, buffer: UnitBuffer) -> Work:
        externally_held = buffer.externally_held
        if externally_held is not None:
            self._externally_held.remove(buffer)
            buffer.externally_held = None
        if buffer.common is not None:
            buffer.whole = buffer.in_common() if externally_held is None else externally_held
            assert self._written is not None, "`announce` precedes every gather"
            return self._written
        if self._alone:
            buffer.whole = buffer.shard
            target = buffer.whole
        else:
            buffer.whole = externally_held if externally_held is not None else self._gathers.room(buffer)
            target = buffer.whole.data  # with a version counter of its own: to gather again is no edit
        return self._gathers.start(unit, buffer, target)

    def _wait(self, unit: Unit) -> None:
        if unit.state is State.GATHERING:
            with unit.waiting():
                while unit.work:
                    unit.work[0].wait()
                    unit.work.pop(0)
            for buffer in unit.buffers:
                buffer.committed.clear()  # its owners, too, have written it
                if buffer.maybe_dirty and buffer.common is not None:
                    buffer.common.restore(buffer)  # undo a fill with NaN, or a write through an external reference
                buffer.maybe_dirty = False
                if buffer.moved and buffer.whole is not None and buffer.common is not None:
                    buffer.whole.data.copy_(buffer.common.whole(buffer.begin, buffer.begin + buffer.bucket.numel))
            unit.state = State.WHOLE

    def install(self, number: int) -> None:
        """Give a unit's parameters their values. Collective if the unit was not unsharded yet."""
        unit = self.units[number]
        if unit.state is State.INSTALLED:
            return
        refuse_transforms(unit.name)
        self.unshard(number)
        self._wait(unit)
        with unit.installing():
            with _usable_later():
                for buffer in unit.buffers:
                    self._install(buffer)
            unit.state = State.INSTALLED

    def _install(self, buffer: UnitBuffer) -> None:
        buffer.installed = buffer.unchecked = True
        released = [self._classes[base] for base in buffer.bases]
        if [parameter.__class__ for parameter in buffer.parameters] != released:
            self._note_swapped(buffer, released)
        for parameter, base in zip(buffer.parameters, buffer.bases, strict=True):
            parameter.__class__ = base
        for slot in buffer.edited():
            if not self._keeps_edit(buffer, slot):
                self._edits.note(f"{buffer.name(slot)!r} was edited while it was released")
                buffer.renew(slot)
        buffer.put_whole()

    def _note_swapped(self, buffer: UnitBuffer, released: Sequence[type[Tensor]]) -> None:
        for slot, (parameter, known) in enumerate(zip(buffer.parameters, released, strict=True)):
            if parameter.__class__ is not known:
                self.lasting = f"{buffer.name(slot)!r} was swapped for another tensor: build a new model and optimizer"

    def uninstall(self, number: int) -> None:
        """Release a unit's parameters, unless the unit is held; its buffers stay. With one rank, edits are kept."""
        unit = self.units[number]
        if unit.state is State.INSTALLED and not unit.held:
            with unit.uninstalling():
                self._uninstall(unit)

    def _uninstall(self, unit: Unit) -> None:
        unit.state, self._edits.is_checked = State.WHOLE, False
        for buffer in unit.buffers:
            for slot in buffer.edited():
                if not (self._alone and buffer.owns(slot)):
                    self._edits.note_slot(buffer, slot)
            self._release(buffer)
            if not self._alone and (buffer.common is None or buffer.moved):
                self._edits.compare(buffer)
                self._on_idle(buffer.shard)

    def _release(self, buffer: UnitBuffer) -> None:
        buffer.installed = False
        buffer.put_nans()
        for parameter, base in zip(buffer.parameters, buffer.bases, strict=True):
            parameter.__class__ = self._classes[base]

    def reshard(self, number: int, *, for_now: bool = False) -> None:
        """Free a unit's buffers, unless the unit is held. Waits for gathers under way. ``for_now``: a backward will
        need it; the slices of the ``post_forward_group`` are kept."""
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
        for buffer in unit.buffers:
            if for_now and self._gathers.post_forward_group and self.join_announcer is None and buffer.common is None:
                buffer.post_forward_shard = self._gathers.keep(buffer)
            if self._alone:
                self._on_idle(buffer.shard)
            else:
                buffer.externally_held = buffer.whole
                self._externally_held.append(buffer)
            buffer.whole = None
        self._sweep()

    def free_post_forward_shards(self) -> None:
        """Free the slices that were kept for a backward."""
        for buffer in self.buffers():
            buffer.post_forward_shard = None

    def reshard_all(self) -> None:
        """Reshard every unit that is not held."""
        for number in range(len(self.units)):
            self.reshard(number)

    def abandon(self) -> None:
        """Abandon the gathers under way and release everything, after a failure of the ranks' communication."""
        for number, unit in enumerate(self.units):
            forward_refs, gather_refs = unit.forward_refs, unit.gather_refs
            unit.forward_refs, unit.gather_refs, unit.work = 0, 0, []
            if unit.state is State.GATHERING:
                unit.state = State.WHOLE
            self.reshard(number)
            unit.forward_refs, unit.gather_refs = forward_refs, gather_refs

    def _sweep(self) -> None:
        """Reclaim the resharded buffers that have no external references any more.

        Edits that were made while a unit was installed are looked for when a reference to its buffer is first seen;
        later ones are undone when the reference is gone."""
        changed = []
        for buffer in list(self._externally_held):
            if buffer.externally_held is not None and buffer.external_refs(buffer.externally_held) == 0:
                self._reclaim(buffer)
                changed += [buffer] if buffer.maybe_dirty else []
            elif not buffer.maybe_dirty:
                buffer.maybe_dirty = True
                changed.append(buffer)
        for common in dict.fromkeys(buffer.common for buffer in changed if buffer.common is not None):
            self._edits.find_in(common)

    def _reclaim(self, buffer: UnitBuffer) -> None:
        if buffer.common is None or not buffer.is_in_common(buffer.externally_held):
            self.saved_tensors.forget(buffer)  # shared memory keeps its address
        buffer.externally_held = None
        self._externally_held.remove(buffer)

    # -- edits ----------------------------------------------------------------------------------------------------

    def edits(self) -> str | None:
        """Return the first edit since the last call that would be lost, as an error's text; None if there is none."""
        self.find_edits()
        return self._edits.take()

    def find_edits(self) -> None:
        """Check for edits, unless there can be none."""
        if not self._edits.is_checked or self._externally_held:
            self._edits.find()

    def _keeps_edit(self, buffer: UnitBuffer, slot: int) -> bool:
        """Return True if an edit of a released parameter was made through a view of the shard, which is the whole."""
        if not (self._alone and buffer.owns(slot)):
            return False
        return bool(buffer.nans[slot].isnan().all())  # host synchronisation: only after such an edit

    def commit(self, buffer: UnitBuffer, slots: Sequence[int]) -> None:
        """Copy the values of these slots, which are installed and equal on all ranks, into this rank's shard."""
        low, high = buffer.bucket.owned(self.shards.rank)
        buffer.committed.update(slots)
        if not self._alone and buffer.whole is not None:
            for piece in buffer.bucket.pieces(low, high):
                if piece.slot in slots:
                    buffer.shard[piece.begin - low : piece.end - low].copy_(buffer.whole[piece.begin : piece.end])
            self._on_idle(buffer.shard)
        self.changed(buffer, slots)

    def _undo_edits(self, number: int) -> None:
        """Undo the edits of a `gathered` block that raised, unless an enclosing block still holds the unit."""
        unit = self.units[number]
        if unit.state is State.INSTALLED and unit.gather_refs == 1:
            for buffer in unit.buffers:
                for slot in range(len(buffer.parameters)):
                    buffer.note(slot)
                if buffer.common is not None and not buffer.moved:
                    buffer.common.restore(buffer)
                elif not self._alone and buffer.whole is not None:
                    low, high = buffer.bucket.owned(self.shards.rank)
                    buffer.whole.data[low:high].copy_(buffer.shard)
                    self._on_idle(buffer.shard)

    # -- changes --------------------------------------------------------------------------------------------------

    def changed(self, buffer: UnitBuffer, slots: Sequence[int]) -> None:
        """Note that the values of these slots have changed: saved tensors and external references are out of date."""
        if not slots:
            return
        buffer.post_forward_shard = None
        for slot in slots:
            buffer.versions[slot] += 1
        with as_plain():  # as an edit in place does, also of what autograd itself has saved
            torch.autograd.graph.increment_version([buffer.parameters[slot] for slot in slots])
            for slot in slots:
                buffer.note(slot)
        self._sweep()
        if buffer.whole is not None:
            torch.autograd.graph.increment_version(buffer.whole)
        if buffer.externally_held is not None:
            buffer.externally_held.fill_(float("nan"))

    def announce(self) -> None:
        """Announce that this rank has written its slices of shared memory. Collective.

        The next gather waits for the announcements of all ranks; it moves nothing else.
        """
        if self._edits.common:
            if self._written is not None:
                self._written.wait()
            self._written = self.shards.announce(Tag(Kind.ALL_GATHER, "slices of units in common memory"))

    @contextmanager
    def gathered(self, numbers: Sequence[int]) -> Iterator[None]:
        """Install units inside the block. Collective."""
        for number in numbers:
            self.units[number].gather_refs += 1
        try:
            self._edits.find()  # edits from now on belong to this block
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
    """Leave inference mode in the block: memory that is allocated in it cannot be used in a backward later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING
