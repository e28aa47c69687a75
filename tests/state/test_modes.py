"""Classes with `train()` and `eval()`, such as schedule-free ones: the weights of each mode are the plain loop's."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from collectives import Transport, solo
from zero import ShardedAverage, ZeroOptimizer

from ..dials.loops import steps
from ..dials.record import config_with
from ..support.errors import error_of, errors_on, is_plain, warned
from ..support.machine.program import Backward, Clip, Command, Modes, Step, ZeroGrad
from ..support.machine.run import run
from ..support.models import build as locked_build
from ..support.models import odd_batches
from ..support.narrowed import PRECISIONS
from ..support.sides import AsPlain, OnRank, Side, same_as_plain
from ..support.two_modes import ScheduleFree
from .training import TOGETHER, average_of, train, values

BF16 = PRECISIONS["bf16"]
USED: list[Command] = [*steps(2), Modes(3), *steps(1, 60), Backward(4), Modes(5), Clip(0.5), Step(), ZeroGrad()]


@pytest.mark.usefixtures("accelerated")
def test_weights_that_are_rounded_where_they_are_read_are_those_of_the_mode() -> None:
    changes = {"stage": 3, "world_size": 2, "optimizer": "schedule-free", "collective": "pairwise", "precision": "bf16"}
    run(config_with(changes), *USED)


def test_of_several_classes_those_with_modes_exchange_their_weights() -> None:
    two = {"classes": ("", "schedule-free"), "shares": (0, 1), "options": ((), ())}
    run(config_with({"world_size": 2, **two}), *USED)


def test_averages_of_evaluated_weights_are_those_of_the_plain_loop() -> None:
    def loop(side: Side) -> Any:
        average = average_of(side, "ema")
        for step in range(2):
            side.set_mode("train")
            train(side, range(step, step + 1))
            side.set_mode("eval")
            average.update_parameters(*([side.model] if isinstance(side, AsPlain) else []))
        side.set_mode("train")
        side.model.eval()  # the weights are those of the average, and those of no mode
        block, model = nullcontext(), side.model
        if isinstance(average, ShardedAverage):
            block = average.applied()
        else:
            model = average.module
        with block, torch.no_grad():
            seen = model(odd_batches(1, 9)[0][0])
            if isinstance(side, OnRank):
                assert "inside applied() of the average" in error_of(side.set_mode, "eval")
                side.model.eval()
        return values(average), seen

    with warned() as warnings:
        same_as_plain(loop, lambda: locked_build(0), ScheduleFree, 3, settings={"stage": 3}, divisor=TOGETHER)
    assert warnings == []


def built(transport: Transport, cls: Any = ScheduleFree, stage: int = 2, **arguments: Any) -> tuple[Any, ZeroOptimizer]:
    model = locked_build(0)
    return model, ZeroOptimizer(model, cls, stage=stage, process_group=transport, bucket_cap_mb=0.0005, **arguments)


class Fails(ScheduleFree):
    def eval(self) -> None:
        if self.param_groups[0].get("fails"):
            raise ZeroDivisionError("of one rank")
        super().eval()


def test_an_error_of_the_class_on_one_rank_reaches_the_others() -> None:
    def program(transport: Transport) -> None:
        _, optimizer = built(transport, Fails)
        optimizer.train()
        optimizer.param_groups[0]["fails"] = transport.rank == 1
        optimizer.eval()

    for said in errors_on(3, program):
        assert "ZeroDivisionError: of one rank" in said


def test_a_forward_in_the_wrong_mode_warns_once() -> None:
    model, optimizer = built(solo())
    tokens = odd_batches(1)[0][0]

    def forwards() -> None:
        copy.deepcopy(model)(tokens)
        for mode in ("train", "eval"):
            getattr(optimizer, mode)()
            getattr(model, mode)()(tokens)
        optimizer.train()
        model(tokens)
        optimizer.eval()
        model.train()(tokens)

    with pytest.warns() as warnings:
        forwards()
    assert len(warnings) == 1
    said = warnings[0]
    assert (said.category, said.filename) == (RuntimeWarning, __file__)
    assert "a forward in eval mode with the weights of the optimizer's train mode" in str(said.message)
    optimizer.close()
    assert "this optimizer is closed: the model is plain again" in error_of(optimizer.eval)
    assert is_plain(model)
    with warned() as later:
        model.eval()(tokens)
    assert later == []
