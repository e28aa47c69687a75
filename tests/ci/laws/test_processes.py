"""On processes, a tenth of the programs that hold each pair of values of two dials gives the plain loop's bits."""

from __future__ import annotations

import pytest

from ...laws.space import ROWS, named, program_of
from ...support.machine.backends import Processes
from ...support.machine.run import run
from ...support.pairs import Row
from ...support.pool import SIZE, GlooPool

pytestmark = pytest.mark.filterwarnings("ignore:.*set aside:RuntimeWarning")
FEW = [row for row in ROWS if int(row["ranks"]) <= SIZE]


@pytest.mark.parametrize("row", FEW[::8], ids=named)
def test_programs_on_processes_give_the_bits_of_the_plain_loop(gloo: GlooPool, row: Row) -> None:
    config, commands = program_of(row)
    run(config, *commands, backend=Processes(gloo))
