"""A process whose torch lacks private names of `collectives.torch_internals`.

``python -m tests.ci.source.hidden PATH...`` hides every name before the library is imported, uses each from the module,
and prints the errors of each name, as JSON.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Callable
from typing import Any


def error_of(action: Callable[[], Any]) -> str:
    """Return the type and text of an action's error, or an empty string if it succeeds."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def errors_of_uses(paths: list[str]) -> dict[str, list[str]]:
    """Hide all names. Return for each name the errors of a call, of an attribute and of ``isinstance``."""
    resolve = pkgutil.resolve_name

    def resolve_others(path: str) -> Any:
        if path in paths:
            raise AttributeError("hidden")
        return resolve(path)

    pkgutil.resolve_name = resolve_others
    from collectives import torch_internals
    from zero import ZeroOptimizer  # noqa: F401

    found = {}
    for value in vars(torch_internals).values():
        if torch_internals.missing(value) is not None:
            uses = (lambda v=value: v(1), lambda v=value: v.__code__, lambda v=value: isinstance(1, v))
            errors = [error_of(use) for use in uses]
            named = next(path for path in paths if f" has no {path.replace(':', '.')}, " in errors[0])
            found[named] = errors
    return found


if __name__ == "__main__":
    assert not {"zero", "collectives"} & {name.partition(".")[0] for name in sys.modules}
    print(json.dumps(errors_of_uses(sys.argv[1:])))
