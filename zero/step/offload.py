"""Memory for what a rank needs only while it steps: a file of its own, mapped, of which a bucket or two are here.

Knows: files, pages, what the kernel may be told of them. Does not know: what the tensors are, or when they are used.

    construction   the file gets its blocks, so a full disk is an error here and not in a step (but for states that a
                   class has not told of: one that is switched on later); it has no name
    arrive         a thread begins to read a bucket's pages, all at once, while another bucket is stepped
    (a step)       pages that are not there yet come as they are touched
    leave          what was written begins its way to the disk, and the pages leave this process

What has left a process may stay in the kernel's page cache, which gives it up as soon as memory is short.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..config import Offload
from ..events import Event

_PAGE = mmap.PAGESIZE
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin to write, wait for nothing
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: read pages, and make them ready to be written; of Linux 5.14


def backend_for(offload: Offload, device: torch.device) -> OffloadBackend | None:
    """What keeps states so, for parameters on ``device``; None where there is nothing to do."""
    if not offload.on_host:
        return DiskOffload(offload.states)
    if device.type != "cpu":
        return HostOffload()
    warnings.warn('offload: states="cpu", but the parameters are on the CPU: nothing to do', stacklevel=2)
    return None


class OffloadBackend(Protocol):
    """Where the states of buckets are kept. ``is_copied_ahead``: a device may copy them before they are needed, by
    itself, so that nobody waits for it."""

    is_copied_ahead: bool

    def reserve(self, wanted: Iterable[tuple[int, torch.dtype]]) -> None:
        """Make room for tensors of so many elements. Raises `ValueError` where there is none."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor, where there is room for it."""

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """These are needed no more: others may lie where they lay."""

    def prefetch(self, tensors: Iterable[Tensor]) -> None:
        """These will be needed soon."""

    def evict(self, tensors: Iterable[Tensor]) -> None:
        """These will not be needed for a while."""

    def close(self) -> None:
        """No further tensor will be asked for."""


class HostOffload:
    """Memory of the host from which a GPU copies by itself."""

    is_copied_ahead = True

    def reserve(self, wanted: Iterable[tuple[int, torch.dtype]]) -> None:
        return

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        return

    def prefetch(self, tensors: Iterable[Tensor]) -> None:
        return

    def evict(self, tensors: Iterable[Tensor]) -> None:
        return

    def close(self) -> None:
        return


@dataclass(eq=False)
class _Region:
    """A part of the file, mapped: where it begins there and in memory, and which bytes of it are not ``taken``."""

    mapping: mmap.mmap
    place: int
    address: int
    taken: int
    end: int

    def __len__(self) -> int:
        """Bytes that are left."""
        return self.end - self.taken


class DiskOffload:
    """A file of this rank alone, in which tensors lie one after the other, each on pages of its own."""

    is_copied_ahead = False  # a copy would wait for the disk, and the host for the copy

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raises `ValueError` where there is no such folder, or nothing can be written there."""
        self._folder = Path(folder)
        if not hasattr(os, "posix_fallocate"):
            raise ValueError("offload: on this system no room can be reserved in a file; leave offload away")
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - it stays open
        except OSError as error:
            raise ValueError(f"offload: no file can be made in {self._folder} ({error.strerror})") from error
        self._end = 0
        self._regions: list[_Region] = []
        self._reader = ThreadPoolExecutor(1, "zero-offload")
        self._coming: dict[int, Future[None]] = {}  # by the address of their pages
        self._spare: list[_Region] = []  # what was given back

    def reserve(self, wanted: Iterable[tuple[int, torch.dtype]]) -> None:
        """In blocks of the disk that are its own, which hold zeros."""
        spare = [len(region) for region in self._spare]
        nbytes = 0
        for size in (_pages(numel, dtype) for numel, dtype in wanted):
            place = next((number for number, left in enumerate(spare) if left >= size), None)
            if place is None:
                nbytes += size
            else:
                spare[place] -= size
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
        self._regions.append(_Region(mapping, self._end, address, 0, nbytes))
        self._end += nbytes

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = _pages(numel, dtype)
        region = next((region for region in (*self._spare, *self._regions[-1:]) if len(region) >= nbytes), None)
        if region is None:
            self.reserve([(numel, dtype)])  # what nobody could know of
            region = self._regions[-1]
        offset, region.taken = region.taken, region.taken + nbytes
        made = torch.frombuffer(region.mapping, dtype=dtype, count=max(1, numel), offset=offset)[:numel]
        return made.zero_() if region in self._spare else made

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        for region, begin, nbytes in self._spans(tensors):
            end = begin + nbytes
            before = next((s for s in self._spare if s.mapping is region.mapping and s.end == begin), None)
            if before is None:
                self._spare.append(_Region(region.mapping, region.place, region.address, begin, end))
            else:
                before.end = end
        self._spare = [spare for spare in self._spare if len(spare)]

    def prefetch(self, tensors: Iterable[Tensor]) -> None:
        for region, begin, nbytes in self._spans(tensors):
            self._coming[region.address + begin] = self._reader.submit(_read, region, begin, nbytes)

    def evict(self, tensors: Iterable[Tensor]) -> None:
        for region, begin, nbytes in self._spans(tensors):
            coming = self._coming.pop(region.address + begin, None)
            if coming is not None:
                coming.result()  # what came later would stay
            _begin_to_write(self._file.fileno(), region.place + begin, nbytes)
            region.mapping.madvise(mmap.MADV_DONTNEED, begin, nbytes)

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._regions, self._spare, self._coming = [], [], {}
        self._file.close()

    def _spans(self, tensors: Iterable[Tensor]) -> Iterator[tuple[_Region, int, int]]:
        """The whole pages on which tensors lie that are here: region, begin and length in bytes."""
        for tensor in tensors:
            for region in self._regions:
                begin = tensor.data_ptr() - region.address
                if tensor.numel() and 0 <= begin < len(region.mapping):
                    end = begin + tensor.numel() * tensor.itemsize
                    low, high = begin // _PAGE * _PAGE, -(-end // _PAGE) * _PAGE
                    yield region, low, high - low


def _pages(numel: int, dtype: torch.dtype) -> int:
    """Bytes of the whole pages that a tensor takes."""
    return max(1, -(-numel * dtype.itemsize // _PAGE)) * _PAGE


def _read(region: _Region, begin: int, nbytes: int) -> None:
    """Map pages for writing: in one call, whose reads are large, and in which other threads run."""
    call = getattr(_LIBC, "madvise", None)
    place = ctypes.c_void_p(region.address + begin)
    if call is None or call(place, ctypes.c_size_t(nbytes), _POPULATE_WRITE):
        with suppress(OSError):  # what is not read ahead comes as it is touched
            region.mapping.madvise(mmap.MADV_WILLNEED, begin, nbytes)


def _begin_to_write(file: int, begin: int, nbytes: int) -> None:
    """So that the disk is busy while other buckets are stepped; the kernel would begin later."""
    call = getattr(_LIBC, "sync_file_range", None)
    if call is not None and call(file, ctypes.c_int64(begin), ctypes.c_int64(nbytes), _WRITE):
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):  # where the file system has no such thing
            raise OSError(number, f"offload: writing failed: {os.strerror(number)}")


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class OffloadedStates:
    """What is kept of one bucket's interval, by name."""

    def __init__(
        self,
        offload_backend: OffloadBackend,
        numel: int,
        names: Iterable[str],
        dtype: torch.dtype,
        prefetching: Event,
        evicting: Event,
    ) -> None:
        """``names``: of the tensors that there will be, each of ``numel`` elements of ``dtype``; others may come."""
        self._prefetching, self._evicting = prefetching, evicting
        self._offload_backend, self._numel = offload_backend, numel
        self._tensors = {(name, dtype): offload_backend.empty(numel, dtype) for name in sorted(names)}
        self.is_copied_ahead = offload_backend.is_copied_ahead

    def tensors(self) -> list[Tensor]:
        """All that there are."""
        return list(self._tensors.values())

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor of this name, with what was last written there."""
        if (name, dtype) not in self._tensors:
            self._tensors[name, dtype] = self._offload_backend.empty(self._numel, dtype)
        return self._tensors[name, dtype]

    def prefetch(self) -> None:
        """They will be needed soon."""
        with self._prefetching():
            self._offload_backend.prefetch(self._tensors.values())

    def evict(self) -> None:
        """They will not be needed for a while."""
        with self._evicting():
            self._offload_backend.evict(self._tensors.values())
