"""The dtypes of weights, gradients and states, and how they are rounded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero import MixedPrecision, StochasticRounding

from ..support.by_module import BY_MODULE
from ..support.narrowed import PRECISIONS
from ..support.two_modes import TWO_MODES
from .record import Dial, Differs, Refused

ROUNDING = StochasticRounding(7)
SEEDS = "rounding=StochasticRounding(seed=0) … rounding=StochasticRounding(seed=1)"


def fails(*_: Any) -> bool:
    raise KeyError("x")


def narrow() -> nn.Module:
    return nn.Linear(3, 3).bfloat16()


def rounded(words: str, model: Any = narrow, **arguments: Any) -> Refused:
    return Refused({"rounding": ROUNDING, **arguments}, words, model)


def frozen_in_fp16() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3).half(), nn.Linear(3, 3).bfloat16())
    model[0].requires_grad_(False)
    return model


def stack() -> Any:
    return [{"params": [("experts", nn.Parameter(torch.ones(3, 8, 8, dtype=torch.bfloat16)))], "blocks": 0}]


ELSE = "leave out rounding="
DIALS = (
    Dial(
        name="mixed_precision",
        first=3,
        values={
            "none": {},
            "bf16": {"precision": "bf16"},
            "by kind": {"precision": "by kind"},
            **{name: {"precision": name} for name in (*PRECISIONS, *BY_MODULE) if name != "outputs alone"},
            "in fp64": {"dtype": "float64"},
            "in bf16": {"dtype": "bfloat16"},
        },
        # numbers of other classes become infinite in 16 bits
        needs=lambda row: row["class"] in ("adamw", "adamw fused", "sgd momentum", "averaged"),
        refused=[
            Refused({"mixed_precision": "bf16"}, "not 'bf16' … give zero.MixedPrecision(torch.bfloat16)"),
            Refused({"mixed_precision": "fp16"}, "give zero.MixedPrecision(torch.float16)"),
            Refused(
                {"mixed_precision": fails},
                "mixed_precision: the function failed for the outermost module (KeyError: 'x'",
            ),
        ],
        differs=[
            Differs(
                {"mixed_precision": MixedPrecision(torch.bfloat16)},
                {"mixed_precision": MixedPrecision(torch.float16)},
                "bfloat16 … float16",
            )
        ],
    ),
    Dial(
        name="rounding",
        values={"none": {}, "rounded": {"rounded": True, "seed": 7}},
        needs=lambda row: (
            row["mixed_precision"] in ("bf16", "bf16, sent in fp32", "by kind", "in bf16")
            and row["cut"] != "stacks"
            and row["look"] != "modes"
        ),
        refused=[
            rounded("'weight' is in fp16", lambda: nn.Linear(3, 3).half()),
            rounded("no parameter is in bf16", lambda: nn.Linear(3, 3)),
            rounded("'0.weight' is in fp16", frozen_in_fp16),
            rounded(f'rounding= with partition="block" … {ELSE} or partition=', partition="block"),
            rounded(f"would lose digits: {ELSE}", optimizer_class=TWO_MODES["schedule-free"][0]),
            rounded(
                f"rounding= with blocks= of a param group ('experts') … {ELSE} or blocks=",
                stack,
                optimizer_class=torch.optim.Muon,
            ),
            Refused({"rounding": 7}, "must be a zero.StochasticRounding, not 7", narrow),
        ],
        differs=[Differs({"rounding": StochasticRounding(0)}, {"rounding": StochasticRounding(1)}, SEEDS, narrow)],
    ),
)
