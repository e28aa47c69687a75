"""A disk for tests: it records every call of `zero.checkpoint.files`, fails and holds calls, kills ranks, and crashes.

And file systems that lack something: a shim between that module and the kernel.

Knows: the functions of that module, which system calls fail where, and what survives a crash. Does not know:
checkpoints.

A crash keeps what was synced. Of the rest, which a real system may keep or lose in parts, there are five worlds:

    everything    all of it is kept, as after the death of a process alone
    nothing       neither entries of folders nor data of files
    entries       entries, but no data: files are as long as their data that was synced
    data          data, but no entries
    last          of the changes of each folder since it was synced the last one alone
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from zero.checkpoint import files

THREAD = "zero-checkpoint rank "
WORLDS = ("everything", "nothing", "entries", "data", "last")
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


@dataclass(frozen=True)
class Call:
    """A call. ``path``: also of a descriptor."""

    rank: int
    name: str
    path: Path


class DiedError(BaseException):
    """The rank is dead: every call of it raises this."""


@dataclass
class Node:
    """A file or a folder: its content now, and the content that a crash keeps."""

    is_folder: bool
    data: bytearray = field(default_factory=bytearray)
    safe_data: bytes = b""
    entries: dict[str, Node] = field(default_factory=dict)
    safe_entries: dict[str, Node] = field(default_factory=dict)
    last: dict[str, Node | None] = field(default_factory=dict)

    def change(self, changes: dict[str, Node | None]) -> None:
        """Give the folder new entries, in one step. None: there is none any more."""
        self.last = changes
        self.entries = {name: node for name, node in {**self.entries, **changes}.items() if node is not None}

    def tree(self, world: str, prefix: str = "") -> Iterator[tuple[str, bytes | None]]:
        entries: dict[str, Node | None] = {**self.safe_entries, **(self.last if world == "last" else {})}
        if world in ("everything", "entries"):
            entries = {**self.entries}
        for name, node in sorted(entries.items()):
            if node is None:
                continue
            path = f"{prefix}{name}"
            if node.is_folder:
                yield path, None
                yield from node.tree(world, f"{path}/")
            else:
                yield path, bytes(node.data) if world in ("everything", "data") else node.safe_data


class Disk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.calls: list[Call] = []
        self.after: Callable[[Call], None] = lambda call: None  # called after each call that changes the disk
        self._root, self._node = root, _existing(root)
        self._me = threading.local()
        self._lock = threading.RLock()
        self._paths: dict[int, Path] = {}
        self._locks: dict[int, int] = {}  # descriptor -> rank
        self.failing: list[Callable[[Call], int | None]] = []
        self.failed: list[Call] = []  # by `fail_when`
        self.dead: set[int] = set()
        self._open = files.opened
        monkeypatch.setattr(files, "opened", self._opened)
        for name in ("reserve", "write_at", "read_at", "sync", "lock"):
            monkeypatch.setattr(files, name, self._of_number(name, getattr(files, name)))
        for name in ("make_folder", "remove", "remove_folder", "rename"):
            monkeypatch.setattr(files, name, self._of_path(name, getattr(files, name)))
        monkeypatch.setattr(files, "ThreadPoolExecutor", self._pool)

    # -- what a test asks for -----------------------------------------------------------------------------------------

    def this_thread_is(self, rank: int) -> None:
        """Let calls of this thread be those of a rank. Those of the threads of saves are known by their names."""
        self._me.rank = rank

    def rank(self) -> int:
        name = threading.current_thread().name
        return int(name.removeprefix(THREAD)) if name.startswith(THREAD) else getattr(self._me, "rank", 0)

    def fail_when(self, when: Callable[[Call], bool], number: int, *, skip: int = 0, most: int | None = None) -> None:
        """Fail calls with an error number: those after ``skip`` that fit, and at most ``most``."""
        seen = [0]

        def failing(call: Call) -> int | None:
            if not when(call):
                return None
            seen[0] += 1
            fails = seen[0] > skip and (most is None or seen[0] <= skip + most)
            self.failed += [call] if fails else []
            return number if fails else None

        self.failing.append(failing)

    def kill(self, rank: int, skip: int) -> None:
        self.fail_when(lambda call: call.rank == rank, -1, skip=skip)

    def revive(self, seconds: float) -> None:
        for thread in threading.enumerate():
            if thread.name.startswith(THREAD):
                thread.join(seconds)
        self.dead.clear()
        self.failing.clear()

    def release_locks(self, rank: int) -> None:
        """Give up the locks of a dead rank, as the kernel does. Their descriptors stay open."""
        with open(os.devnull) as nothing:
            for number, owner in list(self._locks.items()):
                if owner == rank:
                    del self._locks[number]
                    os.dup2(nothing.fileno(), number, inheritable=False)

    def tree(self, world: str) -> dict[str, bytes | None]:
        with self._lock:
            return dict(self._node.tree(world))

    def _pool(self, most: int) -> ThreadPoolExecutor:
        """Return one thread in the place of many: its calls are those of the caller, in order."""
        rank, name = self.rank(), threading.current_thread().name

        def begin() -> None:
            self.this_thread_is(rank)
            threading.current_thread().name = name

        return ThreadPoolExecutor(1, initializer=begin)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _begin(self, name: str, path: Path) -> Call:
        rank = self.rank()
        call = Call(rank, name, path)
        with self._lock:
            if rank in self.dead:
                raise DiedError
            numbers = [number for failing in self.failing if (number := failing(call)) is not None]
            self.calls.append(call)
            if -1 in numbers:
                self.dead.add(rank)
                raise DiedError
        if numbers:
            raise OSError(numbers[0], os.strerror(numbers[0]), str(path))
        return call

    @contextmanager
    def _opened(self, path: Path, *flags: int) -> Iterator[int]:
        self._begin("open", path)
        creates = bool(flags and flags[0] & os.O_CREAT)
        with self._open(path, *flags) as number:
            with self._lock:
                self._paths[number] = path
                parent = self._at(path.parent, missing=True) if creates else None  # it may have been removed since
                if parent is not None and (path.name not in parent.entries or flags[0] & os.O_TRUNC):
                    parent.change({path.name: Node(is_folder=False)})
            try:
                yield number
            finally:
                self._locks.pop(number, None)

    def _of_number(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(number: int, *arguments: Any) -> Any:
            path = self._paths[number]
            made = self._begin(name, path)
            with self._lock:
                found = call(number, *arguments)
                if name == "lock":
                    self._locks[number] = made.rank
                elif name != "read_at":
                    self._note_data(name, path, arguments)
                    self.after(made)
            return found

        return wrapped

    def _note_data(self, name: str, path: Path, arguments: tuple[Any, ...]) -> None:
        node = self._at(path, missing=True)
        if node is None:
            return  # its folder was renamed or removed
        if name == "reserve":
            node.data.extend(bytes(max(0, arguments[0] - len(node.data))))
        elif name == "write_at":
            data, offset = arguments
            node.data.extend(bytes(max(0, offset + len(data) - len(node.data))))
            node.data[offset : offset + len(data)] = data
        elif node.is_folder:
            node.safe_entries, node.last = dict(node.entries), {}
        else:
            node.safe_data = bytes(node.data)

    def _of_path(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Path, *others: Path) -> Any:
            made = self._begin(name, path)
            with self._lock:
                found = call(path, *others)
                parent = self._at(path.parent)
                if name == "make_folder":
                    parent.change({path.name: Node(is_folder=True)})
                elif name == "rename":
                    assert path.parent == others[0].parent
                    moved = parent.entries.get(path.name) or _existing(others[0])
                    parent.change({path.name: None, others[0].name: moved})
                else:
                    parent.change({path.name: None})
                self.after(made)
            return found

        return wrapped

    def _at(self, path: Path, *, missing: bool = False) -> Any:
        node: Node | None = self._node
        for part in path.relative_to(self._root).parts:
            node = None if node is None else node.entries.get(part)
        assert missing or node is not None, f"{path} is not known"
        return node


def _existing(path: Path) -> Node:
    if not path.is_dir():
        data = path.read_bytes()
        return Node(is_folder=False, data=bytearray(data), safe_data=data)
    entries = {entry.name: _existing(entry) for entry in path.iterdir()}
    return Node(is_folder=True, entries=dict(entries), safe_entries=dict(entries))


def materialize(tree: dict[str, bytes | None], folder: Path) -> None:
    for path, data in tree.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


class Module:
    def __init__(self, real: Any, others: Mapping[str, Callable[..., Any]]) -> None:
        self._real, self._others = real, others

    def __getattr__(self, name: str) -> Any:
        return self._others[name] if name in self._others else getattr(self._real, name)


def failing(number: int, when: Callable[..., bool], call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if when(*arguments, **options):
            raise OSError(number, os.strerror(number), str(arguments[0]))
        return call(*arguments, **options)

    return wrapped


def always(*_: Any, **__: Any) -> bool:
    return True


def of_a_folder(number: int) -> bool:
    return stat.S_ISDIR(os.fstat(number).st_mode)


def not_at_the_end(number: int, data: Any, offset: int) -> bool:
    return offset != os.fstat(number).st_size


def writes_again(path: Path | str, flags: int, *_: Any, dir_fd: int | None = None) -> bool:
    if not flags & (os.O_WRONLY | os.O_RDWR) or flags & (os.O_TRUNC | os.O_EXCL):
        return False
    try:
        return os.stat(path, dir_fd=dir_fd).st_size > 0
    except OSError:
        return False


@dataclass(frozen=True)
class FileSystem:
    """A file system. ``lacks``: names of calls, with what makes them fail. ``warning``: words of the one warning of a
    run; None: there is none. ``error``: words of the error of every rank; None: a save succeeds."""

    lacks: Mapping[str, Callable[..., bool]]
    warning: str | None = None
    error: str | None = None

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Let the library find this file system everywhere."""
        for module in (os, fcntl):
            others = {
                name: failing(errno.EOPNOTSUPP, when, getattr(module, name))
                for name, when in self.lacks.items()
                if hasattr(module, name)
            }
            patch.setattr(files, module.__name__, Module(module, others))


LOCKS, FOLDERS, ROOM, PLACES = (
    "where no file can be locked",
    "cannot put the entries of a folder on the disk",
    "reserves no room for files",
    "from its beginning to its end alone",
)
OBJECT_STORE = {
    **dict.fromkeys(("flock", "posix_fallocate", "ftruncate"), always),
    "fsync": of_a_folder,
    "pwrite": not_at_the_end,
    "open": writes_again,
}
FILE_SYSTEMS = {
    "no flock": FileSystem({"flock": always}, LOCKS),
    "no fsync of folders": FileSystem({"fsync": of_a_folder}, FOLDERS),
    "no posix_fallocate": FileSystem({"posix_fallocate": always}, ROOM),
    "no sizes": FileSystem({"posix_fallocate": always, "ftruncate": always}, ROOM),
    "no writes in place": FileSystem({"pwrite": not_at_the_end}, PLACES),
    "an object store": FileSystem(OBJECT_STORE, f"{LOCKS}|{FOLDERS}|{PLACES}"),
    "no rename": FileSystem({"rename": always}, error="cannot rename"),
    "no rename of folders": FileSystem({"rename": lambda source, _: source.is_dir()}, error="cannot rename"),
    "no fsync of files": FileSystem(
        {"fsync": lambda number: not of_a_folder(number)}, error="cannot put a file on the disk"
    ),
    "no folders": FileSystem({"mkdir": always}, error="cannot make folders"),
    "no removal": FileSystem({"unlink": always}, error="cannot remove files"),
    "no removal of folders": FileSystem({"rmdir": always}, error="cannot remove folders"),
}
