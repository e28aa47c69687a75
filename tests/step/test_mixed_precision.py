"""Mixed precision is that of the plain loop, also by module: 16-bit modules, fp32 masters, sums in their dtype."""

from __future__ import annotations

import pytest

from ..support.by_module import BY_MODULE
from ..support.narrowed import BF16, PRECISIONS
from ..support.programs import Program, Round, Step, check
from ..support.rows import without

pytestmark = pytest.mark.law("requested dtypes")

OFF, ON = Round(sync=False), Round()
STEPS = (Step(clips=((0.1, 2.0),)), Step(), Step((ON, ON, ON)))
NO_SYNC = (Step((OFF, OFF, ON)), Step((OFF, OFF)), Step((ON, OFF)), Step((ON, OFF, ON, OFF), clips=((0.1, 2.0),)))
CLEARED = (
    Step(clear="module zeros"),
    Step(clear="zeros", step=False),
    Step(clear="module", clips=((0.1, 2.0),)),
    Step(clear="none"),
    Step(),
)
FROZEN = (
    Step(),
    Step(toggle=("frozen", "first.weight")),
    Step(toggle=("last.bias",)),
    Step(toggle=("first.weight",)),
)

P = PRECISIONS
ROWS = {
    "0-bf16-W2": Program(2, 0, "adamw", 1e-6, precision=P["bf16"], steps=STEPS),
    "2-bf16-W3": Program(3, 2, "sgd momentum", precision=P["bf16"], steps=STEPS),
    "2-sent in bf16-W1": Program(1, 2, "adamw", 25.0, precision=P["fp32, sent in bf16"], steps=NO_SYNC),
    "3-fp16-W2": Program(2, 3, "adamw fused", 1e-6, precision=P["fp16"], steps=STEPS),
    "no_sync": Program(3, 2, "adamw", precision=P["bf16"], steps=NO_SYNC),
    "cleared": Program(2, 2, "adamw fused", 0.0005, precision=P["bf16, added up in bf16"], steps=CLEARED),
    "frozen": Program(2, 1, "adamw", 0.0005, precision=P["bf16, sent in fp32"], steps=FROZEN),
    "by patterns, 0": Program(2, 0, "adamw", 1e-6, precision=BY_MODULE["ends in fp32"], steps=NO_SYNC),
    "by patterns, 1": Program(3, 1, "adamw", precision=BY_MODULE["ends in fp16"], steps=FROZEN),
    "by a function, 2": Program(2, 2, "adamw fused", 0.0005, precision=BY_MODULE["by kind"], steps=CLEARED),
    "by a function, 3": Program(3, 3, "sgd momentum", 0.0005, precision=BY_MODULE["by kind"], steps=STEPS),
    "outputs alone": Program(2, 0, "adamw", precision=BY_MODULE["outputs alone"], steps=STEPS),
    "made in bf16": Program(3, 2, "adamw", dtype=BF16, precision=P["bf16"]),
}


SLOW = ("2-sent in bf16-W1", "3-fp16-W2", "cleared", "frozen", "by patterns, 0", "outputs alone")


@pytest.mark.first(5)
@pytest.mark.parametrize("row", without(ROWS, *SLOW))
def test_training_is_that_of_the_plain_loop(row: str) -> None:
    check(ROWS[row])
