"""The system calls of a checkpoint: every write, sync, rename and removal is one of these. The warnings at the end tell
of a file system that lacks one.

Knows: paths and descriptors. Does not know: checkpoints. No call follows a symbolic link at the end of its path.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | _NO_LINK  # a pipe is opened without waiting
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | _NO_LINK
_WRITE = os.O_RDWR | os.O_CLOEXEC | _NO_LINK
LOCK = _WRITE | os.O_CREAT
FOLDER = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECTORY", 0)
DIRECT = getattr(os, "O_DIRECT", 0)
MOST_AT_ONCE = 8
_MOST_PIECES = 1024  # of one read: IOV_MAX of Linux
_ENOTSUPP = 524  # of the kernel, which it should keep to itself, and NFS does not
UNSUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, _ENOTSUPP})  # the file system lacks the call
NO_LOCKS = UNSUPPORTED | {errno.ENOLCK}
_NO_FOLDER_SYNC = UNSUPPORTED | {errno.EBADF}  # of a descriptor that was opened to read


@contextmanager
def opened(path: Path | str, flags: int = _WRITE, folder: int | None = None) -> Iterator[int]:
    """Open an existing file for a block. The value is its descriptor. ``folder``: to which ``path`` is relative."""
    number = os.open(path, flags, 0o666, dir_fd=folder)
    try:
        yield number
    finally:
        os.close(number)


@contextmanager
def read_only(folder: Path, path: str) -> Iterator[int]:
    """Open a regular file below a folder to read it. ``path``: relative, with "/".

    Raises `OSError` for anything else. No part of ``path`` may be a symbolic link.
    """
    *parents, name = path.split("/")
    with ExitStack() as opening:
        place = opening.enter_context(opened(folder, FOLDER))
        for parent in parents:
            place = opening.enter_context(opened(parent, FOLDER | _NO_LINK, place))
        number = opening.enter_context(opened(name, _READ, place))
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(f"{folder / path} is not a regular file")
        yield number


@contextmanager
def _needs(what: str) -> Iterator[None]:
    """Let the error of a file system that lacks a call say what a checkpoint needs it for."""
    try:
        yield
    except OSError as error:
        if error.errno in UNSUPPORTED:
            error.strerror = f"{error.strerror}: this file system cannot {what}"
        raise


def create(path: Path, nbytes: int) -> bool:
    """Create a file of ``nbytes``, all zero. Raises `OSError` if the disk has no room for it.

    Returns whether there is room for all of them: on a file system that reserves none, it may be missing later.
    """
    with opened(path, NEW) as number:
        return not nbytes or reserve(number, nbytes)


def reserve(number: int, nbytes: int) -> bool:
    """Reserve room on the disk for the first ``nbytes`` of a file. Return False if the file system reserves none."""
    try:
        os.posix_fallocate(number, 0, nbytes)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        with suppress(OSError):  # it only keeps the file from growing while several hosts write
            os.ftruncate(number, nbytes)
        return False
    return True


def write_at(number: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    rest = memoryview(data)
    while rest:
        done = os.pwrite(number, rest, offset)
        rest, offset = rest[done:], offset + done


def read_at(number: int, data: memoryview, offset: int) -> int:
    """Fill ``data`` from ``offset`` on, and return how many bytes there were."""
    return read_pieces(number, [data], offset)


def read_pieces(number: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Fill ``pieces``, one after the other, from ``offset`` on, and return how many bytes there were."""
    left, first, done = list(pieces), 0, 0
    while first < len(left):
        read = os.preadv(number, left[first : first + _MOST_PIECES], offset + done)
        if not read:
            break
        done += read
        while first < len(left) and read >= len(left[first]):
            read -= len(left[first])
            first += 1
        if read:
            left[first] = left[first][read:]
    return done


def read_whole(path: Path, longest: int) -> bytes:
    """Return the content of a regular file. Raises `OSError` if it has more than ``longest`` bytes."""
    with read_only(path.parent, path.name) as number:
        size = os.fstat(number).st_size
        if size > longest:
            raise OSError(f"{path} has {size:,} bytes: at most {longest:,} are read")
        data = bytearray(size)
        return bytes(data[: read_at(number, memoryview(data), 0)])


def sync(number: int) -> None:
    """Wait until all that was written to a file is on the disk."""
    with _needs("put a file on the disk (fsync), so that a crash could leave a checkpoint without its bytes"):
        os.fsync(number)


def sync_file(path: Path) -> None:
    """Wait until a file is on the disk, by its path."""
    with opened(path) as number:
        sync(number)


def sync_files(paths: Sequence[Path]) -> None:
    """Wait until files are on the disk. At once, because a journal that commits once serves all of them."""
    try:
        with ThreadPoolExecutor(max(1, min(len(paths), MOST_AT_ONCE))) as pool:
            list(pool.map(sync_file, paths))
    except RuntimeError:  # no thread can be started: there are too many, or the program ends
        for path in paths:
            sync_file(path)


def sync_folder(path: Path) -> bool:
    """Wait until the entries of a folder are on the disk. Return False if the file system cannot."""
    try:
        with opened(path, FOLDER) as number:
            sync(number)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
        return False
    return True


def write_new(path: Path, data: bytes) -> None:
    """Create a file with this content, and wait until it is on the disk."""
    with opened(path, NEW) as number:
        write_at(number, data, 0)
        sync(number)


def put_note(path: Path, data: bytes, *, synced: bool = False) -> None:
    """Create a file that other processes see with its whole content or not at all.

    Unless it is ``synced``, it may be lost in a crash.
    """
    beside = path.with_name(f".{path.name}.part")
    with opened(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | _NO_LINK) as number:
        write_at(number, data, 0)
        if synced:
            sync(number)
    try:
        rename(beside, path)
    except OSError:
        if exists(beside) or not exists(path):  # else it was renamed: NFS may send a rename twice
            raise


def make_folder(path: Path) -> None:
    """Create a folder in one that exists."""
    with _needs("make folders"):
        os.mkdir(path)


def make_folders(path: Path) -> None:
    """Create a folder and those above it, as far as they are missing. They are on the disk afterwards."""
    if not path.is_dir():
        make_folders(path.parent)
        try:
            make_folder(path)
        except FileExistsError:
            if not path.is_dir():  # else another process has made it
                raise
        sync_folder(path.parent)


def exists(path: Path) -> bool:
    """Return whether there is anything at a path. Raises `OSError` if that cannot be known."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def rename(source: Path, target: Path) -> None:
    with _needs("rename, and it is a rename that makes a checkpoint complete"):
        os.rename(source, target)


def remove(path: Path) -> None:
    """Remove a file."""
    with _needs("remove files"):
        os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    with _needs("remove folders"):
        os.rmdir(path)


def lock(number: int) -> bool:
    """Lock a file until its descriptor is closed. Returns False if another process holds the lock."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# -- warnings: what is weaker on a file system that lacks a call -------------------------------------------------------


_WEAKER = {
    "flock": "where no file can be locked ({why}): the file .lease keeps other runs out instead, and is removed when "
    "this one ends; if this one is killed, and the next one begins on another host, remove the file yourself",
    "fsync": "that cannot put the entries of a folder on the disk (fsync): after a crash of the machine the last "
    "checkpoints may be missing or lack files, and restore() takes an older one: keep several of them (max_to_keep)",
    "posix_fallocate": "that reserves no room for files (posix_fallocate): a full disk is found while a checkpoint is "
    "written, and not before; that save fails then, and nothing is lost",
    "pwrite": "that writes a file from its beginning to its end alone: each rank writes a part, and rank 0 puts the "
    "files together, so a save takes longer, needs room twice, and finds a full disk while it writes; where a folder "
    "is renamed file by file, a crash meanwhile costs that save",
}


def weaker(folder: Path, call: str, why: str | None = None) -> str:
    """Return the warning for a file system that lacks a call: `flock`, `fsync` of a folder, `posix_fallocate`, or
    `pwrite` at any place. ``why``: the text of its error."""
    return f"{folder} is on a file system {_WEAKER[call].format(why=why)}"
