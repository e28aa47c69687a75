"""The schedules of other systems, by which rows of published runs are planned, and their all-reduce."""

from __future__ import annotations

import pytest
import torch

from benchmarks.plan.systems import SYSTEMS, all_reduce, program_of_system
from zero.core.layout import Dtypes
from zero.planning.hardware import Cluster, presets
from zero.planning.seconds.compute import Compute, PassSeconds
from zero.planning.seconds.program import AFTER_THE_LAST, StepProgram
from zero.planning.seconds.schedule import UnitLoad
from zero.planning.seconds.simulate import simulate
from zero.planning.seconds.wires import RankGroup, Wires

MB, GB = 1e6, 1e9
NUMELS = (10_000_000, *[40_000_000] * 3)
ALL_REDUCE = {1: (422, 436, 462), 2: (302, 362, 436), 4: (45, 160, 219), 8: (42, 99.6, 193)} | {
    16: (31, 84.7, 188),
    32: (25, 64.9, 194),
    64: (13, 32.9, 177),
}
"""GB/s of busbw of 256 MB over hosts of 8 H100: 5th percentile, mean, 95th percentile. Source: Ultra-Scale Playbook
(huggingface.co/spaces/nanotron/ultrascale-playbook), "a quick focus on networks"."""


def other(name: str, cluster: Cluster, factor: int | None = None, micro_batches: int = 1) -> StepProgram:
    compute = Compute(cluster.gpu, "bfloat16")
    mixed = Dtypes(torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    units = [UnitLoad(PassSeconds(1e-3, 2e-3, 0, 1e-4, 1e-4), numel, 2) for numel in NUMELS]
    ranks = factor or cluster.ranks
    return program_of_system(
        units, Wires(cluster), SYSTEMS[name], compute, mixed, factor=ranks, micro_batches=micro_batches
    )


def test_a_unit_is_a_bucket_of_fsdp() -> None:
    found = other("fsdp1", presets().cluster("h100:8x2"), micro_batches=3)
    assert [reduction.unit for reduction in found.reductions] == [3, 2, 1, AFTER_THE_LAST]
    assert [unit.again is None for unit in found.units] == [True, False, False, False]
    assert found.reduced == 3
    assert simulate(found).sent == 15 * 2 * (3 * (130_000_000 + 120_000_000 + 130_000_000))
    assert other("fsdp2", presets().cluster("h100:8x2")).units[3].again is None


def test_replicas_of_fsdp_are_all_reduced() -> None:
    cluster = presets().cluster("h100:8x4")
    found = simulate(other("fsdp2", cluster, factor=8))
    gathers = 4 * 7 * 2 * (130_000_000 + 80_000_000)
    assert found.sent == gathers + 4 * 7 * 2 * 130_000_000 + 2 * 3 * 2 * 130_000_000
    assert found.crossed == 2 * 3 * 2 * 130_000_000


def test_ddp_reduces_buckets_that_cross_units_in_the_last_micro_batch() -> None:
    found = other("ddp", presets().cluster("h100:8x2"), micro_batches=4)
    assert found.reduced == 1
    assert simulate(found).sent == 2 * 15 * 2 * 130_000_000
    assert all(not unit.gather.sent for unit in found.units)
    assert len(found.reductions) == -(-2 * 130_000_000 // (25 << 20))


def test_sharded_states_are_gathered_after_the_step() -> None:
    cluster = presets().cluster("h100:8x2")
    for name in ("zero1", "zero2"):
        found = other(name, cluster)
        assert simulate(found).sent == pytest.approx(2 * 15 * 2 * 130_000_000)
        assert sum(update.gather.sent for update in found.updates) == pytest.approx(15 * 2 * 130_000_000)


def test_one_rank_sends_nothing() -> None:
    for name in SYSTEMS:
        found = simulate(other(name, presets().cluster("h100:1x1")))
        assert found.sent == found.parts["gather"] == found.parts["reduction"] == 0


@pytest.mark.parametrize("hosts", ALL_REDUCE)
@pytest.mark.by_default
def test_an_all_reduce_is_as_fast_as_measured(hosts: int) -> None:
    """Within 40 % of the mean up to 32 hosts. At 64 hosts the measured mean falls by half, which no tree explains:
    the estimate there is between the percentiles."""
    n = 8 * hosts
    wires = Wires(presets().cluster(f"h100:8x{hosts}"))
    seconds = all_reduce(wires, 256 * MB, RankGroup.neighbours(wires.cluster, n)).seconds
    found = 2 * (n - 1) / n * 256 * MB / seconds / GB
    low, mean, high = ALL_REDUCE[hosts]
    if hosts < 64:
        assert found == pytest.approx(mean, rel=0.4)
    else:
        assert low < found < high


def test_an_all_reduce_on_one_host_of_a100_is_as_fast_as_measured() -> None:
    """Source: MiniTrainBench, 8 A100-40, NCCL 2.28. Within 20 %."""
    wires = Wires(presets().cluster("a100-40:8"))
    assert all_reduce(wires, 2**26, RankGroup.neighbours(wires.cluster, 8)).seconds == pytest.approx(0.719e-3, rel=0.2)
