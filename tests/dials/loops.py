"""What loops do: how they clip, clear, accumulate, freeze, evaluate, save and load."""

from __future__ import annotations

from collections.abc import Sequence

from ..support.machine import program as p
from ..support.machine.program import Command
from ..support.two_modes import TWO_MODES
from .record import Dial, Moment

INFINITY = float("inf")


def step(seed: int, *between: Command, clear: p.Clear = "zero_grad", last: bool = True) -> list[Command]:
    """Return a step: a backward, further commands, a clip, the update and clearing. ``last`` False: without update.

    Of three steps with seeds in turn, in two some ranks do not use all parameters, which rank 0 does: they are all
    stepped equally often, as the formula of their bytes supposes.
    """
    return [
        p.Backward(seed, mask=1 if seed % 3 else -1),
        *between,
        *([p.Clip(0.5), p.Step()] if last else []),
        p.ZeroGrad(clear),
    ]


def steps(count: int, seed: int = 50) -> list[Command]:
    return [command for number in range(count) for command in step(seed + number)]


def clears(how: p.Clear) -> Sequence[Command]:
    """Return steps, of which one is followed by a backward that is dropped, as that of an adversary is."""
    held = [p.Backward(7, mask=1, sync=False), p.Clip(INFINITY), p.Freeze(None), p.ZeroGrad(how), p.Freeze(None)]
    dropped = [p.Backward(5, mask=1), p.Clip(0.5), p.Step(), p.Dropped(6, -1, True, how)]
    return [
        *(*step(1, clear=how), *step(2, clear=how, last=False), *dropped),
        *(*step(3, clear=how), *held, *step(4), *step(6)),
        *(p.Backward(8, "zeros"), p.Clip(0.5), p.Step(), p.ZeroGrad(how), *step(9)),
    ]


OFF = p.Backward(9, sync=False)
DIVIDED = "the gradient of 'first.weight' was already divided; call optimizer.zero_grad() before"
USES = {  # of a gradient: each is refused from a further backward on
    "step()": "optimizer.step()",
    "clip_grad_norm_()": "optimizer.clip_grad_norm_(1.0)",
    "clip_grad_norm_(also=...)": "optimizer.clip_grad_norm_(1.0, also=[])",
    "full_grad of 'last.bias'": "optimizer.full_grad(model.last.bias)",
    "set_full_grad of 'last.bias'": "optimizer.set_full_grad(model.last.bias, None)",
    "GradScaler.unscale_()": "unscale()",
}


def too_late(settled: Command, by: str, turns: int, stages: Sequence[int] = (1, 2, 3)) -> Moment:
    """Return the uses of a gradient after a further backward. ``turns``: how many rank 0 has run; rank 1 has one."""
    return Moment(
        {
            call: f"RuntimeError: {use} on rank  … backward() after {by} without zero … {DIVIDED}"
            for use, call in USES.items()
        },
        [p.Backward(1), settled, p.Uneven(2, (turns, 1)), OFF],
        [p.Describe(), p.ZeroGrad(), *steps(1), p.Describe()],
        stages,
    )


IN_HOOK = {
    "step()": "optimizer.step()",
    "zero_grad()": "optimizer.zero_grad()",
    "clip_grad_norm_()": "optimizer.clip_grad_norm_(1.0)",
    "full_grad of 'last.bias'": "optimizer.full_grad(model.last.bias)",
    "add_param_group()": "optimizer.add_param_group({'params': [torch.nn.Parameter(torch.zeros(3))]})",
}
OTHER = "in_backward(lambda: torch.optim.SGD([model.last.bias], lr=0.5).step())"
READ = "RuntimeError … 'first.weight' … optimizer.clip_grad_norm_ … optimizer.full_grad"
READS = (  # of the gradient of `p`, the first parameter
    "torch.nn.utils.clip_grad_norm_([p], 1.0)",
    "torch.nn.utils.clip_grad_value_([p], 1.0)",
    "p.grad + 1",
    "p.grad.add_(1)",
    "p.grad.copy_(p)",
    "p.grad[0]",
    "p.grad.sum().item()",
    "p.grad.numpy()",
    "p.grad.tolist()",
    "p.grad.data.sum()",
    "setattr(p.grad, 'data', torch.zeros(p.shape))",
    "p.grad.set_(torch.zeros(p.shape))",
    "p.grad.data_ptr()",
    "p.grad.untyped_storage()",
    "copy.deepcopy(p.grad)",
    "torch.stack([p.grad])",
    "torch._foreach_norm([p.grad])",
    "torch.optim.SGD([p], lr=0.1, foreach=False).step()",
    "torch.optim.SGD([p], lr=0.1, foreach=True).step()",
)
LOOKS = {  # a sharded gradient looks like the gradient
    **{
        f"1 / (model.parts[8].of[0].turned.grad.{of} == model.parts[8].of[0].turned.{of})": "nothing"
        for of in ("shape", "stride()", "dtype", "device")
    },
    "1 / (\"gradient of 'first.weight'\" in repr(p.grad))": "nothing",
}
SOMETIMES = "model.parts[7].of[0].inner"  # which rank 1 alone uses
ERROR = "ZeroDivisionError"
FAILS = {  # on all ranks, in the user's code
    "in_backward(lambda: 1 // 0)": ERROR,
    "within(model.parts[0].register_forward_pre_hook(lambda *_: 1 // 0), backward)": ERROR,
    "within(model.parts[0].register_forward_hook(lambda _, __, y: y.register_hook(lambda _: 1 // 0) and None), "
    "backward)": ERROR,
    "within(p.register_hook(lambda _: 1 // 0), backward)": ERROR,
    "within(optimizer.no_sync(), lambda: [backward(), 1 // 0])": ERROR,
    "within(optimizer.gathered(), lambda: 1 // 0)": ERROR,
    "within(optimizer.gathered(model.last.weight, write=True), lambda: 1 // 0)": ERROR,
    "optimizer.step(lambda: [backward(), 1 // 0])": ERROR,
    "within(optimizer.register_step_pre_hook(lambda *_: 1 // 0), lambda: [optimizer.zero_grad(), backward(), "
    "optimizer.clip_grad_norm_(1e-3), optimizer.step()])": ERROR,
}
ONE_FAILS = [  # in its backward; all go on to zero_grad(), then fail
    f"[fired := [], within(contextlib.suppress(ZeroDivisionError), lambda: {fails}), optimizer.zero_grad(), "
    "1 // (rank and not fired)]"
    for fails in (
        "within(p.register_hook(lambda _: (rank and (fired.append(1) or 1 // 0)) or None), backward)",
        "in_backward(lambda: (rank and (fired.append(1) or 1 // 0)) or None)",
    )
]
ALONE = {"world_size": 1}
OURS = "the gradient of 'first.weight' was"
EDITS: list[tuple[str, str, list[Command], int]] = [  # call, words, commands before, stage
    ("[p.grad.mul_(3), backward(), optimizer.step()]", f"{OURS} edited", [p.Backward(1)], 0),
    ("[p.grad.mul_(3), setattr(optimizer, 'divisor', 7), optimizer.step()]", f"{OURS} edited", [p.Backward(1)], 0),
    ("[setattr(p.grad, 'data', torch.ones(p.shape)), optimizer.step()]", f"{OURS} given other", [p.Backward(1)], 0),
    ("[p.grad.set_(torch.ones(p.shape)), optimizer.clip_grad_norm_(1.0)]", f"{OURS} given other", [p.Backward(1)], 0),
    ("[setattr(p, 'grad', 0 * p), optimizer.step()]", f"{OURS} assigned", [p.Backward(1), p.Clip(1.0)], 2),
]
"""Edits of p.grad that cannot count, with what refuses them."""
ASSIGNED = {  # before a backward, whichever parameter it is
    name: f"[setattr(model.{name}, 'grad', torch.ones(model.{name}.shape)), backward()]"
    for name in ("first.weight", "first.bias", "last.weight", "last.bias")
}
SET_FULL_GRAD = {
    "optimizer.set_full_grad(p, torch.ones(3, 2))": "has shape (3, 2), the parameter (4, 3): give a whole gradient",
    "optimizer.set_full_grad(p, torch.ones(4, 3).double())": "is torch.float64, and full_grad returns torch.float32",
    "optimizer.set_full_grad(p, torch.ones(4, 3).to_sparse())": "the gradient is torch.sparse_coo: give a dense one",
    "optimizer.set_full_grad(p, [1.0] if rank else torch.ones(4, 3))": (
        "rank 1: set_full_grad of 'first.weight': the gradient i"
    ),
    "optimizer.set_full_grad(p, torch.ones(4, 3) if rank else None)": "rank 0 gives None, and rank 1 a gradient",
    "optimizer.set_full_grad(p, torch.ones(4, 2 + rank))": "rank 0: set_full_grad of 'first.weight': the gradient has",
    "optimizer.set_full_grad(model.parts[8].of[1].gain, torch.ones(4))": (
        "of 'parts.8.of.1.gain': the parameter is frozen: unfreeze it, or give None"
    ),
    "optimizer.set_full_grad(torch.nn.Parameter(torch.ones(2)), None)": "is not one of this optimizer's parameters",
    "within(optimizer.no_sync(), lambda: optimizer.set_full_grad(p, None))": (
        "set_full_grad of 'first.weight' inside no_sync()"
    ),
}
IN_JOIN = {
    "within(optimizer.join(), lambda: optimizer.clip_grad_norm_(1.0 + rank))": (
        "inside join … rank 0 calls clip_grad_norm_() and rank 1 … max_norm … 1.0 … max_norm … 2.0"
    ),
    "within(optimizer.join(), lambda: 1 // 0 if rank else [backward(), optimizer.step()])": ERROR,
    "within(optimizer.join(), lambda: 1 // 0)": ERROR,
    "within(optimizer.join(), optimizer.close)": "inside join",
    "within(optimizer.join(), lambda: optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(1))]}))": (
        "inside join"
    ),
    "within(optimizer.join(), optimizer.join().__enter__)": "join() inside join()",
}
RELOAD = "all ranks call optimizer.reload() before the model or the optimizer is used"
LENT = {
    "optimizer.offload()": "nothing",
    "kept()": RELOAD,
    "backward()": RELOAD,
    "optimizer.step()": RELOAD,
    "optimizer.zero_grad()": RELOAD,
    "[optimizer.offload()]": RELOAD,
    "optimizer.describe()": RELOAD,
    "optimizer.state_dict()": RELOAD,
    "optimizer.clip_grad_norm_(1.0)": RELOAD,
    "optimizer.gathered().__enter__()": RELOAD,
    "optimizer.full_master(p)": RELOAD,
    "optimizer.state[p]": RELOAD,
    "ShardedAverage(optimizer)": RELOAD,
    "optimizer.reload()": "nothing",
    "[optimizer.reload()]": "nothing",  # nothing is left to do
}
IN_PLACE = "TypeError … edits of its tensors in place … optimizer.reset_states(params)"
STATES = {
    **dict.fromkeys(
        (
            "setattr(optimizer, 'state', {})",
            "optimizer.__setstate__({'state': {}, 'param_groups': []})",
            "optimizer.state.__setitem__(p, {})",
            "optimizer.state.__delitem__(p)",
            "optimizer.state.pop(p)",
            "optimizer.state.update({p: {}})",
            "optimizer.state.__ior__({p: {}})",
            "optimizer.state[p].__setitem__('exp_avg', torch.zeros(12))",
            "optimizer.state[p].__delitem__('exp_avg')",
            "optimizer.state[p].pop('exp_avg')",
            "optimizer.state[p].update(exp_avg=torch.zeros(12))",
            "optimizer.state[p].__ior__({'mine': 0})",
        ),
        IN_PLACE,
    ),
    "optimizer.reset_states([p, model.last.weight][: 1 + rank])": (
        "rank 0 and rank 1 chose different parameters, of which the first is 'last.weight'"
    ),
    "optimizer.reset_states(p if rank else torch.zeros(3))": (
        "rank 0: reset_states(): a tensor of shape (3,) is not one of this optimizer's"
    ),
    "optimizer.reset_states(None if rank else [p])": "chose different parameters, of which the first is '",
    "within(optimizer.gathered(), optimizer.reset_states)": "reset_states() inside gathered() or inside a forward",
    "within(optimizer.join(), optimizer.reset_states)": "reset_states() inside a backward or inside join():",
}
IN_APPLIED = {
    **{
        f"within(average.applied(), {call})": f"{name} … inside applied() of the average"
        for name, call in {
            "step": "optimizer.step",
            "clip_grad_norm_": "lambda: optimizer.clip_grad_norm_(1.0)",
            "save": "lambda: save('/nowhere/saved', optimizer)",
            "load": "lambda: load('/nowhere/saved', optimizer)",
            "update_parameters": "average.update_parameters",
            "applied": "lambda: average.applied().__enter__()",
        }.items()
    },
    "within(average.applied(), backward)": "a backward inside applied",
    "optimizer.zero_grad()": "nothing",
}
AVERAGES = {
    "ShardedAverage(optimizer, avg_fn=lambda a, w, n: a, multi_avg_fn=lambda a, w, n: None)": "not both",
    "ShardedAverage(optimizer, avg_fn=lambda a, w, n: a / a.norm())": "must be element-wise",
    "ShardedAverage(optimizer, avg_fn=lambda a, w, n: None)": "failed on 1-D tensors",
    "ShardedAverage(optimizer, avg_fn=lambda a, w, n: a * a.shape[1])": "failed on 1-D tensors (IndexError",
    "ShardedAverage(optimizer, multi_avg_fn=lambda a, w, n: [x.lerp_(y / max(z.abs().max() for z in w), 0.1) "
    "for x, y in zip(a, w)])": "other values for parts than for whole tensors",
    "ShardedAverage(optimizer, name='a/b')": "bad name of averages 'a/b'",
    "ShardedAverage(optimizer, name=3)": "bad name of averages 3",
    "ShardedAverage(optimizer, name='mean')": "has an average 'mean' already",
    "ShardedAverage(torch.optim.AdamW([p]))": "TypeError … not of AdamW: … AveragedModel",
    "ShardedAverage(optimizer, name='one').gather()": "'one': it has no values yet: call update_parameters",
    "optimizer._engine.averages.by_name.pop('one').close()": "nothing",
    "[each.close() or each.gather() for each in [ShardedAverage(optimizer, name='one')]]": "'one' is closed",
    "average.gather(to=7)": "rank 7 is not one of the 2 ranks",
    "[None if rank else average.update_parameters(), average.gather(to=None)]": "ranks have averaged [3, 2] weights",
    "save('/nowhere/saved', optimizer)": "the averages is … on rank 1",
}
WHOLE = "for whole in [optimizer.full_state_dict(None)]"
FULL_STATES = {
    **{
        f"[optimizer.load_full_state_dict({given} if rank else None) {WHOLE}]": words
        for given, words in {
            "{n: v + 1 for n, v in whole.items() if n != 'last.bias'}": (
                "load_full_state_dict(): Error(s) in loading state_dict for Tree: Missing key(s) in state_dict: "
            ),
            "{**whole, 'other': torch.ones(1)}": 'Unexpected key(s) in state_dict: "other"',
            "{**whole, 'last.bias': torch.ones(1)}": "size mismatch for last.bias",
            "{f'module.{n}': v for n, v in whole.items()}": "Its names begin with 'module.'",
            "list(whole)": "a state dict is a mapping of names to tensors, not a list",
            "None": "no rank has a state dict: give it on one rank at least, and None elsewhere",
        }.items()
    },
    "within(optimizer.gathered(), optimizer.full_state_dict)": "inside gathered()",
    "within(optimizer.gathered(), lambda: optimizer.load_full_state_dict(None))": "inside gathered()",
    "optimizer.full_state_dict(2)": "full_state_dict: rank 2 is not one of the 2",
}
SAVE = "save('/nowhere/saved', optimizer)"
IN_FORWARD = "save() … inside gathered() or inside a forward: leave it first"
IN_BACKWARD = "save() … inside a backward or inside join(): leave it first"
UNUSED = {
    SAVE: "save() … call it after step() or zero_grad()",
    SAVE.replace("save", "load", 1): "() with gradients that no step",
}
SAVES = [  # calls, commands before, stages
    ({f"within(optimizer.gathered(write=True), lambda: {SAVE})": IN_FORWARD}, [], (0, 1, 2, 3)),
    ({f"within(model.first.register_forward_hook(lambda *_: {SAVE}), backward)": IN_FORWARD}, [], (3,)),
    ({f"in_backward(lambda: {SAVE})": IN_BACKWARD}, [], (0, 2, 3)),
    ({f"within(optimizer.join(), lambda: {SAVE})": IN_BACKWARD}, [], (0, 2)),
    (UNUSED, [p.Backward(1)], (0, 2, 3)),
    (UNUSED, [p.Backward(1), p.Clip(1.0)], (0, 2)),
    (UNUSED, [p.Backward(1, sync=False)], (0, 2)),
]
WITH_MODES = {"optimizer": "schedule-free"}
MODES = {  # before any step, whose states an exchange would round
    "within(optimizer.gathered(), optimizer.eval)": "eval() inside gathered() or inside a forward: leave it first",
    "within(optimizer.join(), optimizer.eval)": "eval() inside a backward or inside join(): leave it first",
    "in_backward(optimizer.eval)": "eval() inside a backward or inside join(): leave it first",
    "optimizer.train(False)": "TypeError: ZeroOptimizer.train() takes 0 positional arguments but 1 was given",
    "optimizer.zero_grad()": "nothing",
    "optimizer.eval()": "nothing",
    "optimizer.state_dict()": "consolidate_state_dict",  # that of before is of the other mode
    "[backward(), optimizer.step()]": (
        "step() in eval mode: param group 0, of ScheduleFree … Call optimizer.train() on all ranks"
    ),
    "optimizer.train()": "nothing",
}
DIALS = (
    Dial(
        name="loop",
        first=6,
        values={
            "clips": [*step(1, p.Clip(0.1)), p.Change(0, "lr", 3e-3), *step(2), p.Backward(3), p.Step(), p.ZeroGrad()],
            "norms": [*step(1, p.Clip(0.3, 1.0), p.Clip(0.2, 3.0)), *step(2, p.Clip(0.3, INFINITY), p.Clip(INFINITY))],
            "no sync": [
                *(OFF, *step(1), OFF, p.Backward(2, sync=False), p.Step(), p.ZeroGrad(), *step(3, OFF)),
                *(p.Backward(4, mask=0, sync=False), p.Backward(5), OFF, p.Backward(6), OFF),
                *(p.Clip(0.1), p.Step(), p.ZeroGrad()),
            ],
            "uneven": [
                *(OFF, p.Uneven(1, (2, 0, 1)), p.Backward(5), p.Clip(0.5), p.Step(), p.ZeroGrad()),
                *(p.Uneven(2, (0, 1, 3)), p.Uneven(3, (1, 0), sync=False), p.Step(), p.ZeroGrad(), *step(4)),
            ],
            "joined": [p.Joined(1, (2, 0, 1, 1)), *step(5), p.Joined(6, (1, 3), sets=True)],
            "freezes": [*step(1), p.Freeze((2, 9)), *step(2), p.Freeze((9, 3)), *step(3), p.Freeze((3,)), *step(4)],
            "divisors": [p.Divide(7.5), *step(1), p.Divide(3), *step(2), *step(3)],
            "scaled": [
                *(p.Scaled(1), p.Scaled(2, overflow=1), p.Scaled(3, 3.0, sets=True), *step(4)),
                *(p.Scaled(5, unscale=False), p.Scaled(6, 8.0, overflow=0, unscale=False, further=True), *step(7)),
                *(p.Scaled(8, overflow=0, beside="also"), *step(9)),
            ],
            "kept": [  # frozen behind a forward, it gets no gradient from it; also on top of another backward
                *(p.Keep(1), *step(2, p.BackwardOfKept()), p.Keep(3), p.Freeze((2,)), *step(4, p.BackwardOfKept())),
                *(p.Freeze((2,)), p.Keep(5), p.Freeze((2,)), p.BackwardOfKept(), *step(6), p.Freeze((2,))),
                *(p.Backward(8), p.Keep(9), p.Freeze((2,)), p.BackwardOfKept(), *step(10)),
            ],
            "fails": [
                p.Fail(1),
                *step(2, p.Fail(3)),
                p.Fail(4, in_block=True),
                *step(5),
                *(p.FailToAdd(why) for why in ("precision", "twice", "class", "class, rank 0")),
                *step(6),
            ],
            "evaluates": [
                *step(1, p.Evaluate(2)),
                p.Evaluate(3, inference=True),
                p.Read((1, 4)),
                *step(4),
                p.Describe(exact=True),
            ],
            "edits": [
                *(*step(1), p.Write(None, 2), *step(2), p.Edit(2, 0.5), *step(3), p.Write((3,), 4), *step(5)),
                *(p.Write((2,), 6, "all"), p.Write(None, 7, "others"), *step(8)),
            ],
            "replaces": [
                *step(1, p.FullGrad(3), p.SetGrad(3, 7), p.SetGrad(11, 8)),  # of which one is never used
                *step(2, p.Clip(0.5), p.FullGrad(3), p.SetGrad(4, 1, none=True), p.FullGrad(4)),
                *(p.SetGrad(2, 3), p.Clip(0.1), p.Step(), p.ZeroGrad("zeros"), p.Divide(7.5)),
                *step(3, p.SetGrad(3, 9)),
            ],
            "several": [
                *(p.Backward(1, "two losses"), *step(2), p.Backward(3, "retained"), *step(4)),
                *(p.Backward(5, "with a graph"), *step(6), *step(7)),
            ],
            "an option adds a state": [*step(1), p.Change(0, "momentum", 0.5), *step(2), *step(3)],
            "losses": [p.Backward(1, "autocast"), *step(2), p.Backward(3, "penalised"), *step(4), *step(5)],
            **{f"clears, {how}": clears(how) for how in ("zeros", "module", "module zeros", "none", "another's zeros")},
        },
        # at stage 3 all ranks run the same number of forwards; what is replaced has a group, and steps in the last step
        needs=lambda row: (
            (row["loop"] != "uneven" or row["stage"] != "3")
            and (
                row["loop"] != "replaces"
                or (row["groups"] != "not all" and row["bucket_cap_mb"] not in ("25.0", "auto"))
            )
        ),
        moments=[
            Moment(
                {
                    "within(optimizer.no_sync(), optimizer.step)": "step() inside no_sync(): call it after the block",
                    "within(optimizer.no_sync(), lambda: optimizer.clip_grad_norm_(1.0))": "_() inside no_sync",
                    "within(optimizer.no_sync(), lambda: 1 // 0)": "ZeroDivisionError",
                    "copy.deepcopy(optimizer)": "cannot be copied or pickled",
                    "pickle.dumps(optimizer)": "cannot be copied or pickled",
                }
            ),
            *(
                too_late(settled, by, *more)
                for settled, by in ((p.Step(), "step()"), (p.Clip(1.0), "clip_grad_norm_()"))
                for more in ((0, (0, 1, 2)), (1, (3,)))
            ),
            Moment(
                {"unscale(8.0 + 8 * rank)": "the loss scale is 8.0 on rank 0, but 16.0 on rank 1 … every rank"},
                after=[p.ZeroGrad()],
                stages=(1, 2, 3),
            ),
            Moment(
                {"setattr(optimizer, 'divisor', 3)": "the divisor was set after clip_grad_norm_()"},
                [p.Backward(1), p.Clip(1.0)],
                [p.Step(), p.ZeroGrad()],
            ),
            Moment(
                {
                    f"in_backward(lambda: {call})": f"RuntimeError: {name} inside a backward"
                    for name, call in IN_HOOK.items()
                },
                [],
                [p.ZeroGrad()],
                (1, 2, 3),
            ),
            Moment({OTHER: "of 'last.bias', which is sharded, not reduced yet, "}, [], [p.ZeroGrad()], (1, 2, 3)),
            too_late(p.SetGrad(0, 3), "set_full_grad of 'first.weight'", 1),
            Moment(
                {
                    "optimizer.state_dict()": "consolidate_state_dict(to=rank)",
                    "optimizer.eval()": "AttributeError … AdamW has no train() and eval() … leave out optimizer.eval()",
                    "optimizer.sum_over_ranks(torch.ones(()))": "numbers, not tensor",
                },
                [*steps(1), p.Consolidate(1), p.Backward(3), p.Step(look=False), p.ZeroGrad()],
                stages=(1, 2, 3),
            ),
            Moment(dict.fromkeys(READS, READ) | LOOKS, after=[p.ZeroGrad()], stages=(1, 2)),
            Moment(
                {f"1 / ({SOMETIMES}.grad is not None)": "nothing"}, [p.Backward(1, mask=4)], [p.ZeroGrad()], (0, 1, 2)
            ),
            Moment(FAILS, [], [p.ZeroGrad()]),
            Moment(dict.fromkeys(ONE_FAILS, ERROR), [], [p.ZeroGrad()], (0, 1, 2)),
            Moment(
                {"optimizer.full_grad(p)": "full_grad of 'first.weight': … no_sync(), or the zeros of zero_grad"},
                [p.Backward(1), p.Backward(2, sync=False)],
                [p.Clip(1.0), p.Step(), p.ZeroGrad()],
            ),
            Moment(
                {"p.grad.sum()": "divided by another number than optimizer.divisor is now"},
                [p.Backward(1), p.Divide(8)],
                [p.FullGrad(0), p.Clip(1.0), p.Step(), p.ZeroGrad(), p.Divide(2)],
                (0,),
            ),
            *(
                Moment({call: words}, before, [p.ZeroGrad(), p.Divide(2)], (stage,))
                for call, words, before, stage in EDITS
            ),
            *(
                Moment(
                    {call: f"the gradient of '{name}' was assigned from outside"},
                    [*steps(1), p.Freeze((-1,)), *steps(1), p.Freeze((-1,))],
                    [p.ZeroGrad()],
                    (stage,),
                    ALONE,
                )
                for stage, (name, call) in enumerate(ASSIGNED.items())
            ),
            Moment(
                {"[backward(), 1 / p.grad.equal(optimizer.full_grad(p))]": "nothing"},
                [p.Divide(5), p.Backward(1)],
                [p.ZeroGrad(), p.Divide(2)],
                (0,),
            ),
            Moment(
                {"[g := p.grad, backward(), optimizer.clip_grad_norm_(1.0), 1 / (p.grad is g)]": "nothing"},
                after=[p.ZeroGrad()],
                stages=(0,),
                changes=ALONE,
            ),
            Moment(
                {
                    "within(p.register_post_accumulate_grad_hook(lambda q: q.grad.sum()), backward)": (
                        "'first.weight' … register it by p.register_hook, … or read it"
                    )
                },
                [],
                [p.ZeroGrad()],
                (0, 1, 2),
            ),
            Moment({"model.to('cpu').float()": "nothing"}, after=[p.Clip(0.5), p.Step(), p.ZeroGrad()]),
            Moment(  # a rank that has caught up shows what the others added
                {"1 / p.grad.equal(optimizer.full_grad(p))": "nothing"},
                [p.Uneven(1, (1, 0))],
                [p.FullGrad(0), p.Step(), p.ZeroGrad()],
                (0,),
            ),
            Moment(SET_FULL_GRAD, after=[p.FullGrad(0), p.Step(), p.ZeroGrad()]),
            Moment(IN_JOIN, [], [p.ZeroGrad()], (0, 1, 2)),
        ],
    ),
    Dial(
        name="look",
        first=7,
        values={
            "none": steps(1),
            "average": [
                p.Average(),
                *steps(1),
                p.Average(),
                p.Average("ema"),
                *steps(1),
                p.Average(),
                p.Average("ema"),
            ],
            "lend": [p.Lend(), *steps(1), p.Lend(), *steps(1)],
            "reset": [p.Reset((2, 4)), *steps(1), p.Reset(), *steps(1)],
            "modes": [p.Modes(1), *steps(1), p.Modes(2), *steps(1)],
            "states": [p.Consolidate(0), p.FullState(0, masters=True), *steps(1), p.Describe(exact=True)],
            "rolled back": [p.RollBack(3), *steps(1)],
        },
        needs=lambda row: (
            (row["look"] == "modes") is (row["class"] in TWO_MODES)
            and (row["look"] != "lend" or "zeros" not in row["loop"])
        ),  # zeros that no step used do not move
        moments=[
            Moment(LENT, [*steps(1), p.Keep(60)]),
            *(
                Moment(
                    {
                        "optimizer.offload()": "nothing",
                        **dict.fromkeys(("model.state_dict()", "p.sum()"), f"is {where}"),
                        "optimizer.reload()": "nothing",
                    },
                    steps(1),
                    stages=stages,
                )
                for stages, where in (((0, 1, 2), "on the host"), ((3,), "released"))
            ),
            Moment(
                {"optimizer.offload()": "offload() with gradients, which do not move: call zero_grad() first"},
                after=[p.ZeroGrad(), p.Lend()],
            ),
            Moment(
                {
                    "optimizer.offload()": "offload() with gradients, which do not move"
                },  # as any others that a loop writes
                [p.Backward(1), p.ZeroGrad("module zeros")],
                [p.ZeroGrad()],
            ),
            Moment(IN_APPLIED, [*steps(1), p.Average()], [p.Average()]),
            Moment(
                {"average.applied().__enter__()": "with gradients that no step has used"}, [p.Average(), p.Backward(1)]
            ),
            Moment(AVERAGES, [*steps(1), p.Average(), p.Average()]),
            Moment(MODES, [p.Consolidate(0)], [p.ZeroGrad()], (1, 2, 3), WITH_MODES),
            Moment(
                {"kept()": "modified by an inplace operation"},
                [*steps(1), p.Keep(60), p.Modes(2)],
                [p.ZeroGrad()],
                (3,),
                WITH_MODES | ALONE,
            ),
            Moment(
                {
                    "[sent := optimizer.traffic.control_sent, optimizer.train(), "
                    "1 / (optimizer.traffic.control_sent == sent)]": "nothing"  # it is in this mode
                },
                changes=WITH_MODES,
                after=[p.ZeroGrad()],
                stages=(2,),
            ),
            Moment(FULL_STATES, steps(1)),
            *(Moment(calls, [*steps(1), *before], [p.ZeroGrad()], stages) for calls, before, stages in SAVES),
            Moment(STATES, steps(1), changes={"world_size": 4}),
        ],
    ),
)
