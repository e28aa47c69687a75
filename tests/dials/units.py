"""At stage 3: which modules are gathered as a whole, when, and for how long."""

from __future__ import annotations

import torch
from torch import nn

from ..support.machine import program as p
from ..support.machine.ranks import UNIT_ARGUMENTS
from .numbers import fails
from .record import Changes, Dial, Differs, Moment, Refused

KEPT = "divides the 1 ranks that share a copy, so one of"
DIFFERENT = "the ranks built different models or optimizers"


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def in_a_list() -> nn.Module:
    return nn.Sequential(nn.ModuleList([nn.Linear(3, 3)]))


MODEL = layers()


def linears(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def never(module: nn.Module) -> bool:
    return False


def always(module: nn.Module) -> bool:
    return True


# -- calls at a wrong moment ------------------------------------------------------------------------------------------

INNER = "model.parts[0].inner"
EDITED = (
    "'parts.0.inner' was edited while its unit was gathered (as an Embedding with max_norm … edit it inside "
    "gathered(write=True) … where a forward moves it (a codebook), list it in ignored="
)
NO_PARAMETER = "ValueError: a tensor of shape (2, 5) is not one of this optimizer's parameters"
NOT_THERE = "is not a parameter of the module that the optimizer was built with"
TAKEN = "ValueError: … belongs to another stage-3 optimizer … give one optimizer param groups, each with its own"


def edited(ranks: str, then: str, block: str = "optimizer.gathered()") -> str:
    """Return a call that edits a parameter in a block on some ranks, and then makes another call."""
    return f"[within({block}, lambda: {ranks} and {INNER}.data.mul_(2)), {then}]"


VIEW = f"[view := within(optimizer.gathered(), lambda: {INNER}.detach()), view.mul_(2), backward(), optimizer.step()]"
ARRAY = (
    f"[array := within(optimizer.gathered(), lambda: {INNER}.detach().numpy()), array.__imul__(2), "
    f"within(optimizer.gathered({INNER}, write=True), int), optimizer.step()]"
)
LATE_ARRAY = (
    f"[array := within(optimizer.gathered(), lambda: {INNER}.detach().numpy()), rank or array.fill(77), "
    "{} and backward(), optimizer.step()]"
)
IN_A_FORWARD, IN_A_BACKWARD = (
    f"[within(model.parts[0].register_{hook}(lambda *_: [None, {INNER}.data.mul_(2)][0]), backward), optimizer.step()]"
    for hook in ("forward_hook", "full_backward_pre_hook")
)
BESIDE = "optimizer.gathered(model.parts[0].bias, write=True)"
LATER = {  # what is told by a step, wherever values are read
    edited("rank == 0", "optimizer.step()"): f"rank 0: {EDITED}",
    edited("rank == 0", "optimizer.clip_grad_norm_(1.0), optimizer.step()"): f"rank 0: {EDITED}",
    edited("rank < 2", "optimizer.step()", BESIDE): EDITED,
    IN_A_FORWARD: EDITED,
    VIEW: "'parts.0.inner' was edited while it was released",
    edited("1 // 0", "1"): "ZeroDivisionError",
    f"within(optimizer.gathered(), lambda: [{INNER}.data.mul_(2), 1 // 0])": "ZeroDivisionError",
    "optimizer.check_replicas()": "nothing",
}
EDITS = LATER | {
    edited("rank == 1", "optimizer.clip_grad_norm_(1.0)"): f"rank 1: {EDITED}",
    edited("rank == 1", "optimizer.check_replicas()"): f"rank 1: {EDITED}",
    IN_A_BACKWARD: EDITED,
}
USES = {  # of a parameter outside of its unit, and the call that is named
    "p + 1": "add(): ",
    "float(model.parts[3].scale)": "__float__(): ",
    "p.numpy()": "numpy(): ",
    "p.data.mul_(2)": ".data: ",
    "torch.autograd.grad(p, p, torch.ones(4, 3))": "",
    "torch.autograd.backward(torch.ones(4, 3, requires_grad=True), p, inputs=[p])": "",
    "p.expand_as(p)": "expand_as(): ",
    "p.view_as(p)": "view_as(): ",
}
PUTS = ("setattr(p, 'data', torch.ones(4, 3))", "torch.nn.utils.vector_to_parameters(torch.ones(12), [p])")
PRINTED = "<Parameter 'first.weight', released (values inside optimizer.gathered()): shape (4, 3), torch.float32, cpu"
ANSWERS = (  # the true ones, to questions that need no value: a false one is a ZeroDivisionError
    f'1 / repr(p).startswith("{PRINTED}")',
    "1 / (p.to(torch.float32) is p)",
    "1 / (type(torch.autograd.graph.get_gradient_edge(p).node).__name__ == 'AccumulateGrad')",
    "1 / (model.to(torch.float32) is model)",
    "1 / (model.to(memory_format=torch.channels_last) is model)",
)
PAST_THE_CLASS = "1 / bool(p.as_subclass(torch.Tensor).{}().all())"  # NaN where units travel, else the values
HIDDEN = {
    **{use: f"{call}' … ' is released … gathered( … register_forward_method" for use, call in USES.items()},
    **dict.fromkeys(PUTS, "' is released … gathered( … . There, p.copy_(t) under torch.no_grad() edits it"),
    **dict.fromkeys(ANSWERS, "nothing"),
    "within(optimizer.gathered(torch.nn.Parameter(torch.ones(2, 5))), int)": NO_PARAMETER,
    "within(optimizer.gathered([model.first.weight, torch.ones(2, 5)], write=True), int)": NO_PARAMETER,
    "within(optimizer.gathered(model.first.weight), model.parts[0].inner.sum)": "'parts.0.inner' is released",
    "within(optimizer.gathered([]), model.first.weight.sum)": "'first.weight' is released",
    "within(model.parts[1].register_forward_hook(lambda *_: model.parts[0].inner.sum()), backward)": "is released",
    edited("rank < 2", "optimizer.step()"): EDITED,  # which names no neighbour in the bucket
    "register_forward_method(model.parts[7].of[0], 'extra_repr')": (
        "ValueError: … Leaf, with the parameter 'inner', lies inside a unit, … of the unit"
    ),
    "[register_forward_method(model.parts, 'append'), 1 / ('append' not in vars(model.parts))]": "nothing",
    "model.state_dict()": "to save, all ranks call optimizer.full_state_dict(to=0), which",
}
GROUPS = {
    "optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(3))]})": NOT_THERE,
    "optimizer.add_param_group({'params': [model.first.weight]})": "'first.weight' is in a param group already",
    "optimizer.add_param_group({'params': [model.first.bias, *[torch.nn.Parameter(torch.ones(3))][rank:]]})": NOT_THERE,
    "optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(2, device='meta'))]})": "no ordinary memory",
    "within(torch.device('meta'), lambda: ZeroOptimizer(torch.nn.Linear(2, 2), process_group=solo()))": "outside of",
    "within(model.last.register_forward_pre_hook(lambda *_: "
    "optimizer.add_param_group({'params': [model.first.bias]})), backward)": "inside gathered() or inside a forward",
    "ZeroOptimizer([model.first.bias], process_group=solo(), stage=1)": TAKEN,
    **{
        f"within(optimizer.gathered(), lambda: ZeroOptimizer({given}, process_group=solo(), stage={stage}))": TAKEN
        for stage, given in (
            (1, "model"),
            (3, "torch.nn.ModuleList([model, torch.nn.Linear(3, 3)])"),
            (3, "[('first.bias', model.first.bias)], module=model"),
        )
    },
}
CHANGED = ("this backward needs, was changed by a step or an edit after the", "modified by an inplace operation")
ALONE: Changes = {"bucket_cap_mb": 1e-6}  # each parameter has a bucket, of which each rank keeps a part
HOSTS: tuple[Changes, ...] = (ALONE, ALONE | {"host": True})
MOMENTS = [
    *(Moment(EDITS, after=[p.ZeroGrad()], stages=(3,), changes=host) for host in HOSTS),
    *(
        Moment(
            HIDDEN | {PAST_THE_CLASS.format(shown): "nothing"},
            after=[p.ZeroGrad()],
            stages=(3,),
            changes={"host": host},
        )
        for host, shown in ((False, "isnan"), (True, "isfinite"))
    ),
    *(Moment(LATER, after=[p.ZeroGrad()], stages=(3,), changes=host, unseen=True) for host in HOSTS),
    Moment(
        {ARRAY: EDITED, **{LATE_ARRAY.format(who): f"rank 0: {EDITED}" for who in ("rank", "1")}},
        after=[p.ZeroGrad()],
        stages=(3,),
        changes={"host": True},
    ),
    Moment(GROUPS, [], [p.ZeroGrad()], (3,), {"shares": (0, -1)}),
    *(
        Moment({"kept()": words}, before, [p.ZeroGrad()], (3,), host)
        for host, words in zip(HOSTS, CHANGED, strict=True)
        for before in ([p.Keep(1), p.Backward(2), p.Step()], [p.Average(), p.Keep(1), p.Average()])
    ),
]


DIALS = (
    Dial(
        name="units",
        values={"usual": {}, **{name: {"units": name} for name in UNIT_ARGUMENTS}},
        needs=lambda row: row["stage"] == "3",
        refused=[
            Refused(
                {"stage": 3, "units": "blocks"}, "units must be a function of a module that returns a bool", layers
            ),
            Refused({"stage": 3, "units": nn.Linear}, "Linear'>: for a class, lambda module: isinstance", layers),
            Refused({"stage": 3, "units": fails}, "units: the function failed for '0' (KeyError: 'x'", layers),
            Refused({"stage": 3, "units": never}, "units: the predicate matches no module", layers),
            Refused(
                {"stage": 3, "units": lambda module: isinstance(module, nn.ModuleList)},
                "is never called: match its",
                in_a_list,
            ),
            Refused(
                {"stage": 3},
                "ValueError: stage 3 without a module: it needs the modules that hold the parameters: pass the",
                lambda: list(layers().parameters()),
            ),
            Refused(
                {"stage": 3, "module": MODEL},
                "ValueError: 'other' is not a parameter of the module that the optimizer was built",
                lambda: [*MODEL.named_parameters(), ("other", nn.Parameter(torch.ones(3)))],
            ),
            *(
                Refused(
                    {"stage": stage, "units": fails}, f"units= with stage {stage}: no … leave it out, since it is for"
                )
                for stage in (0, 2)
            ),
            *(Refused({"stage": 3, "prefetch_depth": depth}, "at least 0, not ") for depth in (-1, 1.0, True, None)),
            Refused({"stage": 2, "prefetch_depth": 0}, "is for stage 3"),
        ],
        differs=[
            Differs({"stage": 3, "prefetch_depth": 0}, {"stage": 3, "prefetch_depth": 2}, "prefetch_depth"),
            Differs({"stage": 3, "units": linears}, {"stage": 3}, DIFFERENT, lambda: nn.Sequential(layers(), layers())),
            Differs({"stage": 3, "units": linears}, {"stage": 3, "units": never}, "matches no module", layers),
            Differs({"stage": 3, "units": fails}, {"stage": 3}, "units: the function failed for '0' (KeyError", layers),
        ],
        moments=MOMENTS,
    ),
    Dial(
        name="reshard",
        values={"true": {}, "false": {"reshard": False}, "2": {"reshard": 2}},
        needs=lambda row: (
            row["stage"] == "3"
            and (row["reshard"] == "false" or (row["ranks"] == "4" and row["sharding_factor"] == "all"))
        ),
        refused=[
            *(Refused({"stage": 3, "reshard_after_forward": given}, KEPT) for given in (0, 3, "2", None)),
            *(Refused({"stage": stage, "reshard_after_forward": False}, "is for stage 3") for stage in (0, 2)),
            Refused(
                {"stage": 3, "units": linears, "reshard_after_forward": lambda module: 2},
                "must return True or False for '0', not 2; a number of ranks is for all units",
                layers,
            ),
        ],
        differs=[
            Differs(
                {"stage": 3, "reshard_after_forward": always},
                {"stage": 3, "reshard_after_forward": never},
                DIFFERENT,
                layers,
            ),
            Differs({"stage": 2}, {"stage": 2, "reshard_after_forward": False}, "rank 0 asked for stage=2, … but rank"),
            Differs(
                {"stage": 3, "reshard_after_forward": fails},
                {"stage": 3, "reshard_after_forward": always},
                "reshard_after_forward: the function failed for '0' (KeyError",
                layers,
            ),
        ],
    ),
)
