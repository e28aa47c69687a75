"""An edit of a group's list of parameters is an error before anything changes; options are live in any dict."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zero import ZeroOptimizer

from ..support.errors import error_of
from ..support.sides import Side, same_as_plain
from ..support.small import blocks

Groups = list[dict[str, Any]]
X = torch.linspace(-1, 1, 8).view(2, 4)


def groups_of(model: nn.Module) -> Groups:
    named = list(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if p.dim() > 1], "lr": 0.1},
        {"params": [(name, p) for name, p in named if p.dim() == 1], "lr": 0.2},
    ]


def loss_of(model: nn.Module, scale: float) -> torch.Tensor:
    found: torch.Tensor = model(X * scale).square().sum()
    return found


def fresh() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2))


EDITS: dict[str, tuple[Callable[[Groups], object], str]] = {
    "drop": (lambda groups: groups[0]["params"].pop(1), "'1.weight' is in param group 0 no more"),
    "filter": (
        lambda groups: groups[1].update(params=[p for p in groups[1]["params"] if p is not groups[1]["params"][0]]),
        "'0.bias' is in param group 1 no more",
    ),
    "move": (
        lambda groups: groups[1]["params"].append(groups[0]["params"].pop()),
        "'2.weight' of param group 0 is now in param group 1",
    ),
    "reverse": (lambda groups: groups[0]["params"].reverse(), "'2.weight' has another place in param group 0"),
    "append": (
        lambda groups: groups[0]["params"].append(fresh()),
        r"param group 0 has a further parameter, of shape \(2,\)",
    ),
    "replace": (lambda groups: groups[0].update(params=[fresh()] * 3), "'0.weight' is in param group 0 no more"),
    "twice": (lambda groups: groups[0]["params"].append(groups[0]["params"][1]), "param group 0 has '1.weight' twice"),
    "generator": (
        lambda groups: groups[0].update(params=iter(groups[0]["params"])),
        "the parameters of param group 0 are a list_iterator, and no list",
    ),
    "no list": (lambda groups: groups[0].pop("params"), "'0.weight' is in param group 0 no more"),
    "pop": (lambda groups: groups.pop(), "'0.bias' is in param group 1 no more"),
    "add": (lambda groups: groups.append({"params": [fresh()], "lr": 1.0}), "there are 3 param groups, not 2"),
    "turn": (lambda groups: groups.reverse(), "'0.weight' of param group 0 is now in param group 1"),
}


@pytest.mark.parametrize(("stage", "edit"), [(3 - number % 4, edit) for number, edit in enumerate(EDITS)])
def test_an_edited_list_is_an_error_on_every_rank_and_nothing_changes(stage: int, edit: str) -> None:
    """One rank edits, and puts everything back. Then training goes on with the bits of the plain loop."""
    change, said = EDITS[edit]

    def edited(side: Side) -> None:
        groups = side.optimizer.param_groups
        kept = [(group, dict(group), list(group["params"])) for group in groups]
        if side.optimizer.rank == 1:
            change(groups)
        calls = (lambda: side.clip(0.1), side.step, lambda: side.optimizer.add_param_group({"params": [fresh()]}))
        for call in calls[: 2 if stage == 3 else 3]:
            error = error_of(call)
            assert re.search(rf"(rank 1|Error): {said}: the lists of param groups are fixed, unlike their", error)
        groups[:] = [group for group, _, _ in kept]
        for group, options, parameters in kept:
            group.update(options, params=parameters)

    def loop(side: Side) -> None:
        for step in range(3):
            side.train(lambda model, rank, step=step: loss_of(model, step + rank + 1))  # type: ignore[misc]
            if step and isinstance(side.optimizer, ZeroOptimizer):
                edited(side)
            side.step()
            side.clear()

    same_as_plain(loop, blocks, torch.optim.Adam, groups=groups_of, settings={"stage": stage})


def replace_groups(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Put other lists and dicts with the same parameters in place of those that are there, and change options."""
    groups = optimizer.param_groups
    match step:
        case 0:
            groups[0]["params"] = list(groups[0]["params"])
        case 1:
            groups[1] = {**groups[1], "lr": 0.05, "params": tuple(groups[1]["params"])}
        case _:
            optimizer.param_groups = [{**group, "betas": (0.5, 0.6)} for group in groups]


@pytest.mark.parametrize("stage", [1, 3])
def test_options_are_live_in_whatever_dict_and_list_of_the_same_parameters(stage: int) -> None:
    def loop(side: Side) -> None:
        for step in range(4):
            replace_groups(side.optimizer, step)
            side.train(lambda model, rank, step=step: loss_of(model, step + rank + 1))  # type: ignore[misc]
            side.step()
            side.clear()

    same_as_plain(loop, blocks, torch.optim.Adam, groups=groups_of, settings={"stage": stage})
