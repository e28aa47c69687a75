"""Between hosts a step in rank order is planned to take at most 1.1 of one in NCCL's order.

TESTS_ROWS=all python -m pytest -s tests/planning/test_between_hosts.py      prints seconds of both, and the ratio
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch

from collectives import algorithm_for
from zero import MixedPrecision
from zero.planning.hardware import presets
from zero.planning.models.shapes import from_config
from zero.planning.models.works import count_transformer
from zero.planning.plan import Planner
from zero.planning.seconds.compute import RankGroup, Wires
from zero.planning.setting import Training

from ..support.rows import only
from .configs import llama

SEQUENCE = 4096
MODELS = {
    "7B": (llama("llama", 32, 4096, 32, 32, 11008, 32000), "none"),
    "70B": (llama("llama", 80, 8192, 64, 8, 28672, 32000), "full"),
}
CASES = [(name, hosts, wire) for name in MODELS for hosts in (4, 16, 64) for wire in ("bfloat16", "float32")]


@pytest.mark.parametrize(("name", "hosts", "wire"), only(CASES, ("7B", 16, "float32")), ids=str)
def test_auto_takes_the_fold_since_a_step_takes_at_most_a_tenth_more(name: str, hosts: int, wire: str) -> None:
    """On hosts of 8 H100, on two fabrics. The model computes in bf16, and sums are in fp32."""
    model = from_config(MODELS[name][0], name)
    works = count_transformer(model, 1, SEQUENCE, torch.bfloat16)
    planner = Planner(model, works, Training(sequence=SEQUENCE, recompute=MODELS[name][1]))
    for fabric, stage in itertools.product(("typical", "good"), range(4)):
        cluster = presets().cluster(f"h100:8x{hosts}", fabric=fabric)
        assert algorithm_for(cluster.ranks, hosts, by_nccl=True) == "fold"
        mixed = MixedPrecision(torch.bfloat16, reduce_dtype=getattr(torch, wire))
        setting, seconds = replace(planner.setting(cluster, stage), mixed_precision=mixed), dict[str, float]()
        for algorithm in ("fold", "native"):

            def between(_: Wires, group: RankGroup, algorithm: str = algorithm) -> str:
                return algorithm if group.hosts > 1 else "all_to_all"

            with mock.patch.object(Wires, "algorithm", between):
                seconds[algorithm] = planner.step(setting, cluster).seconds
        ratio = seconds["fold"] / seconds["native"]
        text = f"{seconds['fold']:.3f} / {seconds['native']:.3f} = {ratio:.3f}"
        print(f"{name:>3} {hosts:>2} {wire:>8} {fabric:>7} {stage} {text}")
        assert ratio <= 1.1
