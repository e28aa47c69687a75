"""What a thread is inside: a forward, a backward, a recomputation. Frames say so even after an interrupt, which skips
hooks.

Knows: frames, and which functions of torch are under way then. Does not know: units, modules.
"""

from __future__ import annotations

import inspect
import sys
import threading
from types import CodeType, FrameType

from torch.utils.checkpoint import CheckpointFunction

from collectives.torch_internals import call_impl, current_graph_task_id, engine_run_backward, wrapped_call_impl

from .module_hooks import ForwardMethod

NO_TASK = -1  # autograd's number where no backward is under way
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_MAX_WALKS = 1000
_CHECKPOINTS = CheckpointFunction.forward.__code__.co_filename


def in_backward() -> bool:
    """Return whether this thread is inside a backward."""
    return current_graph_task_id() != NO_TASK


def in_a_thread_of_autograd() -> bool:
    """Return whether the caller is an autograd device thread, whose backward another thread has called."""
    return in_backward() and not calls_backward(threading.current_thread())


def calls_backward(thread: threading.Thread) -> bool:
    """Return whether a thread has called a backward that has not returned."""
    return _runs(thread, engine_run_backward.__code__)


def in_forward(thread: threading.Thread) -> bool:
    """Return whether a thread is inside a module's forward. A compiled call of the second function hides the first."""
    return _runs(thread, call_impl.__code__, wrapped_call_impl.__code__, ForwardMethod.__call__.__code__)


def in_recomputation() -> bool:
    """Return whether this thread computes a forward anew, which a checkpoint does to unpack what it has not saved."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "unpack_hook" and frame.f_code.co_filename == _CHECKPOINTS:
            return True
        frame = frame.f_back
    return False


def _runs(thread: threading.Thread, *codes: CodeType) -> bool:
    """Return whether a thread is inside one of these functions.

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
