"""Memory of a rank that the other ranks of its host can read.

Every rank has one file without a name (`memfd_create`), which exists only as long as some process holds it. So nothing
is left behind, whichever process dies. A peer that received the descriptor maps the whole file once. Pages are made
before they are used, so that the kernel's refusal is an error and not a signal. They are given back with the last
holder of a region.

Knows: regions of pages. Does not know: how a descriptor reaches a peer, or when a peer reads.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_OF_A_FILE, _HERE = 1 << 61, -1 << 62  # bits of /proc/self/pagemap (the second: in memory or in swap)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python does not name


def arena_bytes(ranks: int = 1) -> int:
    """Return the address space of an arena: more than there is memory, as only pages that are used exist.

    A process maps the arenas of all ``ranks`` of its host, for each of its groups, and has 128 TiB. The arenas of a
    group take 8 TiB at most.
    """
    return min(2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), (8 << 40) // ranks // PAGE * PAGE)


class Spans:
    """The free parts of a range of pages, in order. Neighbours are merged."""

    def __init__(self, pages: int) -> None:
        self._free = [(0, pages)]  # begin, end
        self._given: deque[tuple[int, int]] = deque()

    def take(self, pages: int) -> int | None:
        """Return the first page of the first free part that is large enough; None if there is none."""
        while self._given:
            self._merge(*self._given.popleft())
        for number, (begin, end) in enumerate(self._free):
            if end - begin >= pages:
                self._free[number : number + 1] = [(begin + pages, end)] if end - begin > pages else []
                return begin
        return None

    def give(self, begin: int, pages: int) -> None:
        """Free pages. A last holder may let go at any moment, in any thread, even during `take`."""
        self._given.append((begin, pages))

    def _merge(self, begin: int, pages: int) -> None:
        end = begin + pages
        number = bisect.bisect_left(self._free, (begin, end))
        if number < len(self._free) and self._free[number][0] == end:
            end = self._free.pop(number)[1]
        if number > 0 and self._free[number - 1][1] == begin:
            number -= 1
            begin = self._free.pop(number)[0]
        self._free.insert(number, (begin, end))


class Arena:
    """The memory of this rank that its peers may read."""

    def __init__(self, size: int | None = None) -> None:
        """``size``: bytes of address space. Raises `OSError` if the kernel forbids such memory."""
        size = arena_bytes() if size is None else size
        self.fd = os.memfd_create("zero", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self._mapping = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self._spans = Spans(size // PAGE)
        self._regions: dict[int, tuple[int, int]] = {}  # address of a region -> its first page, and pages
        self._close = weakref.finalize(self, os.close, self.fd)

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory that starts on a page, with undefined content. It is freed with its last holder."""
        pages = -(-nbytes // PAGE)
        page = self._spans.take(pages)
        if page is None:
            raise _exhausted(nbytes)
        begin, length = page * PAGE, pages * PAGE
        try:
            _make_pages(self._mapping, self.fd, begin, length)
        except OSError as error:
            self._spans.give(page, pages)
            raise _exhausted(nbytes) from error
        part = memoryview(self._mapping)[begin : begin + nbytes]
        storage = torch.frombuffer(part, dtype=torch.uint8).untyped_storage()
        address = storage.data_ptr()
        self._regions[address] = (page, pages)
        end = weakref.finalize(part, _free, self._mapping, self._spans, self._regions, address, os.getpid())
        end.atexit = False
        return storage

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset of the tensor's first byte in the file; None if it is not in the file."""
        address = tensor.untyped_storage().data_ptr()
        region = self._regions.get(address)
        return None if region is None else region[0] * PAGE + tensor.data_ptr() - address


class MappedRegion:
    """See `collectives.backend.Region`. Each rank maps the file twice, and `whole` is a private map: if a rank writes
    there, the kernel copies the page first, so a stray write reaches no other rank."""

    def __init__(self, written: memoryview, copies: mmap.mmap, begin: int, size: int) -> None:
        self._written, self._copies, self._begin, self._size = written, copies, begin, size

    def own(self, low: int, high: int) -> Tensor:
        """Return the bytes ``[low, high)``, 1-D, for this rank to write."""
        return _tensor(self._written, self._begin + low, high - low)

    def whole(self, low: int = 0, high: int | None = None) -> Tensor:
        """Return the bytes ``[low, high)``, 1-D, as all ranks wrote them, except for this rank's own writes here."""
        high = self._size if high is None else high
        return _tensor(memoryview(self._copies), self._begin + low, high - low)

    def written(self) -> list[tuple[int, int]]:
        """Return where this rank has written into `whole` since `refresh`, in bytes, by whole pages."""
        pages = -(-self._size // PAGE)
        first = self.whole().data_ptr() // PAGE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as file:
                data = os.pread(file.fileno(), 8 * pages, 8 * first)
        except OSError:  # forbidden: any page may have been written
            return [(0, self._size)]
        entries = torch.frombuffer(bytearray(data), dtype=torch.int64)
        here = (entries & _HERE) != 0
        copied = (here & ((entries & _OF_A_FILE) == 0)).nonzero().flatten().tolist()
        return [(page * PAGE, min((page + 1) * PAGE, self._size)) for page in copied]

    def refresh(self, low: int = 0, high: int | None = None) -> None:
        """Undo what was written into the pages of `whole` in ``[low, high)``. The cost is per page."""
        begin, end = self._begin + low // PAGE * PAGE, self._begin + (self._size if high is None else high)
        if begin < end:
            self._copies.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def file_of(sizes: Sequence[int]) -> int:
    """Make a file without a name for `regions_of`, with all its pages. Raise `OSError` if there are none left."""
    fd, length = os.memfd_create("zero-common", os.MFD_CLOEXEC), _offsets(sizes)[-1]
    try:
        os.ftruncate(fd, length)
        os.posix_fallocate(fd, 0, length)
    except BaseException:
        os.close(fd)
        raise
    return fd


def regions_of(fd: int, sizes: Sequence[int]) -> list[MappedRegion]:
    """Return regions of these bytes in a file of `file_of`. The descriptor is closed."""
    offsets = _offsets(sizes)
    try:
        written = memoryview(mmap.mmap(fd, offsets[-1]))
        copies = mmap.mmap(fd, offsets[-1], flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    return [MappedRegion(written, copies, begin, size) for begin, size in zip(offsets, sizes, strict=False)]


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Return the offsets at which regions begin, each on a page, and the end of the last."""
    return list(itertools.accumulate((-(-size // PAGE) * PAGE for size in sizes), initial=0))


def _tensor(memory: memoryview, begin: int, size: int) -> Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=begin)


class Window:
    """The arena of a peer, to be read."""

    def __init__(self, fd: int) -> None:
        """``fd``: of its file, which may be closed afterwards. Raises `OSError` if the kernel refuses it."""
        mapping = mmap.mmap(fd, os.fstat(fd).st_size)
        _forbid_writes(mapping)
        self._memory = memoryview(mapping)

    def view(self, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Return ``nbytes`` of the peer's own memory, 1-D. A write there is a segmentation fault."""
        return torch.frombuffer(self._memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)


def _forbid_writes(mapping: mmap.mmap) -> None:
    """Make the mapping read-only by `mprotect`, so that a write is a segmentation fault.

    If Python itself opened it read-only, `torch.frombuffer` would warn, and to silence a warning changes the filters of
    all threads.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), mmap.PROT_READ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _exhausted(nbytes: int) -> MemoryError:
    return MemoryError(
        f"{nbytes} bytes of memory that other processes can read could not be had: give the ranks more memory, or "
        "choose collective='pairwise', which needs none"
    )


def _make_pages(mapping: mmap.mmap, fd: int, begin: int, length: int) -> None:
    try:
        mapping.madvise(_POPULATE_WRITE, begin, length)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the kernel does not have this option
            raise
        os.posix_fallocate(fd, begin, length)


def _free(mapping: mmap.mmap, spans: Spans, regions: dict[int, tuple[int, int]], address: int, process: int) -> None:
    page, pages = regions.pop(address)
    if os.getpid() == process:  # a forked child has a copy of these records, but the pages are its parent's
        mapping.madvise(mmap.MADV_REMOVE, page * PAGE, pages * PAGE)
        spans.give(page, pages)
