"""Where states and parameters lie between steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.testing._internal.two_tensor import TwoTensor

from zero import Offload

from ..support.machine.program import Backward, ZeroGrad
from ..support.machine.ranks import OFFLOADS
from ..support.quantised import Packed
from .record import Dial, Differs, Moment, Refused

EDIT = "[within(optimizer.gathered(), lambda: model.parts[0].inner.data.mul_(2)), optimizer.step()]"
MODEL = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
NEITHER = "TypeError: ignored[{}] is a {}, neither a parameter nor a module"
NO_PART = "ValueError: ignored[0] is no part of the optimizer's module"


# -- models on the meta device -----------------------------------------------------------------------------------------


def on_meta(build: Callable[[], nn.Module], words: str, **arguments: Any) -> Refused:
    """Return what is refused of a model on the meta device."""

    def built() -> nn.Module:
        with torch.device("meta"):
            return build()

    return Refused({"stage": 1, **arguments}, words, built)


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def forgetful() -> nn.Module:
    """Return a model that cannot make its mask again."""
    made = linear()
    made.register_buffer("mask", torch.ones(2, dtype=torch.int64), persistent=False)
    return made


def scripted() -> Any:
    return torch.jit.script(linear())


def listed(held: Callable[[], torch.Tensor] = lambda: torch.ones(3)) -> nn.Module:
    return nn.Sequential(linear(), nn.ParameterList([nn.Parameter(held(), requires_grad=False)]))


def hooked() -> nn.Module:
    made = linear()
    made.weight.register_hook(print)  # type: ignore[operator]
    return made


def referred_to() -> nn.Module:
    made = linear()
    made.reference = weakref.ref(made.bias)  # type: ignore[assignment, arg-type]
    return made


def replaces(module: nn.Module) -> None:
    module.bias = nn.Parameter(torch.ones(2))


def fails(module: nn.Module) -> None:
    raise KeyError("nothing for it")


def with_held(held: torch.Tensor) -> nn.Module:
    made = nn.Linear(3, 3)
    made.held = held if isinstance(held, nn.Parameter) else nn.Parameter(held)
    return made


def wrapped() -> nn.Module:
    return with_held(two(1.0))


def imaginary() -> nn.Module:
    return with_held(torch.ones(3) * 1j)


def in_fp8() -> nn.Module:
    return with_held(torch.ones(3).to(torch.float8_e5m2))


def frozen() -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)])


def two(number: float) -> torch.Tensor:
    return TwoTensor(torch.ones(3), torch.full((3,), number))


def with_frozen(held: torch.Tensor) -> nn.Module:
    made = nn.Linear(3, 3)
    made.held = held if isinstance(held, nn.Parameter) else nn.Parameter(held, requires_grad=False)
    return made


def with_buffer(held: torch.Tensor) -> nn.Module:
    made = nn.Linear(3, 3)
    made.register_buffer("held", held)
    return made


def apart(stage: int, held: Callable[[float], torch.Tensor], hold: Callable[..., nn.Module] = with_frozen) -> Differs:
    """Return ranks whose frozen parameter has other values, which cannot be copied."""
    words = (
        "not the same on every rank: 'held' (first between rank 0 and rank 1) … is not copied from rank 0: load or "
        "quantise the same weights on every rank"
    )
    given = {"stage": stage}
    return Differs(given, given, words, lambda: hold(held(1.0)), lambda: hold(held(2.0)))


FREEZE = "freeze it with requires_grad_(False) before the optimizer is built"
FILLED = {"param_init_fn": print}
SCALE = {"1.0": torch.full((3,), 2.0)}
META = [
    on_meta(forgetful, "'mask' was on the meta device and has no value: … reset_parameters"),
    on_meta(linear, "param_init_fn replaced parameter or buffer", param_init_fn=replaces),
    on_meta(listed, "while module '0' got its values: KeyError: 'nothing", param_init_fn=fails, stage=3),
    on_meta(linear, "has shape (2,), but (3,)", **FILLED, init_state_dict={"bias": torch.ones(3)}),
    on_meta(listed, "has no '0.weight', which the model has: pass param_i", init_state_dict=SCALE, stage=3),
    on_meta(listed, "'2.0', which the model lacks", **FILLED, init_state_dict={"2.0": torch.ones(3)}),
    on_meta(listed, "'1.0' is on … (ParameterList) has no reset_param … init_of", stage=3),
    on_meta(
        lambda: listed(lambda: TwoTensor(torch.ones(3), torch.ones(3))),
        "'1.0' is a TwoTensor on the meta device, which only its own class",
    ),
    on_meta(hooked, "'weight' is on the meta device and has hooks, which it would lose"),
    on_meta(scripted, "a ScriptModule's never can", stage=0, param_init_fn=print),
    on_meta(referred_to, "'bias' is on the meta device and cannot be given memory: … weakref"),
    Refused({"param_init_fn": print}, "this one has values: build it under"),
    Refused(
        {"stage": 1},
        "parameters on the meta device need their module",
        lambda: [nn.Parameter(torch.ones(2, device="meta"))],
    ),
    Refused(
        {"stage": 1, "module": MODEL},
        "of those listed is on the meta device and not in",
        lambda: [*MODEL.parameters(), nn.Parameter(torch.ones(2, device="meta"))],
    ),
]
DIALS = (
    Dial(
        name="offload",
        first=3,
        values={"none": {}, "stepped on the host": {"offload": "stepped on the host"}, "disk": {"offload": True}}
        | {name: {"offload": name} for name in OFFLOADS},
        needs=lambda row: (
            row["offload"] in ("disk", "states on the host") or (row["stage"] == "3" and row["look"] != "average")
        ),
        refused=[
            Refused({"offload": "cpu"}, "not 'cpu': give zero.Offload(\"cpu\") or zero.Offload(folder)"),
            Refused({"offload": Offload("/missing")}, "offload: no file can be made in /missing"),
            Refused({"offload": Offload(__file__)}, f"offload: no file can be made in {__file__}"),
            Refused({"offload": CPUOffloadPolicy()}, 'give zero.Offload("cpu", parameters="cpu", step="cpu")'),
            Refused(
                {"offload": Offload("cpu", parameters="cpu"), "stage": 2},
                'Offload(parameters="cpu") with stage 2 … leave parameters= out',
            ),
        ],
        moments=[
            Moment(
                {
                    "Offload('cpu', parameters='cpu', step='host')": "step must be 'cpu' or None, not 'host'",
                    **dict.fromkeys(("Offload('')", "Offload(3)"), "TypeError: offload"),
                    "Offload('cpu', parameters='disk')": "parameters must be 'cpu' or None, not 'disk'",
                    "ShardedAverage(optimizer)": 'Offload(parameters="cpu") with a ShardedAverage: ',
                    EDIT: "'parts.0.inner' was edited while its unit was gathered",
                },
                [Backward(1)],
                [ZeroGrad()],
                (3,),
                {"offload": "parameters on the host"},
            )
        ],
        differs=[
            Differs(
                {"offload": Offload("cpu", parameters="cpu"), "stage": 3},
                {"offload": Offload("cpu", parameters="cpu", step="cpu"), "stage": 3},
                "offload=states and parameters in the host's memory … stepped there",
            )
        ],
    ),
    Dial(
        name="memory", values={"each rank's": {}, "of one host": {"host": True}}, needs=lambda row: row["stage"] == "3"
    ),
    Dial(name="built", values={"with values": {}, "on meta": {"meta": True}}, refused=META),
    Dial(
        name="trained",
        values={"what can be": {}},
        refused=[
            Refused({"stage": 2}, f"'held' is a TwoTensor, a tensor subclass with its own __torch … {FREEZE}", wrapped),
            Refused({"stage": 2}, f"'held' is torch.complex64, and only real parameters … {FREEZE}", imaginary),
            Refused({"stage": 3}, f"'held' is torch.float8_e5m2: train one of … {FREEZE}", in_fp8),
            Refused({"stage": 3}, "no listed parameter can be trained: all are frozen", frozen),
        ],
        differs=[
            apart(2, two),
            apart(3, two, with_buffer),
            apart(3, lambda number: TwoTensor(two(1.0), two(number))),
            apart(2, lambda number: Packed(torch.full((3,), number), requires_grad=False)),
        ],
        moments=[
            Moment(
                {"optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(3) * 1j)]})": "torch.complex64"},
                [],
                (),
                (1, 2),
            )
        ],
    ),
    Dial(
        name="ignored",
        values={"none": {}},
        refused=[
            *(Refused({"ignored": text}, NEITHER.format(0, "str")) for text in ("weight", "")),
            Refused({"ignored": len}, NEITHER.format(0, "builtin_function_or_method")),
            Refused({"ignored": [MODEL[0], 3]}, NEITHER.format(1, "int"), lambda: MODEL),
            *(Refused({"ignored": each}, NO_PART) for each in (nn.Linear(2, 2), [nn.Parameter(torch.ones(2))])),
            Refused(
                {"ignored": [MODEL[0]]},
                "ValueError: ignored= without a module: it needs the modules that hold the parameters: pass the",
                lambda: list(MODEL.parameters()),
            ),
            Refused(
                {"module": MODEL, "ignored": [MODEL[0]]},
                "ValueError: '0.weight' is ignored, and is",
                lambda: list(MODEL.parameters()),
            ),
            Refused({"ignored": MODEL}, "ValueError: the parameter list is empty", lambda: MODEL),
        ],
    ),
)
