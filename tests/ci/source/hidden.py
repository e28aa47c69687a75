"""A process whose torch lacks private names of `collectives.torch_internals`.

``python -m tests.ci.source.hidden PATH...`` hides every name before the library is imported, uses each from the module,
and prints the errors of each name, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import Enum
from pkgutil import resolve_name
from types import ModuleType
from typing import Any


class _Gone:
    """A descriptor that makes a class attribute seem absent, even an inherited one."""

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError("hidden")


class _Without:
    """A proxy for an object that lacks one attribute."""

    def __init__(self, whole: object, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError("hidden")
        return getattr(self._whole, name)


def hide(path: str) -> None:
    """Make torch lack the name ``path``."""
    module, _, attributes = path.partition(":")
    *parents, name = attributes.split(".")
    owner = resolve_name(f"{module}:{'.'.join(parents)}")
    if isinstance(owner, ModuleType):
        delattr(owner, name)
    elif isinstance(owner, type) and not issubclass(owner, Enum):
        setattr(owner, name, _Gone())
    else:
        setattr(resolve_name(f"{module}:{'.'.join(parents[:-1])}"), parents[-1], _Without(owner, name))
    assert is_hidden(path), path


def is_hidden(path: str) -> bool:
    try:
        resolve_name(path)
    except AttributeError:
        return True
    return False


def error_of(action: Callable[[], Any]) -> str:
    """Return the type and text of an action's error, or an empty string if it succeeds."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def errors_of_uses(paths: list[str]) -> dict[str, list[str]]:
    """Hide all names. Return for each name the errors of a call, of an attribute and of ``isinstance``."""
    for path in paths:
        if not is_hidden(path):
            hide(path)
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
