"""`zero verify MODULE:FUNCTION`: calls `zero.verify` with the arguments that a function of the user returns.

Knows: how to find the function. Does not know: what is verified.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from ..runner import check_alone, checking_input, reports_errors
from .spec import resolve
from .verification import verify

HELP = "a function without arguments that returns a dict of zero.verify's; the current directory is importable"


@reports_errors
def run(function: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help=HELP)]) -> int:
    """Find where your own model, at each stage and number of ranks, first leaves the bits of your plain loop."""
    sys.path.insert(0, os.getcwd())
    with checking_input():
        check_alone("zero verify")
        arguments = _arguments(function)
    with checking_input(ValueError, TypeError):
        return 0 if verify(**arguments).ok else 1


def _arguments(text: str) -> dict[str, Any]:
    """Import and call the function. Return the arguments of `verify`."""
    if not all(text.partition(":")):
        raise ValueError(f"{text!r} must be MODULE:FUNCTION, as in `zero verify my_model:arguments`")
    try:
        arguments = resolve(text)()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{text}() failed in {os.getcwd()}: {type(error).__name__}: {error}") from error
    if not isinstance(arguments, dict):
        raise TypeError(f"{text}() must return a dict of zero.verify's arguments, not {type(arguments).__name__}")
    return arguments
