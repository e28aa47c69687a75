"""Training goes on at another stage, number of ranks and bucket size, from dicts, whole state dicts and checkpoints."""

from __future__ import annotations

import pytest

from ..dials import DIALS
from ..dials.loops import steps
from ..dials.record import config_of
from ..support.machine.hosts import ThreadsOnHosts
from ..support.machine.program import FOLDER, Average, Change, Consolidate, Describe, Load
from ..support.machine.run import run
from ..support.pairs import Row, pair_rows
from ..support.rows import ALL
from ..support.two_modes import TWO_MODES
from .space import allowed, named

pytestmark = pytest.mark.usefixtures("copied_from_the_host")
OF_A_SETTING = (
    "stage",
    "ranks",
    "bucket_cap_mb",
    "collective",
    "sharding_factor",
    "offload",
    "memory",
    "units",
    "reshard",
)
HOW = {"dict": {}, "whole state dict": {"full": True}, "checkpoint": {"folder": FOLDER}}


def of_one_training(row: Row) -> bool:
    """Return whether the values of both halves of a row go together."""
    looks = {"loop": "clips", "look": "modes" if row["class"] in TWO_MODES else "none"}
    return allowed({**row, **looks}) and allowed({**after(row), **looks})


def after(row: Row) -> Row:
    return {dial.name: row.get(f"{dial.name} later", row.get(dial.name)) for dial in DIALS}


USED = [dial for dial in DIALS if dial.name not in ("loop", "look")]
VALUES = {dial.name: dial.names if ALL or dial.name == "stage" else dial.names[:2] for dial in USED}
TABLE = {"how": list(HOW)} | VALUES | {f"{name} later": VALUES[name] for name in VALUES if name in OF_A_SETTING}
ROWS = pair_rows(TABLE, of_one_training, most=None if ALL else 8)


def case(row: Row) -> str:
    looks = {"loop": "clips", "look": "none"}
    return f"{row['how']}: {named({**row, **looks})} -> {named({**after(row), **looks})}"


LISTED = {  # what differs from the usual row; killers of `tests.zoo` are named by these
    "dict": {"how": "dict", "stage": "3", "stage later": "1", "ranks later": "2", "bucket_cap_mb later": "1e-06"},
    "dict in bf16": {"how": "dict", "stage later": "3", "ranks later": "2", "mixed_precision": "bf16"},
    "whole state dict": {"how": "whole state dict", "stage later": "3", "mixed_precision": "bf16"},
    "checkpoint": {"how": "checkpoint", "stage": "1", "stage later": "3", "ranks later": "2"},
    "checkpoint with what is not listed": {"how": "checkpoint", "groups": "not all", "stage": "3", "stage later": "3"},
}
USUAL = {name: values[0] for name, values in TABLE.items()}


@pytest.mark.parametrize(
    "row",
    [
        *(pytest.param({**USUAL, **changes}, id=name) for name, changes in LISTED.items()),
        *(pytest.param(row, id=case(row)) for row in ROWS),
    ],
)
def test_training_goes_on_from_what_was_saved(row: Row) -> None:
    looks = {"loop": "clips", "look": "none"}
    before, later = config_of({**row, **looks}, DIALS), config_of({**after(row), **looks}, DIALS)
    on_host = {row["offload"], row["offload later"]} - {"none", "disk"}  # where averages are refused
    averages = [Average(), Average("ema")] if row["how"] == "checkpoint" and not on_host else []
    first = [*steps(1), Change(0, "lr", 3e-3), *steps(1, 60), *averages]
    then = [Consolidate(0), *averages, *steps(2, 70), Describe(exact=True)]
    run(before, *first, Load(later.setting, **HOW[row["how"]]), *then, backend=ThreadsOnHosts())
