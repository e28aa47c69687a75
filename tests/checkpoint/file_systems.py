"""File systems that lack something: a shim between `zero.checkpoint.files` and the kernel.

Knows: which system calls fail there, and how. Does not know: checkpoints.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from zero.checkpoint import files

ENOTSUPP = 524  # of the kernel, which NFS lets out
Call = Callable[..., Any]


class Module:
    def __init__(self, real: Any, others: Mapping[str, Call]) -> None:
        self._real, self._others = real, others

    def __getattr__(self, name: str) -> Any:
        return self._others[name] if name in self._others else getattr(self._real, name)


def failing(number: int, when: Callable[..., bool], call: Call) -> Call:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if when(*arguments, **options):
            raise OSError(number, os.strerror(number), str(arguments[0]))
        return call(*arguments, **options)

    return wrapped


def always(*_: Any, **__: Any) -> bool:
    return True


def of_a_folder(number: int) -> bool:
    return stat.S_ISDIR(os.fstat(number).st_mode)


def of_a_file(number: int) -> bool:
    return not of_a_folder(number)


def not_at_the_end(number: int, data: Any, offset: int) -> bool:
    return offset != os.fstat(number).st_size


def renames_a_folder(source: Path, _: Path) -> bool:
    return source.is_dir()


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
    numbers: tuple[int, ...]
    warning: str | None = None
    error: str | None = None

    def use(self, patch: pytest.MonkeyPatch, number: int | None = None) -> None:
        """Let the library find this file system everywhere. ``number``: of the error; None: the first one."""
        number = self.numbers[0] if number is None else number
        for module in (os, fcntl):
            others = {
                name: failing(number, when, getattr(module, name))
                for name, when in self.lacks.items()
                if hasattr(module, name)
            }
            patch.setattr(files, module.__name__, Module(module, others))


USUAL = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, ENOTSUPP)
FILE_SYSTEMS = {
    "whole": FileSystem({}, (0,)),
    "no flock": FileSystem({"flock": always}, (*USUAL, errno.ENOLCK), "where no file can be locked"),
    "no fsync of folders": FileSystem(
        {"fsync": of_a_folder}, (*USUAL, errno.EBADF), "cannot put the entries of a folder on the disk"
    ),
    "no posix_fallocate": FileSystem({"posix_fallocate": always}, USUAL, "reserves no room for files"),
    "no sizes": FileSystem({"posix_fallocate": always, "ftruncate": always}, USUAL, "reserves no room for files"),
    "no links": FileSystem({"link": always, "symlink": always}, (*USUAL, errno.EPERM)),
    "no writes in place": FileSystem(
        {"pwrite": not_at_the_end}, (*USUAL, errno.ESPIPE), "from its beginning to its end alone"
    ),
    "an object store": FileSystem(
        {
            **dict.fromkeys(("flock", "posix_fallocate", "ftruncate", "link"), always),
            "fsync": of_a_folder,
            "pwrite": not_at_the_end,
            "open": writes_again,
        },
        USUAL,
        "where no file can be locked|cannot put the entries of a folder|from its beginning to its end alone",
    ),
    "no rename": FileSystem({"rename": always}, USUAL, error="this file system cannot rename"),
    "no rename of folders": FileSystem({"rename": renames_a_folder}, USUAL, error="this file system cannot rename"),
    "no fsync of files": FileSystem(
        {"fsync": of_a_file}, USUAL, error="this file system cannot put a file on the disk"
    ),
    "no folders": FileSystem({"mkdir": always}, USUAL, error="this file system cannot make folders"),
    "no removal": FileSystem({"unlink": always}, USUAL, error="this file system cannot remove files"),
    "no removal of folders": FileSystem({"rmdir": always}, USUAL, error="this file system cannot remove folders"),
}
