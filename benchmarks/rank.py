"""What every rank of a benchmark does first: it joins its group, and ends with the process that has started it.

Knows: processes, process groups, the memory that the kernel counts and that tensors hold. Does not know: what a rank
measures.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


def end_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        sys.exit(1)


@contextmanager
def as_rank(meeting: str, timeout: float, parent: int) -> Iterator[None]:
    """Be a rank with one thread inside the block: RANK and WORLD_SIZE are set, and ``meeting`` is the file at which the
    ranks find each other. ``timeout``: seconds; ``parent``: the process with which this one ends."""
    end_with(parent)
    torch.set_num_threads(1)  # there may be as many ranks as cores, or more
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout),
    )
    yield
    dist.barrier()
    dist.destroy_process_group()


def resident(field: str) -> int:
    """Return the bytes of this process as the kernel counts them: VmRSS is the current value, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def forget_peak() -> None:
    """Let the peak of `resident` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def live_storages() -> dict[int, int]:
    """Address -> bytes of each distinct CPU or GPU storage behind a live tensor, its `grad` included.

    Storages without memory are left out. Gradients are read from their parameters: a gradient has no Python object
    until `p.grad` is read.
    """
    with torch.DisableTorchFunctionSubclass():
        return dict(entry for tensor in _tensors() if (entry := _storage(tensor)) is not None)


def _tensors() -> Iterator[Tensor]:
    for found in gc.get_objects():
        if issubclass(type(found), Tensor):
            yield found
            if found.is_leaf and found.grad is not None:
                yield found.grad


def _storage(tensor: Tensor) -> tuple[int, int] | None:
    """Address and size of the memory behind a tensor; None for sparse, meta and placeholder tensors."""
    try:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        return (storage.data_ptr(), size) if size and tensor.device.type != "meta" else None
    except (RuntimeError, NotImplementedError):
        return None


def proportional_set_size() -> int | None:
    """Bytes of physical memory of this process, where a page shared by n processes counts 1/n; None if unknown."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), None)
