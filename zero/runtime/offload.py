"""Offload of optimizer states, which a rank needs only during a step: to pinned host memory, or to a mapped file.

The file belongs to one rank. During a step, the pages of one or two buckets are in memory:

    construction   the file, which has no name, gets its blocks on the disk: a full disk is an error here, not in a step
                   (except for states that a class does not create at first, as an option may be switched on later)
    prefetch       a thread reads the pages of a bucket, all at once, while another bucket is stepped
    (the step)     pages that were not read yet are read when they are touched
    evict          write-back of changed pages to the disk begins, and the pages are unmapped from this process

Evicted pages may stay in the kernel's page cache, which frees them when memory is short.

Copies between the host and a device, beside the device's current stream.

`Staging` copies states that are offloaded for the step, and back:

    fetch     launch the copies to the device, on a stream of their own
    wait      make the device's current stream wait for these copies
    put_back  launch the copies back to the host, after all work that the current stream has so far
    let_go    make the current stream wait for those, and release the memory on the device

If the host's memory is pinned, the host waits for none of these. On the CPU a copy is complete when the call returns.

Knows: files, pages, streams. Does not know: what the tensors hold, or when they are used.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ..config import Offload
from ..core.layout import ALIGNMENT_BYTES, BucketSpec
from .profiler_ranges import ProfilerRange


class CopyStream:
    """A stream of a device for copies, which is made when it is first used. The CPU has none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch the work of the block on this stream, after all work of the current stream so far."""
        if self._stream is None:
            self._stream = _line_on(self._device)
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def wait(self) -> None:
        """Make the current stream wait for all copies so far."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def event(self) -> torch.Event | None:
        """Return an event of all copies so far, for which `torch.Stream.wait_event` waits; None on the CPU."""
        return None if self._stream is None else self._stream.record_event()


class Staging:
    """Copies of tensors on a device, by name. Not collective."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies = device, CopyStream(device)
        self.tensors: dict[str, Tensor] = {}

    def fetch(self, kept: Mapping[str, Tensor]) -> None:
        self.tensors = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) for name, tensor in kept.items()
        }
        with self._beside():
            for name, tensor in kept.items():
                self.tensors[name].copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        if self.tensors:
            self._copies.wait()

    def put_back(self, kept: Mapping[str, Tensor]) -> None:
        with self._beside():
            for name, tensor in self.tensors.items():
                kept[name].copy_(tensor, non_blocking=True)

    def let_go(self) -> None:
        self.wait()
        self.tensors = {}

    def _beside(self) -> AbstractContextManager[None]:
        return self._copies.beside() if self.tensors else nullcontext()


def _line_on(device: torch.device) -> torch.Stream | None:
    """Return a new stream of the device; None on the CPU, which has no streams."""
    return None if device.type == "cpu" else torch.Stream(device)


_PAGE = mmap.PAGESIZE
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin to write, wait for nothing
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: read pages and map them writable; since Linux 5.14


def backend_for(offload: Offload, device: torch.device) -> OffloadBackend | None:
    """Return the backend for states of parameters on ``device``; None if they are on the host already."""
    if not offload.on_host:
        return DiskOffload(offload.states)
    if device.type != "cpu":
        return HostOffload(device)
    warnings.warn('offload: states="cpu", but the parameters are on the CPU: nothing to do', stacklevel=2)
    return None


class OffloadBackend:
    """The memory in which the states of buckets are kept. Each rank has its own; nothing here is collective.

    ``is_copied_ahead``: a device may copy states before they are needed, asynchronously, without the host waiting.
    ``is_for_frozen``: room is reserved also for parameters that are frozen.
    """

    is_copied_ahead: ClassVar[bool]
    is_for_frozen: ClassVar[bool]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor of zeros, from reserved memory if there is any left."""
        raise NotImplementedError

    def reserve(self, wanted: Iterable[tuple[int, torch.dtype]]) -> None:
        """Reserve memory for tensors, given as (elements, dtype). Raises `ValueError` if there is not enough."""

    def prefetch(self, tensors: Iterable[Tensor]) -> None:
        """Begin to read tensors that will be needed soon."""

    def evict(self, tensors: Iterable[Tensor]) -> None:
        """Begin to write tensors back that will not be needed for a while, and free their memory."""

    def close(self) -> None:
        """Release all resources. No tensor may be requested afterwards."""


class HostOffload(OffloadBackend):
    """Pinned memory of the host, from which a GPU copies asynchronously. One call of `reserve` makes one block.

    Torch's allocator of pinned memory rounds each tensor up to a power of two. So a block is ordinary memory that is
    pinned as it is (`cudaHostRegister`), until this object is gone and the device has copied what it had to.
    """

    is_copied_ahead, is_for_frozen = True, False

    def __init__(self, device: torch.device) -> None:
        """``device``: which copies from here and back."""
        self._device = device
        self._blocks: list[Tensor] = []
        self._left: list[Tensor] = []  # of each

    def reserve(self, wanted: Iterable[tuple[int, torch.dtype]]) -> None:
        """Make a block. Raises `ValueError` if it cannot be pinned."""
        nbytes = sum(_aligned(numel, dtype) for numel, dtype in wanted)
        if nbytes:
            block = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
            if self._device.type == "cuda":
                self._pin(block)
            self._blocks.append(block)
            self._left.append(block)

    def start_over(self, wanted: Iterable[tuple[int, torch.dtype]]) -> bool:
        """Return True if there is room for these tensors. Earlier ones may then be overwritten."""
        self._left = [*self._blocks]
        nbytes = sum(_aligned(numel, dtype) for numel, dtype in wanted)
        return any(block.nbytes >= nbytes for block in self._blocks)

    def _pin(self, block: Tensor) -> None:
        runtime = cast(Any, torch.cuda).cudart()  # torch's function has no annotation
        error = int(runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0))
        if error:
            raise ValueError(
                f"offload: {block.nbytes:,} bytes of the host's memory cannot be pinned (CUDA error {error}): leave "
                "more memory free, raise the limit of locked memory, or leave out offload="
            )
        weakref.finalize(self, _unpin, runtime, self._device, block).atexit = False

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = _aligned(numel, dtype)
        if not any(left.nbytes >= nbytes for left in self._left):
            self.reserve([(max(1, numel), dtype)])  # for a state that was not known at construction
        number = max(n for n, left in enumerate(self._left) if left.nbytes >= nbytes)  # reserved last, for these
        found, self._left[number] = self._left[number][:nbytes], self._left[number][nbytes:]
        return found[: numel * dtype.itemsize].view(dtype)


def wait_for_host(buckets: Iterable[BucketSpec]) -> None:
    """Wait until offloaded buckets can be used on the host: copies to it are complete, and copies from it."""
    for device in {bucket.device for bucket in buckets if bucket.offloaded and bucket.on_accelerator}:
        torch.accelerator.synchronize(torch.device(device))  # host synchronisation: the host reads next


def _aligned(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor with what follows it in its block."""
    return -(-numel * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _unpin(runtime: Any, device: torch.device, block: Tensor) -> None:
    torch.cuda.synchronize(device)  # host synchronisation: copies into the block may be under way, once an optimizer
    runtime.cudaHostUnregister(block.data_ptr())


@dataclass(eq=False)
class _Region:
    """A mapped part of the file, of which the first bytes are ``taken``."""

    mapping: mmap.mmap
    place: int  # the mapping's offset in the file, in bytes
    address: int  # the mapping's address in memory
    taken: int = 0


class DiskOffload(OffloadBackend):
    """A file of this rank alone, in which tensors lie one after another, each on pages of its own."""

    is_copied_ahead = False  # a copy would wait for the disk, and the host for the copy
    is_for_frozen = True  # a full disk is an error at construction

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Create the file in ``folder``. Raises `ValueError` if that does not exist or cannot be written."""
        self._folder = Path(folder)
        if not hasattr(os, "posix_fallocate"):
            raise ValueError("offload: this system cannot reserve room in a file; leave out offload=")
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - it stays open
        except OSError as error:
            raise ValueError(f"offload: no file can be made in {self._folder} ({error.strerror})") from error
        self._end = 0
        self._regions: list[_Region] = []
        self._reader = ThreadPoolExecutor(1, "zero-offload")
        self._coming: dict[int, Future[None]] = {}  # reads under way, by the address of the pages

    def reserve(self, wanted: Iterable[tuple[int, torch.dtype]]) -> None:
        """Reserve blocks on the disk, which hold zeros. Raises `ValueError` if the disk is full."""
        nbytes = sum(_pages(numel, dtype) for numel, dtype in wanted)
        if not nbytes:
            return
        number = self._file.fileno()
        try:
            os.posix_fallocate(number, self._end, nbytes)
            mapping = mmap.mmap(number, nbytes, offset=self._end)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(number, self._end)
            free = os.fstatvfs(number)
            raise ValueError(
                f"offload: {nbytes:,} bytes more than the {self._end:,} that this rank has there do not fit into "
                f"{self._folder}, which has {free.f_bavail * free.f_frsize:,} free ({error.strerror})"
            ) from error
        address = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
        self._regions.append(_Region(mapping, self._end, address))
        self._end += nbytes

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = _pages(numel, dtype)
        if not self._regions or len(self._regions[-1].mapping) - self._regions[-1].taken < nbytes:
            self.reserve([(numel, dtype)])  # for a state that was not known at construction
        region = self._regions[-1]
        offset, region.taken = region.taken, region.taken + nbytes
        return torch.frombuffer(region.mapping, dtype=dtype, count=max(1, numel), offset=offset)[:numel]

    def prefetch(self, tensors: Iterable[Tensor]) -> None:
        for region, begin, nbytes in self._spans(tensors):
            self._coming[region.address + begin] = self._reader.submit(_read, region, begin, nbytes)

    def evict(self, tensors: Iterable[Tensor]) -> None:
        for region, begin, nbytes in self._spans(tensors):
            coming = self._coming.pop(region.address + begin, None)
            if coming is not None:
                coming.result()  # pages that are read after the eviction would stay in memory
            _begin_to_write(self._file.fileno(), region.place + begin, nbytes)
            region.mapping.madvise(mmap.MADV_DONTNEED, begin, nbytes)

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._regions, self._coming = [], {}
        self._file.close()

    def _spans(self, tensors: Iterable[Tensor]) -> Iterator[tuple[_Region, int, int]]:
        """Yield the whole pages of the tensors that lie in this file: region, begin and length in bytes."""
        for tensor in tensors:
            for region in self._regions:
                begin = tensor.data_ptr() - region.address
                if tensor.numel() and 0 <= begin < len(region.mapping):
                    end = begin + tensor.numel() * tensor.itemsize
                    low, high = begin // _PAGE * _PAGE, -(-end // _PAGE) * _PAGE
                    yield region, low, high - low


def _pages(numel: int, dtype: torch.dtype) -> int:
    """Return the size of the whole pages that a tensor takes, in bytes."""
    return max(1, -(-numel * dtype.itemsize // _PAGE)) * _PAGE


def _read(region: _Region, begin: int, nbytes: int) -> None:
    """Read pages and map them for writing, in one call: its reads are large, and it does not hold Python's lock."""
    call = getattr(_LIBC, "madvise", None)
    place = ctypes.c_void_p(region.address + begin)
    if call is None or call(place, ctypes.c_size_t(nbytes), _POPULATE_WRITE):
        with suppress(OSError):  # pages that are not read ahead are read when they are touched
            region.mapping.madvise(mmap.MADV_WILLNEED, begin, nbytes)


def _begin_to_write(file: int, begin: int, nbytes: int) -> None:
    """Begin the write-back of a part of the file, so that the disk works while other buckets are stepped.

    The kernel by itself would begin later. Raises `OSError` if writing failed.
    """
    call = getattr(_LIBC, "sync_file_range", None)
    if call is not None and call(file, ctypes.c_int64(begin), ctypes.c_int64(nbytes), _WRITE):
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):  # these: the file system does not support it
            raise OSError(number, f"offload: writing failed: {os.strerror(number)}")


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class OffloadedStates:
    """The offloaded states of one bucket's interval, by name, and their copies on the device that steps them.

    ``flats``: all states in use, by name, offloaded or not.
    """

    def __init__(
        self,
        offload_backend: OffloadBackend,
        numel: int,
        names: Iterable[str],
        dtype: torch.dtype,
        device: torch.device,
        prefetching: ProfilerRange,
        evicting: ProfilerRange,
        *,
        stepped_in_place: bool = False,
    ) -> None:
        """Allocate the tensors that are known at construction; `tensor` allocates others later.

        ``names``: of these tensors, which have ``numel`` elements of ``dtype`` each. ``device``: which steps them.
        ``prefetching`` and ``evicting``: the profiler's events of the two calls. ``stepped_in_place``: the host steps
        them where they lie, and nothing is copied.
        """
        self._prefetching, self._evicting = prefetching, evicting
        self._offload_backend, self._numel, self._device = offload_backend, numel, device
        self._tensors = {(name, dtype): offload_backend.empty(numel, dtype) for name in sorted(names)}
        self._staging, self._stepped_in_place = Staging(device), stepped_in_place

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        return list(self._tensors.values())

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the tensor of this name, with the values last written; zeros on the first call."""
        if (name, dtype) not in self._tensors:
            self._tensors[name, dtype] = self._offload_backend.empty(self._numel, dtype)
        return self._tensors[name, dtype]

    @property
    def on_device(self) -> Mapping[str, Tensor]:
        """The copies on the device, by name."""
        return self._staging.tensors

    def prefetch(self, flats: Mapping[str, Tensor]) -> None:
        """Begin to read the states, which will be needed soon, and to copy them where a copy may come early."""
        with self._prefetching():
            self._offload_backend.prefetch(self._tensors.values())
        if self._offload_backend.is_copied_ahead:
            self._fetch(flats)

    def ready(self, flats: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return copies of all states that lie elsewhere, which the device may use in its current stream."""
        if not self.on_device:
            self._fetch(flats)
        self._staging.wait()
        return self.on_device

    def evict(self, flats: Mapping[str, Tensor]) -> None:
        """Begin to copy and to write the states back, which will not be needed for a while. Copies keep their memory
        until `free_copies`."""
        self._staging.put_back(flats)
        with self._evicting():
            self._offload_backend.evict(self._tensors.values())

    def free_copies(self) -> None:
        """Free the memory of the copies."""
        self._staging.let_go()

    def wait_for_copies(self) -> None:
        """Wait until states that were copied back can be read."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # host synchronisation: the reader is on the host

    def _fetch(self, flats: Mapping[str, Tensor]) -> None:
        if not self._stepped_in_place:
            self._staging.fetch({name: flat for name, flat in flats.items() if self._is_elsewhere(flat)})

    def _is_elsewhere(self, flat: Tensor) -> bool:
        return flat.device != self._device
