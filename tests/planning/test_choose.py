"""What is recommended fits and is nearly the fastest, and the smallest cluster is the smallest that fits."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from zero import Offload
from zero.planning.choose import (
    LATENCY_SHARE,
    SAME,
    enough_bytes,
    frontier,
    recommended,
    scale_curves,
    settings,
    smallest_cluster,
)
from zero.planning.hardware import presets
from zero.planning.models.shapes import from_config
from zero.planning.models.works import count_transformer
from zero.planning.plan import Planner, Training, usable_bytes
from zero.planning.seconds.wires import RankGroup, Wires

from .configs import LLAMA_3_8B, SMALL, Config


def planner(config: Config) -> Planner:
    model = from_config(config, "llama")
    works = count_transformer(model, 1, 512)
    assert works is not None
    return Planner(Training(model, works, 1, 512))


small, large = functools.cache(lambda: planner(SMALL)), functools.cache(lambda: planner(LLAMA_3_8B))


@pytest.mark.parametrize("text", ["h100:8x4", "cpu:2"])
def test_what_is_recommended_fits_and_nothing_beats_it(text: str) -> None:
    cluster = presets().cluster(text)
    found = [small().choice(setting, cluster, always=True) for setting in settings(small(), cluster)]
    assert len({choice.setting for choice in found}) == len(found)
    for choice in found:
        assert choice.step is not None
        assert sum(choice.step.parts.values()) == pytest.approx(choice.step.seconds)
        assert 0 < choice.step.utilization < 1
    fitting = [choice for choice in found if choice.peak.total <= usable_bytes(cluster)]
    near = [choice for choice in fitting if choice.seconds <= min(each.seconds for each in fitting) * (1 + SAME)]
    assert recommended(found) == min((c for c in near if not c.setting.offload), key=lambda choice: choice.peak.total)
    for one in frontier(found):
        assert not any(other.seconds <= one.seconds and other.peak.total < one.peak.total for other in fitting)


def test_the_smallest_cluster_fits_and_a_smaller_one_does_not() -> None:
    for text in ("rtx4090:4", "a100-40:8"):
        found = smallest_cluster(large(), replace(presets().cluster(text), nic=1e10))
        assert found is not None
        assert found.fits
        here = found.cluster
        smaller = here.with_hosts(here.hosts - 1) if here.hosts > 1 else replace(here, per_host=here.per_host // 2)
        tried = [large().setting(smaller, stage) for stage in range(4)]
        for setting in [*tried, replace(tried[-1], offload=Offload("cpu"))]:
            assert large().peak(setting).total > usable_bytes(smaller)
    alone = presets().cluster("rtx4090:1")
    found_none = [large().choice(setting, alone) for setting in settings(large(), alone)]
    assert (recommended(found_none), frontier(found_none)) == (None, [])


def test_recomputing_takes_time_and_saves_memory() -> None:
    cluster = presets().cluster("h100:8")
    plans = [small().recomputing(kind) for kind in ("none", "selective", "full")]
    steps = [
        (plan.step(plan.setting(cluster, 2), cluster).seconds, plan.peak(plan.setting(cluster, 2)).total)
        for plan in plans
    ]
    assert steps == sorted(steps)
    assert [memory for _, memory in steps] == sorted((memory for _, memory in steps), reverse=True)
    assert len(set(steps)) == 3


def test_the_curve_is_that_of_the_chosen_setting_and_has_a_band() -> None:
    cluster = presets().cluster("h100:8x4")
    chosen = small().setting(cluster, 3)
    curves = scale_curves(small(), cluster, chosen, presets().fabrics)
    for point in (point for curve in curves for point in curve.points):
        assert point.low <= point.tokens_per_second_of_rank <= point.high
    point = next(each for each in curves[0].points if each.ranks == 32)
    assert point.tokens_per_second_of_rank == small().step(chosen, cluster).tokens_per_second / 32


def test_from_the_named_bucket_on_latency_takes_a_tenth_of_a_ring() -> None:
    for text, factor in (("h100:8x4", 32), ("h100:8", 8), ("h100:8x4", 8)):
        cluster = presets().cluster(text)
        ring, base = (
            functools.partial(Wires(cluster).ring, group=RankGroup.neighbours(cluster, factor)),
            cluster.network.base,
        )
        share = (ring(0.0).seconds - base) / (ring(enough_bytes(cluster, factor)).seconds - base)
        assert share == pytest.approx(LATENCY_SHARE, rel=0.15)


def test_a_wrong_training_is_refused() -> None:
    training = small().training
    for name, value in (("micro", 0), ("global_batch", 0), ("checkpoint", "some")):
        with pytest.raises(ValueError, match=f"{name}.*{value}"):
            replace(training, **{name: value})
    assert replace(training, global_batch=64).micro_batches(8) == 8
    with pytest.raises(ValueError, match=r"63 sequences is not divisible by 8 ranks .*: use 56 or 64"):
        replace(training, global_batch=63).micro_batches(8)
