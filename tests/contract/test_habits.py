"""Other habits of training loops give the plain loop's bits: autocast, checkpoints, double backwards, averages."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero import MixedPrecision, ZeroOptimizer

from ..support.loops import even, network, seeded
from ..support.narrowed import BF16, FP16
from ..support.rows import rows
from ..support.sides import Side, same_as_plain

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


def in_part() -> Any:
    model: Any = build()
    model[2] = torch.jit.script(nn.Sequential(model[2], nn.LayerNorm(16), seeded(1, lambda: nn.Linear(16, 16))))
    return model


def scripted() -> Any:
    return torch.jit.script(build())


def traced() -> Any:
    return torch.jit.trace(build(), even(1)[0][0])


def loaded() -> Any:
    stream = io.BytesIO()
    torch.jit.save(scripted(), stream)
    stream.seek(0)
    return torch.jit.load(stream)


def after_its_first_calls(make: Callable[[], Any]) -> nn.Module:
    """Return a model whose next calls run the graph that torch.jit has optimised, which may round otherwise."""
    model: nn.Module = make()
    for number in range(3):
        simple(model, inputs(model, 0, number)).backward()
    model.zero_grad()
    return model


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "stage", "ranks", "precision"),
    rows(
        [
            (in_part, 3, 3, "fp32"),
            (in_part, 3, 2, "bf16"),
            (scripted, 0, 2, "fp32"),
            (traced, 1, 3, "fp32"),
            (loaded, 2, 1, "fp32"),
            (scripted, 3, 2, "fp32"),
        ],
        [
            (scripted, 3, 1, "fp16"),
            (traced, 3, 3, "fp32"),
            (loaded, 3, 2, "bf16"),
            (in_part, 0, 3, "bf16"),
            (in_part, 1, 1, "fp32"),
            (in_part, 2, 2, "fp32"),
        ],
    ),
)
def test_script_modules_train_as_in_the_plain_loop(make: Any, stage: int, ranks: int, precision: str) -> None:
    """Scripted, traced, or loaded, as a whole or in part. Each rank evaluates between its forward and its backward."""

    def loss_of(model: Any, step: int, number: int) -> Tensor:
        loss = simple(model, inputs(model, step, number))
        with torch.no_grad():
            model(inputs(model, step, 0))
        return loss

    def loop(side: Side) -> None:
        for step in range(STEPS):
            side.train(lambda model, rank, at=step: loss_of(model, at, rank))  # type: ignore[misc]
            side.step()
            side.clear()

    settings, mixed = {"stage": stage, "bucket_cap_mb": 6e-4}, PRECISIONS[precision]
    make = partial(after_its_first_calls, make)
    same_as_plain(loop, make, torch.optim.AdamW, ranks, precision=mixed, settings=settings, lr=0.05)


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


@pytest.mark.parametrize(("stage", "world_size"), rows([(3, 3), (0, 1)], [(1, 2), (2, 2)]))
def test_param_groups_may_be_empty_beside_named_ones_and_are_kept(stage: int, world_size: int) -> None:
    """As of transformers' groups with and without decay. torch.optim takes empty groups, but only without names."""
    built = list[nn.Module]()

    def build() -> nn.Module:
        built.append(seeded(0, network))
        return built[-1]

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        listed: Any = list(model.parameters() if model is built[0] else model.named_parameters())
        return [{"params": [], "weight_decay": 0.1}, {"params": listed, "lr": 0.01}, {"params": []}]

    def loop(side: Side) -> list[tuple[int, float]]:
        for step in range(STEPS):
            for turn in range(0, 6, world_size):
                side.train(
                    lambda model, rank, at=(step, turn): simple(model, inputs(model, at[0] % 2, at[1] + rank))  # type: ignore[misc]
                )
            side.step()
            side.clear()
            for group in side.optimizer.param_groups:
                group["lr"] /= 2
            if step == 0:
                side.optimizer.add_param_group({"params": [], "lr": 0.3})
            if isinstance(side.optimizer, ZeroOptimizer):
                side.optimizer.consolidate_state_dict(None)
            side.optimizer.load_state_dict(side.optimizer.state_dict())
        return [(len(group["params"]), group["lr"]) for group in side.optimizer.param_groups]

    settings = {"stage": stage}
    same_as_plain(loop, build, torch.optim.AdamW, world_size, groups=groups, settings=settings, divisor=6, lr=0.05)
