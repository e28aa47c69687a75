"""The names of flags, each of which is a field of a command's settings, and their errors."""

from __future__ import annotations


def option_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise ValueError for the value of a field, unless ``holds``."""
    if not holds:
        raise ValueError(f"{option_of(name)} is {value}: it must be {expected}")
