"""`process_group`: how a rank that a launcher may end and start again enters and leaves the default process group.

Knows: torch's default process group, torch's launcher, the end of a parent. Does not know: optimizers, checkpoints.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MEETING = 120.0  # seconds in which the ranks must have met
_PR_SET_PDEATHSIG = 1  # of prctl(2)


@contextmanager
def process_group(backend: str = "gloo", **arguments: Any) -> Iterator[None]:
    """Return a context in which this process is a rank of torch's default process group. All ranks.

    It calls ``init_process_group(backend)``, and at the end, even after an error, ``destroy_process_group()``. Under
    torchrun it also

    - binds this process to its agent: on Linux it is killed if the thread that started it ends in any way. Otherwise it
      would train on after its agent was killed, and no agent could end it.
    - ends this process with code 1 if the ranks have not met within two minutes, so that the agents start them again.
      Otherwise, if a rank dies before, the others would wait for the whole ``timeout`` (30 minutes).

    Args:
        backend: the ``backend`` of ``init_process_group``.
        arguments: its other arguments. Without any, torchrun's environment variables say where the ranks meet.
    """
    import torch.distributed as dist

    from ..config import transport_of

    watch = threading.Timer(MEETING, _give_up)
    watch.daemon = True
    if under_launcher():
        bind_to_parent()
        watch.start()
    try:
        dist.init_process_group(backend, **arguments)
        transport_of(None)  # makes the gloo group beside one of NCCL, whose ranks have not met yet
    finally:
        watch.cancel()
    try:
        yield
    finally:
        dist.destroy_process_group()


def _give_up() -> None:
    """End this process, whose main thread waits inside torch, so that its agent starts it again."""
    print(f"error: rank {os.environ['RANK']}: the ranks have not met after {MEETING:g} s", file=sys.stderr, flush=True)
    os._exit(1)


def under_launcher() -> bool:
    """Return whether torch's elastic launcher, be it torchrun's, started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def bind_to_parent() -> None:
    """Let this process be killed when its agent ends. Raises `RuntimeError` if it has ended already."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() == 1 and not _is_python(1):
        raise RuntimeError("the agent that started this rank has ended: nothing could end this rank")


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send a signal to this process when the thread that started it ends. Does nothing but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _is_python(pid: int) -> bool:
    """Return whether a process runs the program of this one: an agent does, the adopter of orphans does not."""
    try:
        return os.readlink(f"/proc/{pid}/exe") == os.readlink("/proc/self/exe")
    except OSError:
        return False
