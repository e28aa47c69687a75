"""The lock of a folder of checkpoints: one run holds it, and every other one is refused.

Knows: files of locks, and when a lock may be taken from its holder. Does not know: checkpoints.

    .lock      locked by the kernel (flock) for the run that writes here; has the text of its `Holder`
    .lease     where the file system has no locks: created by that run, which removes it when it ends; same text
"""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .. import files

LOCK, LEASE = ".lock", ".lease"
_GONE = 0.5  # seconds after which a lock is free, or has the text of a new holder, if its holder has ended
_PAUSE = 0.05  # seconds between two tries
_LONGEST = 4096  # bytes of the text of a holder


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host, pid: of the process; nonce: of its run.
        started: in ticks since the boot of its host.
        system: the boot of its host and its namespace of pids, since several hosts and containers may have one name.
    """

    host: str = ""
    pid: int = 0
    nonce: str = ""
    started: int = 0
    system: str = ""

    @classmethod
    def me(cls, nonce: str) -> Holder:
        return cls(socket.gethostname(), os.getpid(), nonce, _start_of(os.getpid()), _system())

    @classmethod
    def unpack(cls, text: bytes) -> Holder:
        """Read what `pack` has written; any other text makes a holder without a host."""
        try:
            found = json.loads(text)
            known = (str(found["host"]), int(found["pid"]), str(found["nonce"]))
            return cls(*known, int(found.get("started", 0)), str(found.get("system", "")))
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()

    def has_ended(self) -> bool:
        """Return whether the process has certainly ended."""
        is_here = self.host and (self.host, self.system) == (socket.gethostname(), _system())
        return bool(is_here and self.started) and _start_of(self.pid) != self.started

    def __str__(self) -> str:
        if not self.host:
            return "another run"
        me = (self.pid, self.host) == (os.getpid(), socket.gethostname())
        which = " (this process: a CheckpointManager that was not closed)" if me else ""
        return f"pid {self.pid} on host {self.host}{which}"


class _Flock:
    """A lock of the kernel, which ends with the process that holds it."""

    remedy = ""

    def __init__(self, path: Path, me: Holder) -> None:
        self.path, self._me = path, me
        self._number = files.open_lock(path)

    def take(self) -> bool:
        """Take the lock if it is free. Return whether this run holds it now."""
        if not files.lock(self._number):
            return False
        files.overwrite(self._number, self._me.pack())
        return True

    def holder(self) -> Holder:
        text = bytearray(_LONGEST)
        return Holder.unpack(bytes(text[: files.read_at(self._number, memoryview(text), 0)]))

    def is_held(self) -> bool:
        return _is_at(self._number, self.path)

    def close(self) -> None:
        files.close(self._number)


class _Lease:
    """A file in the place of a lock. It outlives a process that is killed."""

    def __init__(self, path: Path, me: Holder) -> None:
        self.path, self._me = path, me
        self.remedy = (
            f"; this file system has no locks, so that nothing shows whether it has ended: if it has, remove {path}"
        )

    def take(self) -> bool:
        """Take the lease if there is none, or if its holder has certainly ended. Return whether this run holds it."""
        if self.holder().has_ended():
            with suppress(FileNotFoundError):
                files.remove(self.path)
        try:
            files.write_new(self.path, self._me.pack())
        except FileExistsError:
            return False
        return True

    def holder(self) -> Holder:
        """Return who holds it; a holder without a host if that is not known."""
        with suppress(FileNotFoundError):
            return Holder.unpack(files.read_whole(self.path, _LONGEST))
        return Holder()

    def is_held(self) -> bool:
        return files.read_whole(self.path, _LONGEST) == self._me.pack()

    def close(self) -> None:
        """Remove the lease. Not in a forked child, which does not hold it."""
        with suppress(OSError):
            if self._me.pid == os.getpid() and self.is_held():
                files.remove(self.path)


class FolderLock:
    """The lock of one folder, held by this process: until `close`, or until this object or the process is gone.

    Attributes:
        path: the folder.
        remark: what is weaker than a lock of the kernel; None if it is one.
    """

    def __init__(self, folder: Path, nonce: str) -> None:
        """Lock an existing folder. Raises `ValueError` if another run holds the lock."""
        self.path, self._me = folder, Holder.me(nonce)
        self.remark: str | None = None
        self._open: list[Callable[[], None]] = []  # closes what is open
        self._closing = weakref.finalize(self, _close, self._open)  # also if nobody calls `close`
        self._lock()
        # a forked child, a worker of a data loader say, must not hold the lock after us
        os.register_at_fork(after_in_child=self._closing)

    def _lock(self) -> None:
        self._held: _Flock | _Lease
        lease = _Lease(self.path / LEASE, self._me)
        try:
            self._folder = files.open_folder(self.path)  # while it is open, no other folder gets its number
            self._open.append(partial(files.close, self._folder))
            if self._take_flock():
                if files.exists(lease.path) and not lease.holder().has_ended():  # of a run on a host without locks
                    raise ValueError(f"{lease.holder()} still trains into {self.path}{lease.remedy}")
            else:
                self._held = lease
                self._take(lease)
                self._open.append(lease.close)
            self._check_held()
        except BaseException:
            _close(self._open)
            raise

    def _take_flock(self) -> bool:
        """Take a lock of the kernel. Return False if the file system has none."""
        try:
            self._held = lock = _Flock(self.path / LOCK, self._me)
            self._open.append(lock.close)
            self._take(lock)
        except OSError as error:
            if error.errno not in files.NO_LOCKS:
                raise
            self.remark = files.no_locks(self.path, error.strerror, LEASE)
            return False
        return True

    def _take(self, lock: _Flock | _Lease) -> None:
        """Take the lock. Raises `ValueError` that names its holder, which may be ending just now."""
        end = time.monotonic() + _GONE
        while not lock.take():
            if time.monotonic() > end:
                text = f"{lock.holder()} still trains into {self.path}: stop it, or use another folder"
                raise ValueError(f"{text}{lock.remedy}")
            time.sleep(_PAUSE)

    def check(self) -> None:
        """Raise an error unless this run holds the lock.

        `RuntimeError`: it was removed, or replaced by another run. `FileNotFoundError`: the folder was removed. If it
        was made again, it is locked again.
        """
        at_its_path = False
        with suppress(OSError):  # ESTALE, or there is none
            at_its_path = bool(self._open) and _is_at(self._folder, self.path)
        if not at_its_path:
            if not self.path.is_dir():
                raise FileNotFoundError(f"{self.path} was removed: make it again, and saves go on")
            _close(self._open)
            self._lock()
        self._check_held()

    def _check_held(self) -> None:
        try:
            how = "" if self._held.is_held() else "belongs to another run"
        except FileNotFoundError:
            how = "is gone"
        if how:
            raise RuntimeError(f"{self._held.path} {how}: this run may not write here any more")

    def close(self) -> None:
        """Give up the lock."""
        self._closing()


def _close(held: list[Callable[[], None]]) -> None:
    while held:
        held.pop()()


def _is_at(number: int, path: Path) -> bool:
    """Return whether what is open is what lies at a path now. Raises `OSError` if nothing does."""
    mine, there = os.fstat(number), os.stat(path)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _system() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> int:
    """Return the start of a process of this host, as proc(5) has it; 0 if it has ended, although it may not be waited
    for yet, or if there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()  # from field 3 on; the name of the process may have blanks
    has_ended = fields[0] in ("Z", "X") and int(fields[17]) <= 1  # none of its threads is left
    return 0 if has_ended else int(fields[19])
