"""Script modules train as in the plain loop."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..support.loops import even, network, seeded
from ..support.narrowed import PRECISIONS
from ..support.rows import rows
from ..support.sides import Side, same_as_plain

INPUTS = [inputs for inputs, _ in even(12)]


def loss_of(model: Any, number: int) -> Tensor:
    """Return the loss of a micro-batch, in the dtype in which a model computes. An evaluation comes behind it."""
    dtype = next(model.parameters()).dtype
    loss: Tensor = model(INPUTS[number].to(dtype)).float().square().mean()
    with torch.no_grad():
        model(INPUTS[number // 4].to(dtype))
    return loss


def in_part() -> Any:
    model: Any = seeded(0, network)
    model[2] = torch.jit.script(nn.Sequential(model[2], nn.LayerNorm(16), seeded(1, lambda: nn.Linear(16, 16))))
    return model


def scripted() -> Any:
    return torch.jit.script(seeded(0, network))


def traced() -> Any:
    return torch.jit.trace(seeded(0, network), INPUTS[0])


def loaded() -> Any:
    torch.jit.save(scripted(), stream := io.BytesIO())
    stream.seek(0)
    return torch.jit.load(stream)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "stage", "ranks", "precision"),
    rows(
        [(in_part, 3, 3, "bf16"), (scripted, 0, 2, ""), (traced, 1, 3, ""), (loaded, 2, 1, ""), (scripted, 3, 2, "")],
        [(traced, 3, 3, ""), (loaded, 3, 2, "bf16"), (scripted, 3, 1, "fp16"), (in_part, 1, 2, "bf16")],
    ),
)
def test_script_modules_train_as_in_the_plain_loop(make: Any, stage: int, ranks: int, precision: str) -> None:
    def build() -> nn.Module:
        """Return a model whose next calls run the graph that torch.jit has optimised, which may round otherwise."""
        model: nn.Module = make()
        for number in range(3):
            loss_of(model, number).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        return model

    def loop(side: Side) -> None:
        for step in range(3):
            side.train(lambda model, rank, step=step: loss_of(model, 4 * step + rank))  # type: ignore[misc]
            side.step()
            side.clear()

    settings = {"stage": stage, "bucket_cap_mb": 6e-4}
    precision = PRECISIONS.get(precision)
    same_as_plain(loop, build, torch.optim.AdamW, ranks, precision=precision, settings=settings, lr=0.05)
