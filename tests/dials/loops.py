"""What loops do: how they clip, clear, accumulate, freeze, evaluate, save and load."""

from __future__ import annotations

from collections.abc import Sequence

from ..support.machine import program as p
from ..support.machine.program import Command
from ..support.two_modes import TWO_MODES
from .record import Dial

INFINITY = float("inf")


def step(seed: int, *between: Command, clear: p.Clear = "zero_grad", last: bool = True) -> list[Command]:
    """Return a step: a backward, further commands, a clip, the update and clearing. ``last`` False: without update."""
    return [p.Backward(seed), *between, *([p.Clip(0.5), p.Step()] if last else []), p.ZeroGrad(clear)]


def steps(count: int, seed: int = 50) -> list[Command]:
    return [command for number in range(count) for command in step(seed + number)]


def clears(how: p.Clear) -> Sequence[Command]:
    return [*step(1, clear=how), *step(2, clear=how, last=False), *step(3, clear=how), *step(4)]


OFF = p.Backward(9, sync=False)
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
            "scaled": [p.Scaled(1), p.Scaled(2, overflow=1), p.Scaled(3, 3.0), *step(4)],
            "kept": [p.Keep(1), *step(2, p.BackwardOfKept()), p.Keep(3), p.Freeze((2,)), *step(4, p.BackwardOfKept())],
            "fails": [p.Fail(1), *step(2, p.Fail(3)), p.Fail(4, in_block=True), *step(5)],
            "evaluates": [
                *step(1, p.Evaluate(2)),
                p.Evaluate(3, inference=True),
                p.Read((1, 4)),
                *step(4),
                p.Describe(exact=True),
            ],
            "edits": [*step(1), p.Write(None, 2), *step(2), p.Edit(2, 0.5), *step(3), p.Write((3,), 4), *step(5)],
            "replaces": [*step(1, p.FullGrad(3), p.SetGrad(3, 7)), *step(2, p.SetGrad(4, 1, none=True)), *step(3)],
            "several": [p.Backward(1, "two losses"), *step(2), p.Backward(3, "retained"), *step(4), *step(5)],
            **{f"clears, {how}": clears(how) for how in ("zeros", "module", "module zeros", "none")},
        },
        needs=lambda row: row["loop"] != "uneven" or row["stage"] != "3",  # where all ranks run the same number
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
