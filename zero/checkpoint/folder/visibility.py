"""The check that all ranks see one folder, and that what they write into one file side by side stays.

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
from contextlib import suppress
from pathlib import Path

from ...optimizer import ZeroOptimizer
from .. import files

_NAME = re.compile(r"\.probe-[0-9a-f]{16}(?:\.(\d+))?")
_LARGEST = 1 << 20
_NOT_IN_PLACE = files.UNSUPPORTED | {errno.ESPIPE}


def check_visible(optimizer: ZeroOptimizer, directory: Path, problem: str | None) -> bool:
    """Return whether each rank needs files of its own, since no two can write into one.

    Raises `ValueError` on every rank unless each names and sees the same ``directory``. Collective: three exchanges,
    and one more if the answer is True. Every rank writes two bytes of a scratch page, the second one first, and reads
    all of them.

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
        in_parts = _agree(optimizer, *_write(shared, rank, in_parts=False), directory)
        if in_parts:
            _agree(optimizer, *_write(shared, rank, in_parts=True), directory)
        _agree(optimizer, _read(shared, world, in_parts), False, directory)
        return in_parts
    finally:
        if rank == 0:
            with suppress(OSError):
                for path in directory.glob(f"{scratch.name}*"):
                    files.remove(path)


def needs_parts(directory: Path) -> bool:
    """Return whether a file of this folder can only be written from its beginning to its end, as one rank sees it."""
    scratch = directory / f".probe-{secrets.token_hex(8)}"
    try:
        with suppress(OSError):  # the save will say what is wrong
            files.create(scratch, 2)
            return not _write_in_place(scratch, 0)
    finally:
        with suppress(OSError):
            files.remove(scratch)
    return False


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
    return True


def _write(path: Path, rank: int, *, in_parts: bool) -> tuple[str | None, bool]:
    """Write a rank's bytes. Return, as text, what kept it from that, and whether it needs a file of its own."""
    try:
        if in_parts:
            files.write_new(_part(path, rank), _bytes(rank))
        elif _write_in_place(path, rank):
            files.sync_file(path)
        else:
            return None, True
    except OSError as error:
        return f"it does not see it, or cannot write there ({error.strerror or error})", False
    return None, False


def _read(path: Path, world: int, in_parts: bool) -> str | None:
    try:
        paths = [_part(path, rank) for rank in range(world)] if in_parts else [path]
        found = b"".join(files.read_whole(each, _LARGEST) for each in paths)
    except OSError as error:
        return f"it cannot read there ({error.strerror or error})"
    if found != b"".join(map(_bytes, range(world))):
        return "it does not see what other ranks have written there: a file system that all hosts share is needed"
    return None


def _agree(optimizer: ZeroOptimizer, problem: str | None, needs_own: bool, directory: Path) -> bool:
    """Return whether some rank needs a file of its own. Raises `ValueError` on every rank if one has a problem."""
    mine = json.dumps([problem, socket.gethostname(), os.getpid(), needs_own])
    told = [json.loads(data) for data in optimizer.exchange(mine.encode())]
    for rank, (theirs, host, pid, _) in enumerate(told):
        if theirs is not None:
            raise ValueError(f"{directory}: rank {rank} (host {host}, pid {pid}) cannot use this folder: {theirs}")
    return any(needs for *_, needs in told)


def is_probe(path: Path) -> bool:
    """Return whether a file is a scratch file that a run has left: each byte names its place, or was not written."""
    name = _NAME.fullmatch(path.name)
    try:
        found = files.read_whole(path, _LARGEST) if name else None
    except OSError:
        return False
    if name is None or found is None:
        return False
    if name[1] is not None:
        return _bytes(int(name[1])).startswith(found)
    return all(byte in (0, _bytes(place // 2)[0]) for place, byte in enumerate(found))


def _part(path: Path, rank: int) -> Path:
    """Return a rank's own scratch file."""
    return path.with_name(f"{path.name}.{rank}")


def _bytes(rank: int) -> bytes:
    """Return what a rank writes."""
    return bytes([1 + rank % 255] * 2)
