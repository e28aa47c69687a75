"""Translate the events of modules and of their graphs into calls of the unit manager: which unit is needed when.

Knows: forwards, saved tensors, and in which order units were used. Does not know: when a backward begins and ends
(`runtime/backward_tracker`), memory or ranks; to unshard, install, uninstall and reshard is `UnitManager`'s work.

    forward    enters u      reshard the unit before, install u, prefetch the units that the last forward used next
               leaves u      uninstall u; it stays whole until another unit is entered (the last: until the backward)
               leaves the outermost module with nothing to differentiate: reshard everything
    backward   reaches u     by the graph of u's outputs, or by a tensor that u's forward saved: as above, in reverse
               ends          reshard everything

A unit that contains u stays as it is while u runs, in a backward, too. So at most the root's own unit, the running unit
with those around it and the prefetched ones are gathered, and the memory that is kept of the others for the backward.
Therefore one thread at a time may be inside forwards, or inside a backward; another one that begins either gets an
error. Which thread that is may change whenever none is inside.

A graph holds no parameter of a unit that travels: a tensor that the unit's forward saved brings it back. Of a resident
unit a graph holds the parameter itself, and only the graph of the unit's outputs tells that a backward reaches it. So
two kinds of resident units stay installed longer:

    its output hides tensors in an object that is not opened     from its forward until the backward or step ends
    its forward runs the forward of a unit that is outside it    in a backward, until that ends
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from collectives.torch_internals import call_impl, current_graph_task_id, wrapped_call_impl

from ..core.units import ROOT, Units, UnitSchedule
from ..runtime.backward_tracker import NO_TASK, BackwardTracker, in_a_thread_of_autograd, in_backward, runs
from ..runtime.joining import UnitOrder
from ..runtime.profiler_ranges import NOTHING
from ..runtime.streams import Streams
from .gathered.units import SavedTensorHooks
from .module_hooks import ForwardMethod, ModuleHooks
from .released import guard_copies, refuse_transforms
from .unit_manager import PrefetchOrder, UnitManager


@dataclass(eq=False)
class _Forward:
    """A forward under way."""

    hooks: ModuleHooks
    thread: threading.Thread
    pushed: bool = False  # it pushed the saved-tensor hooks
    pushed_again: int = 0  # times that it pushed them on top of the user's


class UnitHooks:
    """The hooks of one optimizer on one module's units, until `remove`."""

    def __init__(
        self,
        units: Units,
        manager: UnitManager,
        streams: Streams,
        backwards: BackwardTracker,
        unit_order: UnitOrder,
        schedule: UnitSchedule,
    ) -> None:
        """Create hooks, of which no module has any before `watch`.

        ``unit_order``: of the units that are used beside training; ``schedule``: which of them may be whole at once.
        """
        self.manager, self._streams, self.schedule = manager, streams, schedule
        self._unit_order, self._entries, self._around = unit_order, units.entries, units.around
        self._order = self._new_order()
        self._running: list[_Forward] = []  # forwards under way, the outermost first
        self._current: list[int] = []  # the unit that runs, or ran last, after those around it that run or ran
        self._ahead: list[int] = []  # the units that were prefetched
        self._backwards = backwards
        backwards.watch_units(self)
        self._starting = False  # a backward began, and no unit was needed yet
        self._warned = False  # that a graph was broken
        # resident units that stay longer
        self._opaque: set[int] = set()  # their outputs have hidden tensors since the last step
        self._enclosing: set[int] = set()  # their forwards have run those of others, at any time
        self._saver = SavedTensorHooks(manager.gathered.saved_tensors, self)
        self._hooks: list[ModuleHooks] = []
        self._guards: list[ForwardMethod] = []

    @property
    def watching(self) -> bool:
        """Whether the modules have hooks."""
        return bool(self._hooks)

    def watch(self) -> None:
        """Register the hooks."""
        self._hooks = [ModuleHooks(self, entry) for entry in self._entries]
        self._guards = guard_copies(self._entries[ROOT].module)

    def remove(self) -> None:
        """Remove all hooks."""
        for hooks in self._hooks:
            hooks.remove()
        for guard in self._guards:
            guard.remove()
        self._hooks, self._guards = [], []

    def busy(self) -> bool:
        """True inside a forward or a backward."""
        return self._inside_a_forward() or in_backward()

    @property
    def needs_gather(self) -> bool:
        """True if a forward needs values that other ranks must send."""
        return self.manager.any_gathered

    def end_iteration(self) -> bool:
        """Begin a step: free the memory that was kept for a backward. Waits for gathers under way. Return False if
        whole parameters are in use."""
        self._end_interrupted()
        if not self._running:
            self.manager.forget_forwards()
        self._order.close()
        self._opaque.clear()
        self._backwards.over()
        return self.manager.all_released()

    def reset_order(self) -> None:
        """Reshard everything and forget the order of units, as after construction. For ranks whose forwards differ."""
        if self.manager.shard_group.broken:
            self.manager.abandon()
        else:
            self.end_iteration()
        self._order = self._new_order()

    def _new_order(self) -> PrefetchOrder:
        return PrefetchOrder(self._around, max(self.schedule.depth, 1))

    # -- which thread -------------------------------------------------------------------------------------------------

    def _inside_a_forward(self) -> bool:
        """True while a thread is inside a forward. An interrupt skips the hooks that would end one."""
        return any(in_forward(forward.thread) for forward in self._running[-1:])

    def _end_interrupted(self) -> None:
        while (last := self._running[-1:]) and not self._inside_a_forward():
            if last == self._running[-1:]:  # else its thread has left it meanwhile
                self._end(in_backward())

    def check_alone(self) -> None:
        """Raise `RuntimeError` if another thread is inside a forward, or inside the backward that began last."""
        beside = any(forward.thread is not threading.current_thread() for forward in self._running[-1:])
        if beside and not in_a_thread_of_autograd():
            self._end_interrupted()
            for forward in self._running[-1:]:
                self._refuse(forward.thread, "a forward")
        thread = self._backwards.other_thread()
        if thread is not None:
            self._refuse(thread, "a backward")

    def _refuse(self, thread: threading.Thread, what: str) -> None:
        raise RuntimeError(
            f"{self.manager.shard_group.rank_label}: another thread, {thread.name!r}, is inside {what}: at stage 3 "
            "only one thread at a time may run forwards or backwards. Run one thread after the other, "
            "or give the threads a copy of the model that was made inside 'with optimizer.gathered():'"
        )

    # -- forward ------------------------------------------------------------------------------------------------------

    def entered(self, hooks: ModuleHooks) -> None:
        """A module's forward begins."""
        forward = _Forward(hooks, threading.current_thread())
        last = self._running[-1:]  # read once: another thread may leave its forward at any moment
        inner = bool(last) and last[0].thread is forward.thread
        if inner:
            self._enter(forward)  # before what may raise: `left` will find it
            if not last[0].hooks.is_root:
                self._note_enclosing(hooks)
        self.manager.shard_group.check_process()  # before a lock that another thread may have held at the fork
        refuse_transforms(hooks.name or "the root's rest")
        forward.pushed = self.manager.any_gathered and self._saver.push()  # torch may refuse
        if not inner:
            self._begin_outermost(forward)
        self._begin()
        if hooks.is_root and all(hooks is not other.hooks for other in self._running[:-1]) and not in_backward():
            self._order.begin_forward()
        if not (torch.is_grad_enabled() or in_backward()):
            self.note_order(hooks.needs)
        for unit in hooks.needs:
            self._demand(unit)

    def note_order(self, units: Iterable[int]) -> None:
        """Note that resident units are used which other ranks may not use, in a forward without gradients or by
        `gathered`. Where units travel, their gathers find that out."""
        for unit in units:
            if not (self.manager.units[unit].installed or self.manager.any_gathered):
                self._unit_order.note(unit)

    def _begin_outermost(self, forward: _Forward) -> None:
        try:
            with self._backwards.beginning:
                self.check_alone()
                for each in self._hooks:
                    each.arrange()
                self._enter(forward)
        except RuntimeError:
            if forward.pushed:
                self._saver.pop()
            raise

    def _enter(self, forward: _Forward) -> None:
        self._running.append(forward)
        self.manager.enter(forward.hooks.needs)

    def _note_enclosing(self, hooks: ModuleHooks) -> None:
        """Remember the units whose forwards run this one, and that do not contain it."""
        around = {outer for unit in hooks.needs for outer in self._around[unit]}
        for outer in self._running[:-1]:
            if hooks.needs and outer.hooks.needs != hooks.needs:
                self._enclosing.update(unit for unit in self._resident(outer.hooks) if unit not in around)

    def _resident(self, hooks: ModuleHooks) -> list[int]:
        return [unit for unit in hooks.needs if not self.manager.units[unit].is_gathered]

    def left(self, hooks: ModuleHooks, output: Any) -> None:
        """A module's forward has ended, perhaps with an exception (then ``output`` is None)."""
        forward = self._innermost(hooks)
        if forward is None:
            return
        self._streams.end_on_current()
        with self._backwards.beginning if len(self._running) == 1 else NOTHING:  # others begin after this
            backward = in_backward()
            try:
                graphs = backward or self._watch(hooks, output)
            finally:
                self._end(backward)
            if not graphs and not self._running:
                self._reshard_all()

    def _innermost(self, hooks: ModuleHooks) -> _Forward | None:
        """Return the forward that this thread runs now, if it is one of this module; None if the module's call was
        refused, or a hook before ours raised."""
        last = self._running[-1:]
        mine = last and last[0].hooks is hooks and last[0].thread is threading.current_thread()
        return last[0] if mine else None

    def _watch(self, hooks: ModuleHooks, output: Any) -> bool:
        """Prepare for a backward through a forward's output. Return False if there can be none."""
        watched, hides = hooks.watch(output)
        if hides and torch.is_grad_enabled():
            self._opaque.update(self._resident(hooks))
            return True
        return watched

    def _end(self, backward: bool) -> None:
        forward = self._running[-1]
        try:
            self._pop_again(forward)
            self._running.pop()
            self.manager.leave(forward.hooks.needs)
        finally:
            if forward.pushed and forward.thread is threading.current_thread():
                self._saver.pop()
        if self.manager.shard_group.broken:
            self.manager.abandon()
        elif not backward:
            for unit in forward.hooks.needs:
                if unit not in (ROOT, *self._current):
                    self._has_run(unit, backward)
                elif unit not in self._opaque:
                    self.manager.uninstall(unit)

    def push_saver_again(self, hooks: ModuleHooks) -> None:
        """Push the saved-tensor hooks again if others were pushed on top of them since a module was entered."""
        forward = self._innermost(hooks)
        if forward is not None and self.manager.any_gathered:
            forward.pushed_again += self._saver.push()

    def pop_saver_again(self, hooks: ModuleHooks) -> None:
        """Undo `push_saver_again` in the forward that runs, if it was called: a hook before it may have raised."""
        forward = self._innermost(hooks)
        if forward is not None:
            self._pop_again(forward)

    def _pop_again(self, forward: _Forward) -> None:
        while forward.pushed_again:
            forward.pushed_again -= 1
            if forward.thread is threading.current_thread():
                self._saver.pop()

    def _has_run(self, unit: int, backward: bool) -> None:
        """Free a unit that is not needed now; keep it if a backward may need it and the settings say so."""
        if unit in self._opaque or (backward and unit in self._enclosing):
            return
        if backward or not torch.is_grad_enabled():
            self.manager.reshard(unit)
        elif unit in self.schedule.kept:
            self.manager.uninstall(unit)
        else:
            self.manager.reshard(unit, after_forward=True)

    def graph_broken(self, hooks: ModuleHooks) -> None:
        """Warn, once, that the graph of a compiled call around several units was broken at a module."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"stage 3: the graph of a compiled call is broken at {hooks.name or 'the model'!r}, whose parameters "
                "are gathered and released there. Gradients may be summed in another order than in the plain loop "
                "compiled in the same way, so bits may differ: compile each unit by itself, as in `for block in "
                "model.blocks: block.compile()`; of units inside units, the innermost ones",
                stacklevel=2,
            )

    # -- which unit, and which next -----------------------------------------------------------------------------------

    def _demand(self, unit: int) -> None:
        """Install a unit, and prefetch those that will probably follow."""
        if unit != ROOT and (unit not in self._current or self._starting):
            self._change_to(unit)
        self.manager.install(unit)

    def _change_to(self, unit: int) -> None:
        self._starting, backward, any_gathered = False, in_backward(), self.manager.any_gathered
        before = [*self._current, *self._ahead]
        self._current = [*(number for number in before if number in self._around[unit] - {unit}), unit]
        following: list[int] = []
        if any_gathered:
            following = self._order.backward(unit, before, self._ahead) if backward else self._order.forward(unit)
        if not (backward or len(self._running) > 1 or torch.is_grad_enabled()):  # it is called alone
            following = []
        self._ahead = following[: self.schedule.depth]
        self._ahead += [n for n in following if n in before and unit in self._around[n] and n not in self._ahead]
        if backward or any_gathered:  # else the unit before was released when its forward ended
            for number in before:
                if number in self._ahead:
                    self.manager.uninstall(number)
                elif number not in self._current:
                    self._has_run(number, backward)
        if any_gathered:
            for number in (unit, *self._ahead):
                self.manager.unshard(number)

    def _reshard_all(self) -> None:
        self._current, self._ahead = [], []
        self.manager.reshard_all()

    # -- backward -----------------------------------------------------------------------------------------------------

    def reached(self, hooks: ModuleHooks) -> None:
        """A backward reaches the output of a module's forward."""
        self.needed_again(*hooks.needs)

    def needed_again(self, *units: int) -> None:
        """A backward needs units: it reaches the output of their forward, a tensor that this saved, or a use of a
        released parameter. If the ranks' communication fails, release everything: nothing stays installed."""
        if self._is_under_way() and not self._starting:
            for unit in units:
                if unit not in self._current or not self.manager.units[unit].installed:
                    break
            else:
                return  # a further tensor of the unit that runs
        self.manager.shard_group.check_process()
        self._begin()
        try:
            for unit in units:
                if unit not in self._current or self._starting or not self.manager.units[unit].installed:
                    self._demand(unit)
        except BaseException:
            if self.manager.shard_group.broken:
                self.manager.abandon()
            raise

    def _is_under_way(self) -> bool:
        """Return whether `_begin` was called in the backward that runs, and the current streams have not changed."""
        if not self._backwards.task == current_graph_task_id() != NO_TASK:
            return False
        return not (self._streams.exist and self._streams.changed())

    def _begin(self) -> None:
        """A forward begins, or a backward needs a unit."""
        self._streams.wait_for_previous()
        self._backwards.reach()

    def backward_began(self) -> None:
        self._starting = True
        self._order.begin_backward()
        for unit in self._opaque:
            self.manager.install(unit)  # another backward may have ended since its forward

    def backward_over(self) -> None:
        if self.manager.shard_group.broken:
            self.manager.abandon()
        self._reshard_all()
        self.manager.free_post_forward_shards()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Push the saved-tensor hooks outside forwards, too."""
        pushed = self.manager.any_gathered and self._saver.push()
        try:
            yield
        finally:
            if pushed:
                self._saver.pop()


def in_forward(thread: threading.Thread) -> bool:
    """Return whether a thread is inside a module's forward. A compiled call of the second function hides the first."""
    return runs(thread, call_impl.__code__, wrapped_call_impl.__code__, ForwardMethod.__call__.__code__)
