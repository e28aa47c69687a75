"""Flags of a command, made of the fields of a frozen dataclass: a field is a flag, the text in its type is its help. A
field without a default is an argument.

Knows: names, types, defaults and help of fields, and how the value of a field is written in a flag and in JSON. Does
not know: the parser, or what a flag does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from collectives import Algorithm

from ..config import Offload
from ..core.rounding import StochasticRounding
from ..core.units import Predicate
from ..precision import PRECISIONS, PrecisionName, PrecisionOption

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class TextForm:
    """How a value is written in a flag and in JSON.

    ``type``: of what is written; ``parse`` and ``write``: from it and to it; ``expected``: what it must be, in words;
    ``metavar``: how help names it, None for the name of the type.
    """

    type: Any
    parse: Callable[[Any], Any]
    write: Callable[[Any], Any]
    expected: str = ""
    metavar: str | None = None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _reshard(text: str) -> bool | int:
    return {"true": True, "false": False}[text] if text in ("true", "false") else int(text)


def _path(text: str) -> Path:
    """Return the path. `Path` would take an empty text, often of a variable that is not set, for this folder."""
    if not text:
        raise ValueError
    return Path(text)


def _offload(text: str) -> Offload:
    """Return the arguments of `Offload` that are written with commas between them. "./cpu" is a folder."""
    states, *given = re.split(",(?=(?:parameters|step)=)", text)
    places: dict[str, Any] = dict(each.split("=", 1) for each in given)
    if len(places) < len(given) or set(places.values()) - {"cpu"}:
        raise ValueError
    return Offload("cpu" if states == "cpu" else _path(states), **places)


def _written_offload(value: Offload | None) -> str | None:
    if value is None:
        return None
    places = {"parameters": value.parameters, "step": value.step}
    return ",".join([str(value.states), *(f"{name}={place}" for name, place in places.items() if place)])


OFFLOAD = "a path (the current folder is .), cpu, cpu,parameters=cpu or cpu,parameters=cpu,step=cpu"
PATH = "a path (the current folder is .)", "<path>"
FORMS: Mapping[Any, TextForm] = {
    Path: TextForm(str, _path, _text, *PATH),
    Path | None: TextForm(str | None, _path, _text, *PATH),
    bool | int | Predicate: TextForm(
        str, _reshard, lambda value: str(value).lower(), "true, false or a number of ranks"
    ),
    float | Literal["auto"] | None: TextForm(
        str | None,
        lambda text: text if text == "auto" else float(text),
        lambda value: value,
        "a number of MiB or auto",
        "<MiB|auto>",
    ),
    tuple[int, ...] | None: TextForm(
        str | None,
        lambda text: tuple(map(int, text.split(","))),
        lambda value: None if value is None else ",".join(map(str, value)),
        "whole numbers with commas between them",
        "<int,int>",
    ),
    str | Algorithm: TextForm(str, str, str),
    Offload | None: TextForm(str | None, _offload, _written_offload, OFFLOAD, "<path|cpu>"),
    StochasticRounding | None: TextForm(
        str | None,
        lambda text: StochasticRounding(int(text)),
        lambda value: None if value is None else str(value.seed),
        "a whole number",
        "<int>",
    ),
    PrecisionOption: TextForm(
        PrecisionName, PRECISIONS.__getitem__, {value: name for name, value in PRECISIONS.items()}.__getitem__
    ),
}
"""The forms of types that are written in another one."""
NAMES = {"mixed_precision": "precision"}
"""The flags that are named otherwise than their field."""


@dataclass(frozen=True)
class Flag:
    """One field of a configuration, as a command line and JSON have it: ``type`` and ``default`` are written ones.

    ``default`` is `MISSING` if there is none. ``group``: of flags, as help has it. ``metavar``: the third part of the
    field's type, else that of its form.
    """

    field: str
    name: str
    type: Any
    default: Any
    help: str
    form: TextForm
    group: str
    metavar: str | None


def flags_of(config: type[Any]) -> list[Flag]:
    """Return the flags of a command, in the order of the fields of its configuration.

    ``config.NO_FLAGS``, if there is one, has the names of fields that are no flags. ``config.GROUPS`` has the names of
    the groups of flags, and of the fields in each; what is in none is in the last one.
    """
    hints = get_type_hints(config, include_extras=True)
    groups = {field: group for group, names in config.GROUPS.items() for field in names}
    found = []
    for item in fields(config):
        if item.name not in getattr(config, "NO_FLAGS", ()):
            kind, text, *metavar = get_args(hints[item.name])
            form = FORMS.get(kind, TextForm(kind, lambda value: value, lambda value: value))
            default = MISSING if item.default is MISSING else form.write(item.default)
            group = groups.get(item.name, list(config.GROUPS)[-1])
            named = (item.name, NAMES.get(item.name, item.name))
            found.append(Flag(*named, form.type, default, text, form, group, *(metavar or [form.metavar])))
    return found


def from_flags(config: type[Settings], written: Mapping[str, Any]) -> Settings:
    """Return the configuration that flags, or the content of JSON, describe. Raises `ValueError`, naming the flag."""
    values = {}
    for flag in flags_of(config):
        value = written[flag.name]
        try:
            values[flag.field] = None if value is None else flag.form.parse(value)
        except (KeyError, ValueError):
            require(False, flag.name, value, flag.form.expected)
    return config(**values)


def to_flags(settings: Any) -> dict[str, Any]:
    """Return what JSON has of a configuration: the values of its flags, as they are written, by name."""
    return {flag.name: flag.form.write(getattr(settings, flag.field)) for flag in flags_of(type(settings))}


def option_of(name: str) -> str:
    """Return the option of a flag, with its dashes."""
    return "--" + name.replace("_", "-")


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise ValueError for the value of a flag, unless ``holds``."""
    if not holds:
        raise ValueError(f"{option_of(name)} is {value if value != '' else 'empty'}: it must be {expected}")
