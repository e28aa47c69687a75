"""`torch.amp.GradScaler`, used as its documentation shows, does the same as in the plain loop, on all ranks alike."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.narrowed import BF16, FP16, PRECISIONS
from ..support.plain import assert_same_bits
from ..support.programs import Program, Round, Step
from .test_mixed_precision import EVERY_SIZE, EVERY_STAGE, check

pytestmark = pytest.mark.contract

NUMBERS = pytest.mark.parametrize("precision", [None, "fp16"])
OVERFLOWS = (
    Step(clips=((0.1, 2.0),)),
    Step(overflow=(1, 0)),
    Step(clips=((0.1, 2.0),)),
    Step((Round(), Round(sync=False)), overflow=(0, 0), clips=((0.1, float("inf")),)),
    Step(unscale=False),
    Step(unscale=False, overflow=(0, 0)),
    Step(),
    Step((Round(sync=False), Round(sync=False))),
)


@EVERY_SIZE
@NUMBERS
@EVERY_STAGE
@pytest.mark.by_default("0-fp16-W2", "2-None-W3", "3-fp16-W2")
def test_one_element_that_is_not_finite_on_one_rank_skips_the_step_everywhere(
    stage: int, precision: str | None, world_size: int, cap: float
) -> None:
    """Parameters, states and master weights are unchanged, and the next steps are those of the plain loop."""
    for optimizer in ("adamw", "sgd momentum"):
        steps = tuple(
            Step(**{**vars(step), "overflow": step.overflow and (step.overflow[0], number % world_size)})
            for number, step in enumerate(OVERFLOWS)
        )
        chosen = PRECISIONS[precision] if precision else None
        check(Program(world_size, stage, optimizer, cap, precision=chosen, scaled=True, steps=steps))


def small(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5, dtype=dtype), nn.Linear(5, 2, dtype=dtype))
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.25 + number)
    return model


def backward(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(model(torch.ones(4, 3, dtype=model[0].weight.dtype)).float().square().mean()).backward()  # type: ignore


def scaler(scale: float = 8.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


@EVERY_STAGE
def test_a_scaler_asks_once_for_each_dtype_and_all_are_unscaled_once(stage: int) -> None:
    def mixed() -> nn.Module:
        return nn.Sequential(small(), small().to(torch.float64))

    def loss(model: Any) -> Any:
        return model[0](torch.ones(4, 3)).sum() + model[1](torch.ones(4, 3, dtype=torch.float64)).sum()

    def run(model: Any, optimizer: torch.optim.Optimizer) -> nn.Module:
        scaling = scaler()
        scaling.scale(loss(model)).backward()
        scaling.unscale_(optimizer)
        scaling.step(optimizer)
        return model

    def program(transport: Transport) -> nn.Module:
        model = mixed()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=stage, process_group=transport)
        run(model, optimizer)
        optimizer.close()
        return model

    plain = mixed()
    run(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for model in on_threads(2, program, timeout=5):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_scales_that_differ_between_ranks_are_an_error_on_every_rank(stage: int) -> None:
    def program(transport: Transport) -> str:
        model = small()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=stage, process_group=transport)
        mine = scaler(8.0 if transport.rank == 0 else 16.0)
        backward(model, mine)
        with pytest.raises(ValueError, match="loss scale") as caught:
            mine.unscale_(optimizer)
        optimizer.zero_grad()
        backward(model, scaler())
        optimizer.clip_grad_norm_(1.0)  # all ranks can continue
        return str(caught.value)

    first, second = on_threads(2, program, timeout=5)
    assert first == second
    assert re.search(r"loss scale is 8.0 on rank 0, but 16.0 on rank 1.*every rank", first)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_fp16_parameters_are_unscaled_where_a_scaler_would_refuse_them(stage: int) -> None:
    """With the scaler's own arithmetic."""

    def program(transport: Transport) -> nn.Module:
        model = small(FP16)
        optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=1e-3, stage=stage, process_group=transport)
        scaling = scaler()
        for _ in range(2):
            backward(model, scaling)
            scaling.unscale_(optimizer)
            scaling.step(optimizer)
            scaling.update()
            optimizer.zero_grad()
        optimizer.close()
        return model

    plain, scaling = small(FP16), scaler()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    for _ in range(2):
        for _ in range(2):
            backward(plain, scaling)
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(2)
        refusing = scaler()
        refusing.scale(torch.ones(()))
        with pytest.raises(ValueError, match="FP16 gradients"):
            refusing.unscale_(optimizer)
        inverse = torch.tensor(1 / scaling.get_scale())
        found = scaling._unscale_grads_(optimizer, inverse, torch.zeros(1), allow_fp16=True)
        assert not any(found.values())
        optimizer.step()
        optimizer.zero_grad()
    for model in on_threads(2, program, timeout=5):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same_bits(ours, theirs)


@EVERY_STAGE
def test_autocast_with_a_scaler_is_that_of_the_plain_loop(stage: int) -> None:
    def run(model: nn.Module, optimizer: Any, batches: list[torch.Tensor]) -> None:
        scaling = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
        for step in range(3):
            for batch in batches:
                with torch.autocast("cpu", dtype=BF16):
                    loss = model(batch + step).float().square().mean()
                scaling.scale(loss).backward()
            scaling.unscale_(optimizer)
            scaling.step(optimizer)
            scaling.update()
            optimizer.zero_grad()

    batches = [torch.full((4, 3), 0.5 + number) for number in range(4)]

    def program(transport: Transport) -> nn.Module:
        model = small()
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=transport, divisor=1)
        run(model, optimizer, batches[transport.rank :: 2])
        optimizer.close()
        return model

    plain = small()
    run(plain, torch.optim.AdamW(plain.parameters()), batches)
    for model in on_threads(2, program, timeout=5):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same_bits(ours, theirs)
