"""Script modules train as in the plain loop."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero import MixedPrecision

from ..support.loops import even, network, seeded
from ..support.narrowed import BF16, FP16
from ..support.rows import rows
from ..support.sides import Side, same_as_plain

PRECISIONS = {"fp32": None, "bf16": MixedPrecision(BF16), "fp16": MixedPrecision(FP16)}
STEPS, MICRO_BATCHES = 3, 4


def build() -> nn.Module:
    return seeded(0, network)


def inputs(model: nn.Module, step: int, number: int) -> Tensor:
    """Return a micro-batch in the dtype in which a model computes."""
    return even(STEPS * MICRO_BATCHES)[MICRO_BATCHES * step + number][0].to(next(model.parameters()).dtype)


def simple(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model(x).float().square().mean()
    return found


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
            (in_part, 3, 3, "bf16"),
            (scripted, 0, 2, "fp32"),
            (traced, 1, 3, "fp32"),
            (loaded, 2, 1, "fp32"),
            (scripted, 3, 2, "fp32"),
        ],
        [(traced, 3, 3, "fp32"), (loaded, 3, 2, "bf16"), (scripted, 3, 1, "fp16"), (in_part, 1, 2, "bf16")],
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
