"""Precisions, rounding, loss scales, classes and cuts: programs whose every command has the plain loop's bits."""

from __future__ import annotations

from typing import Any

import pytest

from ..support.machine import program as p
from ..support.machine.backends import Threads
from ..support.machine.hosts import ThreadsWithParametersOnTheHost
from ..support.machine.run import run
from ..support.machine.trees import Part
from ..support.rows import without

SOME = (Part("linear"), Part("matrix"), Part("scalar"), Part("sometimes", of=(Part("linear", 3),)), Part("unused"))
TWO_DTYPES = (*SOME, Part("linear", 3, dtype="float64"))
MADE_IN_BF16 = {"precision": "bf16", "dtype": "bfloat16"}
ROUNDED: dict[str, Any] = {"precision": "bf16", "rounded": True}
TWO_CLASSES: dict[str, Any] = {"shares": (0, 1), "options": ((), ()), "classes": ("", "muon")}


def step(seed: int, *between: p.Command) -> list[p.Command]:
    return [p.Backward(seed), *between, p.Clip(0.5), p.Step(), p.ZeroGrad()]


OFF = p.Backward(9, mask=-1, sync=False)
STEPS = [*step(1), *step(2, p.Backward(3)), *step(4)]
NO_SYNC = [
    *step(1, OFF, p.Backward(2, sync=False)),
    *(p.Backward(3, mask=0), OFF, p.Clip(0.1), p.Step(), p.ZeroGrad()),
    *(p.Backward(4, mask=0, sync=False), p.Backward(5), OFF, p.Step(), p.ZeroGrad(), *step(6)),
]
SCALED = [
    *(p.Scaled(1), p.Scaled(2, overflow=-1), p.Scaled(3, 3.0), *step(4)),
    *(p.Scaled(5, unscale=False), p.Scaled(6, 8.0, overflow=0, unscale=False), p.Scaled(7), *step(8)),
]
CLEARED = [p.Backward(1), p.ZeroGrad("zeros"), p.Backward(2, mask=0), p.FullGrad(8), *step(3, p.FullGrad(5))]
AVERAGES = [p.Average(), *step(1), p.Average(), *step(2), p.Average()]
LATER = [*step(1), p.Change(0, "momentum", 0.5), *step(2), *step(3)]  # an option that adds a state
NOT_ADDED = [*step(1), *(p.FailToAdd(why) for why in ("precision", "twice", "class", "class, rank 0")), *step(2)]
ROWS: dict[str, tuple[int, int, list[p.Command], dict[str, Any]]] = {  # stage, ranks, commands, of `Config`
    "bf16": (0, 2, NO_SYNC, {"precision": "bf16"}),
    "bf16, made in bf16": (2, 3, NO_SYNC, MADE_IN_BF16),
    "fp16": (2, 3, SCALED, {"precision": "fp16"}),
    "outputs in bf16": (1, 2, STEPS, {"precision": "outputs alone"}),
    "zeroed, sums in bf16": (3, 2, CLEARED, {"precision": "bf16, added up in bf16"}),
    "groups that cannot be added": (3, 2, NOT_ADDED, {"precision": "by kind", "shares": (0, 0, -1)}),
    "groups that cannot be added, stage 1": (1, 3, NOT_ADDED, {"precision": "by kind", "shares": (0, 0, -1)}),
    "losses are scaled": (2, 3, SCALED, {"parts": TWO_DTYPES}),
    "losses are scaled, stage 0": (0, 2, SCALED, {"parts": TWO_DTYPES}),
    "rounded, two classes": (3, 2, STEPS, {**ROUNDED, **TWO_CLASSES}),
    "rounded, averages": (3, 2, AVERAGES, {**ROUNDED, "optimizer": "sgd momentum"}),
    "rounded, an option adds a state": (2, 2, LATER, {**ROUNDED, "optimizer": "sgd", "parts": (Part("scalar"),)}),
    "rounded, an option adds a state, whole": (2, 2, LATER, {**ROUNDED, "optimizer": "sgd", "wholes": (True,)}),
    "stacks, averages": (2, 3, AVERAGES, {"stacks": (True,)}),
}
FURTHER = ("losses are scaled, stage 0", "groups that cannot be added, stage 1", "outputs in bf16", "fp16")


@pytest.mark.law("loss scale")
@pytest.mark.law("norm and overflow")
@pytest.mark.parametrize("row", without(ROWS, *FURTHER))
def test_a_program_gives_the_bits_of_the_plain_loop(row: str) -> None:
    stage, ranks, commands, changes = ROWS[row]
    setting = p.Setting(stage, ranks, 1e-6 if "whole" in row else 0.0005)
    run(p.Config(setting, **{"parts": SOME, **changes}), *commands, backend=Threads())


@pytest.mark.usefixtures("copied_from_the_host")
@pytest.mark.parametrize("step_there", [False, True])
def test_parameters_on_the_host_are_rounded_to_the_same_bits(step_there: bool) -> None:
    config = p.Config(p.Setting(3, 2, offload=step_there), SOME, dtype="bfloat16", rounded=True)
    run(config, *STEPS, backend=ThreadsWithParametersOnTheHost())
