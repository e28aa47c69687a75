"""Ranks send the payload bytes of the formula and hold no more in flight than it says: pairs of settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..dials import DIALS
from ..dials.record import config_of
from ..support.machine.hosts import ThreadsOnHosts
from ..support.machine.program import Describe, Measure
from ..support.machine.run import run
from ..support.machine.trees import Part
from ..support.pairs import Row, pair_rows
from ..support.rows import ALL
from .space import allowed, named

PLAIN = (Part("linear", 48), Part("matrix"), Part("norm"), Part("linear", 96))  # each is entered once, and trained
WIDTH = 48  # shards are multiples of 64 bytes, so that a bucket has little padding
OTHERS = {dial.name: dial.usual for dial in DIALS}
OF_TRAFFIC = ("stage", "ranks", "bucket_cap_mb", "sharding_factor", "mixed_precision", "cut", "reshard")
ROWS = pair_rows(
    {dial.name: dial.names for dial in DIALS if dial.name in (*OF_TRAFFIC, "offload", "units")},
    lambda row: allowed(OTHERS | row),
    most=None if ALL else 6,
)
UNDER_WAY = {"stage": "1", "ranks": "8", "sharding_factor": "2", "mixed_precision": "bf16"}  # between four replicas


@pytest.mark.law("traffic")
@pytest.mark.parametrize("row", [UNDER_WAY, *ROWS], ids=lambda row: named(OTHERS | row))
def test_ranks_send_what_the_formula_says(row: Row) -> None:
    config = replace(config_of(OTHERS | row, DIALS), parts=PLAIN, width=WIDTH)
    run(config, *map(Measure, (1, 3, 5)), Describe(exact=True), backend=ThreadsOnHosts())
