"""A process that is forked from a rank is not a rank: its actions never reach the ranks, which continue training.

Calls that would communicate raise in it at once, with the remedy; all other calls work.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import CollectiveError
from collectives.backends.shared_memory import PeerProcess
from zero import ZeroOptimizer

from ..support.forks import Child, said_by_a_child
from ..support.models import Odd, build, odd_batches, odd_loss
from ..support.plain import assert_same_model, plain_step
from ..support.pool import GlooPool

RANKS, STEPS = 2, 3
CAP = 0.0005
ALGORITHMS = ("auto", "pairwise")  # through shared memory, where a gather sends no unit; by messages
REMEDY = "a copy of the model that was made before the fork"


class Run:
    """A rank that trains, and forks a child at some moment."""

    def __init__(self, group: Any, rank: int, stage: int, algorithm: str) -> None:
        self.model: Any = build(0)
        self.optimizer = ZeroOptimizer(
            self.model,
            torch.optim.AdamW,
            stage=stage,
            process_group=group,
            collective=algorithm,
            lr=0.1,
            bucket_cap_mb=CAP,
        )
        self.rank = rank
        self.batches = batches()
        self.kept: Any = None  # a loss whose backward has not run yet

    def loss(self, step: int = 0) -> Any:
        return odd_loss(self.model, self.batches[step][self.rank])

    def step(self, number: int) -> None:
        (self.loss(number) if self.kept is None else self.kept).backward()
        self.kept = None
        self.end_step()

    def end_step(self) -> None:
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, first: int) -> None:
        """Run all remaining steps from the number ``first`` on."""
        for number in range(first, STEPS):
            self.step(number)


def batches() -> list[list[Any]]:
    return [odd_batches(RANKS, seed=step, extra=False) for step in range(STEPS)]


def plain(ranks: int = RANKS) -> Odd:
    model = build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in batches():
        plain_step(model, optimizer, odd_loss, step[:ranks], ranks, max_norm=1.0)
        optimizer.zero_grad()
    return model


# -- actions of a child -----------------------------------------------------------------------------------------------


def evaluates(run: Run) -> None:
    with torch.no_grad():
        run.loss()


def enters_a_unit(run: Run) -> None:
    run.model.layers[1](torch.ones(2, 13))


def ends_a_kept_graph(run: Run) -> None:
    assert run.kept is not None
    run.kept.backward()


def gathers(run: Run) -> None:
    with run.optimizer.gathered():
        pass


def edits(run: Run) -> None:
    with run.optimizer.gathered(write=True):
        pass


FORWARDS: dict[str, Callable[[Run], Any]] = {
    "forward": Run.loss,
    "evaluation": evaluates,
    "forward of a unit": enters_a_unit,
}
COLLECTIVES: dict[str, Callable[[Run], Any]] = {
    "gathered": gathers,
    "gathered(write=True)": edits,
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
    "another optimizer over the transport": lambda run: ZeroOptimizer(
        nn.Linear(2, 2), process_group=run.optimizer._transport
    ),
    "close": lambda run: run.optimizer.close(),
}


def tried(run: Run, actions: dict[str, Callable[[Run], Any]]) -> dict[str, str]:
    """Return the error of each action."""
    found = {}
    for name, action in actions.items():
        try:
            action(run)
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def assert_refused(found: Any, actions: dict[str, Callable[[Run], Any]], rank: int) -> None:
    assert isinstance(found, dict), found
    assert list(found) == list(actions)
    for name, said in found.items():
        assert said.startswith(f"CollectiveError: rank {rank}: process "), (name, said)
        assert REMEDY in said, (name, said)
        assert "optimizer.gathered()" in said, (name, said)


# -- moments of the fork ----------------------------------------------------------------------------------------------


Fork = Callable[[], None]


def before_the_first_step(run: Run, fork: Fork) -> None:
    fork()
    run.steps(0)


def after_a_step(run: Run, fork: Fork) -> None:
    run.step(0)
    fork()
    run.steps(1)


def inside_gathered(run: Run, fork: Fork) -> None:
    run.step(0)
    with run.optimizer.gathered():
        fork()
    run.steps(1)


def inside_gathered_to_write(run: Run, fork: Fork) -> None:
    run.step(0)
    with run.optimizer.gathered(write=True):
        fork()
    run.steps(1)


def inside_no_sync(run: Run, fork: Fork) -> None:
    with run.optimizer.no_sync():
        run.loss(0).backward()
        fork()
    run.end_step()
    run.steps(1)


def while_a_graph_is_kept(run: Run, fork: Fork) -> None:
    run.step(0)
    run.kept = run.loss(1)
    fork()
    run.steps(1)


def inside_a_forward(run: Run, fork: Fork) -> None:
    """Fork in the forward of a unit: the child leaves all forwards around it by an error."""
    run.step(0)
    with run.model.layers[0].register_forward_pre_hook(lambda *_: fork()):
        run.kept = run.loss(1)
    run.steps(1)


def inside_a_backward(run: Run, fork: Fork) -> None:
    """Fork while buckets are under way."""
    run.step(0)
    run.kept = run.loss(1)
    with run.model.one.register_hook(lambda _: fork()):
        run.step(1)
    run.steps(2)


MOMENTS: dict[str, Callable[[Run, Fork], None]] = {
    moment.__name__: moment
    for moment in (
        before_the_first_step,
        after_a_step,
        inside_gathered,
        inside_gathered_to_write,
        inside_no_sync,
        while_a_graph_is_kept,
        inside_a_forward,
        inside_a_backward,
    )
}


FEW = ("after_a_step", "inside_a_backward")
MANY = ("inside_gathered_to_write", "inside_no_sync")  # these repeat what others show

# -- the tests --------------------------------------------------------------------------------------------------------


def forks(group: dist.ProcessGroup, rank: int, stage: int, algorithm: str, moment: str) -> Any:
    run, forked = Run(group, rank, stage, algorithm), list[bool]()
    actions = FORWARDS | COLLECTIVES if stage == 3 else COLLECTIVES
    if moment == "while_a_graph_is_kept":
        actions = {"backward of a kept graph": ends_a_kept_graph} | actions

    def fork() -> None:
        if forked:  # a unit that is used twice
            return
        forked.append(True)
        assert_refused(said_by_a_child(lambda: tried(run, actions)), actions, rank)
        assert said_by_a_child(lambda: run.optimizer._transport.abort("of a fork")) == [1 - rank], "who was not told"
        if stage < 3:
            expected = run.loss().item()
            assert said_by_a_child(lambda: [run.loss().item() for _ in range(2)]) == [expected] * 2

    MOMENTS[moment](run, fork)
    assert forked
    run.optimizer.close()
    return run.model


@pytest.mark.parametrize(
    ("algorithm", "moment"),
    [
        pytest.param(
            algorithm,
            moment,
            marks=() if moment in FEW or (algorithm == "auto" and moment not in MANY) else pytest.mark.slow,
        )
        for algorithm in ALGORITHMS
        for moment in MOMENTS
    ],
)
@pytest.mark.by_default("auto-after_a_step", "auto-inside_gathered", "auto-inside_a_forward")
def test_what_a_forked_child_does_at_stage_3_raises_at_once_and_the_ranks_go_on(
    gloo: GlooPool, algorithm: str, moment: str
) -> None:
    for model in gloo.run(forks, 3, algorithm, moment):
        assert_same_model(model, plain())


@pytest.mark.parametrize("algorithm", ["auto", pytest.param("pairwise", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.by_default("2-auto")
def test_below_stage_3_a_forked_child_evaluates_and_calls_nothing_collective(
    gloo: GlooPool, stage: int, algorithm: str
) -> None:
    moment = "while_a_graph_is_kept" if stage == 2 else "after_a_step"
    for model in gloo.run(forks, stage, algorithm, moment):
        assert_same_model(model, plain())


def unwinds(group: dist.ProcessGroup, rank: int, algorithm: str, write: bool) -> Any:
    """Check that the child leaves the blocks around it, normally or by its error."""
    run = Run(group, rank, 3, algorithm)
    for raises in (False, True):
        run.step(int(raises))
        read, end = os.pipe()
        child = -1
        try:
            with run.optimizer.gathered(write=write):
                child = os.fork()
                if not child and raises:
                    run.loss()
        except BaseException as error:
            if child:
                raise
            os.write(end, f"{type(error).__name__}: {error}".encode())
        finally:
            if not child:
                os._exit(0)
        os.close(end)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        assert (REMEDY in said) is (write or raises), said
    run.steps(2)
    run.optimizer.close()
    return run.model


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("algorithm", ["auto", pytest.param("pairwise", marks=pytest.mark.slow)])
@pytest.mark.by_default("auto-True")
def test_a_child_that_was_forked_inside_gathered_leaves_the_block_alone(
    gloo: GlooPool, algorithm: str, write: bool
) -> None:
    for model in gloo.run(unwinds, algorithm, write):
        assert_same_model(model, plain())


def collects(group: dist.ProcessGroup, rank: int, stage: int, algorithm: str) -> Any:
    run = Run(group, rank, stage, algorithm)
    run.step(0)

    def collect() -> list[int]:
        optimizer = weakref.ref(run.optimizer)
        del run.optimizer, run.model
        gc.collect()
        peers = [thing for thing in gc.get_objects() if isinstance(thing, PeerProcess)]
        return [optimizer() is None, len(peers)]

    assert said_by_a_child(collect) == [True, 0]
    run.steps(1)
    run.optimizer.close()
    return run.model


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.by_default("3-auto")
def test_to_collect_an_optimizer_in_a_forked_child_takes_nothing_from_the_ranks(
    gloo: GlooPool, stage: int, algorithm: str
) -> None:
    for model in gloo.run(collects, stage, algorithm):
        assert_same_model(model, plain())


def evaluates_a_copy(group: dist.ProcessGroup, rank: int, algorithm: str) -> Any:
    run = Run(group, rank, 3, algorithm)
    run.step(0)
    for to in range(RANKS):
        run.optimizer.consolidate_state_dict(to)
    with run.optimizer.gathered():
        copied = copy.deepcopy(run.model)
    ready, go = os.pipe()

    def values() -> list[float]:
        loss: Any = odd_loss(copied, run.batches[0][0])
        loss.backward()
        states = run.optimizer.state_dict()["state"].values()
        return [loss.item(), *(float(state["exp_avg"].sum()) for state in states)]

    def when_told() -> list[float]:
        os.read(ready, 1)
        assert run.optimizer.describe().bytes
        return values()

    child = Child(when_told)
    expected = values()
    run.steps(1)  # the ranks have continued meanwhile
    os.write(go, b"!")
    assert child.said() == expected
    os.close(ready)
    os.close(go)
    run.optimizer.close()
    return run.model


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.by_default("auto")
def test_a_copy_made_inside_gathered_evaluates_and_trains_in_a_forked_child(gloo: GlooPool, algorithm: str) -> None:
    for model in gloo.run(evaluates_a_copy, algorithm):
        assert_same_model(model, plain())


class Losses(torch.utils.data.Dataset[Tensor]):
    """A dataset of losses, which the model computes in the process that loads them, or of numbers."""

    def __init__(self, run: Run, evaluates: bool) -> None:
        self.run, self.evaluates = run, evaluates

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.run.loss(index) if self.evaluates else torch.tensor(float(index))


def loader(run: Run, *, evaluates: bool) -> torch.utils.data.DataLoader[Tensor]:
    dataset = Losses(run, evaluates)
    return torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")


def loads(group: dist.ProcessGroup, rank: int, stage: int, algorithm: str) -> Any:
    run = Run(group, rank, stage, algorithm)
    run.step(0)
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # may have workers
    try:
        assert list(loader(run, evaluates=False)) == [0.0, 1.0]
        values = iter(loader(run, evaluates=True))
        try:
            if stage == 3:
                with pytest.raises(CollectiveError, match=REMEDY):
                    next(values)
            else:
                with torch.no_grad():
                    assert list(values) == [run.loss(index) for index in range(2)]
        finally:
            values._shutdown_workers()  # type: ignore[attr-defined] # else when garbage is collected, perhaps in a fork
    finally:
        multiprocessing.process.current_process()._config["daemon"] = True  # type: ignore[attr-defined]
    run.steps(1)
    run.optimizer.close()
    return run.model


@pytest.mark.parametrize(("stage", "algorithm"), [(2, "auto"), (3, "auto"), (3, "pairwise")])
@pytest.mark.by_default("2-auto")
def test_a_worker_of_a_data_loader_that_evaluates_raises_and_one_that_does_not_is_silent(
    gloo: GlooPool, stage: int, algorithm: str
) -> None:
    for model in gloo.run(loads, stage, algorithm):
        assert_same_model(model, plain())


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_alone_behaves_as_several(stage: int) -> None:
    run = Run(None, 0, stage, "auto")
    run.step(0)
    assert_refused(said_by_a_child(lambda: tried(run, COLLECTIVES)), COLLECTIVES, 0)
    if stage == 3:
        assert_refused(said_by_a_child(lambda: tried(run, FORWARDS)), FORWARDS, 0)
    run.steps(1)
    run.optimizer.close()
    assert_same_model(run.model, plain(1))
