"""Which setting is taken, the smallest cluster that fits, and how a setting goes on with more ranks."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero import Offload
from zero.planning.choose import (
    LATENCY_SHARE,
    MOST_RANKS,
    SAME,
    enough_bytes,
    frontier,
    host_counts,
    recommended,
    scale_curves,
    settings,
    sharding_factors,
    smallest_cluster,
)
from zero.planning.hardware import Cluster, presets
from zero.planning.models.shapes import from_config
from zero.planning.models.works import count_transformer
from zero.planning.plan import PlannedSetting, Planner, Training, usable_bytes
from zero.planning.seconds.compute import Compute
from zero.planning.seconds.wires import RankGroup, Wires

from .configs import LLAMA_3_8B, Config, llama

SMALL = llama("llama", 4, 256, 4, 2, 704, 1000)
CLUSTERS = ("h100:8", "h100:8x4", "a100-40:4x2", "cpu:2", "rtx4090:4")


@functools.cache
def planner(size: str = "small", checkpoint: str = "none", micro: int = 1, precision: str = "bf16") -> Planner:
    config: Config = SMALL if size == "small" else LLAMA_3_8B
    model = from_config(config, size)
    works = count_transformer(model, micro, 512, torch.bfloat16 if precision == "bf16" else torch.float32)
    assert works is not None
    return Planner(Training(model, works, micro, 512, checkpoint=checkpoint, precision=precision))


def cluster(text: str) -> Cluster:
    return presets().cluster(text)


@functools.cache
def choices(text: str, size: str = "small") -> list[PlannedSetting]:
    plan, here = planner(size), cluster(text)
    return [plan.choice(setting, here, always=True) for setting in settings(plan, here)]


@pytest.mark.parametrize("text", CLUSTERS)
def test_settings_differ_and_each_is_planned(text: str) -> None:
    found = choices(text)
    assert len({choice.setting for choice in found}) == len(found)
    for choice in found:
        step = choice.step
        assert step is not None
        assert step.seconds > 0
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
        assert 0 < step.utilization < 1
        assert min(choice.peak.states, choice.peak.activations) > 0
        assert choice.fits is (choice.peak.total <= usable_bytes(cluster(text)))


@pytest.mark.parametrize("text", CLUSTERS)
def test_no_setting_is_better_than_one_of_the_frontier_in_both(text: str) -> None:
    best = frontier(choices(text))
    assert best
    for one in best:
        others = [other for other in choices(text) if other.fits]
        assert not any(
            other.seconds <= one.seconds and other.peak.total < one.peak.total for other in others if other is not one
        )


@pytest.mark.parametrize("text", CLUSTERS)
def test_what_is_recommended_fits_and_is_nearly_the_fastest(text: str) -> None:
    best = recommended(choices(text))
    assert best is not None
    assert best.fits
    fitting = [choice for choice in choices(text) if choice.fits]
    fastest = min(choice.seconds for choice in fitting)
    near = [choice for choice in fitting if choice.seconds <= fastest * (1 + SAME)]
    on_device = [choice for choice in near if not choice.setting.offload]
    assert best.peak.total == min(choice.peak.total for choice in on_device or near)
    assert best in (on_device or near)


def test_nothing_is_recommended_where_nothing_fits() -> None:
    found = choices("rtx4090:4", "large")
    assert not any(choice.fits for choice in found)
    assert recommended(found) is None
    assert frontier(found) == []


def test_one_rank_sends_nothing() -> None:
    for choice in choices("h100:1"):
        assert choice.step is not None
        assert choice.step.sent == 0
        assert choice.step.left_host == 0


@given(st.sampled_from([1, 2, 3, 4]), st.sampled_from(["none", "selective", "full"]))
def test_memory_grows_with_the_batch_and_falls_with_recomputing(micro: int, checkpoint: str) -> None:
    here = cluster("h100:8")
    setting = planner().setting(here, 2)
    total = planner(checkpoint=checkpoint, micro=micro).peak(setting).total
    assert total < planner(checkpoint=checkpoint, micro=micro + 1).peak(setting).total
    assert planner(micro=micro).recomputing(checkpoint).peak(setting).total == total
    order = ["none", "selective", "full"]
    for more in order[order.index(checkpoint) + 1 :]:
        assert planner(micro=micro).recomputing(more).peak(setting).total < total


def test_recomputing_takes_time() -> None:
    here = cluster("h100:8")
    setting = planner().setting(here, 2)
    seconds = [planner().recomputing(kind).step(setting, here).seconds for kind in ("none", "selective", "full")]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1] < seconds[2]


@pytest.mark.parametrize("text", ["h100:8", "rtx4090:4", "a100-40:8"])
def test_the_smallest_cluster_fits_and_a_smaller_one_does_not(text: str) -> None:
    plan = planner("large")
    here = replace(cluster(text), nic=cluster(text).nic or 1e10)
    found = smallest_cluster(plan, here)
    assert found is not None
    assert found.peak.total <= found.usable
    smaller = found.cluster.with_hosts(found.cluster.hosts - 1) if found.cluster.hosts > 1 else None
    if smaller is None and found.cluster.per_host > 1:
        smaller = replace(found.cluster, per_host=found.cluster.per_host // 2)
    assert smaller is not None
    tried = [plan.setting(smaller, stage) for stage in range(4)]
    for setting in [*tried, replace(tried[-1], offload=Offload("cpu"))]:
        assert plan.peak(setting).total > usable_bytes(smaller)


@pytest.mark.parametrize(("text", "factor"), [("h100:8x4", 32), ("h100:8x16", 128), ("h100:8", 8), ("h100:8x4", 8)])
def test_from_the_named_bucket_on_latency_takes_a_tenth_of_a_ring(text: str, factor: int) -> None:
    here = cluster(text)
    wires, group = Wires(here), RankGroup.neighbours(here, factor)
    nbytes = enough_bytes(here, factor)
    base = here.network.base
    latency = wires.ring(0.0, group).seconds - base
    assert latency / (wires.ring(nbytes, group).seconds - base) == pytest.approx(LATENCY_SHARE, rel=0.15)


def test_the_curve_has_a_band_and_ends_at_most_ranks() -> None:
    here = cluster("h100:8x4")
    fabrics = presets().fabrics
    chosen = planner().setting(here, 3)
    curves = scale_curves(planner(), here, chosen, fabrics)
    assert len(curves) >= 3
    for curve in curves:
        ranks = [point.ranks for point in curve.points]
        assert ranks == sorted(set(ranks))
        assert ranks[-1] <= MOST_RANKS
        for point in curve.points:
            assert point.low <= point.tokens_per_second_of_rank <= point.high
    assert 32 in [point.ranks for point in curves[0].points]


@pytest.mark.parametrize("changes", [{}, {"offload": Offload("cpu")}, {"reshard_after_forward": False}])
def test_the_curve_is_that_of_the_chosen_setting(changes: dict[str, Any]) -> None:
    here = cluster("h100:8x4")
    chosen = replace(planner().setting(here, 3, planner().training.unit_cap_mb("cuda")), **changes)
    point = next(each for each in scale_curves(planner(), here, chosen, {})[0].points if each.ranks == 32)
    found = planner().choice(chosen, here)
    assert found.step is not None
    assert point.tokens_per_second_of_rank == found.step.tokens_per_second / 32
    assert point.fits is found.fits


def test_factors_divide_hosts_or_are_whole_hosts() -> None:
    assert sharding_factors(cluster("h100:8x4")) == [2, 4, 8, 16, 32]
    assert sharding_factors(cluster("h100:8x3")) == [2, 4, 8, 24]
    assert sharding_factors(cluster("h100:1")) == [1]


def test_hosts_of_the_curve() -> None:
    assert host_counts(cluster("h100:8x3")) == [1, 3, 4, 16, 64, 256, 1250]
    assert host_counts(replace(cluster("h100:8"), nic=0.0)) == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro": 0}, "micro is 0: it must be at least 1"),
        ({"global_batch": 0}, "global_batch is 0: it must be at least 1"),
        ({"checkpoint": "some"}, "some"),
    ],
)
def test_a_wrong_training_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(planner().training, **arguments)


def test_a_batch_that_ranks_do_not_divide_is_refused_with_the_nearest() -> None:
    training = replace(planner().training, global_batch=63)
    with pytest.raises(ValueError, match=r"63 sequences is not divisible by 8 ranks .*: use 56 or 64"):
        training.micro_batches(8)
    assert replace(training, global_batch=64).micro_batches(8) == 8


def test_a_recompute_stops_before_the_last_product_of_a_block() -> None:
    """Of a block's forward, a backward needs no output of its last product: 2 f h operations a token."""
    training = planner().training
    numbers, work = training.model.transformer, training.works[1]
    assert numbers is not None
    left = work.matmul_flops - training.repeated(work).matmul_flops
    assert left == 2 * numbers.ffn * numbers.hidden * training.tokens
    assert replace(training.repeated(work), matmul_flops=work.matmul_flops) == work
    here, recomputing = presets().cluster("h100:8"), planner().recomputing("full")
    compute, width = Compute(here.gpu, str(training.param_dtype).removeprefix("torch.")), training.model.hidden
    again = sum(compute.forward(training.repeated(each), width) for each in training.works[1:])
    found = recomputing.step(recomputing.setting(here, 2), here, micro_batches=1)
    assert found.parts["recompute"] == pytest.approx(again)
