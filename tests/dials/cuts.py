"""The class, and where parameters may be cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..support.programs import BY_PARAMETER, CLASSES
from ..support.two_modes import Centred
from .record import Dial, Refused

USE = 'leave out partition=, or use "par'


class OddState(torch.optim.SGD):
    """A class that keeps a state of another shape than the parameter's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = torch.zeros(2, 2)


def matrix() -> nn.Module:
    return nn.Linear(8, 8, bias=False)


def by_element(cls: type[torch.optim.Optimizer], words: str) -> Refused:
    return Refused({"optimizer_class": cls, "partition": "element"}, words, matrix)


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
    ),
    Dial(
        name="groups",
        first=3,
        values={
            "one": {},
            "two": {"shares": (0, 1), "options": ((), (("lr", 0.03), ("weight_decay", 0.1)))},
            "not all": {"shares": (0, 0, -1), "empty": 1},
            "of two classes": {"shares": (0, 1), "options": ((), ()), "classes": ("", "muon")},
        },
        needs=lambda row: row["mixed_precision"] in ("none", "bf16") or row["groups"] != "of two classes",
    ),
)
