"""What is planned for states with a scale for each block of elements is what ranks hold and send, to the byte."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Loopback, Transport
from zero import MixedPrecision, ZeroOptimizer
from zero.planning.memory import MemoryPlan
from zero.planning.models.shapes import model_of
from zero.planning.setting import OptimizerStates, PlanSetting, Quantized

from ..support.blockwise import BLOCK, Blockwise

BF16 = MixedPrecision(torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class OfBlockwise(PlanSetting):
    """A setting of `Blockwise`, which keeps a number of 8 bits per element, a scale per block, and no step count."""

    @property
    def classes(self) -> tuple[OptimizerStates, ...]:
        return (OptimizerStates(1, quantized=Quantized(8, BLOCK)),)


def made() -> nn.Module:
    """Return a model with matrices of whole blocks, one of them too small to be cut, and with parameters of none."""
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.Tanh(),
        nn.Linear(128, 96),
        nn.Tanh(),
        nn.Linear(96, 64),
        nn.LayerNorm(64),
        nn.Linear(64, 33),
    )


def compare_with_plan(setting: PlanSetting, optimizer_class: type[torch.optim.Optimizer]) -> MemoryPlan:
    """Train a step of `made` on threads, and compare what each rank holds and sends with the plan."""
    first = made()
    plan, modules = MemoryPlan(model_of(first, "made")), [copy.deepcopy(first) for _ in range(setting.world_size)]

    def program(transport: Transport) -> Any:
        module = modules[transport.rank]
        optimizer = ZeroOptimizer(module, optimizer_class, lr=1e-3, process_group=transport, **setting.arguments())
        before = optimizer.traffic
        module(torch.ones(2, 64)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.describe().bytes, (optimizer.traffic - before).payload_sent

    results: list[tuple[Mapping[str, int], int]] = Loopback(setting.world_size).run(program)
    for rank, (found, _) in enumerate(results):
        here = plan.of_rank(setting, rank)
        kinds = {"parameters": here.parameters, "gradients": here.gradients, "optimizer": here.optimizer}
        assert kinds == {kind: found[kind] for kind in kinds}, rank
        assert found["scratch_peak"] <= here.scratch_peak
    assert sum(sent for _, sent in results) == plan.sent(setting)
    return plan


@pytest.mark.filterwarnings("ignore:.*is not element-wise")
@pytest.mark.parametrize(
    ("stage", "ranks", "cap", "precision"),
    [(0, 2, 25.0, None), (1, 3, 0.03, BF16), (2, 5, 25.0, None), (3, 3, 0.03, None), (3, 5, 25.0, BF16)],
)
def test_states_for_blocks_are_planned_to_the_byte(
    stage: int, ranks: int, cap: float, precision: MixedPrecision | None
) -> None:
    setting = OfBlockwise(
        stage=stage, world_size=ranks, partition="block", bucket_cap_mb=cap, mixed_precision=precision, threads=True
    )
    plan = compare_with_plan(setting, Blockwise)
    largest, each = plan.of_largest(setting), [plan.of_rank(setting, rank) for rank in range(ranks)]
    assert largest.resident == max(rank.resident for rank in each)


def test_a_state_in_8_bits_has_a_quarter_of_the_bytes_with_scales_and_a_table() -> None:
    of_8_bits = Quantized(8, 256, 1024)
    assert of_8_bits.nbytes(4096) == 4096 + 16 * 4 + 1024
    assert Quantized(4, 128, 64).nbytes(4096) == 2048 + 32 * 4 + 64
    sizes = (4095, 4096, 4097, 8192, 8192 + 256, 8192 + 128)
    assert [of_8_bits.fits(numel) for numel in sizes] == [False, True, False, True, True, False]
    assert [of_8_bits.is_cut(numel) for numel in sizes] == [False, False, False, True, True, False]
    assert OptimizerStates(2, quantized=of_8_bits).moved == 2 * 65 / 256
