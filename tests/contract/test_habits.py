"""Other habits of training loops give the plain loop's bits: autocast, checkpoints, double backwards, averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero import MixedPrecision

from ..support.loops import even, network, seeded
from ..support.narrowed import BF16, FP16
from ..support.rows import rows
from ..support.sides import Side, same_as_plain

pytestmark = pytest.mark.contract

PRECISIONS = {"fp32": None, "bf16": MixedPrecision(BF16), "fp16": MixedPrecision(FP16)}
STEPS, MICRO_BATCHES = 3, 4
LossOf = Callable[[Any, Tensor], Tensor]


def build() -> nn.Module:
    return seeded(0, network)


def inputs(model: nn.Module, step: int, number: int) -> Tensor:
    """Return a micro-batch in the dtype in which a model computes."""
    return even(STEPS * MICRO_BATCHES)[MICRO_BATCHES * step + number][0].to(next(model.parameters()).dtype)


def simple(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(x).float().square().mean()
    return found


def autocast(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return simple(model, x)


def recomputed(model: Any, x: Tensor) -> Tensor:
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    return x.float().square().mean()


def penalised(model: Any, x: Tensor) -> Tensor:
    """Return a loss that contains the norm of a gradient, as in a WGAN's gradient penalty."""
    x = x.detach().requires_grad_()
    out = model(x).float()
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + slope.float().square().sum()


@pytest.mark.parametrize(
    ("habit", "stage", "precision"),
    rows(
        [
            (autocast, 0, "bf16"),
            (recomputed, 2, "bf16"),
            (penalised, 2, "fp32"),
        ],
        [
            (autocast, 3, "fp32"),
            (recomputed, 1, "fp32"),
            (recomputed, 3, "fp16"),
            (penalised, 0, "fp16"),
            (penalised, 3, "bf16"),
        ],
    ),
)
def test_a_loss_is_that_of_the_plain_loop(habit: LossOf, stage: int, precision: str) -> None:
    def loop(side: Side) -> None:
        for step in range(STEPS):
            for turn in range(0, MICRO_BATCHES, 2):
                side.train(lambda model, rank, at=(step, turn): habit(model, inputs(model, at[0], at[1] + rank)))  # type: ignore[misc]
            side.step()
            side.clear()

    settings = {"stage": stage, "bucket_cap_mb": 6e-4}
    mixed = PRECISIONS[precision]
    same_as_plain(loop, build, torch.optim.AdamW, precision=mixed, settings=settings, divisor=MICRO_BATCHES, lr=0.05)


@pytest.mark.parametrize(
    ("stage", "precision"), rows([(2, "bf16")], [(0, "fp16"), (1, "fp32"), (3, "fp32"), (3, "bf16")])
)
def test_averages_and_hooks_of_a_step_see_what_they_see_in_a_plain_loop(stage: int, precision: str) -> None:
    """With an exponential moving average of the weights, and the optimizer's own hooks. Only rank 0 trains; at stage 3
    units are gathered, so all ranks run the same number of forwards and backwards."""

    def averaged(side: Side) -> list[Any]:
        seen = list[Any]()
        side.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        side.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        with side.gathered():
            average = torch.optim.swa_utils.AveragedModel(
                side.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=False
            )
        for step in range(STEPS):
            side.train(
                lambda model, rank, step=step: simple(model, inputs(model, step, 0)) * (1.0 if rank == 0 else -0.0),  # type: ignore[misc]
                ranks=None if stage == 3 else [0],
            )
            side.step()
            side.clear()
            with side.gathered():
                average.update_parameters(side.model)
            seen.append([p.detach().clone() for p in average.module.parameters()])
        return seen

    settings, mixed = {"stage": stage}, PRECISIONS[precision]
    same_as_plain(averaged, build, torch.optim.AdamW, precision=mixed, settings=settings, divisor=1, lr=0.05)
