"""The worlds of a unit at stage 3: alone, sent between ranks, and in memory that ranks of a host share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from collectives import Transport, on_threads

from ..support.cases import Case, check_rank, plain_loop
from ..support.limits import BOUND
from ..support.sockets import on_sockets

T = TypeVar("T")
WORLDS = {"one": (on_threads, 1), "travel": (on_threads, 2), "several": (on_threads, 3), "common": (on_sockets, 2)}
TOGETHER = pytest.mark.parametrize("world", ["one", "common"])  # where no unit is sent


def on(world: str, program: Callable[[Transport], T]) -> list[T]:
    """Run a program on the ranks of a world."""
    ranks, size = WORLDS[world]
    return ranks(size, program, timeout=2 * BOUND)


def size_of(world: str) -> int:
    return WORLDS[world][1]


def check_in(world: str, case: Case) -> None:
    """Train a case on the ranks of a world, and compare each step with the plain loop."""
    _, expected = plain_loop(case, size_of(world))
    on(world, lambda transport: check_rank(case, transport, expected))
