"""The plain loop's bits after every command, the formulas' bytes, and nothing left behind: pairs of values of dials."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ..support.machine.hosts import ThreadsOnHosts
from ..support.machine.program import Describe
from ..support.machine.ranks import Rank
from ..support.machine.run import run
from ..support.pairs import Row
from .space import ROWS, named, program_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*set aside:RuntimeWarning"),
    pytest.mark.usefixtures("copied_from_the_host"),
]


@contextmanager
def nothing_left() -> Iterator[None]:
    """Assert that a block leaves no optimizer, thread or open file."""
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert not Rank.built
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.law("memory")
@pytest.mark.law("no traces")
@pytest.mark.law("requested dtypes")
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_programs_give_the_bits_of_the_plain_loop(row: Row) -> None:
    config, commands = program_of(row)
    with nothing_left():
        run(config, *commands, Describe(exact=True), backend=ThreadsOnHosts())
