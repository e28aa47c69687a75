"""A process whose torch lacks every private name of `collectives.torch_internals`.

``python -m tests.ci.source.hidden`` hides the names before the library is imported, uses each from the module, and
prints the errors of each name, as JSON.
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


def errors_of_uses() -> dict[str, list[str]]:
    """Hide all names. Return for each name the errors of a call, of an attribute and of ``isinstance``."""
    hidden = list[str]()

    def resolve_nothing(path: str) -> Any:
        hidden.append(path.replace(":", "."))
        raise AttributeError(path)

    pkgutil.resolve_name = resolve_nothing
    from collectives import torch_internals
    from zero import ZeroOptimizer  # noqa: F401

    found = {}
    for value in vars(torch_internals).values():
        if torch_internals.missing(value) is not None:
            uses = (lambda v=value: v(1), lambda v=value: v.__code__, lambda v=value: isinstance(1, v))
            errors = [error_of(use) for use in uses]
            found[next(path for path in hidden if f" has no {path}, " in errors[0])] = errors
    assert found.keys() == {*hidden}
    return found


if __name__ == "__main__":
    assert not {"zero", "collectives"} & {name.partition(".")[0] for name in sys.modules}
    print(json.dumps(errors_of_uses()))
