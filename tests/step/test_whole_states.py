"""States of any shape, dtype or subclass are saved and loaded, and training goes on at other stages and ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from collectives import Transport, solo
from zero import ZeroOptimizer

from ..support.blockwise import Blockwise
from ..support.loops import Several
from ..support.plain import assert_same_model, assert_same_states
from ..support.rows import rows
from ..support.shampoo import Shampoo
from .whole import Mixed, groups_of, made, on_ranks, train, train_plainly

pytestmark = pytest.mark.filterwarnings("ignore:.* is not element-wise")

MUON, ADAMW = (f"{cls.__module__}.{cls.__qualname__}" for cls in (torch.optim.Muon, torch.optim.AdamW))
LARGE = 64  # elements from which on `Codes` keeps another state


class Wide(nn.Sequential):
    """Two matrices that consist of whole blocks, and vectors: `Blockwise` keeps its states in two ways."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8))


class Codes(torch.optim.Optimizer):
    """Keeps the momentum of a large parameter in whole numbers of 8 bits, as 8-bit classes do, with a scale in bf16.

    Also a copy in bf16, and something without elements.
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
                    state.update(momentum=wide, scale=1.0, none=[torch.empty(0, 3)], narrow=wide.bfloat16())
                    if p.numel() >= LARGE:
                        scale = (wide.abs().amax().clamp_min(1e-12) / 127).bfloat16()
                        state.update(momentum=(wide / scale).round().to(torch.int8), scale=scale)
                    p.sub_(wide, alpha=group["lr"])


def in_bf16() -> nn.Module:
    return Mixed().bfloat16()


Row = tuple[Any, Callable[[], nn.Module], str, tuple[int, int], tuple[int, int]]
ROWS: list[Row] = rows(  # class (None: Muon and AdamW), model, by, before: ranks and stage, after
    [
        (Codes, Mixed, "checkpoint", (2, 0), (1, 1)),
        (Blockwise, Wide, "dict of the class", (1, 2), (2, 3)),
        (None, Mixed, "dict of the class", (1, 2), (2, 0)),
    ],
    [
        (Shampoo, Mixed, "dict", (3, 3), (2, 1)),
        (Shampoo, Mixed, "checkpoint", (1, 2), (3, 3)),
        (Codes, Mixed, "dict", (2, 1), (3, 2)),
        (Blockwise, Wide, "checkpoint", (2, 3), (3, 0)),
        (None, Mixed, "dict", (3, 3), (2, 1)),
        (None, in_bf16, "checkpoint", (2, 1), (3, 3)),
    ],
)


def plainly(cls: Any, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizer of each class in the plain loop, by the name of the class if there are several."""
    if cls is not None:
        return {"": cls(model.parameters())}
    muon, *adamw = ({k: v for k, v in group.items() if k != "optimizer_class"} for group in groups_of(model))
    return {MUON: torch.optim.Muon([muon]), ADAMW: torch.optim.AdamW(adamw)}


def by_class(states: dict[str, Any]) -> dict[str, Any]:
    return {"": states} if "state" in states else states


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0].__name__ if row[0] else 'groups'}-{row[2]}")
def test_training_goes_on_as_if_it_had_not_stopped(row: Row, tmp_path: Path) -> None:
    cls, build, by, before, after = row
    plain = made(build)
    stepped = plainly(cls, plain)
    loop = Several(*stepped.values())
    train_plainly(plain, loop, range(2))
    weights, theirs = plain.state_dict(), {name: each.state_dict() for name, each in stepped.items()}

    def run(model: nn.Module, transport: Transport, stage: int, steps: range, saved: Any) -> Any:
        if saved is not None:
            model.load_state_dict(weights)
        given = (groups_of(model),) if cls is None else (model, cls)
        arguments: dict[str, Any] = {"stage": stage, "process_group": transport, "bucket_cap_mb": 0.002}
        optimizer = ZeroOptimizer(*given, module=model, partition=None if cls is None else "parameter", **arguments)
        if saved is not None:
            optimizer.load_state_dict(saved.get("", saved))
        elif steps.start:
            zero.load(tmp_path / "saved", optimizer, rng=False)
        train(model, optimizer, steps)
        if not steps.start:
            zero.save(tmp_path / "saved", optimizer)
        optimizer.consolidate_state_dict(None)
        states = by_class(optimizer.state_dict())
        optimizer.close()
        return model, states

    begun = on_ranks(before[0], lambda model, group: run(model, group, before[1], range(2), None), build)
    for model, states in begun:
        assert_same_model(model, plain)
        for name, of_class in theirs.items():
            assert_same_states(states[name], of_class)
            plainly(cls, made(build))[name].load_state_dict(states[name])  # the class itself takes it
    if by == "checkpoint" and cls is not Blockwise:
        saved_states = by_class(zero.open_checkpoint(tmp_path / "saved").optimizer_state_dict())
        for name, of_class in theirs.items():
            assert_same_states(saved_states[name], of_class)
    saved = {"dict": begun[0][1], "dict of the class": theirs}.get(by)
    continued = on_ranks(after[0], lambda model, t: run(model, t, after[1], range(2, 4), saved), build)
    train_plainly(plain, loop, range(2, 4))
    for model, states in continued:
        assert_same_model(model, plain)
        for name, each in stepped.items():
            assert_same_states(states[name], each.state_dict())


# -- states that are tensor subclasses ---------------------------------------------------------------------------------


def test_ranks_never_step_pieces_of_what_is_in_blocks() -> None:
    for shape in ((64, 64), (100, 300), (4096,), (1000, 1024)):
        model = nn.ParameterList([nn.Parameter(torch.zeros(shape))])
        said = r"its state 'momentum' is a Blocks"
        with pytest.raises(ValueError, match=rf"Blockwise is not element-wise: {said}.* or use \"parameter\""):
            ZeroOptimizer(model, Blockwise, process_group=solo(), partition="element")
        with pytest.warns(UserWarning, match=rf"Blockwise is not element-wise \({said}"):
            ZeroOptimizer(model, Blockwise, process_group=solo()).close()
