"""Arguments of the public calls, checked, and warnings at the line of the program that made the call."""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")
_INSIDE = ("zero", "torch", "contextlib")  # packages whose frames lie between a call and the warning
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str | int) -> int:
    """Return a size in bytes. Raises `ValueError` for what is no positive size."""
    if isinstance(text, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?B?)", text.strip().upper())
        unit = None if found is None else found[2] if found[2] in _SIZES else found[2] + "B"
        text = -1 if found is None else int(float(found[1]) * _SIZES[unit or ""])
    require(text > 0, "max_shard_size must be a number of bytes, or a text such as '5GB'")
    return text


def read_assets(folder: str | os.PathLike[str] | None) -> dict[str, bytes]:
    """Return the files of a folder, by name. Those that a checkpoint writes itself, and folders, are left out."""
    if folder is None:
        return {}
    is_folder = os.fspath(folder) != "" and os.path.isdir(folder)  # an empty text is not this folder
    require(is_folder, f"assets is {os.fspath(folder)!r}: name a folder that exists")
    found = {entry.name: entry for entry in sorted(Path(folder).iterdir()) if entry.is_file()}
    for name in found:
        is_text = name == name.encode(errors="replace").decode()
        require("\\" not in name and is_text, f"assets: {name!r} cannot be the name of a file of a checkpoint")
    return {name: entry.read_bytes() for name, entry in found.items() if not name.endswith(_WEIGHTS)}


def check_step(step: int) -> None:
    """Raise `ValueError` for what is not the number of a checkpoint."""
    is_whole = isinstance(step, int) and not isinstance(step, bool)
    require(is_whole and step >= 0, f"step must be an int of 0 or more, not {step!r}")
    require(step < 2**63, f"step must be below 2**63, not {step}")


def require(holds: bool, otherwise: str) -> None:
    """Raise `ValueError` with this text unless a condition holds."""
    if not holds:
        raise ValueError(otherwise)


def warn_caller(text: str) -> None:
    """Warn at the line of the program that has called this library."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    text = text.encode(errors="backslashreplace").decode()  # a path may have bytes that are no text
    warnings.warn(text, RuntimeWarning, stacklevel=level)
