"""The names of files and keys in a checkpoint.

model/       fqn                       what the model computes with
optimizer/   state.<fqn>.<name>        the states; those without dimensions come last; a tensor in a list or a dict has
                                       the name <name>.<index or key>
masters/     fqn                       the master weights of mixed precision, if there are any
averages/<name>/   fqn                 whole tensors that accompany the model, if there are any: moving averages;
                                       n_averaged: how many weights a `ShardedAverage` has seen
state.safetensors                      the caller's state, equal on all ranks
ranks/rank-00000.safetensors ...       each rank's own
checkpoint.json                        the manifest
notes/                                 while a checkpoint is written: what ranks leave for each other
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable

from ...core.names import MASTERS as MASTERS
from ...core.statetree import check_average_name

MODEL, OPTIMIZER = "model", "optimizer"
FOLDERS = MODEL, OPTIMIZER, MASTERS
AVERAGES = "averages"
STATE_FILE = "state.safetensors"
NOTES = "notes"
COPIED = "copied"  # a note: the files of `model/` that are copies of the caller's


def rank_file(rank: int) -> str:
    """Return the path of a rank's own file."""
    return f"ranks/rank-{rank:05d}.safetensors"


def index_file(folder: str) -> str:
    """Return the path of a folder's index."""
    return f"{folder}/{folder.rpartition('/')[2]}.safetensors.index.json"


def is_copied(path: str) -> bool:
    """Return whether a checkpoint's file is a copy of one of the caller's: all others are safetensors and indices."""
    return not path.endswith((".safetensors", ".safetensors.index.json"))


def copied_in(note: bytes) -> set[str]:
    """Return the paths that the note `COPIED` names; none if it is damaged."""
    try:
        return {path for path in json.loads(note) if isinstance(path, str)}
    except (ValueError, TypeError, RecursionError):
        return set()


def averages_folder(name: str) -> str:
    """Return the folder of averages of this name. Raises `ValueError` for a name that no folder or file should have."""
    check_average_name(name)
    return f"{AVERAGES}/{name}"


def averages_in(paths: Iterable[str]) -> list[str]:
    """Return the names of the averages to which some of these files belong, in order."""
    found = (path.split("/") for path in paths)
    return sorted({parts[1] for parts in found if parts[0] == AVERAGES and len(parts) == 3})


def state_key(parameter: str, name: str) -> str:
    """Return the key of a parameter's state."""
    return f"state.{parameter}.{name}"


def split_key(key: str, parameters: Container[str]) -> tuple[str, str] | None:
    """Return the parameter and the name of a state's key; None if it is the state of none of these parameters."""
    rest = key.removeprefix("state.")
    place = rest.rfind(".")
    while place > 0:
        if rest[:place] in parameters:
            return rest[:place], rest[place + 1 :]
        place = rest.rfind(".", 0, place)
    return None
