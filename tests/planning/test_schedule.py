"""A step of the library's schedule sends the bytes of the formula, and faster hardware is never slower."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero import Offload
from zero.config import PRECISIONS
from zero.core.buckets import build
from zero.planning.hardware import Cluster, presets
from zero.planning.memory import MemoryPlan
from zero.planning.model import Model, ParameterShape
from zero.planning.seconds.compute import Compute, PassSeconds
from zero.planning.seconds.program import StepProgram
from zero.planning.seconds.schedule import UnitLoad, bucket_loads, program_of
from zero.planning.seconds.simulate import simulate
from zero.planning.seconds.wires import RankGroup, Wires
from zero.planning.setting import PlanSetting

from ..support.pairs import pair_rows

SHAPES = (("embedding", 6000, 0), *((f"{n}.{name}", 3000, n) for n in (1, 2, 3) for name in "ab"), ("head", 6000, 0))
MODEL = Model(
    "three blocks",
    tuple(ParameterShape((name,), (numel,), unit) for name, numel, unit in SHAPES),
    ("the root's rest", "blocks.0", "blocks.1", "blocks.2"),
)
PLAN, HOSTS = MemoryPlan(MODEL), {"cpu:2x2": "shared", "cpu:1x4": "pairwise", "h100:4x2": "native"}
SETTINGS = {
    "cluster": (*HOSTS, "h100:4x1", "cpu:1x1"),
    "stage": (0, 1, 2, 3),
    "sharding_factor": (None, 1, 2, 4),
    "reshard_after_forward": (True, False, 2),
    "mixed_precision": (None, PRECISIONS["bf16"]),
    "micro_batches": (1, 3),
}


@functools.cache
def cluster_of(text: str) -> Cluster:
    return presets().cluster(text, nic=10 if text.startswith("cpu") else None)


def setting_of(cluster: Cluster, stage: int, **more: object) -> PlanSetting:
    """Return a setting for the ranks of a cluster, with buckets of 4 KiB."""
    device = "cuda" if cluster.gpu.family != "cpu" else "cpu"
    given = {"world_size": cluster.ranks, "ranks_per_host": cluster.per_host, "device": device, **more}
    return PlanSetting(stage=stage, bucket_cap_mb=4096 / 2**20, **given)  # type: ignore[arg-type]


def program(cluster: Cluster, setting: PlanSetting, micro_batches: int = 1) -> StepProgram:
    units = [UnitLoad(PassSeconds(1e-3, 2e-3, 0, 1e-4, 1e-4), numel, 2) for numel in MODEL.unit_numels()]
    loads = bucket_loads(PLAN.laid_out(setting).layout, [parameter.unit for parameter in MODEL.parameters])
    return program_of(units, loads, Wires(cluster), setting, Compute(cluster.gpu, "float32"), micro_batches)


def there_is(row: dict[str, object]) -> bool:
    given = {name: value for name, value in row.items() if name not in ("cluster", "micro_batches")}
    try:
        return bool(setting_of(cluster_of(str(row["cluster"])), **given))  # type: ignore[arg-type]
    except ValueError:
        return False


def test_a_step_sends_the_bytes_of_the_formula_and_one_rank_none() -> None:
    for row in pair_rows(SETTINGS, there_is):
        cluster, count = cluster_of(row.pop("cluster")), row.pop("micro_batches")
        setting = setting_of(cluster, **row)
        found = simulate(program(cluster, setting, count))
        sent = PLAN.sent(setting, count, setting.row.reduced_backwards(count))
        assert found.sent == pytest.approx(sent), (cluster, setting)
        if cluster.ranks == 1:
            assert found.sent == found.parts["gather"] == found.parts["reduction"] == found.parts["control"] == 0
        if cluster.per_host == 1:
            assert found.crossed == pytest.approx(found.sent), "between hosts of one rank all that is sent crosses"


def test_with_a_copy_on_each_host_only_sums_cross_between_hosts() -> None:
    """Each of two hosts sends 4 bytes for each element (measured on 2026-11-22), at every stage."""
    for stage in (1, 2, 3):
        cluster = cluster_of("cpu:2x2")
        setting = setting_of(cluster, stage, sharding_factor=2, offload=Offload("."))
        elements = sum(bucket.numel for bucket in PLAN.laid_out(setting).layout.buckets)
        assert simulate(program(cluster, setting)).crossed == 2 * 4 * elements


def test_units_are_gathered_again_unless_they_are_kept_or_shared() -> None:
    cluster = cluster_of("h100:4x2")
    kept = program(cluster, setting_of(cluster, 3, reshard_after_forward=False))
    assert all(unit.again is None for unit in kept.units)
    again = program(cluster, setting_of(cluster, 3)).units
    assert [unit.again is None for unit in again] == [True, False, False, True], "the rest and the last unit stay"
    near = program(cluster, setting_of(cluster, 3, reshard_after_forward=4)).units
    assert [unit.again.crossed for unit in near if unit.again] == [0, 0], "among the ranks of a host"
    host = cluster_of("cpu:2x1")
    assert not any(unit.gather.seconds for unit in program(host, setting_of(host, 3)).units), "in common memory"
    for text, algorithm in HOSTS.items():
        wires = Wires(cluster_of(text))
        ranks = wires.cluster.per_host if algorithm == "shared" else wires.cluster.ranks
        assert wires.algorithm(RankGroup.neighbours(wires.cluster, ranks)) == algorithm


def test_a_bucket_with_one_owner_takes_as_long_as_even_slices_of_its_length() -> None:
    matrices = tuple(ParameterShape((f"{unit}.{n}",), (60, 50), unit) for unit in (1, 2, 3) for n in "ab")
    specs = replace(MODEL, parameters=matrices).specs(with_units=False, whole_matrices=True)
    cluster = cluster_of("h100:8x1")
    loads = bucket_loads(build(specs, 8, 1), [p.unit for p in matrices], (2, 1))  # a matrix a bucket
    evenly = [replace(load, whole=None) for load in loads]
    units = [UnitLoad(PassSeconds(1e-3, 2e-3), numel) for numel in (0, 6000, 6000, 6000)]
    one, even, long = (
        program_of(units, each, Wires(cluster), setting_of(cluster, 1), Compute(cluster.gpu, "float32")).reductions
        for each in (loads, evenly, [replace(load, elements=8 * 3008) for load in evenly])
    )
    assert [load.whole.share for load in loads if load.whole] == [pytest.approx(1 / 6)] * 6
    for mine, other, longer in zip(one, even, long, strict=True):
        assert mine.cost.sent == other.cost.sent
        assert other.cost.seconds < mine.cost.seconds == longer.cost.seconds


@given(
    st.sampled_from(["h100:8x1", "h100:2x5", "h100:1x8", "cpu:2x2"]),
    st.integers(0, 3),
    st.sampled_from(["link", "memory_bandwidth", "nic", "ring_step", "base"]),
    st.floats(1, 100),
)
def test_faster_hardware_is_never_slower(text: str, stage: int, quicker: str, factor: float) -> None:
    before = cluster_of(text)
    if quicker == "nic":
        after = replace(before, nic=before.nic * factor)
    elif quicker in ("ring_step", "base"):
        time = getattr(before.network, quicker) / factor
        after = replace(before, network=replace(before.network, **{quicker: time}))
    else:
        after = replace(before, gpu=replace(before.gpu, **{quicker: getattr(before.gpu, quicker) * factor}))
    slow, fast = (simulate(program(each, setting_of(each, stage))) for each in (before, after))
    assert fast.seconds <= slow.seconds * (1 + 1e-9)
    assert (fast.sent, fast.crossed) == (slow.sent, slow.crossed)
