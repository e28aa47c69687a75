"""Formulas at 2^31 elements and of what is gathered at most; a missing gradient adds nothing, not even a sign."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zero.core.buckets import build
from zero.core.formulas import KeptStates, formula_bytes, formula_traffic, peak_bounds
from zero.core.layout import Layout
from zero.core.stage import STAGES, stage_of

from ..support.sides import Side, same_as_plain
from .drawn import spec

pytestmark = pytest.mark.law("sizes")

LIMIT = 2**31 - 1
SHAPES = [(3,), (7, LIMIT), (5, 2**30 + 3), (), (0, 4), (LIMIT, 3), (1,)]
"""In order of registration; the layout turns it around, so that all but the last large one lie beyond the limit."""


def large_layout(world_size: int) -> Layout:
    specs = [spec(f"p{index}", shape, index=index, device="meta") for index, shape in enumerate(SHAPES)]
    layout = build(specs, world_size, 2**50)
    assert len(layout.buckets) == 1
    assert layout.numel > 12 * LIMIT
    return layout


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_bytes_and_traffic_beyond_two_to_the_31_are_exact(stage: int) -> None:
    layout, world_size = large_layout(4), 4
    found = formula_bytes(layout, STAGES[stage], 3, lambda _: KeptStates(2 * 4))
    psi = 7 * LIMIT + 5 * (2**30 + 3) + 3 * LIMIT + 5
    assert layout.numel == psi
    padded, slack = layout.buckets[0].numel, 512 * len(layout.parameters)
    assert 4 * psi <= 4 * padded <= 4 * psi + slack
    last = 16 * -(-padded // 16 // world_size)  # the last rank has the largest shard
    owned = [4 * padded if stage < number else 4 * last for number in (3, 2, 1)]
    assert found["parameters"] == owned[0]
    assert found["gradients"] == owned[1] + (4 * last if stage == 0 else 0)
    assert found["optimizer"] == 2 * owned[2]
    passes = 1 + 1 if stage == 3 else 2  # at stage 3 the root unit is gathered for the forward only
    assert formula_traffic(layout, STAGES[stage], 1, 1) == 3 * passes * 4 * padded


class Signs(nn.Module):
    """A model whose gradient is ``sign`` * 0.0 if it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.full((3,), -0.0)), nn.Parameter(torch.ones(3))

    def forward(self, sign: float | None) -> Tensor:
        loss = self.other.sum()
        return loss if sign is None else loss + (self.weight * sign * 0.0).sum()


SIGNS = [(-1.0, None), (None, -1.0), (-1.0, -1.0), (1.0, None), (-1.0, 1.0), (None, None)]  # of two ranks


@pytest.mark.law("missing gradients")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_missing_gradient_adds_nothing_not_even_a_sign(stage: int) -> None:
    """-0.0 + 0.0 is 0.0, and -0.0 + -0.0 is -0.0: only adding -0.0 preserves a negative zero. A step shows it."""

    def loop(side: Side) -> list[Tensor]:
        found = []
        for signs in SIGNS:
            side.model.weight.data.fill_(-0.0)
            side.train(lambda model, rank, signs=signs: model(signs[rank]))  # type: ignore[misc]
            side.step()
            side.clear()
            found.append(side.model.weight.detach().clone())
        return found

    same_as_plain(loop, Signs, lr=0.5, settings={"stage": stage})


UNITS = {0: 16, 1: 32, 2: 64, 3: 128}  # elements of each unit: one parameter, whose slot needs no padding
KEPT = {None: 0, 4: 0, 2: sum(UNITS.values()) // 2, 1: 32}  # by what stays: nothing, this rank's shard, half, all


@pytest.mark.parametrize("stays", KEPT)
def test_at_most_the_root_two_units_and_what_stays_for_the_backward_are_gathered(stays: int | None) -> None:
    """Of four ranks. If all stays, every unit is there at once: the two largest, and the smallest as well."""
    layout = build([spec(f"unit {n}", (numel,), unit=n) for n, numel in UNITS.items()], 4, 10**6)
    found = peak_bounds(layout, stage_of(3), None, stays)
    assert found["gathered_peak"] == 4 * (16 + 64 + 128 + KEPT[stays])
    assert found["scratch_peak"] == 3 * 4 * 128
    exposed = peak_bounds(layout, stage_of(3), None, stays, shards_are_exposed=True)
    assert exposed["scratch_peak"] - found["scratch_peak"] == 4 * (16 + 64 + 128) // 4
    assert peak_bounds(layout, stage_of(2), None, stays)["gathered_peak"] == 0
