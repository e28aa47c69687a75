"""The bytes that a rank holds and sends are those of the formulas, in fp32 and in 16 bits, of all ranks or some."""

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
NARROW = MixedPrecision(torch.bfloat16)
NARROW_SUMS = MixedPrecision(torch.bfloat16, accumulate_dtype=torch.bfloat16)


def locked_wide() -> nn.Module:
    return seeded(0, lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))


def backward(model: Any) -> None:
    model(torch.ones(2, WIDTH)).float().square().sum().backward()


@pytest.mark.law("memory")
@pytest.mark.parametrize(
    ("stage", "world_size", "cap", "precision", "more"),
    rows(
        [
            (1, 4, 0.04, None, {}),
            (2, 1, 0.04, None, {}),
            (3, 4, 0.01, NARROW, {"sharding_factor": 2}),
            (3, 1, 0.03, None, {"reshard_after_forward": False}),
        ],
        [
            (0, 4, 25.0, NARROW, {}),
            (1, 2, 0.01, NARROW, {"sharding_factor": 1}),
            (2, 2, 0.04, NARROW_SUMS, {}),
            (3, 4, 0.03, None, {"sharding_factor": 2, "reshard_after_forward": False}),
        ],
    ),
)
def test_bytes_of_a_rank_are_those_of_the_formulas(
    stage: int, world_size: int, cap: float, precision: MixedPrecision | None, more: dict[str, Any]
) -> None:
    """Of an element, sharded as the stage says: 4 bytes of parameter and of gradient and 8 of states; in 16 bits 2 of
    parameter, 4 of gradient (2 if it is added up so), and 12 of states and master weight."""
    narrow, size = precision is not None, 2 if precision is NARROW_SUMS else 4
    shared = more.get("sharding_factor", world_size)
    share = PSI // shared

    def program(transport: Transport) -> None:
        model = locked_wide()
        own = {"stage": stage, "process_group": transport, "bucket_cap_mb": cap, "mixed_precision": precision}
        optimizer = ZeroOptimizer(model, torch.optim.Adam, **own, **more)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            gradients = optimizer.describe().bytes["gradients"]
            optimizer.step()
        described = optimizer.describe()
        assert (described.sharding_factor, described.world_size) == (shared, world_size)
        assert (f"sharding factor {shared}" in str(described)) is (shared < world_size)
        at_stage_1 = 2 * PSI + 4 * share if narrow else 4 * PSI
        of_gradients = {0: size * PSI + size * share, 1: at_stage_1}.get(stage, size * share)
        formula = {
            "parameters": (2 if narrow else 4) * (PSI if stage < 3 else share),
            "gradients": of_gradients,
            "optimizer": (12 if narrow else 8) * (PSI if stage == 0 else share),
        }
        measured = {**described.bytes, "gradients": max(gradients, described.bytes["gradients"])}
        for kind, nbytes in formula.items():
            assert described.formula_bytes[kind] == measured[kind], kind
            slack = (6 if narrow else 3) * 64 * (2 * LAYERS + len(described.buckets))
            assert nbytes - slack <= measured[kind] <= nbytes + slack, (kind, nbytes, measured[kind])
        assert shared < world_size or measured["scratch_peak"] <= 3 * max(4 * b.bounds[-1] for b in described.buckets)
        if stage == 3:
            assert measured["gathered_peak"] <= described.formula_bytes["gathered_peak"] + 4096
            assert shared == 1 or "reshard_after_forward" not in more or measured["gathered_peak"] >= 4 * PSI

    on_threads(world_size, program)


@pytest.mark.law("traffic")
@pytest.mark.parametrize(
    ("stage", "world_size", "backwards", "synchronised", "precision", "more"),
    rows(
        [
            pytest.param(1, 3, 1, 1, None, {}, id="1-3-1-1-None"),
            (2, 1, 3, 1, None, {}),
            (3, 4, 2, 2, NARROW, {"sharding_factor": 2}),
        ],
        [
            (0, 2, 3, 3, None, {}),
            (0, 2, 1, 1, NARROW, {}),
            (2, 3, 3, 1, NARROW, {}),
            (3, 3, 3, 3, NARROW, {}),
            (2, 4, 2, 2, None, {"sharding_factor": 2}),
            (3, 4, 2, 2, None, {"reshard_after_forward": 2}),
        ],
    ),
)
def test_traffic_is_the_closed_form(
    stage: int,
    world_size: int,
    backwards: int,
    synchronised: int,
    precision: MixedPrecision | None,
    more: dict[str, Any],
) -> None:
    """In 16 bits contributions and parameters are sent so; at stage 0 the means, which are final, once in 32 bits."""

    def program(transport: Transport) -> tuple[int, int, int]:
        model = locked_wide()
        model[2].requires_grad_(False)  # type: ignore[index]
        arguments: dict[str, Any] = {"stage": stage, "process_group": transport, "bucket_cap_mb": 0.03, **more}
        optimizer = ZeroOptimizer(model, torch.optim.Adam, mixed_precision=precision, **arguments)
        for _ in range(2):
            before = optimizer.traffic
            for index in range(backwards):
                if index < backwards - synchronised:
                    with optimizer.no_sync():
                        backward(model)
                else:
                    backward(model)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        spent = optimizer.traffic - before
        described = optimizer.describe()
        optimizer.close()  # a description keeps the facts of its moment
        padded = sum(b.bounds[-1] for b in described.buckets if b.trainable)
        return spent.payload_sent, described.formula_traffic_bytes(backwards, synchronised), padded

    results = on_threads(world_size, program)
    size = 4 if precision is None else 2
    of_an_element = {0: (size + 4) * synchronised if precision is None else size * synchronised + 4}
    expected = of_an_element.get(stage, size * (synchronised + 1)) * (world_size - 1) * results[0][2]
    assert results[0][1] == sum(sent for sent, _, _ in results)
    if stage < 3 and not more:
        assert results[0][1] == expected
