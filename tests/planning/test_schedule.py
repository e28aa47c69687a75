"""The schedule of this library, over layouts of the library: order, bytes, settings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero import Offload
from zero.config import PRECISIONS
from zero.core.buckets import build
from zero.core.cuts import EvenCuts
from zero.core.formulas import formula_traffic
from zero.core.layout import Dtypes, Layout
from zero.core.stage import check_reshard, stage_of, units_share_buckets
from zero.planning.hardware import Cluster, presets
from zero.planning.model import Model, ParameterShape
from zero.planning.seconds.compute import Compute, PassSeconds, values
from zero.planning.seconds.program import AFTER_THE_LAST, StepProgram
from zero.planning.seconds.schedule import BucketLoad, UnitLoad, bucket_loads, program_of
from zero.planning.seconds.simulate import simulate
from zero.planning.seconds.wires import RankGroup, Wires
from zero.planning.setting import PlanSetting

BF16, FP32 = torch.bfloat16, torch.float32
PLAIN, MIXED = Dtypes.all(FP32), Dtypes(BF16, BF16, FP32, FP32)


def shape(name: str, numel: int, unit: int) -> ParameterShape:
    return ParameterShape((name,), (numel,), unit)


MODEL = Model(
    "three blocks",
    (
        shape("embedding", 6000, 0),
        *(shape(f"{unit}.{name}", n, unit) for unit in (1, 2, 3) for name, n in (("a", 3000), ("b", 1000))),
        shape("norm", 100, 0),
        shape("head", 6000, 0),
    ),
    ("the root's rest", "blocks.0", "blocks.1", "blocks.2"),
)
UNITS = [parameter.unit for parameter in MODEL.parameters]


def layout_of(ranks: int, bucket_bytes: int, dtypes: Dtypes = PLAIN, *, with_units: bool) -> Layout:
    specs = MODEL.specs(dtypes, with_units=with_units)
    return build(specs, ranks, bucket_bytes)


def units_of(numels: Sequence[int]) -> list[UnitLoad]:
    return [UnitLoad(PassSeconds(1e-3, 2e-3, 0, 1e-4, 1e-4), numel, 2) for numel in numels]


def setting_of(cluster: Cluster, stage: int, factor: int | None = None, **more: Any) -> PlanSetting:
    """Return a setting for the ranks of a cluster."""
    device = "cuda" if cluster.gpu.family != "cpu" else "cpu"
    return PlanSetting(
        stage=stage,
        world_size=cluster.ranks,
        sharding_factor=factor,
        device=device,
        ranks_per_host=cluster.per_host,
        **more,
    )


def program(
    cluster: Cluster, setting: PlanSetting | int, micro_batches: int = 1, bucket_bytes: int = 4096, **more: Any
) -> StepProgram:
    """Return a program of a setting; a number is the stage of `setting_of`, which takes ``more``."""
    if isinstance(setting, int):
        setting = setting_of(cluster, setting, **more)
    layout = layout_of(setting.factor, bucket_bytes, setting.dtypes, with_units=setting.has_units)
    loads, compute = bucket_loads(layout, UNITS), Compute(cluster.gpu, "float32")
    return program_of(units_of(MODEL.unit_numels()), loads, Wires(cluster), setting, compute, micro_batches)


def clusters() -> list[Cluster]:
    hardware = presets()
    return [hardware.cluster("h100:4x1"), hardware.cluster("h100:4x2"), hardware.cluster("cpu:4x2", nic=10)]


def test_a_bucket_with_one_owner_takes_as_long_as_even_slices_of_its_length_and_sends_no_more() -> None:
    matrices = tuple(ParameterShape((f"{unit}.{n}",), (60, 50), unit) for unit in (1, 2, 3) for n in "ab")
    specs = replace(MODEL, parameters=matrices).specs(with_units=False, whole_matrices=True)
    cluster, compute = presets().cluster("h100:8x1"), Compute(presets().cluster("h100:8x1").gpu, "float32")
    layout = build(specs, 8, 1)  # a matrix a bucket
    loads = bucket_loads(layout, [p.unit for p in matrices], (2, 1))
    units = units_of([0, 6000, 6000, 6000])
    one = program_of(units, loads, Wires(cluster), setting_of(cluster, 1), compute)
    even = program_of(
        units, [replace(load, whole=None) for load in loads], Wires(cluster), setting_of(cluster, 1), compute
    )
    long = program_of(
        units,
        [replace(load, whole=None, elements=8 * 3008) for load in loads],
        Wires(cluster),
        setting_of(cluster, 1),
        compute,
    )
    assert [load.whole.share for load in loads if load.whole] == [pytest.approx(1 / 6)] * 6
    for mine, other, longer in zip(one.reductions, even.reductions, long.reductions, strict=True):
        assert mine.cost.sent == other.cost.sent
        assert other.cost.seconds < mine.cost.seconds == longer.cost.seconds
    work = 60 * 50 * 50
    seconds = compute.update(3008 / 6, PLAIN, 1) + compute.orthogonalization(work / 6)
    assert [update.update for update in one.updates] == [pytest.approx(seconds)] * 6
    plainly = program_of(units, loads, Wires(cluster), setting_of(cluster, 0), compute)
    assert plainly.updates[0].update == pytest.approx(6 * seconds)


# -- order -------------------------------------------------------------------------------------------------------------


def test_buckets_are_reduced_in_layout_order_when_their_last_gradient_is_ready() -> None:
    """Of 16 KiB each, which a block fills: first the head, then the norm, the blocks in reverse, and the embedding."""
    layout = layout_of(1, 1 << 14, with_units=True)
    loads = bucket_loads(layout, UNITS)
    names = [[layout.parameters[slot.parameter].name for slot in bucket.slots] for bucket in layout.buckets]
    blocks = [[["3.b", "3.a"]], [["2.b", "2.a"]], [["1.b", "1.a"]]]
    assert names == [["head"], ["norm"], *itertools.chain(*blocks), ["embedding"]]
    assert [(load.unit, load.home) for load in loads] == [(0, 0), (0, 0), (3, 3), (2, 2), (1, 1), (AFTER_THE_LAST, 0)]
    assert [load.ready for load in loads] == pytest.approx([1 - 100 / 6100, 1, 1, 1, 1, 1])
    found = program(presets().cluster("h100:2x1"), 3, bucket_bytes=1 << 14)
    assert [reduction.unit for reduction in found.reductions] == [load.unit for load in loads]


def test_a_bucket_that_crosses_units_is_ready_with_its_first_parameter() -> None:
    loads = bucket_loads(layout_of(1, 1 << 30, with_units=False), UNITS)
    assert [(load.unit, load.ready) for load in loads] == [(AFTER_THE_LAST, 1.0)]
    small = bucket_loads(layout_of(1, 8_000, with_units=False), UNITS)
    assert (small[1].unit, small[1].ready) == (3, pytest.approx(1 - 3000 / 4000)), "norm and 3.b, before 3.a"


def test_as_many_reductions_are_in_flight_as_the_library_has() -> None:
    cluster = presets().cluster("h100:4x2")
    assert [program(cluster, stage).in_flight for stage in (0, 1, 2, 3)] == [2, 2, 1, 1]
    assert program(cluster, 1).gathers_in_flight == 2


@given(st.integers(1, 10_000), st.integers(1, 64), st.sampled_from([16, 32]))
def test_the_last_rank_owns_the_largest_share_of_a_bucket(chunks: int, ranks: int, align: int) -> None:
    cuts = EvenCuts(chunks * align, ranks, align)
    largest = max(high - low for low, high in map(cuts.owned, range(ranks)))
    low, high = cuts.owned(ranks - 1)
    assert high - low == largest


def test_units_in_common_memory_are_not_gathered_also_if_states_are_on_disk() -> None:
    cluster = presets().cluster("cpu:2x1")
    for offload in (None, Offload(".")):
        assert not any(unit.gather.seconds for unit in program(cluster, 3, offload=offload).units)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [PLAIN, MIXED], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.by_default
def test_a_step_sends_the_bytes_of_the_formula(stage: int, dtypes: Dtypes) -> None:
    """For every sharding factor, resharding, and number of micro-batches and reductions."""
    for cluster in clusters():
        ranks = cluster.ranks
        factors: list[int | None] = [None] if stage == 0 else [f for f in range(1, ranks + 1) if ranks % f == 0]
        for factor, count in itertools.product(factors, [1, 3]):
            near = factor or ranks
            reshards = [True, False, *(k for k in range(2, near) if near % k == 0)] if stage == 3 else [True]
            layout = layout_of(near, 4096, dtypes, with_units=stage == 3)
            in_common = Wires(cluster).algorithm(RankGroup.neighbours(cluster, near)) == "shared"
            for reshard in reshards:
                precision = None if dtypes is PLAIN else PRECISIONS["bf16"]
                setting = setting_of(
                    cluster,
                    stage,
                    factor,
                    reshard_after_forward=reshard,
                    offload=Offload("."),
                    mixed_precision=precision,
                )
                found = simulate(program(cluster, setting, count))
                group = check_reshard(reshard, near, stage_of(stage))
                sent = formula_traffic(
                    layout,
                    stage_of(stage),
                    count,
                    stage_of(stage).reduced_backwards(count),
                    units_need_gather=not units_share_buckets(near, in_common=in_common),
                    means_are_shown=dtypes is PLAIN,
                    replicas=ranks // near,
                    reshard_group_size=group,
                )
                assert found.sent == pytest.approx(sent), (cluster, setting)


def test_units_that_lie_in_common_memory_are_not_gathered() -> None:
    for name, are_gathered in (("cpu:2x1", False), ("cpu:2x2", True)):
        units = program(presets().cluster(name, nic=10), 3).units
        assert any(unit.gather.sent for unit in units) is are_gathered


def test_between_hosts_of_one_rank_everything_that_is_sent_crosses() -> None:
    cluster = presets().cluster("cpu:1x4", nic=10)
    for stage in (0, 1, 2, 3):
        found = simulate(program(cluster, stage, micro_batches=2))
        assert found.crossed == pytest.approx(found.sent)
        assert found.sent


def test_with_a_copy_on_each_host_only_sums_cross_between_hosts() -> None:
    """Each of two hosts sends 4 bytes for each element (measured on 2026-11-22), at every stage."""
    cluster = presets().cluster("cpu:2x2", nic=10)
    for stage in (1, 2, 3):
        layout = layout_of(2, 4096, with_units=stage == 3)
        found = simulate(program(cluster, stage, factor=2))
        assert found.crossed == 2 * 4 * sum(bucket.numel for bucket in layout.buckets)


@pytest.mark.parametrize("name", ["h100:1x1", "cpu:1x1"])
@pytest.mark.by_default
def test_one_rank_sends_nothing_and_waits_for_nothing(name: str) -> None:
    cluster = presets().cluster(name)
    for stage in (0, 1, 2, 3):
        found = simulate(program(cluster, stage, micro_batches=2))
        assert (found.sent, found.crossed) == (0, 0)
        waited = {part: found.parts[part] for part in ("gather", "reduction", "slowdown", "control", "jitter")}
        assert not any(waited.values()), waited


# -- settings ----------------------------------------------------------------------------------------------------------


def test_kept_parameters_are_never_gathered_in_the_backward() -> None:
    for cluster in clusters():
        kept = program(cluster, 3, reshard_after_forward=False)
        assert kept.kept
        assert all(unit.again is None for unit in kept.units)
        again = program(cluster, 3).units
        assert [unit.again is None for unit in again] == [True, False, False, True], "the rest and the last unit stay"


def test_a_backward_that_gathers_among_the_ranks_of_a_host_does_not_use_the_network() -> None:
    units = program(presets().cluster("h100:4x2"), 3, reshard_after_forward=4).units
    crossed = [(unit.gather.crossed > 0, unit.again.crossed) for unit in units if unit.again is not None]
    assert crossed == [(True, 0)] * 2


def test_stages_with_whole_gradients_reduce_once() -> None:
    cluster = presets().cluster("h100:4x2")
    assert [program(cluster, stage, micro_batches=4).reduced for stage in (0, 1, 2, 3)] == [1, 1, 4, 4]


def test_ranks_that_share_cores_compute_more_slowly() -> None:
    alone, crowded = (program(presets().cluster(f"cpu:{n}x1"), 2) for n in (2, 4))
    assert crowded.units[1].passes.forward == 2 * alone.units[1].passes.forward


def test_a_bucket_of_a_unit_is_faster_than_small_ones_where_ranks_are_many() -> None:
    """A ring over 1,024 ranks waits 30 us for each of them, whatever the bucket."""
    cluster = presets().cluster("h100:8x128")
    whole = [BucketLoad(1 << 27, MIXED, unit or AFTER_THE_LAST, 1.0, unit) for unit in (3, 2, 1, 0)]
    parts = [replace(load, elements=load.elements // 8) for load in whole for _ in range(8)]
    units, compute = units_of([1 << 27] * 4), Compute(cluster.gpu, "bfloat16")
    setting = setting_of(cluster, 2)
    slow, fast = (
        simulate(program_of(units, loads, Wires(cluster), setting, compute)).seconds for loads in (parts, whole)
    )
    assert slow > 2 * fast


def test_sums_of_a_7b_model_are_under_way_between_replicas_on_every_hop() -> None:
    """128 replicas of 8 GPUs with 200 Gb/s each, 15 us a message: 540 buckets of 25 MB would take 38 s, one after the
    other. With one on every hop they take the 0.27 s in which a link sends all sums both ways, behind the first."""
    cluster = presets().cluster("a100-80:8x128", nic=1600)
    network = replace(cluster.network, ring_step=15e-6, nic_efficiency=1.0)
    loads = [BucketLoad(12_500_000, MIXED, AFTER_THE_LAST, 1.0)] * 540
    compute = Compute(cluster.gpu, "bfloat16", values(jitter=0.0))
    wires = Wires(replace(cluster, network=network))
    many = program_of(units_of([0, 0]), loads, wires, setting_of(cluster, 2, 8), compute)
    assert many.in_flight == 1 + 2 * 127
    assert 0.27 < simulate(many).parts["reduction"] < 0.4
    assert simulate(replace(many, in_flight=1)).parts["reduction"] == pytest.approx(38, rel=0.03)
