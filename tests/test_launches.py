"""A step launches no more kernels on a device, and looks at its values no more often, than this table says.

Launches are what a host has to do for each unit and each bucket, whatever its size, and on GPUs they decide the time of
a step. The counts are those of `launches`, for 4 blocks as one of 8 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch.distributed as dist

from benchmarks.gpu_short.peers import NARROW, device_paths, join_fake_group

from .launches import RANKS, Counted, cap_of, count
from .support.rows import only

SHAPE = replace(NARROW, layers=4)


@dataclass(frozen=True)
class Budget:
    """The most launches of one gather, one release and one reduction, and of all divisions, clips and steps together.

    ``looks``: at values of the device, with and without a clip. ``rounds``: headers of collectives: of the gate, and of
    the first reduction of a round.
    ``control``: meetings and exchanges, with and without a clip.
    """

    gather: int
    release: int
    reduce: int
    divide: int
    clip: int
    step: int
    looks: tuple[int, int]
    rounds: int
    control: tuple[int, int] = (3, 1)


BUDGETS = {  # by stage; of the default sizes of buckets on a device: 9 buckets, at stage 3 5
    0: Budget(gather=2, release=0, reduce=31, divide=0, clip=284, step=117, looks=(32, 0), rounds=1),
    1: Budget(gather=1, release=0, reduce=31, divide=9, clip=285, step=117, looks=(38, 0), rounds=1),
    2: Budget(gather=1, release=0, reduce=31, divide=9, clip=285, step=117, looks=(38, 0), rounds=1),
    3: Budget(gather=2, release=6, reduce=55, divide=5, clip=250, step=65, looks=(36, 1), rounds=2),
}


@pytest.fixture(autouse=True)
def one_of_many() -> Iterator[None]:
    join_fake_group(RANKS)
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
    assert counted.times["rounds"] <= budget.rounds
    assert counted.times["control"] <= budget.control[not clip]
