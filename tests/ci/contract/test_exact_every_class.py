"""The plain loop, bit for bit: every class and precision with each value of the other settings."""

from __future__ import annotations

import pytest

from collectives import on_threads

from ...contract.space import MANY, named, program_of, rows
from ...support.pairs import Row
from ...support.programs import Program, Step, check
from ...support.sockets import on_sockets


@pytest.mark.parametrize("row", rows(MANY), ids=named)
def test_a_program_gives_the_bits_of_the_plain_loop(row: Row) -> None:
    check(program_of(row), run=on_sockets if row["collective"] == "one host" else on_threads)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_eight_ranks_give_the_bits_of_the_plain_loop(stage: int) -> None:
    check(Program(8, stage, bucket_cap_mb=1e-6, steps=(Step(clips=((0.1, 2.0),)), Step())))
