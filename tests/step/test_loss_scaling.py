"""`torch.amp.GradScaler`, used as its documentation shows, does the same as in the plain loop."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.narrowed import PRECISIONS
from ..support.programs import Program, Round, Step, check
from ..support.rows import rows
from ..support.sides import AsPlain, Side, same_as_plain
from ..support.small import blocks


def overflows(world_size: int) -> tuple[Step, ...]:
    """Return steps of which some have one element that is inf, on one rank."""
    last = world_size - 1
    return (
        Step(clips=((0.1, 2.0),)),
        Step(overflow=(1, last)),
        Step(clips=((0.1, 2.0),)),
        Step((Round(), Round(sync=False)), overflow=(0, last // 2), clips=((0.1, float("inf")),)),
        Step(unscale=False),
        Step(unscale=False, overflow=(0, 0)),
        Step(),
        Step((Round(sync=False), Round(sync=False))),
    )


ROWS = rows(  # ranks, stage, class, cap, precision
    [
        (3, 2, "adamw", 0.0005, None),
    ],
    [
        (2, 0, "sgd momentum", 1e-6, "fp16"),
        (2, 3, "adamw fused", 0.0005, "fp16"),
    ],
)


@pytest.mark.law("loss scale")
@pytest.mark.law("norm and overflow")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[1]}-{row[4]}-W{row[0]}")
def test_one_element_that_is_not_finite_on_one_rank_skips_the_step_everywhere(
    row: tuple[int, int, str, float, str | None],
) -> None:
    """Parameters, states and master weights are unchanged, and the next steps are those of the plain loop."""
    world_size, stage, optimizer, cap, name = row
    precision = PRECISIONS[name] if name else None
    check(Program(world_size, stage, optimizer, cap, precision=precision, scaled=True, steps=overflows(world_size)))


def scaler(scale: float = 8.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_scaler_asks_once_for_each_dtype_and_all_are_unscaled_once(stage: int) -> None:
    def loop(side: Side) -> None:
        scaling, ones = scaler(), torch.ones(4, 4)
        side.train(lambda model, _: scaling.scale(model[0](ones).sum() + model[1](ones.double()).sum()))
        if isinstance(side, AsPlain):
            side.settle()
        scaling.unscale_(side.optimizer)
        scaling.step(side.optimizer)

    same_as_plain(loop, lambda: nn.Sequential(blocks(), blocks().double()), lr=0.1, settings={"stage": stage})


def backward(model: nn.Module, scaling: torch.amp.GradScaler) -> None:
    loss: Tensor = scaling.scale(model(torch.ones(4, 4)).square().mean())
    loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.law("loss scale")
@pytest.mark.parametrize("stage", rows([1], [2, 3]))
def test_scales_that_differ_between_ranks_are_an_error_on_every_rank(stage: int) -> None:
    def program(transport: Transport) -> str:
        model = blocks()
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
