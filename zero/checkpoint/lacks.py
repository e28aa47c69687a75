"""What is weaker on a file system that lacks a call: the texts of the warnings, each of which a run gives once.

Knows: what follows for a user. Does not know: which calls fail, or what is done instead.
"""

from __future__ import annotations

from pathlib import Path


def no_locks(folder: Path, why: str | None, lease: str) -> str:
    return (
        f"{folder} is on a file system where no file can be locked ({why}): the file {lease} keeps other runs out "
        "instead, and is removed when this one ends; if this one is killed, and the next one begins on another host, "
        "remove the file yourself"
    )


def no_sync_of_folders(folder: Path) -> str:
    return (
        f"{folder} is on a file system that cannot put the entries of a folder on the disk (fsync): after a crash of "
        "the machine the last checkpoints may be missing or lack files, and restore() takes an older one: keep several "
        "of them (max_to_keep)"
    )


def no_room_reserved(folder: Path) -> str:
    return (
        f"{folder} is on a file system that reserves no room for files (posix_fallocate): a full disk is found while a "
        "checkpoint is written, and not before; that save fails then, and nothing is lost"
    )


def no_writes_in_place(folder: Path) -> str:
    return (
        f"{folder} is on a file system that writes a file from its beginning to its end alone: each rank writes a "
        "part, and rank 0 puts the files together, so a save takes longer, needs room twice, and finds a full disk "
        "while it writes; where a folder is renamed file by file, a crash meanwhile costs that save"
    )
