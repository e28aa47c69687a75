"""The backwards that reach the parameters and the units of one optimizer: which one is under way, in which thread.

Knows: autograd's graph tasks (one per backward call), threads, and the order of what a backward ends with. Does not
know: gradients, units, ranks.

    begins        autograd reaches a parameter or a unit for the first time in a graph task
    ends          one callback of the graph task, in this order:
                  1. the gradients: the reductions that are left are launched and awaited, p.grad is published
                  2. the units are resharded, also if 1 raises
    interrupted   an exception, such as a Ctrl-C, skips the callback. What is local is made up for by the next
                  beginning, forward or step: units are resharded. What all ranks take part in, the reductions, waits
                  for the next call that all ranks make
    re-entrant    a backward inside another one (a checkpoint's, `autograd.grad` in a hook) replaces it until it ends;
                  the outer one begins again where it reaches something next
    threads       autograd runs the hooks of an accelerator's parameters in threads of its own
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import Protocol

import torch

from collectives.torch_internals import current_graph_task_id, engine_run_backward, queue_callback

from .compiled_calls import untraced

NO_TASK = -1  # what torch returns as the graph task outside of a backward
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_MAX_WALKS = 1000


class UnitListener(Protocol):
    def check_alone(self) -> None:
        """Raise `RuntimeError` if another thread is inside a forward or a backward."""

    def backward_began(self) -> None:
        """A backward begins."""

    def backward_over(self) -> None:
        """The backward has ended, or an exception has ended it."""


class BackwardTracker:
    """The backward under way of one optimizer on one rank. It holds its listeners weakly."""

    def __init__(self) -> None:
        self._gradients: Callable[[], Callable[[int], None] | None] = _nothing
        self._units: Callable[[], UnitListener | None] = _nothing
        self.task = NO_TASK  # of the backward that began last and has not ended
        self._thread: threading.Thread | None = None  # in which it began
        # held while an outermost forward or a backward checks whether it may begin, and while an outermost forward ends
        self.beginning = threading.RLock()

    def watch_gradients(self, ended: Callable[[int], None]) -> None:
        """Call a method with the graph task of each backward that ends."""
        self._gradients = weakref.WeakMethod(ended)

    def watch_units(self, listener: UnitListener) -> None:
        """Report each backward to the listener of the units."""
        self._units = weakref.ref(listener)

    def reach(self) -> None:
        """Note that autograd, or a forward, reaches a parameter or a unit: the beginning of a backward, or the end of
        one that raised. Raises `RuntimeError` if another thread is inside a forward or a backward of units."""
        task = current_graph_task_id()
        if task == self.task:
            return
        units = self._units()
        with self.beginning:
            if units is not None:
                units.check_alone()
            if self.task != NO_TASK:
                self.over()
            if task != NO_TASK:
                self.task, self._thread = task, threading.current_thread()
        if task != NO_TASK:
            queue_callback(partial(self._end, task))
            if units is not None:
                units.backward_began()

    @untraced
    def _end(self, task: int) -> None:
        gradients_ended = self._gradients()
        try:
            if gradients_ended is not None:
                gradients_ended(task)
        finally:
            self.over()

    def over(self) -> None:
        """Forget the backward that began last. Units are resharded, unless a forward needs them."""
        self.task, self._thread = NO_TASK, None
        units = self._units()
        if units is not None:
            units.backward_over()

    def other_thread(self) -> threading.Thread | None:
        """Return the other thread that is inside the backward which began last; None if an exception has ended that,
        or if autograd runs it here, too."""
        thread = self._thread
        if thread in (None, threading.current_thread()) or self.task in (NO_TASK, current_graph_task_id()):
            return None
        return thread if calls_backward(thread) else None


def _nothing() -> None:
    return None


def callers() -> Iterator[CodeType]:
    """Yield the code of each function that is being called in this thread."""
    frame: FrameType | None = sys._getframe().f_back
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def in_backward() -> bool:
    """Return whether this thread is inside a backward."""
    return current_graph_task_id() != NO_TASK


def in_a_thread_of_autograd() -> bool:
    """Return whether this is a thread of autograd, which runs the backward on a device while its caller waits."""
    return in_backward() and not calls_backward(threading.current_thread())


def calls_backward(thread: threading.Thread) -> bool:
    """Return whether a thread has called a backward that has not returned."""
    return runs(thread, engine_run_backward.__code__)


def reentrant(device: torch.device) -> bool:
    """Return True in a backward that runs inside another one. It ends first, and torch reports no end of the outer one.

    ``device`` is that of the parameter whose hook runs. Autograd runs hooks of CPU parameters in the thread that called
    the backward, which has one frame of the engine's `run_backward`. It runs hooks of an accelerator's parameters in
    its own threads, where only a nested backward has such a frame.
    """
    in_caller = device.type == "cpu" or not torch.autograd.is_multithreading_enabled()
    run_backward = engine_run_backward.__code__
    return sum(code is run_backward for code in callers()) > in_caller


def runs(thread: threading.Thread, *codes: CodeType) -> bool:
    """Return whether a thread is inside one of these functions. Frames show it even after an interrupt, which skips
    hooks.

    Another thread runs while its frames are read. If a generator yields, its frame has no caller any more, and the walk
    ends there instead of at the bottom of the thread. It is repeated then; after `_MAX_WALKS` walks the result is True.
    A thread that Python started and that has ended is inside nothing, though a later one may have its number.
    """
    own = thread is threading.current_thread()
    for _ in range(_MAX_WALKS):
        last: FrameType | None = None
        current = sys._getframe() if own else sys._current_frames().get(thread.ident or 0)
        if not own and thread not in threading.enumerate():  # if it is there now, the frames read above are its own
            return False
        while current is not None:
            if current.f_code in codes:
                return True
            last, current = current, current.f_back
        if own or last is None or not last.f_code.co_flags & _GENERATOR:
            return False
    return True
