"""Modules that some processes train apart: the plain loop's bits and norms."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import Tensor

from ...parameters.apart import Case, Rank
from ...support.pool import MADE, GlooPool

CASES = {
    "in a ring": Case({"a": (0, 1), "b": (1, 3), "c": (2, 3), "d": (0, 2)}, ("ad", "ab", "cd", "bc"), (3, 2, 0)),
    "bf16": Case({"a": (0, 2), "b": (1, 3)}, ("a", "b", "a", "b"), (3, 1), "bf16", {"sharding_factor": 2}),
}


def train(group: dist.ProcessGroup, rank: int, case: Case) -> tuple[Rank, list[Tensor]]:
    trained = Rank(rank, case, {"all": group, **{n: MADE[ranks] for n, ranks in case.groups.items() if rank in ranks}})
    norms = trained.train([2.0, 2.0])
    trained.close()
    trained.all = dict.fromkeys(trained.all)  # type: ignore[arg-type]  # optimizers are not sent
    del trained.first, trained.also
    return trained, norms


@pytest.mark.parametrize("name", CASES)
def test_modules_that_processes_train_apart_have_the_bits_of_one_plain_loop_with_one_norm(
    gloo: GlooPool, name: str
) -> None:
    case = CASES[name]
    case.check(gloo.run(train, case, ranks=range(case.ranks)), [2.0, 2.0])
