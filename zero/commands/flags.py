"""Flags of a command, made of the fields of a frozen dataclass: a field is a flag, the text in its type is its help. A
field without a default is an argument.

Knows: names, types and help of fields, and how the value of a field is written in a flag. Does not know: which values
are valid, or what a flag does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

from collectives import Algorithm

from ..config import Offload
from ..core.rounding import StochasticRounding
from ..core.units import Predicate
from ..precision import PRECISIONS, PrecisionOption

NAMES = {"mixed_precision": "--precision"}
"""The flags that are named otherwise than their field."""


class Form(NamedTuple):
    """How a value is written: ``parse`` makes it of a text, which must be ``expected``; ``metavar``: its name in help.

    ``parse`` raises `KeyError` or `ValueError` for another text.
    """

    parse: Callable[[str], Any]
    expected: str
    metavar: str

    def __call__(self, text: str) -> Any:
        """Return the value. Raises `typer.BadParameter`."""
        import typer

        try:
            return self.parse(text)
        except (KeyError, ValueError):
            raise typer.BadParameter(f"it must be {self.expected}, not {text!r}") from None


def _path(text: str) -> Path:
    """Return the path. `Path` would take an empty text, often of a variable that is not set, for this folder."""
    if not text:
        raise ValueError
    return Path(text)


def _reshard(text: str) -> bool | int:
    return text == "true" if text in ("true", "false") else int(text)


def _offload(text: str) -> Offload:
    """Return the arguments of `Offload` that are written with commas between them. "./cpu" is a folder."""
    states, *given = re.split(",(?=(?:parameters|step)=)", text)
    places: dict[str, Any] = dict(each.split("=", 1) for each in given)
    if len(places) < len(given) or set(places.values()) - {"cpu"} or states.startswith("cpu,"):
        raise ValueError
    return Offload("cpu" if states == "cpu" else _path(states), **places)


PATH = Form(_path, "a path (the current folder is .)", "<path>")
FORMS: Mapping[Any, Form] = {
    **dict.fromkeys((int, int | None), Form(int, "a whole number", "<int>")),
    **dict.fromkeys((float, float | None), Form(float, "a number", "<float>")),
    **dict.fromkeys((Path, Path | None), PATH),
    bool | int | Predicate: Form(_reshard, "true, false or a number of ranks", "<str>"),
    float | Literal["auto"] | None: Form(
        lambda text: text if text == "auto" else float(text), "a number of MiB or auto", "<MiB|auto>"
    ),
    tuple[int, ...] | None: Form(
        lambda text: tuple(map(int, text.split(","))), "whole numbers with commas between them", "<int,int>"
    ),
    str | Algorithm: Form(str, "a name", "<str>"),
    Offload | None: Form(
        _offload, f"{PATH.expected}, cpu, cpu,parameters=cpu or cpu,parameters=cpu,step=cpu", "<path|cpu>"
    ),
    StochasticRounding | None: Form(lambda text: StochasticRounding(int(text)), "a whole number", "<int>"),
    PrecisionOption: Form(
        PRECISIONS.__getitem__, f"one of {', '.join(map(repr, PRECISIONS))}", f"<{'|'.join(PRECISIONS)}>"
    ),
}
"""The forms of types. Typer reads the values of the others by itself."""


def signature_of(config: type[Any]) -> Signature:
    """Return the parameters of a function of which typer makes a command: the arguments, and the flags in the order of
    ``config.GROUPS``, group -> fields. A flag that is left out is None, if its type is in `FORMS`."""
    import typer

    hints = get_type_hints(config, include_extras=True)
    defaults = {item.name: Parameter.empty if item.default is MISSING else item.default for item in fields(config)}
    arguments = [name for name, default in defaults.items() if default is Parameter.empty]
    parameters = []
    for group, names in {"": arguments, **config.GROUPS}.items():
        for name in names:
            kind, text, *metavar = get_args(hints[name])
            default, how = defaults[name], {"help": text, "metavar": metavar[0] if metavar else None}
            if form := FORMS.get(kind):
                kind, how = Any, {"help": text, "metavar": form.metavar, "parser": form}
                if default is not None:
                    how["help"] += f"  [default: {'true' if default is True else default}]"
                    default = None
            info: Any = typer.Argument(**how)
            if group:
                info = typer.Option(*filter(None, [NAMES.get(name)]), **how, rich_help_panel=group)
            annotation: Any = Annotated[kind, info]
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return Signature(parameters)


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise ValueError for the value of a flag, unless ``holds``."""
    if not holds:
        option = "--" + name.replace("_", "-")
        raise ValueError(f"{option} is {value if value != '' else 'empty'}: it must be {expected}")
