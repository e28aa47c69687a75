"""The plain loop's bits after every command, and the formulas' bytes: each pair of values of two dials."""

from __future__ import annotations

import pytest

from ..support.machine.hosts import ThreadsOnHosts
from ..support.machine.run import run
from ..support.pairs import Row
from .space import ROWS, named, program_of

pytestmark = pytest.mark.filterwarnings("ignore:.*set aside:RuntimeWarning")


@pytest.mark.law("memory")
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_programs_give_the_bits_of_the_plain_loop(row: Row) -> None:
    config, commands = program_of(row)
    run(config, *commands, backend=ThreadsOnHosts())
