"""What loops do: how they clip, clear, accumulate, freeze, evaluate, save and load."""

from __future__ import annotations

from collections.abc import Sequence

from ..support.machine import program as p
from ..support.machine.program import Command
from ..support.two_modes import TWO_MODES
from .record import Dial, Moment

INFINITY = float("inf")


def step(seed: int, *between: Command, clear: p.Clear = "zero_grad", last: bool = True) -> list[Command]:
    """Return a step: a backward, further commands, a clip, the update and clearing. ``last`` False: without update."""
    return [p.Backward(seed), *between, *([p.Clip(0.5), p.Step()] if last else []), p.ZeroGrad(clear)]


def steps(count: int, seed: int = 50) -> list[Command]:
    return [command for number in range(count) for command in step(seed + number)]


def clears(how: p.Clear) -> Sequence[Command]:
    return [*step(1, clear=how), *step(2, clear=how, last=False), *step(3, clear=how), *step(4)]


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


def too_late(settled: Command, by: str, turns: int, stages: Sequence[int]) -> Moment:
    """Return the uses of a gradient after a further backward. ``turns``: how many rank 0 has run; rank 1 has one."""
    return Moment(
        {
            call: f"RuntimeError: {use} on rank  … backward() after {by}() without zero … {DIVIDED}"
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
DIALS = (
    Dial(
        name="loop",
        first=6,
        values={
            "clips": [*step(1, p.Clip(0.1)), p.Change(0, "lr", 3e-3), *step(2), p.Backward(3), p.Step(), p.ZeroGrad()],
            "norms": [*step(1, p.Clip(0.3, 1.0), p.Clip(0.2, 3.0)), *step(2, p.Clip(0.3, INFINITY), p.Clip(INFINITY))],
            "no sync": [
                *(OFF, *step(1), OFF, p.Backward(2, sync=False), p.Step(), p.ZeroGrad(), *step(3, OFF)),
                *(p.Backward(4), OFF, p.Backward(5), OFF, p.Clip(0.1), p.Step(), p.ZeroGrad()),
            ],
            "uneven": [
                *(p.Uneven(1, (2, 0, 1)), p.Clip(0.5), p.Step(), p.ZeroGrad()),
                *(p.Uneven(2, (0, 1, 3)), p.Uneven(3, (1, 0), sync=False), p.Step(), p.ZeroGrad(), *step(4)),
            ],
            "joined": [p.Joined(1, (2, 0, 1, 1)), *step(5), p.Joined(6, (1, 3))],
            "freezes": [*step(1), p.Freeze((2, 9)), *step(2), p.Freeze((9, 3)), *step(3), p.Freeze((3,)), *step(4)],
            "divisors": [p.Divide(7.5), *step(1), p.Divide(3), *step(2), *step(3)],
            "scaled": [
                *(p.Scaled(1), p.Scaled(2, overflow=1), p.Scaled(3, 3.0), *step(4)),
                *(p.Scaled(5, unscale=False), p.Scaled(6, 8.0, overflow=0, unscale=False), *step(7)),
                *(p.Scaled(8, overflow=0, beside="also"), *step(9)),
            ],
            "kept": [p.Keep(1), *step(2, p.BackwardOfKept()), p.Keep(3), p.Freeze((2,)), *step(4, p.BackwardOfKept())],
            "fails": [p.Fail(1), *step(2, p.Fail(3)), p.Fail(4, in_block=True), *step(5)],
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
            "replaces": [*step(1, p.FullGrad(3), p.SetGrad(3, 7)), *step(2, p.SetGrad(4, 1, none=True)), *step(3)],
            "several": [p.Backward(1, "two losses"), *step(2), p.Backward(3, "retained"), *step(4), *step(5)],
            **{f"clears, {how}": clears(how) for how in ("zeros", "module", "module zeros", "none")},
        },
        needs=lambda row: row["loop"] != "uneven" or row["stage"] != "3",  # where all ranks run the same number
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
                for settled, by in ((p.Step(), "step"), (p.Clip(1.0), "clip_grad_norm_"))
                for more in ((0, (0, 1, 2)), (1, (3,)))
            ),
            Moment(
                {"unscale(8.0 + 8 * rank)": "the loss scale is 8.0 on rank 0, but 16.0 on rank 1 … every rank"},
                after=[p.ZeroGrad()],
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
        ],
    ),
    Dial(
        name="look",
        first=7,
        values={
            "none": steps(1),
            "average": [p.Average(), *steps(1), p.Average(), *steps(1), p.Average()],
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
    ),
)
