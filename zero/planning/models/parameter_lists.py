"""Reads lists of parameters: headers of safetensors files and their index, or lines of text.

Knows: names, shapes, and how units are recognised by names. Does not know: what a model computes; no value is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ...core.units import ROOT
from ..model import ROOT_NAME, Model, ParameterShape

UNITS: Final = re.compile(r"(?:.*?\.)?\d+(?=\.)")  # the outermost list: everything up to the first number
LONGEST_HEADER: Final = 100_000_000  # bytes; the limit of the format itself
_FLOATS: Final = {"float64", "float32", "float16", "bfloat16", "f64", "f32", "f16", "bf16"}

_Entry = tuple[str, tuple[int, ...], str]  # name, shape, dtype


def of_parameter_list(path: str | Path) -> Model:
    """Return the model of a list of parameters. Its work is not known.

    Args:
        path: a safetensors file, a `...safetensors.index.json` with its files beside it, or text with a line
            ``name shape dtype`` for each parameter, such as ``h.0.weight 768x768 float32``. Lines that begin with #
            are comments. Lines are in order of registration; a safetensors file does not keep that order, so its
            tensors are sorted by name, numbers by value.

    Raises:
        ValueError: the file cannot be read or has no parameter, or a line has another form.
    """
    path = Path(path)
    entries = [(name, shape) for name, shape, dtype in _entries(path) if dtype.lower() in _FLOATS]
    if not entries:
        raise ValueError(f"{path} has no tensor of a float dtype: name a file that lists parameters")
    return in_units(path.name, entries)


def in_units(name: str, entries: Iterable[tuple[str, tuple[int, ...] | str]]) -> Model:
    """Return the model of named shapes, which a unit is everything up to the first number of: a member of a list.

    ``entries``: a parameter's name, and its shape or the name of the parameter of which it is another name.
    """
    numbers: dict[str, int] = {}
    parameters: list[ParameterShape] = []
    places: dict[str, int] = {}
    for key, shape in entries:
        if isinstance(shape, str):
            first = parameters[places[shape]]
            parameters[places[shape]] = replace(first, names=(*first.names, key))
            continue
        found = UNITS.match(key)
        places[key] = len(parameters)
        unit = numbers.setdefault(found.group(), len(numbers) + 1) if found else ROOT
        parameters.append(ParameterShape((key,), shape, unit))
    return Model(name, tuple(parameters), (ROOT_NAME, *numbers))


def _entries(path: Path) -> list[_Entry]:
    """Return name, shape and dtype of each entry of a file."""
    try:
        if path.suffix == ".safetensors":
            return _sorted(_header(path))
        if path.suffix == ".json":
            files = sorted(set(_json(path.read_bytes(), path)["weight_map"].values()))
            return _sorted(entry for file in files for entry in _header(path.parent / Path(file).name))
        return list(_lines(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{path} is no list of parameters: it must be a safetensors file, an index of some with a 'weight_map', "
            "or lines 'name shape dtype'"
        ) from None


def _sorted(entries: Iterator[_Entry]) -> list[_Entry]:
    """Return entries by name, numbers in names by value."""

    def key(entry: _Entry) -> list[tuple[int, str]]:
        return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", entry[0])]

    return sorted(entries, key=key)


def _header(path: Path) -> Iterator[_Entry]:
    """Yield the entries of the header of a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError(f"{path} is no safetensors file: its header would have {length} bytes")
        header = _json(file.read(length), path)
    for name, described in header.items():
        if name != "__metadata__":
            yield name, tuple(int(size) for size in described["shape"]), str(described["dtype"])


def _json(text: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read, since it holds no JSON where some should be: {error}") from None
    if not isinstance(found, dict):
        raise TypeError
    return found


def _lines(path: Path) -> Iterator[_Entry]:
    """Yield the entries of lines ``name shape dtype``."""
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, _, rest = text.partition(" ")
        shape, _, dtype = rest.strip().rpartition(" ")
        sizes = [int(size) for size in re.findall(r"\d+", shape)]
        if not re.fullmatch(r"(torch\.)?[a-z]+\d*", dtype) or not re.fullmatch(r"[\[(]?[\dx, ]*[\])]?", shape.strip()):
            raise ValueError(
                f"{path}, line {number}: {text!r} is not 'name shape dtype', such as 'h.0.weight 768x768 float32'"
            )
        if not shape.strip() or math.prod(sizes) < 1:
            raise ValueError(f"{path}, line {number}: {name!r} has no elements: write its shape, () if it is a scalar")
        yield name, tuple(sizes), dtype.removeprefix("torch.")
