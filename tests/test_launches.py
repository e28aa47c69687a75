"""A step launches no more kernels on a device, and looks at its values no more often, than this table says.

Launches are what a host has to do for each unit and each bucket, whatever its size, and on GPUs they decide the time of
a step. The counts are those of `launches`, for 4 blocks as one of 8 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.gpu_short.peers import NARROW, TINY, AnsweredBackend, device_paths, join_fake_group

from .launches import RANKS, Counted, cap_of, count
from .support.rows import only

SHAPE = replace(NARROW, layers=4)


@dataclass(frozen=True)
class Budget:
    """The most launches of one gather, one release and one reduction, and of all divisions, clips and steps together.

    ``looks``: at values of the device, ``rounds``: headers of collectives (of the gate, and of the first reduction of a
    round), ``control``: meetings and exchanges; each with and without a clip.
    """

    gather: int
    release: int
    reduce: int
    divide: int
    clip: int
    step: int
    looks: tuple[int, int]
    rounds: tuple[int, int]
    control: tuple[int, int] = (2, 1)


BUDGETS = {  # by stage; of the default sizes of buckets on a device: 9 buckets, at stage 3 5
    0: Budget(gather=2, release=0, reduce=3, divide=0, clip=6, step=4, looks=(0, 0), rounds=(1, 1)),
    1: Budget(gather=1, release=0, reduce=3, divide=1, clip=6, step=16, looks=(0, 0), rounds=(1, 1)),
    2: Budget(gather=1, release=0, reduce=3, divide=1, clip=6, step=16, looks=(0, 0), rounds=(1, 1)),
    3: Budget(gather=2, release=2, reduce=3, divide=1, clip=6, step=2, looks=(1, 1), rounds=(2, 2)),
}


@pytest.fixture(params=[RANKS], ids=str, autouse=True)
def one_of_many(request: pytest.FixtureRequest) -> Iterator[None]:
    join_fake_group(request.param)
    with device_paths():
        yield
    dist.destroy_process_group()


def of_each(counted: Counted, phase: str) -> float:
    return counted.launches[phase] / max(1, counted.times[phase])


@pytest.mark.parametrize(("clip", "stage"), only(product((True, False), BUDGETS), (True, 3), (False, 2)))
def test_a_step_is_within_its_budget(clip: bool, stage: int) -> None:
    budget = BUDGETS[stage]
    counted = count(stage, cap_of(stage), clip=clip, shape=SHAPE)
    assert counted.others == {}, "launches of no phase"
    for phase in ("gather", "release", "reduce"):
        assert of_each(counted, phase) <= getattr(budget, phase), phase
    for phase in ("divide", "clip", "step"):
        assert counted.launches[phase] <= getattr(budget, phase), phase
    assert (counted.launches["clip"] > 0) is clip, "else nothing would be counted at all"
    assert sum(counted.looks.values()) <= budget.looks[not clip]
    assert counted.times["rounds"] <= budget.rounds[not clip]
    assert counted.times["control"] <= budget.control[not clip]


@pytest.mark.parametrize("stage", only(BUDGETS, 3))
def test_a_step_of_all_blocks_launches_at_most_450_kernels_beyond_the_models(stage: int) -> None:
    assert count(stage, cap_of(stage)).total <= 450


@pytest.mark.parametrize("one_of_many", [6, 8, 16], indirect=True, ids=str)
@pytest.mark.parametrize("stage", only((2, 3), 3))
def test_shards_are_even_so_that_collectives_read_and_write_buckets_in_place(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`native` launches the copy into the bucket, the reduction, and the cast of its sum; nothing is padded. An
    all-to-all has no sizes of parts."""
    counted = count(stage, cap_of(stage), clip=False, shape=TINY, collective="native")
    assert of_each(counted, "reduce") <= 3
    assert of_each(counted, "gather") <= BUDGETS[stage].gather
    exchange, sizes = AnsweredBackend.all_to_all, list[object]()

    def noted(*given: Any) -> Any:
        sizes.append(given[-1])
        return exchange(*given)

    monkeypatch.setattr(AnsweredBackend, "all_to_all", noted)
    count(stage, cap_of(stage), clip=False, shape=TINY)
    assert sizes
    assert not any(sizes)
