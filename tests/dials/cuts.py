"""The class, and where parameters may be cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ..support.machine import program as p
from ..support.machine.classes import BY_PARAMETER, CLASSES
from ..support.two_modes import Centred
from .record import Dial, Differs, Moment, Refused

USE = 'leave out partition=, or use "par'


class OddState(torch.optim.SGD):
    """A class that keeps a state of another shape than the parameter's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = torch.zeros(2, 2)


def matrix() -> nn.Module:
    return nn.Linear(8, 8, bias=False)


def stack(*rows: int) -> Any:
    """Return a param group of a matrix that is a stack of others."""
    return [{"params": [("qkv", nn.Parameter(torch.ones(32, 16)))], "blocks": list(rows)}]


def by_element(cls: type[torch.optim.Optimizer], words: str) -> Refused:
    return Refused({"optimizer_class": cls, "partition": "element"}, words, matrix)


TWO_GROUPS = {"shares": (0, 1), "options": ((), (("lr", 0.03), ("weight_decay", 0.1)))}
EDITS = {  # of the list of param groups, by one rank
    "groups[0]['params'].pop(1)": "'parts.0.inner' is in param group 0 no more",
    "groups[1].update(params=groups[1]['params'][1:])": "'first.bias' is in param group 1 no more",
    "groups[1]['params'].append(groups[0]['params'].pop())": "of param group 0 is now in param group 1",
    "groups[0]['params'].reverse()": "has another place in param group 0",
    "groups[0]['params'].append(torch.nn.Parameter(torch.ones(2)))": "0 has a further parameter, of shape (2,)",
    "groups[0].update(params=[torch.nn.Parameter(torch.ones(2))])": "'first.weight' is in param group 0 no more",
    "groups[0]['params'].append(groups[0]['params'][1])": "param group 0 has 'parts.0.inner' twice",
    "groups[0].update(params=iter(groups[0]['params']))": "of param group 0 are a list_iterator, and no list",
    "groups[0].pop('params')": "'first.weight' is in param group 0 no more",
    "groups.pop()": "'first.bias' is in param group 1 no more",
    "groups.append({'params': [torch.nn.Parameter(torch.ones(2))]})": "there are 3 param groups, not 2",
    "groups.reverse()": "'first.weight' of param group 0 is now in param group 1",
}
SAME_LISTS = (  # other dicts and lists of the same parameters
    "optimizer.param_groups[0].update(params=list(optimizer.param_groups[0]['params']))",
    "optimizer.param_groups.__setitem__(1, {**(g := optimizer.param_groups[1]), 'params': tuple(g['params'])})",
    "setattr(optimizer, 'param_groups', [{**group} for group in optimizer.param_groups])",
)


def edited(*calls: str, stages: tuple[int, ...] = (0, 1, 2, 3), edits: tuple[str, ...] = tuple(EDITS)) -> Moment:
    """Return a moment at which one rank has edited the lists of parameters."""
    fixed = "the lists of param groups are fixed, unlike their"
    wrong = {f"edited(lambda groups: {e}, {call})": f"{EDITS[e]}: {fixed}" for e in edits for call in calls}
    return Moment(wrong, stages=stages, changes=TWO_GROUPS)


DIALS = (
    Dial(
        name="class",
        first=3,
        values={
            name: {"optimizer": name}
            for name in dict.fromkeys(("adamw", "adamw fused", *BY_PARAMETER, "averaged", *CLASSES, "schedule-free"))
            if name != "sgd fused"  # with momentum it fails where a parameter's first use is a later step
        },
        refused=[
            Refused({"optimizer_class": torch.optim.LBFGS}, "LBFGS cannot be sharded … closure"),
            Refused({"optimizer_class": "adamw"}, "not 'adamw': give the class torch.optim.AdamW, and its arguments"),
            Refused({"optimizer_class": nn.Linear}, "which is not derived from torch.optim.Optimizer: give a class"),
            Refused({"lr": -1}, "Invalid learning rate: -1"),
            Refused({"momentum": 0.9}, "nor AdamW has an argument 'momentum'"),
            Refused({"zero_stage": 3}, "neither ZeroOptimizer nor AdamW … 'zero_stage': did you mean 'stage'"),
        ],
    ),
    Dial(
        name="cut",
        first=3,
        values={
            "by element": {},
            "whole": {"wholes": (True,)},
            "some": {"wholes": (False, True)},
            "stacks": {"stacks": (True,)},
        },
        needs=lambda row: row["class"] not in ("averaged",) or row["cut"] != "stacks",
        refused=[
            by_element(torch.optim.LBFGS, f"LBFGS is not element-wise: … {USE}"),
            by_element(torch.optim.Adafactor, f"Adafactor is not element-wise: … {USE}"),
            by_element(torch.optim.Muon, f"Muon is not element-wise: … {USE}"),
            by_element(Centred, "Centred is not element-wise: … (after eval())"),
            by_element(OddState, "OddState is not … its state 'history' has shape (2, 2)"),
        ],
        differs=[
            Differs({}, {}, "[32, 16] … stack [(16, 16), (16, 16)]", partial(stack, 16, 8, 8), partial(stack, 16, 16))
        ],
    ),
    Dial(
        name="groups",
        first=3,
        values={
            "one": {},
            "two": TWO_GROUPS,
            "not all": {"shares": (0, 0, -1), "empty": 1},
            "of two classes": {"shares": (0, 1), "options": ((), ()), "classes": ("", "muon")},
        },
        needs=lambda row: row["mixed_precision"] in ("none", "bf16") or row["groups"] != "of two classes",
        moments=[
            edited("optimizer.step"),
            edited("lambda: optimizer.clip_grad_norm_(0.1)", edits=("groups.pop()",)),
            edited("lambda: optimizer.add_param_group({'params': []})", stages=(0, 1, 2), edits=("groups.reverse()",)),
            *(
                Moment(
                    {call: "nothing"},
                    (),
                    (p.Change(0, "lr", 0.05), p.Change(1, "betas", (0.5, 0.6))),
                    (1, 3),
                    TWO_GROUPS,
                )
                for call in SAME_LISTS
            ),
        ],
    ),
)
