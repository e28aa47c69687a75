"""The probe of a folder: all ranks see it, and what they write into one file side by side stays.

Knows: scratch files. Does not know: checkpoints. On several hosts a file system may keep another rank's bytes from
being seen, or lose bytes that two hosts wrote into one page: such a folder is refused. Another one may write a file
from its beginning to its end alone: then each rank needs files of its own.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...optimizer import ZeroOptimizer
from .. import files

PROBE = re.compile(r"\.probe-[0-9a-f]{16}(\.\d+)?")  # the names of scratch files
_LARGEST = 1 << 20
_NOT_IN_PLACE = files.UNSUPPORTED | {errno.ESPIPE}


def check_visible(optimizer: ZeroOptimizer, directory: Path, problem: str | None) -> bool:
    """Return whether each rank needs files of its own, since no two can write into one. Collective.

    Raises `ValueError` on every rank unless each names and sees the same ``directory``. Every rank writes two bytes of
    a scratch page, the second one first, or a file of its own, and reads those of all.

    ``problem``: an error that this rank found.
    """
    rank, world = optimizer.rank, optimizer.world_size
    scratch = directory / f".probe-{secrets.token_hex(8)}"
    if rank == 0 and problem is None:
        try:
            files.create(scratch, 2 * world)
        except OSError as error:
            problem = f"{directory} cannot be written on host {socket.gethostname()}: {error}"
    try:
        mine = [problem, scratch.name, str(directory), socket.gethostname()]
        told = [json.loads(data) for data in optimizer.exchange(json.dumps(mine).encode())]
        for number, (theirs, *_) in enumerate(told):
            if theirs is not None:
                raise ValueError(f"rank {number}: {theirs}")
        _, name, first, _ = told[0]
        for number, (_, _, theirs, host) in enumerate(told):
            if theirs != first:
                raise ValueError(
                    f"the folder is {theirs!r} on rank {number} (host {host}), but {first!r} on rank 0: every rank "
                    "must name the same one"
                )
        shared = directory / name
        in_parts = _on_any(optimizer, directory, lambda: not _write_in_place(shared, rank))
        if in_parts:
            _on_any(optimizer, directory, lambda: files.write_new(_part(shared, rank), _bytes(rank)))
        _on_any(optimizer, directory, lambda: _read(shared, world, in_parts))
        return in_parts
    finally:
        if rank == 0:
            with suppress(OSError):
                for path in directory.glob(f"{scratch.name}*"):
                    files.remove(path)


def _write_in_place(path: Path, rank: int) -> bool:
    """Write a rank's bytes, the second one first. Return False if the file system cannot."""
    try:
        with files.opened(path) as number:
            for place in (1, 0):
                files.write_at(number, _bytes(rank)[place:][:1], 2 * rank + place)
    except OSError as error:
        if error.errno not in _NOT_IN_PLACE:
            raise
        return False
    files.sync_file(path)
    return True


def _read(path: Path, world: int, in_parts: bool) -> None:
    """Raise `OSError` unless this rank sees what every rank has written."""
    paths = [_part(path, rank) for rank in range(world)] if in_parts else [path]
    if b"".join(files.read_whole(each, _LARGEST) for each in paths) != b"".join(map(_bytes, range(world))):
        raise OSError("it does not see what other ranks have written there: a file system that is shared is needed")


def _on_any(optimizer: ZeroOptimizer, directory: Path, action: Callable[[], bool | None]) -> bool:
    """Return whether ``action`` is true on some rank. Raises `ValueError` on every rank if one gets an `OSError`."""
    problem, found = None, False
    try:
        found = bool(action())
    except OSError as error:
        seen = f"it does not see it, or cannot read or write there ({error.strerror})"
        problem = str(error) if error.errno is None else seen
    mine = json.dumps([problem, socket.gethostname(), os.getpid(), found])
    told = [json.loads(data) for data in optimizer.exchange(mine.encode())]
    for rank, (theirs, host, pid, _) in enumerate(told):
        if theirs is not None:
            raise ValueError(f"{directory}: rank {rank} (host {host}, pid {pid}) cannot use this folder: {theirs}")
    return any(found for *_, found in told)


def _part(path: Path, rank: int) -> Path:
    """Return a rank's own scratch file."""
    return path.with_name(f"{path.name}.{rank}")


def _bytes(rank: int) -> bytes:
    """Return what a rank writes."""
    return bytes([1 + rank % 255] * 2)
