"""States of any shape, dtype or subclass are saved and loaded, and training goes on at other stages and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from collectives import Transport, solo
from zero import ZeroOptimizer

from ..support.blockwise import Blockwise
from ..support.plain import assert_same_model, assert_same_states
from ..support.shampoo import Shampoo
from .whole import Mixed, made, on_ranks, train, train_plainly

pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore:.* is not element-wise")]

LARGE = 64  # elements from which on `Codes` keeps another state


class Wide(nn.Sequential):
    """Two matrices that consist of whole blocks, and vectors: `Blockwise` keeps its states in two ways."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8))


class Codes(torch.optim.Optimizer):
    """Keeps the momentum of a large parameter in whole numbers of 8 bits, as 8-bit classes do, with a scale in bf16.

    Also something without elements.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    wide = p.grad + (0.9 * state["momentum"].float() * state["scale"] if state else 0)
                    state.update(momentum=wide, scale=1.0, none=[torch.empty(0, 3)])
                    if p.numel() >= LARGE:
                        scale = (wide.abs().amax().clamp_min(1e-12) / 127).bfloat16()
                        state.update(momentum=(wide / scale).round().to(torch.int8), scale=scale)
                    p.sub_(wide, alpha=group["lr"])


ROWS: list[tuple[Any, type[nn.Module], str, tuple[int, int], tuple[int, int]]] = [
    # class, model, by, before: ranks and stage, after
    (Shampoo, Mixed, "dict", (3, 3), (2, 1)),
    (Shampoo, Mixed, "checkpoint", (1, 2), (3, 3)),
    (Codes, Mixed, "dict", (2, 1), (3, 2)),
    (Codes, Mixed, "checkpoint", (2, 0), (1, 1)),
    (Blockwise, Wide, "checkpoint", (2, 3), (3, 0)),
    (Blockwise, Wide, "dict of the class", (1, 2), (2, 3)),
]


def plainly(cls: Any, model_class: type[nn.Module], steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = made(model_class)
    optimizer = cls(model.parameters())
    train_plainly(model, optimizer, range(steps))
    return model, optimizer


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0].__name__}-{row[2]}")
def test_training_goes_on_as_if_it_had_not_stopped(row: Any, tmp_path: Path) -> None:
    cls, model_class, by, before, after = row
    (plain, stepped), (whole, expected) = (plainly(cls, model_class, steps) for steps in (2, 4))

    def run(model: nn.Module, transport: Transport, stage: int, steps: range, saved: Any) -> Any:
        if saved is not None:
            model.load_state_dict(saved[0])
        arguments: dict[str, Any] = {"stage": stage, "process_group": transport, "bucket_cap_mb": 0.01}
        optimizer = ZeroOptimizer(model, cls, partition="parameter", **arguments)
        if saved is not None:
            optimizer.load_state_dict(saved[1])
        elif steps.start:
            zero.load(tmp_path / "saved", optimizer, rng=False)
        train(model, optimizer, steps)
        if not steps.start:
            zero.save(tmp_path / "saved", optimizer)
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        optimizer.close()
        return model, states

    begun = on_ranks(before[0], lambda model, group: run(model, group, before[1], range(2), None), plain)
    for model, states in begun:
        assert_same_model(model, plain)
        assert_same_states(states, stepped.state_dict())
    cls(made(model_class).parameters()).load_state_dict(begun[0][1])  # the class itself takes it
    saved = {
        "dict": (begun[0][0].state_dict(), begun[0][1]),
        "dict of the class": (plain.state_dict(), stepped.state_dict()),
    }.get(by)
    if by == "checkpoint" and cls is Shampoo:
        assert_same_states(zero.open_checkpoint(tmp_path / "saved").optimizer_state_dict(), stepped.state_dict())
    for model, states in on_ranks(after[0], lambda model, t: run(model, t, after[1], range(2, 4), saved), plain):
        assert_same_model(model, whole)
        assert_same_states(states, expected.state_dict())


# -- states that are tensor subclasses ---------------------------------------------------------------------------------


def test_ranks_never_step_pieces_of_what_is_in_blocks() -> None:
    for shape in ((64, 64), (100, 300), (4096,), (1000, 1024)):
        model = nn.ParameterList([nn.Parameter(torch.zeros(shape))])
        said = r"its state 'momentum' is a Blocks"
        with pytest.raises(ValueError, match=rf"Blockwise is not element-wise: {said}.* or use \"parameter\""):
            ZeroOptimizer(model, Blockwise, process_group=solo(), partition="element")
        with pytest.warns(UserWarning, match=rf"Blockwise is not element-wise \({said}"):
            ZeroOptimizer(model, Blockwise, process_group=solo()).close()
