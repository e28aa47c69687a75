"""`process_group`: how a rank that a launcher may end and start again enters and leaves the default process group.

Knows: torch's default process group, the end of a parent. Does not know: optimizers, checkpoints.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

_PR_SET_PDEATHSIG = 1  # of prctl(2)


@contextmanager
def process_group(backend: str = "gloo", **arguments: Any) -> Iterator[None]:
    """Return a context in which this process is a rank of torch's default process group. All ranks.

    It is ``init_process_group(backend)``, and at the end, also after an error, ``destroy_process_group()``. On Linux
    this process is killed if the one that started it ends in any way: the worker of an agent that was killed would be
    an orphan, for which the other ranks wait, or with which they go on although no agent can end it.

    Args:
        backend: of ``init_process_group``.
        arguments: its other ones. Without any the ranks meet as torchrun tells them by environment variables.
    """
    end_with_parent(signal.SIGKILL)
    dist.init_process_group(backend, **arguments)
    try:
        yield
    finally:
        dist.destroy_process_group()


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send a signal to this process when the thread that started it ends. Does nothing but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
