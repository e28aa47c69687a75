"""A process that is forked from a rank is none: what would communicate raises at once, and the ranks go on."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collectives.backends.shared_memory import PeerProcess
from zero import ZeroOptimizer

from ..support.forks import said_by_a_child
from ..support.models import Odd, build, odd_batches, odd_loss
from ..support.plain import assert_same_model, plain_step
from ..support.pool import GlooPool

RANKS, STEPS = 2, 3
REMEDY = "a copy of the model that was made before the fork"


class Run:
    """A rank that trains."""

    def __init__(self, group: Any, rank: int, stage: int, algorithm: str) -> None:
        self.model: Any = build(0)
        given: Any = {"process_group": group, "collective": algorithm, "bucket_cap_mb": 0.0005, "lr": 0.1}
        self.optimizer = ZeroOptimizer(self.model, torch.optim.AdamW, stage=stage, **given)
        self.rank, self.batches = rank, batches()

    def loss(self, step: int = 0) -> Any:
        return odd_loss(self.model, self.batches[step][self.rank])

    def end_step(self) -> None:
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, first: int, last: int = STEPS) -> None:
        for number in range(first, last):
            self.loss(number).backward()
            self.end_step()


def batches() -> list[list[Any]]:
    return [odd_batches(RANKS, seed=step, extra=False) for step in range(STEPS)]


def plain(ranks: int = RANKS) -> Odd:
    model = build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in batches():
        plain_step(model, optimizer, odd_loss, step[:ranks], ranks, max_norm=1.0)
        optimizer.zero_grad()
    return model


FORWARDS: dict[str, Callable[[Run], Any]] = {
    "forward": Run.loss,
    "evaluation": torch.no_grad()(Run.loss),
    "forward of a unit": lambda run: run.model.layers[1](torch.ones(2, 13)),
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


def assert_child_is_refused(run: Run, stage: int, kept: Any) -> None:
    """Below stage 3 the child may evaluate. ``kept``: a loss from before the fork."""
    actions = COLLECTIVES | (FORWARDS if stage == 3 else {}) | {"backward": lambda _: kept.backward()}

    def tried() -> dict[str, str]:
        found = {}
        for name, action in actions.items():
            try:
                action(run)
                found[name] = "nothing"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        return found

    found = said_by_a_child(tried)
    assert list(found) == list(actions), found
    for name, said in found.items():
        assert said.startswith(f"CollectiveError: rank {run.rank}: process "), (name, said)
        assert REMEDY in said, (name, said)
        assert "optimizer.gathered()" in said, (name, said)
    if stage < 3:
        assert said_by_a_child(lambda: run.loss().item()) == run.loss().item()


def forks(group: dist.ProcessGroup, rank: int, stage: int, algorithm: str, moment: str) -> Any:
    run, forked = Run(group, rank, stage, algorithm), list[bool]()
    run.steps(0, 1)
    kept = run.loss(1)

    def fork(*_: Any) -> None:
        if not forked:  # else in a unit that is used twice
            forked.append(True)
            assert_child_is_refused(run, stage, kept)

    where: Any = nullcontext()
    if moment == "inside a forward":
        where = run.model.layers[0].register_forward_pre_hook(fork)
    elif moment == "inside a backward":
        where = run.model.one.register_hook(fork)
    with where:
        loss = run.loss(1)
        loss.backward()
    if moment == "inside gathered":
        with run.optimizer.gathered():
            fork()
    elif moment == "before a step":
        fork()
    assert forked
    run.end_step()
    run.steps(2)
    run.optimizer.close()
    return run.model


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
        assert_same_model(model, plain())


def collects(group: dist.ProcessGroup, rank: int) -> Any:
    run = Run(group, rank, 3, "auto")
    run.steps(0, 1)
    with run.optimizer.gathered():
        copied = copy.deepcopy(run.model)

    def collect() -> list[Any]:
        optimizer = weakref.ref(run.optimizer)
        del run.optimizer, run.model
        gc.collect()
        peers = [thing for thing in gc.get_objects() if isinstance(thing, PeerProcess)]
        return [optimizer() is None, len(peers), odd_loss(copied, run.batches[0][0]).item()]

    assert said_by_a_child(collect) == [True, 0, odd_loss(copied, run.batches[0][0]).item()]
    run.steps(1)
    run.optimizer.close()
    return run.model


def test_to_collect_an_optimizer_in_a_forked_child_takes_nothing_from_the_ranks(gloo: GlooPool) -> None:
    """A copy that was made inside `gathered()` evaluates there."""
    for model in gloo.run(collects):
        assert_same_model(model, plain())


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_alone_behaves_as_several(stage: int) -> None:
    run = Run(None, 0, stage, "auto")
    run.steps(0, 1)
    kept = run.loss(1)
    assert_child_is_refused(run, stage, kept)
    del kept
    run.steps(1)
    run.optimizer.close()
    assert_same_model(run.model, plain(1))
