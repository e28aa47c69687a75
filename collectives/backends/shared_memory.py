"""The backend among processes of one host: frames over Unix sockets, bytes through memory that both sides map.

    frame    slot | kind | body
    bytes    a short message, in the body
    at       the offset and size of a long message in the sender's arena; the receiver reads it there and answers
    read     "I have read the oldest message whose offset you sent"
    end      "I failed: I send and read nothing more in this slot"

A frame is one system call on each side, which orders memory on every CPU. A peer that ended shows as the end of its
socket. If a forked child still holds the socket, its process descriptor shows it. A rank that waits sleeps.

Memory of a rank that the other ranks of its host can read.

Every rank has one file without a name (`memfd_create`), which exists only as long as some process holds it. So nothing
is left behind, whichever process dies. A peer that received the descriptor maps the whole file once. Pages are made
before they are used, so that the kernel's refusal is an error and not a signal. They are given back with the last
holder of a region.

Ranks of several hosts: shared memory to those of this host, the network to the others.

Knows: sockets, arenas, processes of this host, which backend reaches a rank. Does not know: headers, collectives,
torch.distributed.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import itertools
import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage

from ..backend import Backend, Pending, PendingBytes, Region
from ..messages import GoneError, PeerError

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


_FRAME = struct.Struct("<IB")
_OFFSET = struct.Struct("<qq")
_BYTES, _AT, _READ, _END = 0, 1, 2, 3
INLINE = 4096  # bytes up to which a message travels in a frame
_FRAME_BYTES = _FRAME.size + INLINE
_NOW = int(getattr(socket, "MSG_DONTWAIT", 0))  # missing on other systems, where this module is imported but not used
_SEND = _NOW | int(getattr(socket, "MSG_NOSIGNAL", 0))
SPIN = 50e-6  # seconds for which a rank with a core of its own polls before it sleeps: waking up takes as long


class _Sent:
    """A message that needs no wait."""

    def wait(self, timeout: float) -> None:
        return


SENT = _Sent()


class _PendingRead:
    def __init__(self, backend: SharedMemoryBackend, tensor: Tensor, to: int, slot: int) -> None:
        self._backend, self._tensor, self._to, self._slot = backend, tensor, to, slot
        backend.placed[to, slot] += 1
        self._number = backend.placed[to, slot]

    def wait(self, timeout: float) -> None:
        backend, key = self._backend, (self._to, self._slot)
        while backend.acknowledged[key] < self._number:
            backend.next_frame(self._to, self._slot, timeout, ack=True)
            backend.acknowledged[key] += 1


class _PendingRecv:
    """A receive. Messages of a rank in a slot belong to its receives in the order in which these began, in whatever
    order they are waited for."""

    __slots__ = ("_backend", "_ended", "_slot", "_source", "_tensor")

    def __init__(self, backend: SharedMemoryBackend, tensor: Tensor, source: int, slot: int) -> None:
        self._backend, self._tensor, self._source, self._slot = backend, tensor, source, slot
        self._ended = False
        backend.receives[source, slot].append(self)

    def wait(self, timeout: float) -> None:
        begun = self._backend.receives[self._source, self._slot]
        while not self._ended:
            begun[0].take(timeout)

    def take(self, timeout: float) -> None:
        """Take the next message. Only the first receive of those under way may."""
        kind, body = self._backend.next_frame(self._source, self._slot, timeout)
        self._backend.receives[self._source, self._slot].popleft()
        if kind == _BYTES:
            arrived, size = torch.frombuffer(bytearray(body), dtype=torch.uint8), len(body)
        else:
            offset, size = _OFFSET.unpack(body)
            arrived = self._backend.map_peer(self._source, offset, size, torch.uint8)
        if size != self._tensor.numel():
            raise _wrong_size(size, self._tensor.numel())
        self._tensor.copy_(arrived)  # host synchronisation: the sender waits until a device has read it
        if kind == _AT:
            self._backend.put(self._source, self._slot, _READ)
        self._ended = True


class _PendingRecvBytes:
    __slots__ = ("_backend", "_data", "_size", "_slot", "_source")

    def __init__(self, backend: SharedMemoryBackend, size: int, source: int, slot: int) -> None:
        self._backend, self._size, self._source, self._slot = backend, size, source, slot
        self._data: bytes | None = None
        backend.receives[source, slot].append(self)

    def wait(self, timeout: float) -> bytes:
        begun = self._backend.receives[self._source, self._slot]
        while self._data is None:
            begun[0].take(timeout)
        return self._data

    def take(self, timeout: float) -> None:
        """Take the next message. Only the first receive of those under way may."""
        kind, body = self._backend.next_frame(self._source, self._slot, timeout)
        self._backend.receives[self._source, self._slot].popleft()
        offset, size = (0, len(body)) if kind == _BYTES else _OFFSET.unpack(body)
        if size != self._size:
            raise _wrong_size(size, self._size)
        self._data = body
        if kind == _AT:
            self._data = self._backend.map_peer(self._source, offset, size, torch.uint8).numpy().tobytes()
            self._backend.put(self._source, self._slot, _READ)


class SharedMemoryBackend(Backend):
    """The sockets of one rank to its peers, and its arena."""

    name = "shared memory"
    maps_memory = True

    def __init__(self, rank: int, peers: Sequence[PeerProcess | None], arena: Arena, timeout: float) -> None:
        """``peers``: one for each rank of the group; None for this rank."""
        self.rank, self.world_size, self.timeout = rank, len(peers), timeout
        self._peers, self._arena = list(peers), arena
        self._frames: defaultdict[tuple[int, int, bool], deque[tuple[int, bytes]]] = defaultdict(deque)
        self.placed: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.acknowledged: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._ended: set[tuple[int, int]] = set()  # rank and slot
        self.receives: defaultdict[tuple[int, int], deque[_PendingRecv | _PendingRecvBytes]] = defaultdict(deque)

    # -- messages -------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, slot: int) -> _Sent | _PendingRead:
        if tensor.numel() <= INLINE:
            return self.send_bytes(tensor.cpu().numpy().tobytes(), to, slot)  # host synchronisation: device memory
        offset = self._arena.offset_of(tensor)
        if offset is None:
            staged = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self.allocate(tensor.numel()))
            tensor = staged.copy_(tensor)  # host synchronisation: device memory
            offset = self._arena.offset_of(tensor)
        placed = _PendingRead(self, tensor, to, slot)
        assert offset is not None
        self.put(to, slot, _AT, _OFFSET.pack(offset, tensor.numel()))
        return placed

    def recv(self, tensor: Tensor, source: int, slot: int) -> _PendingRecv:
        return _PendingRecv(self, tensor, source, slot)

    def needs_posted_recv(self, source: int) -> bool:
        return False

    def send_bytes(self, data: bytes, to: int, slot: int, patience: float | None = None) -> _Sent | _PendingRead:
        if len(data) > INLINE:
            return self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to, slot)
        self.put(to, slot, _BYTES, data, patience)
        return SENT

    def recv_bytes(self, size: int, source: int, slot: int) -> _PendingRecvBytes:
        return _PendingRecvBytes(self, size, source, slot)

    # -- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> UntypedStorage:
        return self._arena.allocate(nbytes)

    def offset_of(self, tensor: Tensor) -> int | None:
        return self._arena.offset_of(tensor)

    def map_peer(self, source: int, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        return self._peer(source).window.view(offset, nbytes, dtype)

    def share_host(self, ranks: Sequence[int]) -> bool:
        return True

    def common(self, sizes: Sequence[int], ranks: Sequence[int]) -> list[MappedRegion] | None:
        first, *others = ranks
        if self.rank != first:
            fd = self._peer(first).receive_descriptor(self.timeout)
        else:
            try:
                fd = file_of(sizes)
            except OSError:
                fd = None
            for rank in others:
                self._peer(rank).send_descriptor(fd)
        try:
            return None if fd is None else regions_of(fd, sizes)
        except OSError:  # no address space is left
            return None

    def close_slot(self, to: int, slot: int) -> None:
        self.put(to, slot, _END)

    # -- frames ---------------------------------------------------------------------------------------------------

    def put(self, to: int, slot: int, kind: int, body: bytes = b"", patience: float | None = None) -> None:
        """Send a frame. While the peer's socket is full, read what arrived here: the peer may be waiting for that.
        ``patience``: seconds to wait for room; None is the time limit."""
        frame = _FRAME.pack(slot, kind) + body
        peer = self._peers[to]
        assert peer is not None, "a rank sends itself nothing"
        limit: float | None = None
        while True:
            try:
                peer.socket.send(frame, _SEND)
                return
            except BlockingIOError:
                patience = self.timeout if patience is None else patience
                limit = time.monotonic() + patience if limit is None else limit
                self._make_room(peer, limit, patience)
            except OSError as error:
                raise GoneError(_GONE) from error

    def next_frame(self, source: int, slot: int, timeout: float, ack: bool = False) -> tuple[int, bytes]:
        """Return kind and body of the next message of a rank in a slot; of its next answer there if ``ack``."""
        key = source, slot, ack
        frames = self._frames.get(key)
        while not frames:
            if self._ended and (source, slot) in self._ended:
                raise GoneError("it gave up")
            read = self._read(source, timeout)
            if read is not None:
                if read[0] == key:
                    return read[1]
                self._frames[read[0]].append(read[1])
        return frames.popleft()

    def _read(self, source: int, timeout: float) -> tuple[tuple[int, int, bool], tuple[int, bytes]] | None:
        """Return the next frame of a rank, by slot and whether it is an answer; None if it ends a slot."""
        frame = self._peer(source).receive(timeout)
        if frame is None:
            raise PeerError(f"time limit of {timeout} s passed")
        if not frame:
            raise GoneError(_GONE)
        slot, kind = _FRAME.unpack_from(frame)
        if kind == _END:
            self._ended.add((source, slot))
            return None
        return (source, slot, kind == _READ), (kind, frame[_FRAME.size :])

    def _make_room(self, peer: PeerProcess, limit: float, patience: float) -> None:
        poll = select.poll()
        ranks: dict[int, int] = {}
        for rank, other in enumerate(self._peers):
            if other is not None and not other.gone:
                ranks[other.socket.fileno()] = rank
                poll.register(other.socket, select.POLLIN | (select.POLLOUT if other is peer else 0))
        if peer.life is not None:
            poll.register(peer.life, select.POLLIN)
        ready = poll.poll(max(0.0, limit - time.monotonic()) * 1000)
        if not ready:
            raise PeerError(f"time limit of {patience} s passed")
        for descriptor, event in ready:
            if descriptor == peer.life:
                raise GoneError(_GONE)
            if event & ~select.POLLOUT:
                try:
                    read = self._read(ranks[descriptor], 0)
                    if read is not None:
                        self._frames[read[0]].append(read[1])
                except GoneError:
                    if self._peers[ranks[descriptor]] is peer:
                        raise  # another rank may have finished, and ended

    def _peer(self, rank: int) -> PeerProcess:
        peer = self._peers[rank]
        assert peer is not None, "a rank sends itself nothing"
        return peer


_GONE = "its process ended, or closed its optimizer"


def _wrong_size(came: int, expected: int) -> PeerError:
    return PeerError(f"{came} bytes came where {expected} were expected")


class PeerProcess:
    """A socket to another process of this host, and its memory."""

    def __init__(
        self, connection: socket.socket, files: socket.socket, window: Window, process: int, spin: float
    ) -> None:
        """``files``: a connection for descriptors alone. ``process``: the peer's process id as the kernel reports it
        here; 0 if it has none that this process can see. ``spin``: seconds for which `receive` polls before it
        sleeps."""
        self.socket, self.window, self.spin, self._files = connection, window, spin, files
        for end in (connection, files):  # a `__del__` may be called after that of a socket, which warns if it is open
            weakref.finalize(self, end.close).atexit = False
        connection.setblocking(False)
        self.gone = False  # the peer will send nothing more
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self.life: int | None = None  # readable when the peer's process has ended
        if process > 0 and hasattr(os, "pidfd_open"):
            try:
                self.life = os.pidfd_open(process)
            except OSError:  # the kernel does not have it; the end of the socket shows most deaths
                return
            weakref.finalize(self, os.close, self.life).atexit = False
            self._poll.register(self.life, select.POLLIN)

    def send_descriptor(self, fd: int | None) -> None:
        try:
            socket.send_fds(self._files, [b"no" if fd is None else b"fd"], [] if fd is None else [fd])
        except OSError as error:
            raise PeerError(f"it is gone ({error})") from error

    def receive_descriptor(self, timeout: float) -> int | None:
        self._files.settimeout(timeout)
        try:
            data, fds, _, _ = socket.recv_fds(self._files, 2, 1)
        except OSError as error:
            raise PeerError(f"it did not answer ({error})") from error
        if not data:
            raise PeerError("it is gone")
        return fds[0] if fds else None

    def receive(self, timeout: float) -> bytes | None:
        """Return the next frame; empty if the peer is gone, None if ``timeout`` seconds passed."""
        begin = time.monotonic()
        while True:
            frame = self._arrived()
            if frame is not None:
                return frame
            waited = time.monotonic() - begin
            if waited < self.spin:
                continue
            if waited >= timeout:
                return None
            events = self._poll.poll((timeout - waited) * 1000)
            if events and all(descriptor == self.life for descriptor, _ in events):
                # Frames that the process sent before it ended are still here; its child may keep the socket open.
                return self._arrived() or self._end()

    def _arrived(self) -> bytes | None:
        """Return the next frame that is here; empty if the peer is gone, None if none is here yet."""
        while True:
            try:
                return self.socket.recv(_FRAME_BYTES, _NOW) or self._end()
            except BlockingIOError:
                return None
            except ConnectionResetError:  # raised once: the peer left frames unread; what it sent is still here
                continue
            except OSError:
                return self._end()

    def _end(self) -> bytes:
        self.gone = True
        return b""


class HybridBackend(Backend):
    """A local and a remote backend as one."""

    maps_memory = True

    def __init__(self, remote: Backend, local: SharedMemoryBackend, ranks: Sequence[int]) -> None:
        """``ranks``: the remote backend's numbers of the ranks of this host, in the order of the local backend."""
        self.name = f"{local.name} and {remote.name}"
        self.rank, self.world_size, self.timeout = remote.rank, remote.world_size, remote.timeout
        self._remote, self._local = remote, local
        self._local_ranks = {rank: offset for offset, rank in enumerate(ranks)}

    def _reaching(self, rank: int) -> tuple[Backend, int]:
        """Return the backend that reaches a rank, and the rank's number there."""
        return (self._local, self._local_ranks[rank]) if rank in self._local_ranks else (self._remote, rank)

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending:
        backend, rank = self._reaching(to)
        return backend.send(tensor, rank, slot)

    def recv(self, tensor: Tensor, source: int, slot: int) -> Pending:
        backend, rank = self._reaching(source)
        return backend.recv(tensor, rank, slot)

    def needs_posted_recv(self, source: int) -> bool:
        return source not in self._local_ranks

    def send_bytes(self, data: bytes, to: int, slot: int, patience: float | None = None) -> Pending:
        backend, rank = self._reaching(to)
        return backend.send_bytes(data, rank, slot, patience)

    def recv_bytes(self, size: int, source: int, slot: int) -> PendingBytes:
        backend, rank = self._reaching(source)
        return backend.recv_bytes(size, rank, slot)

    def close_slot(self, to: int, slot: int) -> None:
        if to in self._local_ranks:
            self._local.close_slot(self._local_ranks[to], slot)

    def allocate(self, nbytes: int) -> UntypedStorage:
        return self._local.allocate(nbytes)

    def offset_of(self, tensor: Tensor) -> int | None:
        return self._local.offset_of(tensor)

    def share_host(self, ranks: Sequence[int]) -> bool:
        return all(rank in self._local_ranks for rank in ranks)

    def common(self, sizes: Sequence[int], ranks: Sequence[int]) -> Sequence[Region] | None:
        return self._local.common(sizes, [self._local_ranks[rank] for rank in ranks])

    def map_peer(self, source: int, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        return self._local.map_peer(self._local_ranks[source], offset, nbytes, dtype)
