"""The device of a run: its clock, its memory, its name.

Knows: torch's devices. Does not know: what is measured.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..rank import forget_peak, resident

GIB = 1 << 30
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
NO_GPU = "no GPU: the CPU in its place"


class Host:
    """The clock and the memory of the CPU, whose work is done when a call returns."""

    backend = "gloo"

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def finish(self) -> None:
        """Wait until everything is done."""

    def restart(self) -> None:
        """Wait until everything is done, and let the peak begin anew."""
        self.finish()
        forget_peak()

    def processor_time(self) -> float:
        """Return the processor seconds of the host's work so far: of this thread."""
        return time.thread_time()

    def mark(self) -> Any:
        """Return a point in time on the device."""
        return time.perf_counter()

    def between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks. Call this after `finish`."""
        return float(end - begin)

    def held(self) -> int:
        """Return the bytes in use."""
        return resident("VmRSS")

    def most(self) -> int:
        """Return the peak in bytes since `restart`."""
        return resident("VmHWM")

    def reserved(self) -> tuple[int, int]:
        """Return the most bytes that an allocator has reserved, and how often it had to free and try again."""
        return 0, 0

    def free(self) -> int:
        """Return the bytes that could be allocated."""
        return 1 << 40

    def name(self) -> str:
        """Return the device in words."""
        return NO_GPU


class Cuda(Host):
    """The clock and the memory of a GPU."""

    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)

    def finish(self) -> None:
        torch.cuda.synchronize()

    def restart(self) -> None:
        self.finish()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def processor_time(self) -> float:
        """See `Host`: of the process, since autograd calls hooks in a thread of its own."""
        return time.process_time()

    def mark(self) -> Any:
        cuda: Any = torch.cuda  # torch does not annotate its events
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def held(self) -> int:
        return torch.cuda.memory_allocated()

    def most(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reserved(self) -> tuple[int, int]:
        return torch.cuda.max_memory_reserved(), int(torch.cuda.memory_stats().get("num_alloc_retries", 0))

    def free(self) -> int:
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def name(self) -> str:
        cuda: Any = torch.cuda
        properties, nccl = cuda.get_device_properties(self.device), ".".join(map(str, cuda.nccl.version()))
        return f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda}, NCCL {nccl}"


@contextmanager
def freed_memory_is_kept() -> Iterator[None]:
    """Let the C library keep the CPU's freed memory in the block, as the caching allocator keeps a device's. Otherwise
    each large tensor costs page faults. Where the library is not glibc, nothing is done."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        yield
        return
    set_option(_MMAP_THRESHOLD, 1 << 30)
    set_option(_TRIM_THRESHOLD, (1 << 31) - 1)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, 128 << 10)  # the defaults, but that they adapt no more
        set_option(_TRIM_THRESHOLD, 128 << 10)


def clock(device: str) -> Host:
    """Return the clock and the memory of a device."""
    return Cuda(torch.device(device)) if device.startswith("cuda") else Host()


def checked_device(name: str) -> str:
    """Return a device by its name, with a number. End the program with code 2 if there is no CUDA for it."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        print("error: there is no CUDA here (--device cpu --quick: to see that it works)", file=sys.stderr)
        raise SystemExit(2)
    return "cuda:0" if name == "cuda" else name
