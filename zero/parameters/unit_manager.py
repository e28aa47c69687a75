"""The parameters of all units of one optimizer on one rank, under one of two policies each.

    resident    every rank sees the whole at all times (`resident_units`)
    gathered    each rank has its shards, and the whole is gathered (`gathered`)

To install a unit is to give its parameters their values and their own classes, to uninstall it is to release them. A
buffer is of one policy from `add_buffer` on; a unit has buffers of both only if memory ran out between two calls of
`add_param_group`.

A prediction of the units that will be needed next.

Knows: the class of each parameter, who needs a unit, which edits were found, which unit is likely to be next. Does not
know: modules, autograd, memory, or when a unit is needed: its callers unshard, install, uninstall and reshard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from collectives import Choice, Collective, Transport
from collectives.torch_internals import current_autograd_node

from ..core.layout import ParameterSpec
from ..core.parameter_specs import COPY, as_plain
from ..core.units import ONE_AHEAD, Around
from ..runtime.backward_tracker import callers
from ..runtime.joining import SAME_UNITS, Joining
from ..runtime.profiler_ranges import NOTHING, ProfilerRange
from .edit_detector import EditDetector
from .gathered.units import GatheredBuffer, GatheredUnit, GatheredUnits, State
from .released import refuse_transforms, released_class, weakly
from .resident_units import ResidentBuffer, ResidentUnits

Buffer = ResidentBuffer | GatheredBuffer
_CHECKPOINTS = CheckpointFunction.forward.__code__.co_filename


@dataclass(eq=False)
class Unit:
    """A unit's buffers, by policy, and who needs it."""

    number: InitVar[int]
    name: str
    rank: InitVar[str]
    resident: list[ResidentBuffer] = field(default_factory=list)
    installed: bool = False  # the parameters have their values
    forward_refs: int = 0  # forwards under way that need it
    gather_refs: int = 0  # blocks of `gathered` that need it

    def __post_init__(self, number: int, rank: str) -> None:
        self.gathered = GatheredUnit(number, self.name, rank)
        self.installing = ProfilerRange(f"install unit {self.name}", rank)
        self.uninstalling = ProfilerRange(f"uninstall unit {self.name}", rank)

    @property
    def buffers(self) -> list[Buffer]:
        return [*self.resident, *self.gathered.buffers]

    @property
    def is_gathered(self) -> bool:
        """True if the unit must be gathered."""
        return bool(self.gathered.buffers)

    @property
    def held(self) -> bool:
        return bool(self.forward_refs or self.gather_refs)


class UnitManager:
    """The units of one optimizer on one rank. A unit is known by its number."""

    def __init__(
        self,
        shard_group: Transport,
        collective: Collective,
        names: Sequence[str],
        post_forward_group: Choice | None,
        needed_in_backward: Callable[[int], object],
        joining: Joining,
    ) -> None:
        """``post_forward_group``: the ranks that share the shards kept between a forward and its backward;
        ``needed_in_backward``: is called with a unit that a backward needs."""
        self.shard_group = shard_group
        self.units = [Unit(number, name, shard_group.rank_label) for number, name in enumerate(names)]
        self.edits = EditDetector(shard_group.rank)
        self.resident = ResidentUnits(shard_group, self.edits)
        self.gathered = GatheredUnits(shard_group, collective, post_forward_group, self.edits, joining)
        self.any_gathered = False  # some unit must be gathered
        self._needed_in_backward = needed_in_backward
        self._classes: dict[type[Tensor], type[Tensor]] = {}

    # -- units and buffers ----------------------------------------------------------------------------------------

    def released_classes(self, parameters: Sequence[Tensor]) -> list[type[Tensor]]:
        """Return the class of each parameter while it is released."""
        for base in map(type, parameters):
            if base not in self._classes:
                self._classes[base] = released_class(base, weakly(self.spec_of), weakly(self._recall))
        return [self._classes[type(parameter)] for parameter in parameters]

    def add_buffer(self, number: int, buffer: Buffer) -> None:
        """Add a buffer to a unit. Its parameters lose their own memory: from now on they are released."""
        unit = self.units[number]
        if isinstance(buffer, ResidentBuffer):
            unit.resident.append(buffer)
            self.resident.add_buffer(buffer)
        else:
            self.gathered.add_buffer(unit.gathered, buffer)
            self.any_gathered = True
            self.shard_group.advise(f". At stage 3, also inside join(), {SAME_UNITS}")
        buffer.set_classes(buffer.released)

    def remove_buffer(self, number: int, buffer: Buffer) -> None:
        """Give the parameters of a buffer, whose unit is installed, memory of their own, and remove the buffer."""
        unit = self.units[number]
        for parameter in buffer.parameters:
            parameter.data = parameter.detach().clone()
        if isinstance(buffer, ResidentBuffer):
            unit.resident.remove(buffer)
            self.resident.remove_buffer(buffer)
        else:
            self.gathered.remove_buffer(unit.gathered, buffer)
            self.any_gathered = any(unit.is_gathered for unit in self.units)

    def buffers(self) -> Iterator[Buffer]:
        for unit in self.units:
            yield from unit.resident
            yield from unit.gathered.buffers

    def spec_of(self, parameter: Tensor) -> ParameterSpec | None:
        """Return the spec of a parameter, for errors and for operations without values; None if it is in no unit."""
        for buffer in self.buffers():
            for slot, known in enumerate(buffer.parameters):
                if known is parameter:
                    return buffer.spec(slot)
        return None

    def _recall(self, parameter: Tensor) -> bool:
        """Install the unit of a released parameter if a backward uses it. Return whether it was installed.

        Most often the graph of the unit's outputs has reported that the backward reaches it. It does not where a
        checkpoint computes anew what used the parameter inside `gathered`, and where a loss that the unit kept beside
        its output leads to a backward in Python, which has saved the parameter.
        """
        node = current_autograd_node()
        if node is None or not (_in_recomputation() or _has_saved(node, parameter)):
            return False
        for number, unit in enumerate(self.units):
            members = (known for buffer in unit.buffers for known in buffer.parameters)
            if not unit.installed and any(known is parameter for known in members):
                self._needed_in_backward(number)
                return unit.installed
        return False

    # -- unshard, install, uninstall, reshard ---------------------------------------------------------------------

    def enter(self, numbers: Iterable[int]) -> None:
        """Hold units for a forward that begins, until `leave`."""
        for number in numbers:
            self.units[number].forward_refs += 1

    def leave(self, numbers: Iterable[int]) -> None:
        """Undo `enter`."""
        for number in numbers:
            self.units[number].forward_refs -= 1

    def forget_forwards(self) -> None:
        """Drop all forwards' references to units, also those that an interrupt left."""
        for unit in self.units:
            unit.forward_refs = 0

    def unshard(self, number: int) -> None:
        """Launch the all-gathers of a unit that is sharded; nothing if it is resident. Collective."""
        unit = self.units[number]
        if unit.gathered.buffers:
            self.gathered.unshard(unit.gathered)

    def install(self, number: int) -> None:
        """Give a unit's parameters their values. Collective if the unit must be gathered and was not unsharded yet."""
        unit = self.units[number]
        if unit.installed:
            return
        if unit.gathered.buffers:
            refuse_transforms(unit.name)
            self.unshard(number)
            self.gathered.wait(unit.gathered)
        with unit.installing():
            unit.installed = True
            self.resident.install(unit.resident)
            if unit.gathered.buffers:
                self.gathered.install(unit.gathered)

    def uninstall(self, number: int) -> None:
        """Release a unit's parameters, unless the unit is held. Gathered buffers stay."""
        unit = self.units[number]
        if unit.installed and not unit.held:
            with unit.uninstalling() if unit.gathered.buffers else NOTHING:
                self._uninstall(unit)

    def _uninstall(self, unit: Unit) -> None:
        self.resident.uninstall(unit.resident)
        if unit.gathered.buffers:
            self.gathered.uninstall(unit.gathered)
        unit.installed = False

    def reshard(self, number: int, *, after_forward: bool = False) -> None:
        """Release a unit's parameters and free its gathered buffers, unless the unit is held. Waits for gathers under
        way. ``after_forward``: a backward will need it."""
        unit = self.units[number]
        if not unit.held:
            self._reshard(unit, after_forward)

    def _reshard(self, unit: Unit, after_forward: bool = False) -> None:
        gathered = unit.gathered.state is not State.SHARDED
        with unit.gathered.resharding() if gathered else NOTHING:
            if gathered:
                self.gathered.wait(unit.gathered)
            if unit.installed:
                self._uninstall(unit)
            if gathered:
                self.gathered.reshard(unit.gathered, after_forward)

    def reshard_all(self) -> None:
        """Reshard every unit that is not held."""
        for number, unit in enumerate(self.units):
            if unit.installed or unit.gathered.state is not State.SHARDED:
                self.reshard(number)

    def all_released(self) -> bool:
        """Return True if no unit is installed or gathered."""
        return not [unit for unit in self.units if unit.installed or unit.gathered.state is not State.SHARDED]

    def free_post_forward_shards(self) -> None:
        """Free the shards that were kept for a backward."""
        for unit in self.units:
            self.gathered.free_post_forward_shards(unit.gathered)

    def abandon(self) -> None:
        """Abandon the gathers under way and release everything, after a failure of the ranks' communication."""
        for unit in self.units:
            self.gathered.abandon(unit.gathered)
            self._reshard(unit)

    # -- edits and changes ----------------------------------------------------------------------------------------

    def diagnose(self, *, waits: bool = True) -> str | None:
        """Return the first edit since the last call that would be lost, or what cannot be undone, as an error's text;
        None if there is none. ``waits``: for devices, see `EditDetector.take`."""
        self.resident.find_edits()
        found = self.edits.lasting or self.edits.take(waits=waits)
        if found is not None:
            return found
        with as_plain():
            for buffer in self.buffers():
                for slot in buffer.edited():
                    if not buffer.owns(slot):
                        return (
                            f"the memory of {buffer.name(slot)!r} was replaced after the optimizer was built (by "
                            f"p.data = t, vector_to_parameters, or moving or casting the model): edit it by {COPY}; "
                            "move and cast the model before the optimizer is built"
                        )
        return None

    def changed(self, buffer: Buffer, slots: Sequence[int]) -> None:
        """Note that the values of these slots change: graphs that need the present ones will raise."""
        if not slots:
            return
        with as_plain():
            buffer.count_change(slots)
        if isinstance(buffer, GatheredBuffer):
            self.gathered.changed(buffer, slots)

    def commit(self, buffer: Buffer, slots: Sequence[int]) -> None:
        """Copy the values of these slots, which are installed and equal on all ranks, into this rank's shard."""
        for slot in slots:
            buffer.note_slot(slot)
        if isinstance(buffer, ResidentBuffer):
            self.resident.commit(buffer, slots)
        else:
            self.gathered.commit(buffer, slots)

    def _undo_edits(self, number: int) -> None:
        """Undo the edits of a `gathered` block that raised, unless an enclosing block still holds the unit."""
        unit = self.units[number]
        if unit.installed and unit.gather_refs == 1:
            self.resident.undo_edits(unit.resident)
            self.gathered.undo_edits(unit.gathered)

    @contextmanager
    def unsharded(self, numbers: Sequence[int]) -> Iterator[None]:
        """Install units inside the block. Collective."""
        for number in numbers:
            self.units[number].gather_refs += 1
        try:
            self.resident.find_edits()  # edits from now on belong to this block
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
            if self.shard_group.broken:
                self.abandon()
            else:
                for number in numbers:
                    self.reshard(number)


def _has_saved(node: Any, parameter: Tensor) -> bool:
    """Return whether a node of a graph, whose backward is in Python, has saved a parameter."""
    in_python = isinstance(node, torch.autograd.function.BackwardCFunction)
    return in_python and any(saved is parameter for saved in node.saved_tensors)


def _in_recomputation() -> bool:
    """Return whether this thread computes a forward anew, which a checkpoint does to unpack what it has not saved."""
    return any(code.co_name == "unpack_hook" and code.co_filename == _CHECKPOINTS for code in callers())


class NoUnitHooks:
    """What `UnitHooks` are at stages without units."""

    needs_gather, schedule = False, ONE_AHEAD

    def busy(self) -> bool:
        return False

    def end_iteration(self) -> bool:
        return True

    def reset_order(self) -> None:
        return None


class PrefetchOrder:
    """The order in which units were used last, as the prediction for the next time. Unit 0 is the root's own.

    The prediction decides only when a gather begins, never a result. It is equal on all ranks, since they enter the
    same units.
    """

    def __init__(self, around: Around, most: int) -> None:
        """``around``: see `Units`; ``most``: how many units are predicted."""
        self._around, self._most = around, most
        self._forward = list(range(1, len(around)))  # units in the last forward of the root; at first a guess
        self._position = 0
        self._path: list[int] = []  # units entered by forwards since the last backward or step
        self._closed = False
        self._back: list[int] = []  # units that the backward under way has not reached yet

    def begin_forward(self) -> None:
        """Begin a forward of the root."""
        self._position = 0

    def close(self) -> None:
        """Note a backward or a step: the next forward begins another path."""
        self._closed = True

    def begin_backward(self) -> None:
        """Begin a backward. A forward leaves a unit after the units inside it, so a backward reaches it before them."""
        self._back, open_ = [], list[int]()
        for unit in self._path:
            while open_ and open_[-1] not in self._around[unit] - {unit}:
                self._back.append(open_.pop())
            open_.append(unit)
        self._back = [*self._back, *reversed(open_)][::-1]
        self.close()

    def forward(self, unit: int) -> list[int]:
        """Note that a forward enters ``unit``; return the units that will probably follow, the next one first."""
        position, self._position = self._position, self._position + 1
        if self._closed:
            self._path, self._closed = [], False
        if torch.is_grad_enabled():
            self._path.append(unit)
        known = self._forward[position : position + 1 + self._most]
        if known[:1] == [unit]:
            return _others(known, unit)
        self._forward[position:] = [unit]
        return []

    def backward(self, unit: int, here: Sequence[int], expected: list[int]) -> list[int]:
        """Note that a backward reaches ``unit``; return the units that will probably follow, the next one first.

        ``here``: the units that are gathered; those of them that follow are returned, however late they are needed.
        ``expected``: the last prediction. It stays if ``unit`` lies inside another one and was not predicted: a
        checkpoint computes such units anew, in the order of a forward.
        """
        if unit not in self._back:
            return expected if len(self._around[unit]) > 1 else []
        del self._back[: self._back.index(unit) + 1]
        following = _others(self._back, unit)
        return [*following[: self._most], *(other for other in here if other in following[self._most :])]


def _others(units: Iterable[int], unit: int) -> list[int]:
    return [other for other in dict.fromkeys(units) if other != unit]
