"""`checkpoint.json`: what a checkpoint holds, and the checksums of its files.

    format, version     what this is; unknown keys are ignored, an unknown version is an error
    step                the number under which it was saved
    parameters          each parameter: name, names, shape, dtype, group, trainable
    param_groups        the options of torch.optim's param groups, as `statetree` writes them, with the class if known,
                        and with "optimizer_blocks", the `blocks` of a group that has some
    files               path: {"bytes", "crc32": of each block}
    block_bytes         the size of a block
    content             SHA-256 over the files without those below ranks/: equal for every topology that wrote them
    not_saved           names of what could not be saved
    written_by          the topology and the versions: information only
    sha256              of all of the above

The names of files and keys in a checkpoint.

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

Knows: the manifest's keys, names of files and keys. Does not know: how files are written, optimizers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ...core.parameter_specs import MASTERS as MASTERS
from ...core.statetree import FormatError, check_average_name
from .tensorfile import parse_json

NAME = "checkpoint.json"
FORMAT = "zero.checkpoint"
VERSION = 1
LONGEST = LARGEST_BLOCK = 1 << 30
_OF_RANKS = "ranks/"
_LARGEST = 2**63 - 1
_T = TypeVar("_T")


class VersionError(FormatError):
    """A manifest of a newer version of the format."""


@dataclass(frozen=True)
class FileSums:
    """A file's size, and the CRC-32 of each of its blocks."""

    nbytes: int
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class SavedParameter:
    """What a manifest says of a parameter. ``group`` is None if it is not listed in a param group."""

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    group: int | None
    trainable: bool


@dataclass(frozen=True)
class Manifest:
    """The manifest of one checkpoint, see the module. ``files``: by path below the checkpoint's folder, with "/"."""

    step: int
    parameters: tuple[SavedParameter, ...]
    param_groups: tuple[Any, ...]
    files: Mapping[str, FileSums]
    block_bytes: int
    not_saved: tuple[str, ...]
    written_by: Mapping[str, Any]

    @property
    def content(self) -> str:
        """The SHA-256 over the sizes and checksums of the files that do not depend on the ranks."""
        chosen = {path: sums for path, sums in self.files.items() if not path.startswith(_OF_RANKS)}
        return _sha256({"block_bytes": self.block_bytes, "files": _files(chosen)})

    def to_bytes(self) -> bytes:
        """Return the text of the file."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "parameters": [vars(parameter) for parameter in self.parameters],
            "param_groups": list(self.param_groups),
            "files": _files(self.files),
            "block_bytes": self.block_bytes,
            "content": self.content,
            "not_saved": list(self.not_saved),
            "written_by": dict(self.written_by),
        }
        return _text({**body, "sha256": _sha256(body)})

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """Return the manifest that a file holds. Raises `FormatError` if it is damaged, or none of this format."""
        found = parse_json(text, "text")
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise FormatError(f"it is not the manifest of a checkpoint: its format is not {FORMAT!r}")
        if type(found.get("version")) is not int or found["version"] != VERSION:
            raise VersionError(
                f"it has version {found.get('version')!r} of the format, and this release of zero reads {VERSION}: "
                "read it with the release that wrote it, or a newer one"
            )
        rest = {key: value for key, value in found.items() if key != "sha256"}
        try:
            if found.get("sha256") != _sha256(rest) or _text(found) != text:
                raise FormatError("its text was changed: it does not have its SHA-256")
            made = _made(found)
        except FormatError:
            raise
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"its text is not that of a manifest ({error!r})") from error
        if made.content != found.get("content"):
            raise FormatError("its files do not have its content")
        return made


def _made(found: Mapping[str, Any]) -> Manifest:
    block_bytes = _number(found["block_bytes"], LARGEST_BLOCK)
    files = {
        path: FileSums(_number(sums["bytes"]), tuple(_number(crc32, 2**32 - 1) for crc32 in _a(list, sums["crc32"])))
        for path, sums in _a(dict, found["files"]).items()
    }
    for path, sums in files.items():
        check_path(path)
        if not block_bytes or len(sums.crc32) != -(-sums.nbytes // block_bytes):
            raise ValueError(f"{path} has {sums.nbytes} bytes and {len(sums.crc32)} checksums")
    groups = _a(list, found["param_groups"])
    for group in groups:
        _texts(_a(dict, group)["params"])
    return Manifest(
        _number(found["step"]),
        tuple(_parameter(_a(dict, entry)) for entry in _a(list, found["parameters"])),
        tuple(groups),
        files,
        block_bytes,
        _texts(found["not_saved"]),
        _a(dict, found["written_by"]),
    )


def _parameter(entry: Mapping[str, Any]) -> SavedParameter:
    return SavedParameter(
        _a(str, entry["name"]),
        _texts(entry["names"]),
        tuple(_number(size) for size in _a(list, entry["shape"])),
        _a(str, entry["dtype"]),
        None if entry["group"] is None else _number(entry["group"]),
        _a(bool, entry["trainable"]),
    )


def _a(kind: type[_T], value: Any) -> _T:
    """Return a value that must be of this type. Raises `TypeError`."""
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80} is no {kind.__name__}")
    return value


def _number(value: Any, largest: int = _LARGEST) -> int:
    if not 0 <= _a(int, value) <= largest:
        raise ValueError(f"{value} is not from 0 to {largest}")
    return int(value)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_a(str, text) for text in _a(list, value))


def check_path(path: str) -> None:
    """Raise `FormatError` unless a path stays inside the folder that it is relative to."""
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in parts) or set(path) & set("\\\0"):
        raise FormatError(f"{path!r} is not a path inside a checkpoint")


def _files(files: Mapping[str, FileSums]) -> dict[str, Any]:
    return {path: {"bytes": sums.nbytes, "crc32": list(sums.crc32)} for path, sums in sorted(files.items())}


def _text(found: Mapping[str, Any]) -> bytes:
    """Return the text with these keys, a line for each: with ``indent``, `json` is ten times slower."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
