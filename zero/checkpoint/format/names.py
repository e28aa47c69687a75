"""The names of files and keys in a checkpoint.

model/       fqn                       what the model computes with
optimizer/   state.<fqn>.<name>        the states; those without dimensions come last
masters/     fqn                       the master weights of mixed precision, if there are any
state.safetensors                      the caller's state, equal on all ranks
ranks/rank-00000.safetensors ...       each rank's own
checkpoint.json                        the manifest
notes/                                 while a checkpoint is written: what ranks leave for each other
"""

from __future__ import annotations

from collections.abc import Container

MODEL, OPTIMIZER, MASTERS = FOLDERS = ("model", "optimizer", "masters")
STATE_FILE = "state.safetensors"
NOTES = "notes"


def rank_file(rank: int) -> str:
    """Return the path of a rank's own file."""
    return f"ranks/rank-{rank:05d}.safetensors"


def index_file(folder: str) -> str:
    """Return the path of a folder's index."""
    return f"{folder}/{folder.rpartition('/')[2]}.safetensors.index.json"


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
