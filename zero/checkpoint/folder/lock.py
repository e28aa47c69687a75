"""The lock of a folder of checkpoints: one run holds it, and every other one is refused.

Knows: files of locks, and when a lock may be taken from its holder. Does not know: checkpoints.

    .lock      locked by the kernel (flock) for the run that writes here; has the text of its `Holder`
    .lease     where the file system has no locks: created by that run, which removes it when it ends; same text
"""

from __future__ import annotations

import os
import time
import weakref
from contextlib import suppress
from pathlib import Path

from .. import files
from .holder import Holder

LOCK, LEASE = ".lock", ".lease"
_GONE = 0.5  # seconds after which a lock is free, or has the text of a new holder, if its holder has ended
_PAUSE = 0.05  # seconds between two tries
_LONGEST = 4096  # bytes of the text of a holder


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

    def check(self) -> None:
        there, mine = os.stat(self.path, follow_symlinks=False), os.fstat(self._number)
        if (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            raise RuntimeError(f"{self.path} belongs to another run: this one may not write here any more")

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

    def check(self) -> None:
        if files.read_whole(self.path, _LONGEST) != self._me.pack():
            raise RuntimeError(f"{self.path} belongs to another run: this one may not write here any more")

    def close(self) -> None:
        """Remove the lease. Not in a forked child, which does not hold it."""
        with suppress(OSError):
            if self._me.pid == os.getpid() and files.read_whole(self.path, _LONGEST) == self._me.pack():
                files.remove(self.path)


class _Folder:
    """The folder itself, which is kept open: so its number is given to no other one, even if it is removed."""

    def __init__(self, path: Path) -> None:
        self._path, self._number = path, files.open_folder(path)

    def is_at_its_path(self) -> bool:
        try:
            mine = os.fstat(self._number)
        except OSError:  # ESTALE
            return False
        try:
            there = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        files.close(self._number)


class FolderLock:
    """The lock of one folder, held by this process: until `close`, or until this object or the process is gone.

    Attributes:
        remark: what is weaker than a lock of the kernel; None if it is one.
    """

    def __init__(self, folder: Path, nonce: str) -> None:
        """Lock an existing folder. Raises `ValueError` if another run holds the lock."""
        self._path, self._me = folder, Holder.me(nonce)
        self.remark: str | None = None
        self._open: list[_Folder | _Flock | _Lease] = []
        self._closing = weakref.finalize(self, _close, self._open)  # also if nobody calls `close`
        self._lock()
        # a forked child, a worker of a data loader say, must not hold the lock after us
        os.register_at_fork(after_in_child=self._closing)

    def _lock(self) -> None:
        try:
            self._folder = _Folder(self._path)
            self._open.append(self._folder)
            self._held = self._flock() or self._lease()
            self._held.check()
        except BaseException:
            _close(self._open)
            raise

    def _flock(self) -> _Flock | None:
        """Take a lock of the kernel. Return None if the file system has none."""
        lease = _Lease(self._path / LEASE, self._me)
        try:
            lock = _Flock(self._path / LOCK, self._me)
            self._open.append(lock)
            self._take(lock)
        except OSError as error:
            if error.errno not in files.NO_LOCKS:
                raise
            self.remark = files.no_locks(self._path, error.strerror, LEASE)
            return None
        if files.exists(lease.path) and not lease.holder().has_ended():  # of a run on a host without locks
            raise ValueError(f"{lease.holder()} still trains into {self._path}{lease.remedy}")
        return lock

    def _lease(self) -> _Lease:
        lease = _Lease(self._path / LEASE, self._me)
        self._take(lease)
        self._open.append(lease)
        return lease

    def _take(self, lock: _Flock | _Lease) -> None:
        """Take the lock. Raises `ValueError` that names its holder, which may be ending just now."""
        end = time.monotonic() + _GONE
        while not lock.take():
            if time.monotonic() > end:
                text = f"{lock.holder()} still trains into {self._path}: stop it, or use another folder"
                raise ValueError(f"{text}{lock.remedy}")
            time.sleep(_PAUSE)

    def check(self) -> None:
        """Raise an error unless this run holds the lock.

        `RuntimeError`: it was removed, or replaced by another run. `FileNotFoundError`: the folder was removed. If it
        was made again, it is locked again.
        """
        if not self._open or not self._folder.is_at_its_path():
            if not self._path.is_dir():
                raise FileNotFoundError(f"{self._path} was removed: make it again, and saves go on")
            _close(self._open)
            self._lock()
        try:
            self._held.check()
        except FileNotFoundError as error:
            raise RuntimeError(f"{self._held.path} is gone: this run may not write here any more") from error

    def close(self) -> None:
        """Give up the lock."""
        self._closing()


def _close(held: list[_Folder | _Flock | _Lease]) -> None:
    while held:
        held.pop().close()
