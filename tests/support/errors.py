"""Errors and warnings as text, and the state of a model that no optimizer holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from collectives import Transport, on_threads

from .limits import BOUND


def error_of(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """Return a call's error as text, "nothing" if it has none."""
    try:
        call(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def assert_in_order(words: str, message: str) -> None:
    """Assert that a message has all parts of ``words``, in order, with " … " between them. "nothing": no error."""
    assert words, "any message has no words"
    assert (message == "nothing") is (words == "nothing"), f"{words!r} is not in {message!r}"
    place = 0
    for part in words.split(" … "):
        assert part in message[place:], f"{part!r} is not in {message[place:]!r}"
        place = message.index(part, place) + len(part)


def errors_on(world_size: int, program: Callable[[Transport], Any]) -> list[str]:
    return on_threads(world_size, lambda transport: error_of(program, transport), timeout=BOUND)


@contextmanager
def warned() -> Iterator[list[str]]:
    """Return the RuntimeWarnings of all ranks, once the block has ended."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    found += [str(warning.message) for warning in seen if issubclass(warning.category, RuntimeWarning)]


def is_plain(model: nn.Module) -> bool:
    hooks: list[Any] = [h for part in model.modules() for h in (part._forward_pre_hooks, part._forward_hooks)]
    hooks += [h for p in model.parameters() for h in (p._post_accumulate_grad_hooks, p._backward_hooks)]
    ours = [hook for some in hooks for hook in (some or {}).values() if hook.__module__.startswith("zero.")]
    return not ours and not any(type(parameter).__module__.startswith("zero.") for parameter in model.parameters())
