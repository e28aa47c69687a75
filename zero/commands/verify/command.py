"""`zero verify MODULE:FUNCTION`: calls `zero.verify` with the arguments that a function of the user returns.

Knows: how to find the function, and which arguments flags replace. Does not know: what is verified.
"""

from __future__ import annotations

import difflib
import os
import sys
from typing import Any

from ...job import resolve
from ..runner import check_alone, checking_input
from .settings import VerifyConfig
from .verification import verify


def run(config: VerifyConfig) -> int:
    """Verify, and return the exit code."""
    sys.path.insert(0, os.getcwd())
    given = {name: value for name, value in vars(config).items() if value is not None and name != "function"}
    with checking_input():
        check_alone("zero verify")
        arguments = _arguments(config.function)
        if "build_model" not in arguments:
            near = difflib.get_close_matches("build_model", arguments, 1)
            meant = f" (did you mean that by {near[0]!r}?)" if near else ""
            raise ValueError(
                f"{config.function}() returned no 'build_model', the function that builds the model{meant}"
            )
    with checking_input(ValueError, TypeError):
        return 0 if verify(**{**arguments, **given}).ok else 1


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
