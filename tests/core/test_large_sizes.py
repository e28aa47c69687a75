"""Nothing ends at 2^31 elements, and a missing gradient adds nothing, not even a sign."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer
from zero.core.buckets import build
from zero.core.formulas import KeptStates, formula_bytes, formula_traffic
from zero.core.layout import Layout
from zero.core.stage import STAGES

from ..support.plain import bits
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


SIGNS: list[tuple[tuple[float | None, float | None], float | None]] = [
    ((-1.0, None), -0.0),
    ((None, -1.0), -0.0),
    ((-1.0, -1.0), -0.0),
    ((1.0, None), 0.0),
    ((-1.0, 1.0), 0.0),
    ((None, None), None),
]


@pytest.mark.law("missing gradients")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_missing_gradient_adds_nothing_not_even_a_sign(stage: int) -> None:
    """-0.0 + 0.0 is 0.0, and -0.0 + -0.0 is -0.0: only adding -0.0 preserves a negative zero."""

    def program(transport: Transport) -> None:
        for signs, expected in SIGNS:
            model = Signs()
            optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=transport, lr=0.5)
            model(signs[transport.rank]).backward()
            found = optimizer.full_grad(model.weight)
            optimizer.step()
            moved = torch.full((3,), -0.0)  # -0.0 - 0.5 * 0.0 is -0.0, and -0.0 - 0.5 * -0.0 is 0.0
            if expected is None:
                assert found is None, "a gradient that no rank has is None"
            else:
                moved.add_(torch.full((3,), expected), alpha=-0.5)
                assert found is not None
                assert torch.equal(bits(found), bits(torch.full((3,), expected)))
            assert torch.equal(bits(model.weight), bits(moved)), signs

    on_threads(2, program, timeout=5)
