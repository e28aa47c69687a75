"""The bytes between hosts in a plan are those that were measured, and those of the library's plans."""

from __future__ import annotations

import pytest

from collectives.algorithms.plans import Hosts, equal_hosts, plans
from zero.planning.memory import MemoryPlan
from zero.planning.model import Model, ParameterShape
from zero.planning.setting import PlanSetting
from zero.planning.traffic import crossing, sent

# Payload bytes that crossed between two hosts of two ranks in a step, by (stage, sharding_factor): counted by the
# library on 2026-11-22, torch 2.13, four layers of 1024 x 1024 in fp32.
CROSSED = {
    (1, 1): 33561896,
    (1, 2): 33562160,
    (1, 4): 41953110,
    (2, 1): 33561896,
    (2, 2): 33562160,
    (2, 4): 41953110,
    (3, 1): 33562688,
    (3, 2): 33563736,
    (3, 4): 54542020,
}


def layers(width: int, count: int) -> Model:
    """Return the shapes of layers without a bias, each a unit."""
    shapes = (ParameterShape((f"{n}.0.weight",), (width, width), n + 1) for n in range(count))
    return Model(f"layers-{count}x1x{width}", tuple(shapes), ("the root's rest", *map(str, range(count))))


def test_what_crosses_between_hosts_is_what_was_measured_within_4_of_1000() -> None:
    """The difference is headers."""
    plan = MemoryPlan(layers(1024, 4))
    for (stage, factor), measured in CROSSED.items():
        planned = crossing(plan, PlanSetting(stage, 4, factor, ranks_per_host=2)).total
        assert planned <= measured <= 1.004 * planned, (stage, factor)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.by_default
def test_equal_hosts_need_no_plans(started: bool) -> None:
    for hosts in range(1, 6):
        for ranks in range(1, 5):
            among = Hosts([range(host * ranks, (host + 1) * ranks) for host in range(hosts)])
            for travel, accumulate in ((4, 4), (2, 4), (2, 2)) if hosts * ranks <= 12 else ():
                found = sum(plan.bytes_per_element for plan in plans(among, started, travel, accumulate))
                assert equal_hosts(hosts, ranks, started, travel, accumulate) == found, (hosts, ranks)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.by_default
def test_one_rank_sends_nothing_and_one_host_sends_nothing_out(stage: int) -> None:
    plan = MemoryPlan(layers(64, 3))
    assert sent(plan, PlanSetting(stage), 3, 2) == 0
    for factor in (8,) if stage == 0 else (1, 2, 8):
        alone = PlanSetting(stage, 8, None if stage == 0 else factor)
        assert crossing(plan, alone, 3, 2).total == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.by_default
def test_between_hosts_of_one_rank_everything_that_is_sent_crosses(stage: int) -> None:
    plan = MemoryPlan(layers(64, 3))
    for precision in ("fp32", "bf16"):
        for near in (True,) if stage < 3 else (True, False, 2):
            setting = PlanSetting(stage, 4, reshard=near, precision=precision, ranks_per_host=1)
            assert crossing(plan, setting, 3, 2).total == sent(plan, setting, 3, 2)


def test_only_sums_cross_between_copies_of_a_host_each() -> None:
    plan = MemoryPlan(layers(64, 3))
    found = crossing(plan, PlanSetting(3, 32, 8, ranks_per_host=8, precision="bf16"), 2, 2)
    assert (found.reductions, found.gathers) == (0, 0)
    assert found.replicas == 2 * 2 * 3 * 4 * plan.model.numel


def test_a_copy_that_fills_no_hosts_evenly_is_an_error() -> None:
    with pytest.raises(ValueError, match="groups of 6 ranks lie across hosts of 4 ranks"):
        crossing(MemoryPlan(layers(64, 3)), PlanSetting(3, 12, 6, ranks_per_host=4))
