"""Every micro-batch is dealt once, in the plain loop's order at any number of ranks, and resumed at any other."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import IterableDataset, SequentialSampler

from collectives import Transport, on_threads
from zero import CheckpointManager, MicroBatchSampler, ZeroOptimizer

from ..support.errors import assert_in_order, error_of

many = settings(max_examples=5 * settings.default.max_examples)
WORLD_SIZES = st.integers(1, 6)


@dataclass(frozen=True)
class Case:
    """The arguments of samplers, without ranks. ``per_step`` is given, so that it is the same at any number of them."""

    samples: int
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    per_step: int

    def rank(self, rank: int = 0, world: int = 1, **others: Any) -> MicroBatchSampler:
        arguments = {**vars(self), **others}
        return MicroBatchSampler(arguments.pop("samples"), arguments.pop("batch_size"), rank, world, **arguments)

    def ranks(self, world: int) -> list[MicroBatchSampler]:
        return [self.rank(rank, world) for rank in range(world)]

    def plain(self, epoch: int) -> list[list[int]]:
        sampler = self.rank()
        sampler.set_epoch(epoch)
        return list(sampler)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    case = Case(
        draw(st.integers(1, 40)),
        draw(st.integers(1, 5)),
        draw(st.integers(-3, 2**70)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(1, 7)),
    )
    assume(not case.drop_last or case.samples >= case.batch_size * case.per_step)
    return case


def in_steps(dealt: Sequence[list[list[int]]], per_step: int) -> Iterator[list[int]]:
    """Yield the micro-batches of all ranks in the order in which the ranks of each step add them up.

    That is a round after the other, and each round rank by rank.
    """
    left = [list(mine) for mine in dealt]
    while any(left):
        for number in range(per_step):
            mine = left[number % len(left)]
            if mine:
                yield mine.pop(0)


@given(cases(), st.integers(0, 3), WORLD_SIZES)
@many
def test_every_sample_is_dealt_once_in_the_plain_loops_order(case: Case, epoch: int, world: int) -> None:
    samplers, plain, size = case.ranks(world), case.plain(epoch), case.batch_size
    flat = [index for batch in plain for index in batch]
    assert len(set(flat)) == len(flat)
    assert set(flat) <= set(range(case.samples))
    assert case.shuffle or flat == list(range(len(flat)))
    sizes = [min(size, case.samples - i) for i in range(0, case.samples, size)]
    kept = case.samples // size // case.per_step * case.per_step if case.drop_last else len(sizes)
    assert [len(batch) for batch in plain] == sizes[:kept]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    dealt = [list(sampler) for sampler in samplers]
    assert list(in_steps(dealt, case.per_step)) == plain
    assert [len(sampler) for sampler in samplers] == [len(mine) for mine in dealt]
    assert dealt == [[b for n, b in enumerate(plain) if n % case.per_step % world == rank] for rank in range(world)]
    assert {sampler.steps for sampler in samplers} == {-(-len(plain) // case.per_step)}


@given(cases(), st.integers(0, 3), st.lists(st.tuples(WORLD_SIZES, st.integers(0, 4)), max_size=4), WORLD_SIZES)
@many
def test_training_that_goes_on_at_other_numbers_of_ranks_has_the_plain_order(
    case: Case, epoch: int, parts: list[tuple[int, int]], last: int
) -> None:
    """Some steps at each number of ranks, saved as text in between, and the rest of the epoch."""
    plain, state, trained = case.plain(epoch), None, list[list[int]]()
    steps_left = -(-len(plain) // case.per_step)
    for world, steps in [*parts, (last, steps_left)]:
        samplers = case.ranks(world)
        for sampler in samplers:
            if state is None:
                sampler.set_epoch(epoch)
            else:
                sampler.load_state_dict(json.loads(state))
                sampler.set_epoch(sampler.epoch)  # as loops do before each epoch
        if samplers[0].epoch > epoch:
            break
        dealt = [list(sampler) for sampler in samplers]
        assert [len(sampler) for sampler in samplers] == [len(mine) for mine in dealt]
        taken = min(steps, steps_left)
        steps_left -= taken
        trained += list(in_steps(dealt, case.per_step))[: taken * case.per_step]
        for sampler in samplers:
            for _ in range(taken):
                sampler.step()
            if not taken:
                sampler.set_epoch(epoch, sampler.trained)  # nothing of what was dealt was trained
        (state,) = {json.dumps(sampler.state_dict()) for sampler in samplers}
    assert trained == plain
    assert state is not None
    assert json.loads(state)["epoch"] == epoch + 1
    assert json.loads(state)["trained"] == 0


@given(cases(), WORLD_SIZES)
def test_an_order_is_a_function_of_seed_and_epoch_alone(case: Case, world: int) -> None:
    sampler = case.rank(world - 1, world)
    before = list(sampler)
    torch.manual_seed(case.samples)
    random.seed(case.samples)
    states = torch.get_rng_state(), random.getstate()
    for epoch in (1, 0):
        sampler.set_epoch(epoch)
        found = list(sampler)
    assert found == before == list(sampler)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_every_pair_of_seed_and_epoch_has_an_order_of_its_own_that_stays_as_it_was() -> None:
    """Checkpoints say how much of an order is trained, so an order must not change between releases."""
    with torch.device("meta"):
        assert list(MicroBatchSampler(11, 2, 0, 1)) == [[1, 5], [3, 0], [4, 10], [9, 2], [6, 7], [8]]
    orders = set()
    for seed in range(-4, 4):
        sampler = MicroBatchSampler(20, 20, 0, 1, seed=seed)
        for epoch in range(8):
            sampler.set_epoch(epoch)
            orders.add(tuple(*sampler))
    assert len(orders) == 64


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((8, 2, 2, 2), {}, "ValueError: rank must be less than world=2, not 2"),
    ((8, 2, -1, 2), {}, "ValueError: rank must be at least 0, not -1"),
    ((8, 2, 0, 0), {}, "ValueError: world must be at least 1, not 0"),
    ((8, 2, None, 2), {}, "TypeError: rank must be a whole number, not None"),
    ((8, 0, 0, 1), {}, "ValueError: batch_size must be at least 1, not 0"),
    ((8, 2.0, 0, 1), {}, "TypeError: batch_size must be a whole number, not 2.0"),
    ((8, 2, 0, 1), {"per_step": 0}, "ValueError: per_step must be at least 1, not 0"),
    ((8, 2, 0, 1), {"seed": None}, "TypeError: seed must be a whole number, not None"),
    ((Endless(), 2, 0, 1), {}, "TypeError: … Endless has no length: give a dataset with __len__"),
    ((SequentialSampler(range(8)), 2, 0, 1), {}, "TypeError: data is a SequentialSampler, whose order"),
    ((0, 2, 0, 1), {}, "ValueError: data has 0 samples, too few for one step"),
    (([], 2, 0, 1), {}, "ValueError: data has 0 samples, too few for one step"),
    ((7, 2, 0, 4), {"drop_last": True}, "ValueError: data has 7 samples, too few for one step, which needs 8"),
]


def test_what_cannot_be_dealt_is_an_error_by_name() -> None:
    for arguments, options, words in WRONG:
        assert_in_order(words, error_of(MicroBatchSampler, *arguments, **options))


def test_a_call_at_a_wrong_moment_or_of_a_wrong_position_is_an_error_and_changes_nothing() -> None:
    sampler = MicroBatchSampler(8, 2, 0, 2)
    assert sampler.state_dict()["trained"] == 0
    next(iter(sampler))
    with pytest.raises(RuntimeError, match="no step was counted"):
        sampler.state_dict()
    sampler.step()
    assert sampler.state_dict()["trained"] == 2
    sampler.step()
    with pytest.raises(RuntimeError, match=r"epoch 0 is trained: call set_epoch\(1\)"):
        next(iter(sampler))
    with pytest.raises(RuntimeError, match="more often than epoch 0 has steps of 2 micro-batches"):
        sampler.step()
    sampler.set_epoch(1, 2)
    for wrong, words in (((-1,), "epoch must be at least 0"), ((2, -1), "start must be"), ((2, 5), "at most 4, .* 5")):
        with pytest.raises(ValueError, match=words):
            sampler.set_epoch(*wrong)
    assert (sampler.epoch, sampler.trained, len(list(sampler))) == (1, 2, 1)


def test_a_state_of_another_order_is_an_error_by_name() -> None:
    case = Case(8, 2, 0, True, False, 2)
    saved = case.rank()
    saved.set_epoch(1, 2)
    state = saved.state_dict()
    others: dict[str, Any] = {"samples": 9, "batch_size": 3, "seed": 1, "shuffle": False}
    for name, other in others.items():
        sampler = case.rank(**{name: other})
        words = f"ValueError: … saved with {name}={vars(case)[name]}, and this sampler has {name}="
        assert_in_order(words, error_of(sampler.load_state_dict, state))
        without = {key: value for key, value in state.items() if key != name}
        assert_in_order(f"has no '{name}': give load_state_dict", error_of(sampler.load_state_dict, without))
        assert (sampler.epoch, sampler.trained) == (0, 0)
    case.rank(per_step=4, drop_last=True).load_state_dict(state)  # these may change


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"seed": 1}, "seed=1 where seed=0"),
    ({"samples": 7}, "samples=7 where samples=8"),
    ({"per_step": 4}, "per_step=4 where per_step=3"),
    ({"rank": 0}, "rank=0 where rank=1"),
    ({"world": 2}, "world=2 where world=3"),
]


def test_ranks_whose_samplers_differ_learn_the_first_difference() -> None:
    def program(transport: Transport) -> None:
        optimizer = ZeroOptimizer(nn.Linear(1, 1), process_group=transport)
        for change, words in [*CHANGES, ({}, "")]:
            own = {"rank": transport.rank, "world": 3, **(change if transport.rank == 1 else {})}
            sampler = Case(8, 2, 0, True, False, 3).rank(**own)
            said = f"ValueError: rank 1 of 3 has a sampler with {words} is expected" if words else "nothing"
            assert_in_order(said, error_of(sampler.check_ranks, optimizer.exchange))

    on_threads(3, program)


def test_a_checkpoint_of_samplers_that_differ_or_between_two_steps_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """After an epoch whose last step is incomplete they need `set_epoch`."""

    def program(transport: Transport) -> dict[str, Any]:
        optimizer = ZeroOptimizer(nn.Linear(1, 1), process_group=transport)
        with CheckpointManager(tmp_path, optimizer) as checkpoints:
            other = MicroBatchSampler(8, 2, transport.rank, 2, seed=transport.rank)
            error = error_of(checkpoints.save, 1, state={"sampler": other})
            assert_in_order("ValueError: … state['sampler'] differs between rank 0 and rank 1", error)
            sampler = MicroBatchSampler(5, 1, transport.rank, 2)
            for _ in sampler:  # three steps on rank 0, two on rank 1
                sampler.step()
            assert_in_order("trained= … call set_epoch", error_of(sampler.check_ranks, optimizer.exchange))
            words = "MicroBatchSampler needs set_epoch(epoch + 1) on every rank after an epoch whose last step"
            assert words in error_of(checkpoints.save, 1, state={"sampler": sampler})
            sampler.set_epoch(1)
            checkpoints.save(1, state={"sampler": sampler})
        return sampler.state_dict()

    assert {(state["epoch"], state["trained"]) for state in on_threads(2, program)} == {(1, 0)}
