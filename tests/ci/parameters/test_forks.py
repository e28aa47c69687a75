"""A process that is forked from a rank is none: what would communicate raises at once, and the ranks go on."""

from __future__ import annotations

import copy
import gc
import json
import os
import select
import signal
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collectives.backends.shared_memory import PeerProcess

from ...parameters.stage3 import INPUTS, Run, loss_of, plain
from ...support.errors import error_of
from ...support.plain import assert_same_model
from ...support.pool import GlooPool

REMEDY = "a copy of the model that was made before the fork"
FORWARDS: dict[str, Callable[[Run], Any]] = {
    "forward": Run.loss,
    "evaluation": Run.evaluate,
    "forward of a unit": lambda run: run.model.block(1)(INPUTS),
}
COLLECTIVES: dict[str, Callable[[Run], Any]] = {
    "gathered": lambda run: run.optimizer.gathered().__enter__(),
    "gathered(write=True)": lambda run: run.optimizer.gathered(write=True).__enter__(),
    "step": lambda run: run.optimizer.step(),
    "clip_grad_norm_": lambda run: run.optimizer.clip_grad_norm_(1.0),
    "zero_grad": lambda run: run.optimizer.zero_grad(),
    "full_grad": lambda run: run.optimizer.full_grad(next(run.model.parameters())),
    "check_replicas": lambda run: run.optimizer.check_replicas(),
    "broadcast_buffers": lambda run: run.optimizer.broadcast_buffers(),
    "reset_states": lambda run: run.optimizer.reset_states(),
    "consolidate_state_dict": lambda run: run.optimizer.consolidate_state_dict(),
    "sum_over_ranks": lambda run: run.optimizer.sum_over_ranks(1),
    "join": lambda run: run.optimizer.join().__enter__(),
    "no_sync": lambda run: run.optimizer.no_sync(),
    "add_param_group": lambda run: run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "exchange of bytes": lambda run: run.optimizer.exchange(b"x"),
    "close": lambda run: run.optimizer.close(),
}


def said_by_a_child(action: Callable[[], Any]) -> Any:
    """Run an action in a fork of this process. Return its result, after a round trip through JSON, or its error."""
    read, write = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.write(write, json.dumps(action()).encode())
        except BaseException as error:
            os.write(write, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(0)  # an ordinary exit would wait for gloo's threads, which do not exist in a fork
    os.close(write)
    if not select.select([read], [], [], 15.0)[0]:
        os.kill(process, signal.SIGKILL)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(process, 0)
    return json.loads(data or b'"the child hung, or died"')


def assert_child_is_refused(run: Run, stage: int, kept: Any) -> None:
    """Below stage 3 the child may evaluate. ``kept``: a loss from before the fork."""
    actions = COLLECTIVES | (FORWARDS if stage == 3 else {}) | {"backward": lambda _: kept.backward()}

    def tried() -> dict[str, str]:
        return {name: error_of(action, run) for name, action in actions.items()}

    found = said_by_a_child(tried)
    assert list(found) == list(actions), found
    for name, said in found.items():
        assert said.startswith(f"CollectiveError: rank {run.rank}: process "), (name, said)
        assert REMEDY in said, (name, said)
        assert "optimizer.gathered()" in said, (name, said)
    if stage < 3:
        assert said_by_a_child(lambda: run.loss().item()) == run.loss().item()


def forks(group: dist.ProcessGroup | None, rank: int, stage: int, algorithm: str, moment: str) -> nn.Module:
    run, forked = Run(group, stage=stage, collective=algorithm), list[bool]()
    run.step()
    kept = run.loss()

    def fork(*_: Any) -> None:
        if not forked:  # else in the child
            forked.append(True)
            assert_child_is_refused(run, stage, kept)

    where: Any = nullcontext()
    if moment == "inside a forward":
        where = run.model.block(0).register_forward_pre_hook(fork)
    elif moment == "inside a backward":
        where = run.model.first.weight.register_hook(fork)
    with where:
        loss = run.loss()
        loss.backward()
    if moment == "inside gathered":
        with run.optimizer.gathered():
            fork()
    elif moment == "before a step":
        fork()
    assert forked
    run.end_step()
    run.step()
    run.optimizer.close()
    model: nn.Module = run.model
    return model


@pytest.mark.parametrize(
    ("stage", "algorithm", "moment"),
    [
        (3, "auto", "before a step"),
        (3, "pairwise", "inside a backward"),
        (3, "auto", "inside a forward"),
        (3, "pairwise", "inside gathered"),
        (2, "auto", "before a step"),
    ],
)
def test_what_a_forked_child_does_raises_at_once_and_the_ranks_go_on(
    gloo: GlooPool, stage: int, algorithm: str, moment: str
) -> None:
    for model in gloo.run(forks, stage, algorithm, moment):
        assert_same_model(model, plain(3))


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_alone_behaves_as_several(stage: int) -> None:
    assert_same_model(forks(None, 0, stage, "auto", "before a step"), plain(3))


def peers() -> list[PeerProcess]:
    return [thing for thing in gc.get_objects() if type(thing) is PeerProcess]  # isinstance() raises for a dead proxy


def collects(group: dist.ProcessGroup, rank: int) -> Any:
    others = peers()  # of earlier programs of this process
    run = Run(group, stage=3)
    (peer,) = (weakref.ref(each) for each in peers() if not any(each is other for other in others))
    del others
    run.step()
    with run.optimizer.gathered():
        copied = copy.deepcopy(run.model)

    def collect() -> list[Any]:
        optimizer = weakref.ref(run.optimizer)
        del run.optimizer, run.model
        gc.collect()
        return [optimizer() is None, peer() is None, loss_of(copied, INPUTS).item()]

    said = said_by_a_child(collect)
    assert said == [True, True, loss_of(copied, INPUTS).item()], said
    run.step()
    run.step()
    run.optimizer.close()
    return run.model


def test_to_collect_an_optimizer_in_a_forked_child_takes_nothing_from_the_ranks(gloo: GlooPool) -> None:
    """A copy that was made inside `gathered()` evaluates there."""
    for model in gloo.run(collects):
        assert_same_model(model, plain(3))
