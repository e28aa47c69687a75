"""The check that all ranks see one folder, and that what they write into one file side by side stays.

Knows: a scratch file. Does not know: checkpoints. On several hosts a file system may keep another rank's bytes from
being seen, or lose bytes that two hosts wrote into one page: such a folder is refused.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from ..optimizer import ZeroOptimizer
from . import files

_NAME = re.compile(r"\.probe-[0-9a-f]{16}")
_LARGEST = 1 << 20


def check_visible(optimizer: ZeroOptimizer, directory: Path, problem: str | None) -> None:
    """Raise `ValueError` on every rank unless each names and sees the same ``directory``. Collective, three exchanges.

    ``problem``: an error that this rank found. Every rank writes one byte of a scratch page, and reads all.
    """
    rank, world = optimizer.rank, optimizer.world_size
    scratch = directory / f".probe-{secrets.token_hex(8)}"
    if rank == 0 and problem is None:
        try:
            files.create(scratch, world)
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
        _agree(optimizer, _write(shared, rank), directory)
        _agree(optimizer, _read(shared, world), directory)
    finally:
        if rank == 0:
            with suppress(OSError):
                files.remove(scratch)


def _write(path: Path, rank: int) -> str | None:
    try:
        with files.opened(path) as number:
            files.write_at(number, bytes([_byte(rank)]), rank)
            files.sync(number)
    except OSError as error:
        return f"it does not see it, or cannot write there ({error.strerror or error})"
    return None


def _read(path: Path, world: int) -> str | None:
    try:
        found = files.read_whole(path, _LARGEST)
    except OSError as error:
        return f"it cannot read there ({error.strerror or error})"
    if found != bytes(_byte(rank) for rank in range(world)):
        return "it does not see what other ranks have written there: a file system that all hosts share is needed"
    return None


def _agree(optimizer: ZeroOptimizer, problem: str | None, directory: Path) -> None:
    mine = json.dumps([problem, socket.gethostname(), os.getpid()])
    for rank, data in enumerate(optimizer.exchange(mine.encode())):
        theirs, host, pid = json.loads(data)
        if theirs is not None:
            raise ValueError(f"{directory}: rank {rank} (host {host}, pid {pid}) cannot use this folder: {theirs}")


def is_probe(path: Path) -> bool:
    """Return whether a file is a scratch file that a run has left: each byte names its place, or was not written."""
    try:
        found = files.read_whole(path, _LARGEST) if _NAME.fullmatch(path.name) else None
    except OSError:
        return False
    return found is not None and all(byte in (0, _byte(rank)) for rank, byte in enumerate(found))


def _byte(rank: int) -> int:
    """Return what a rank writes."""
    return 1 + rank % 255
