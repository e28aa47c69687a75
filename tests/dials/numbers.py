"""The dtypes of weights, gradients and states, and how they are rounded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from zero import MixedPrecision, StochasticRounding

from ..support.by_module import BY_MODULE, KEEP
from ..support.machine.program import ZeroGrad
from ..support.machine.trees import Part
from ..support.narrowed import PRECISIONS
from ..support.two_modes import TWO_MODES
from .record import ODD, Dial, Differs, Moment, Refused

ROUNDING = StochasticRounding(7)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL = MixedPrecision(BF16)
SEEDS = "rounding=StochasticRounding(seed=0) … rounding=StochasticRounding(seed=1)"


def fails(*_: Any) -> bool:
    raise KeyError("x")


def no_precision(name: str, _: Any) -> Any:
    return None if name else ALL


def two() -> Any:
    return nn.ModuleDict({"first": nn.Linear(3, 3), "last": nn.Linear(3, 3)})


def tied() -> nn.Module:
    model = two()
    model["last"].weight = model["first"].weight
    return model  # type: ignore[no-any-return]


def mixed(given: Any, words: str, model: Any = two) -> Refused:
    return Refused({"mixed_precision": given}, words, model)


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
            "bf16, made in bf16": {"precision": "bf16", "dtype": "bfloat16"},
            "of two dtypes": {"parts": (*ODD, Part("linear", 3, dtype="float64"))},
        },
        # numbers of other classes become infinite in 16 bits
        needs=lambda row: row["class"] in ("adamw", "adamw fused", "sgd momentum", "averaged"),
        refused=[
            Refused({"mixed_precision": "bf16"}, "not 'bf16' … give zero.MixedPrecision(torch.bfloat16)"),
            Refused({"mixed_precision": "fp16"}, "give zero.MixedPrecision(torch.float16)"),
            mixed(fails, "mixed_precision: the function failed for the outermost module (KeyError: 'x'"),
            mixed(MixedPrecision, "TypeError: mixed_precision must be a zero.MixedPrecision, not <class"),
            mixed(BF16, "TypeError: mixed_precision must be a zero.MixedPrecision, not torch.bfloat16"),
            mixed({3: ALL}, "mixed_precision: a pattern must be a name of modules, not 3"),
            mixed({"*": BF16}, "mixed_precision['*'] must be a zero.MixedPrecision, not torch.bf"),
            mixed(
                no_precision, "mixed_precision returned None for 'first': … MixedPrecision(torch.float32) keeps fp32"
            ),
            mixed(lambda *_: 3, "what mixed_precision returns for the outermost module must be a zero.M"),
            mixed({"first": KEEP}, "no pattern matches the outermost module: put '*' first"),
            mixed({"*": ALL, "norm": KEEP}, "the pattern 'norm' decides about no module: correct it"),
            mixed({"first": KEEP, "*": ALL}, "the pattern 'first' decides about no module: … or move it"),
            mixed({"*": ALL, "last": KEEP}, "'first.weight' and 'last.weight' are one parameter, but … bfloa", tied),
            mixed(
                {"*": ALL},
                "by patterns or by a function without a module: … : pass the mod",
                lambda: [*two().parameters()],
            ),
            mixed(MixedPrecisionPolicy(reduce_dtype=FP32), "reduce_dtype and accumulate_dtype need a param_dtype"),
            mixed(MixedPrecisionPolicy(torch.float64), "param_dtype must be one of"),
        ],
        differs=[
            Differs(
                {"mixed_precision": MixedPrecision(torch.bfloat16)},
                {"mixed_precision": MixedPrecision(torch.float16)},
                "bfloat16 … float16",
            ),
            Differs(
                {"mixed_precision": {"*": ALL, "last": MixedPrecision(FP32, output_dtype=FP16)}},
                {"mixed_precision": {"*": ALL, "last": MixedPrecision(FP32, output_dtype=BF16)}},
                "rank 0 has [precision of 'last': … float16 … ] where rank 1 has [ … bfloat16",
                two,
            ),
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
        moments=[
            Moment(
                {
                    "[optimizer.param_groups[0].update(rounding_steps=rank), optimizer.step()]": (
                        "option 'rounding_steps' of the param groups differs between rank 0 and"
                    ),
                    "optimizer.param_groups[0].pop('rounding_steps')": "nothing",
                },
                after=[ZeroGrad()],
                changes={"dtype": "bfloat16", "rounded": True},
            )
        ],
    ),
)
