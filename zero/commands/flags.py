"""Flags of a command, made of the fields of a frozen dataclass: a field is a flag, the text in its type is its help.

Knows: names, types, defaults and help of fields. Does not know: the parser, or what a flag does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

__all__ = ["Flag", "flags_of", "option_of", "require"]


@dataclass(frozen=True)
class Flag:
    """One field of a configuration, as a command line needs it."""

    name: str
    type: Any
    default: Any
    help: str


def flags_of(config: type[Any]) -> list[Flag]:
    """Return the flags of a command, in the order of the fields of its configuration."""
    hints = get_type_hints(config, include_extras=True)
    parts = {item.name: get_args(hints[item.name]) for item in fields(config)}
    return [Flag(item.name, parts[item.name][0], item.default, parts[item.name][1]) for item in fields(config)]


def option_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise ValueError for the value of a field, unless ``holds``."""
    if not holds:
        raise ValueError(f"{option_of(name)} is {value}: it must be {expected}")
