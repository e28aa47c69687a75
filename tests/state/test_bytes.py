"""What a rank holds and sends, in numbers of their own beside the formulas of laws: in fp32 and in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads
from zero import MixedPrecision, ZeroOptimizer

from ..support.loops import seeded
from ..support.rows import rows

WIDTH, LAYERS = 67, 5
PSI = LAYERS * (WIDTH * WIDTH + WIDTH)


def backward(model: Any) -> None:
    model(torch.ones(2, WIDTH)).float().square().sum().backward()


@pytest.mark.law("memory")
@pytest.mark.law("traffic")
@pytest.mark.parametrize(
    ("stage", "world_size", "narrow"),
    rows([(1, 3, False), (0, 2, True), (3, 4, True)], [(0, 2, False), (2, 3, True), (3, 3, False)]),
)
def test_bytes_and_traffic_of_a_step_with_no_sync_are_the_closed_form(
    stage: int, world_size: int, narrow: bool
) -> None:
    """Of an element, sharded as the stage says: 4 bytes of parameter and 8 of states; in 16 bits 2 of parameter, and 12
    of states and master weight. Contributions and parameters are sent as they are; the means of stage 0 in 32 bits."""

    def program(transport: Transport) -> tuple[int, int, int]:
        model = seeded(0, lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
        precision = MixedPrecision(torch.bfloat16) if narrow else None
        given: dict[str, Any] = {"stage": stage, "bucket_cap_mb": 0.03, "mixed_precision": precision}
        optimizer = ZeroOptimizer(model, torch.optim.Adam, process_group=transport, **given)
        for _ in range(2):
            before = optimizer.traffic
            with optimizer.no_sync():
                backward(model)
            backward(model)
            backward(model)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        spent, told = optimizer.traffic - before, optimizer.describe()
        optimizer.close()  # a description keeps the facts of its moment
        slack = (6 if narrow else 3) * 64 * (2 * LAYERS + len(told.buckets))
        parameters = (2 if narrow else 4) * PSI // (world_size if stage == 3 else 1)
        states = (12 if narrow else 8) * PSI // (world_size if stage else 1)
        assert abs(told.bytes["parameters"] - parameters) < slack
        assert abs(told.bytes["optimizer"] - states) < slack
        return spent.payload_sent, told.formula_traffic_bytes(3, 2), sum(each.bounds[-1] for each in told.buckets)

    results = on_threads(world_size, program)
    size = 2 if narrow else 4
    expected = size * 2 + 4 if stage == 0 and narrow else size * 4 if stage == 0 else size * 3
    assert results[0][1] == sum(sent for sent, _, _ in results)
    assert stage == 3 or results[0][1] == expected * (world_size - 1) * results[0][2]
