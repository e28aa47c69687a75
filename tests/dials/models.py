"""What models are: parameters and modules that an optimizer cannot take, and models that change under it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero import MixedPrecision

from ..support.machine import program as p
from ..support.shampoo import Shampoo
from .record import Dial, Differs, Moment, Refused

FURTHER = "list(model.parameters())[2]"  # which no param group has
MODEL = nn.Linear(3, 3)
WEIGHT, BIAS = MODEL.weight, MODEL.bias
NO_PARAMETERS: list[tuple[Any, str]] = [
    ([WEIGHT, BIAS, 42], "params[2] is 42 (int), neither a parameter nor a (name, parameter) pair"),
    ([42, WEIGHT], "params[0] is 42 (int)"),
    ([("weight", WEIGHT), ("bias", 3)], "params[1] is ('bias', 3) (tuple)"),
    ([("weight", WEIGHT, 1)], "params[0] is ('weight', "),
    ([WEIGHT, None], "params[1] is None (NoneType)"),
    ([MODEL], "params[0] is Linear("),
    ({"weight": WEIGHT}, "params[0] is 'weight' (str)"),
    ([WEIGHT, torch.ones(3).numpy()], "params[1] is a ndarray, neither"),
    ([{"params": [WEIGHT]}, {"params": [BIAS, "x"]}], "params[1]['params'][1] is 'x' (str)"),
    ([{"params": [WEIGHT]}, {"params": 7}], "params[1]['params'] is 7 (int), and must be parameters"),
    ([{"params": [WEIGHT]}, BIAS], "params[1] is a Parameter, not a param group with 'params'"),
    ([WEIGHT, {"params": [BIAS]}], "params[0] is a Parameter, not a param group with 'params'"),
    ([{"lr": 0.5}], "params[0] is {'lr': 0.5} (dict), not a param group with 'params'"),
    ([{"params": {WEIGHT}}], "params[0]['params'] must be in an order that all ranks share; a set has none"),
    (None, "params is None (NoneType), and must be parameters, param groups or a module"),
    (torch.zeros(3, requires_grad=True), "… not one tensor"),
]
ADAMW = "give the class torch.optim.AdamW, and its arguments here"
NO_CLASSES: list[tuple[Any, str]] = [
    (torch.optim.AdamW([WEIGHT]), f"not an instance of AdamW: {ADAMW}"),
    (partial(torch.optim.AdamW, lr=0.1), f"not a partial of AdamW: {ADAMW}"),
    (Shampoo([WEIGHT]), f"not an instance of Shampoo: give the class {Shampoo.__module__}.Shampoo, and its arguments"),
    ("adan", "not 'adan': give a class, such as torch.optim.AdamW, and its arguments here"),
    (nn.Linear, "not torch.nn.modules.linear.Linear, which is not derived from torch.optim.Optimizer: give a class, "),
]
A_CLASS = "optimizer_class must be a class of optimizers, "


def of(*values: Tensor) -> Callable[[], nn.Module]:
    """Return a function that builds a module with further parameters."""

    def build() -> nn.Module:
        model = nn.Linear(3, 3)
        for number, value in enumerate(values):
            model.register_parameter(f"more{number}", nn.Parameter(value, value.dtype is not torch.int64))
        return model

    return build


UNLISTED = of(torch.zeros(1, 4, dtype=torch.int64).expand(5, 4))()
UNLISTED.weight = WEIGHT


def result() -> list[Any]:
    found = nn.Parameter(torch.ones(3)) * 2
    found.retain_grad()  # torch itself would then accept it
    return [("p", found)]


def beside(place: str, held: Callable[[Tensor], Tensor] = lambda memory: memory) -> nn.Sequential:
    """Return two layers. The second has memory of the first one's weight, as a buffer or a parameter."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other = held(model[0].weight.data)
    if place == "buffer":
        model[1].register_buffer("other", other, persistent=False)
    else:
        model[1].other = nn.Parameter(other, requires_grad=place == "trained")
    return model


def shared(stage: int, model: nn.Module, listed: Callable[[Any], Any] = lambda model: model, **more: Any) -> Refused:
    return Refused({"stage": stage, "module": model, **more}, SHARE, lambda: listed(model))


def first(model: Any) -> Any:
    return model[0].parameters()


def frozen_first(model: Any) -> Any:
    """Freeze the listed one, which would not follow the other."""
    model[0].weight.requires_grad_(False)
    return model[0].parameters()


SHARE = (
    "'0.weight' and '1.other' share memory but are different parameters or buffers: tie them by using one parameter in "
    "both places, or give one of them its own memory with .clone()"
)
STRIPES = beside("trained", lambda memory: memory[:, ::2])
COLUMN = beside("buffer", lambda memory: memory[:, 1:2].expand(4, 3))
SHARES = [
    shared(2, beside("buffer", lambda memory: memory[0])),
    shared(3, beside("frozen"), lambda model: [q for q in model.parameters() if q.requires_grad]),
    shared(0, beside("trained"), first),
    shared(1, beside("trained"), frozen_first),
    shared(3, STRIPES, ignored=[STRIPES[1]]),
    shared(2, COLUMN, ignored=[COLUMN[1]]),
]


def made_in_inference_mode(name: str) -> nn.Module:
    model = nn.Linear(3, 3)
    with torch.inference_mode():
        if name == "bias":
            model.bias = nn.Parameter(torch.ones(3))
        else:
            model.register_buffer(name, torch.ones(3))
    return model


def in_order(*names: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(3, 3) for name in names})


def with_a_buffer() -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_buffer("mine", torch.zeros(2))
    return model


def scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Sequential(nn.Linear(3, 3))))


BF16, FP32 = MixedPrecision(torch.bfloat16), MixedPrecision(torch.float32)
SAVE = (
    "to save, all ranks call optimizer.full_state_dict(to=0), which returns the whole one on rank 0, or "
    "zero.save(path, optimizer), or all enter 'with optimizer.gathered():', where model.state_dict() is whole"
)
LOAD = "load inside 'with optimizer.gathered(write=True):', which all ranks enter, or before the optimizer is built"
RELEASED = "'first.weight' is released: at stage 3 a parameter has values only inside"
NEED_A_WHOLE_MODEL = {
    "torch.save(model.state_dict(), '/dev/null')": f"RuntimeError: model.state_dict(): {SAVE}. {RELEASED}",
    "torch.save(model, '/dev/null')": f"RuntimeError: torch.save(): {SAVE}. {RELEASED}",
    "pickle.dumps(model)": f"RuntimeError: pickle: {SAVE}. {RELEASED}",
    "copy.deepcopy(model)": "RuntimeError: copy.deepcopy(): copy inside 'with optimizer.gathered():', which all ranks "
    f"enter. {RELEASED}",
    "model.load_state_dict({'first.weight': torch.ones(4, 3)}, strict=False)": f"load_state_dict(): {LOAD}. {RELEASED}",
    "torch.jit.script(model.last)": "script it before the optimizer is built, or after its close()",
    "ZeroOptimizer(model, process_group=group)": (
        "belongs to another stage-3 optimizer, which holds the values: close() that one first"
    ),
}
OVERLAPPING = (
    "ZeroOptimizer([torch.nn.Parameter(torch.zeros(rank or 5, 4).expand(5, 4))], process_group=group)"  # on rank 1
)
CASTS = {"double": "torch.float64", "bfloat16": "torch.bfloat16"}
CAST = "move and cast the model before the optimizer is built, or after its close()"
UNDONE = "while its unit was gathered, which was undone: cast the model before"
DIALS = (
    Dial(
        name="parameters",
        values={},
        refused=[
            *(
                Refused({"stage": stage, "module": MODEL}, f"TypeError: {words}", lambda given=given: given)
                for given, words in NO_PARAMETERS
                for stage in (0, 3)
            ),
            *(Refused({"optimizer_class": given}, f"TypeError: {A_CLASS}{words}") for given, words in NO_CLASSES),
            *(
                Refused(
                    {},
                    f"TypeError: param group 0: {A_CLASS}{words}",
                    lambda given=given: [{"params": [nn.Parameter(torch.ones(3))], "optimizer_class": given}],
                )
                for given, words in NO_CLASSES
            ),
            Refused(
                {"module": MODEL}, "'weight' is listed twice", lambda: [{"params": [WEIGHT]}, {"params": [WEIGHT]}]
            ),
            Refused({}, "'parameter 1' is listed twice", lambda: [WEIGHT, WEIGHT]),
            Refused({}, "'more0' is torch.complex128 … or freeze", of(torch.zeros(3).to(torch.complex128))),
            Refused({}, "'more0' is torch.float8_e4m3fn … or freeze", of(torch.zeros(3).to(torch.float8_e4m3fn))),
            Refused({}, "'more0' overlaps itself in memory … clone", of(torch.zeros(1, 4).expand(5, 4))),
            *(
                Refused(
                    {"stage": stage, "module": UNLISTED}, "'more0' overlaps itself in memory … clone", lambda: [WEIGHT]
                )
                for stage in (0, 3)
            ),
            *SHARES,
            Refused({}, "ValueError: can't optimize a non-leaf Tensor", lambda: [WEIGHT * 2]),
            Refused({}, "ValueError: … 'p' is the result of a computation", result),
            Refused({"module": MODEL}, "ValueError: … two different modules"),
            Refused({}, "ValueError: … empty", list),
            Refused({"ignored": MODEL}, "the parameter list is empty, or all is in ignored=: pass", lambda: MODEL),
            *(
                Refused(
                    {"stage": stage},
                    f"{name!r} was made under torch.inference_mode()",
                    partial(made_in_inference_mode, name),
                )
                for name in ("bias", "seen")
                for stage in (0, 3)
            ),
            Refused(
                {"stage": 0, "mixed_precision": {"*": BF16, "1.0": FP32}},
                "'1.0' has another precision than the ScriptModule around it",
                scripted,
            ),
        ],
        differs=[
            Differs(
                {"stage": 1},
                {"stage": 1},
                "rank 0 has [weight [3, 3] … rank 1 has [weight [4, 3]",
                model_of_others=lambda: nn.Linear(3, 4),
            ),
            Differs(
                {"stage": 1},
                {"stage": 1},
                "the ranks built different models … rank 0 has [left.weight [3, 3]",
                partial(in_order, "left", "right"),
                partial(in_order, "right", "left"),
            ),
            Differs(
                {"stage": 1},
                {"stage": 1},
                "rank 0 has [buffer mine [2] … rank 1 has [nothing more]",
                with_a_buffer,
                lambda: nn.Linear(3, 3),
            ),
            Differs({}, {}, SHARE, partial(beside, "buffer", Tensor.clone), partial(beside, "buffer")),
        ],
        moments=[
            Moment(
                {
                    OVERLAPPING: "'parameter 0' overlaps itself",
                    **{
                        f"ZeroOptimizer(torch.nn.LazyLinear(3), stage={stage}, process_group=group)": (
                            "'weight' is not initialised yet: run a forward of its lazy module first"
                        )
                        for stage in (0, 3)
                    },
                },
                [],
            ),
            Moment(
                {
                    f"(rank and model.last.register_buffer('other', {FURTHER}.data[:1], persistent=False), "
                    f"optimizer.add_param_group({{'params': [{FURTHER}]}}))": "share memory but are different",
                    "rank and delattr(model.last, 'other')": "nothing",
                    "optimizer.add_param_group({'params': [torch.nn.Parameter(p.data[1:])]})": (
                        "'first.weight' and 'parameter … share memory but are different parameters"
                    ),
                    f"(rank and setattr({FURTHER}, 'grad', torch.ones_like({FURTHER})), "
                    f"optimizer.add_param_group({{'params': [{FURTHER}]}}))": (
                        "add_param_group: … has a gradient already … set p.grad = None"
                    ),
                },
                [],
                [p.ZeroGrad("module")],
                (2,),
                {"shares": (0, 0, -1)},
            ),
            Moment(NEED_A_WHOLE_MODEL, [], stages=(3,)),
            Moment(
                {f"model.{cast}()": f"'first.weight' is released … {CAST}" for cast in CASTS}
                | {
                    f"(within(optimizer.gathered(), model.{cast}), optimizer.step())": f"was cast to {dtype} {UNDONE}"
                    for cast, dtype in CASTS.items()
                },
                [],
                [p.ZeroGrad()],
                (3,),
            ),
        ],
    ),
)
