"""Classes with `train()` and `eval()`, such as schedule-free ones: the weights of each mode are the plain loop's."""

from __future__ import annotations

import tempfile

import pytest

from zero import Offload

from ..contract.space import HABITS
from ..support.narrowed import PRECISIONS
from ..support.programs import Program, check
from ..support.rows import rows


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "program",
    rows(
        [
            Program(3, 3, "schedule-free", precision=PRECISIONS["bf16"], steps=HABITS["freezes"]),
            Program(3, 2, "averaged", precision=PRECISIONS["bf16"], steps=HABITS["clips"]),
            Program(3, 1, "schedule-free", steps=HABITS["no sync"]),
            Program(4, 3, "averaged", sharding_factor=2, reshard=False, collective="pairwise", steps=HABITS["freezes"]),
            Program(2, 0, "schedule-free", offload=Offload(tempfile.gettempdir()), steps=HABITS["fewer"]),
            Program(1, 3, "averaged", precision=PRECISIONS["fp16"], scaled=True, steps=HABITS["scales"]),
        ],
        [],
    ),
    ids=lambda program: f"{program.world_size}-{program.stage}-{program.optimizer}",
)
def test_weights_of_each_mode_are_those_of_the_plain_loop(program: Program) -> None:
    check(program)
