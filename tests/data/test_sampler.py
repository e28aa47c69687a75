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
from torch import Tensor, nn
from torch.utils.data import IterableDataset, SequentialSampler

from collectives import Transport, on_threads
from zero import CheckpointManager, MicroBatchSampler, ZeroOptimizer

from ..support.models import seeded
from ..support.plain import assert_same_model, plain_step

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

    def plain(self, epoch: int = 0, start: int = 0) -> list[list[int]]:
        """Return the micro-batches of the plain loop."""
        sampler = self.rank()
        sampler.set_epoch(epoch, start)
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


@given(cases(), st.integers(0, 3))
@many
def test_an_epoch_of_the_plain_loop_has_every_sample_once_in_whole_micro_batches(case: Case, epoch: int) -> None:
    batches = case.plain(epoch)
    flat = [index for batch in batches for index in batch]
    size = case.batch_size
    assert len(set(flat)) == len(flat)
    assert set(flat) <= set(range(case.samples))
    if case.drop_last:
        assert {len(batch) for batch in batches} == {size}
        assert len(batches) == case.samples // size // case.per_step * case.per_step
    else:
        assert len(flat) == case.samples
        assert [len(batch) for batch in batches] == [min(size, case.samples - i) for i in range(0, case.samples, size)]
    if not case.shuffle:
        assert flat == list(range(len(flat)))


@given(cases(), st.integers(0, 3), WORLD_SIZES)
@many
def test_the_ranks_micro_batches_are_the_plain_loops_in_its_order(case: Case, epoch: int, world: int) -> None:
    samplers, plain = case.ranks(world), case.plain(epoch)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    dealt = [list(sampler) for sampler in samplers]
    assert list(in_steps(dealt, case.per_step)) == plain
    assert [len(sampler) for sampler in samplers] == [len(mine) for mine in dealt]
    expected: list[list[list[int]]] = [[] for _ in range(world)]
    for number, batch in enumerate(plain):
        expected[number % case.per_step % world].append(batch)
    assert dealt == expected
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


@given(cases(), st.integers(0, 3), WORLD_SIZES, st.data())
@many
def test_an_epoch_can_begin_behind_any_micro_batch(case: Case, epoch: int, world: int, data: st.DataObject) -> None:
    whole = Case(**{**vars(case), "drop_last": False}).plain(epoch)
    start = data.draw(st.integers(0, len(whole) if not case.drop_last else case.samples // case.batch_size))
    samplers = case.ranks(world)
    for sampler in samplers:
        sampler.set_epoch(epoch, start)
    rest = list(in_steps([list(sampler) for sampler in samplers], case.per_step))
    assert rest == whole[start:][: len(rest)]
    if not case.drop_last:
        assert rest == whole[start:]


@given(cases(), WORLD_SIZES)
def test_with_whole_steps_each_rank_has_as_many_micro_batches_in_every_step(case: Case, world: int) -> None:
    assume(case.drop_last)
    for rank, sampler in enumerate(case.ranks(world)):
        assert len(list(sampler)) == sampler.steps * len(range(rank, case.per_step, world))


@given(cases(), WORLD_SIZES)
def test_an_order_is_a_function_of_seed_and_epoch_alone(case: Case, world: int) -> None:
    sampler = case.rank(world - 1, world)
    before = list(sampler)
    torch.manual_seed(case.samples)
    random.seed(case.samples)
    states = torch.get_rng_state(), random.getstate()
    sampler.set_epoch(1)
    list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == before == list(sampler)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_every_pair_of_seed_and_epoch_has_another_order() -> None:
    """Also seed 0 in epoch 1, and seed 1 in epoch 0."""
    orders = set()
    for seed in range(-4, 4):
        sampler = MicroBatchSampler(20, 20, 0, 1, seed=seed)
        for epoch in range(8):
            sampler.set_epoch(epoch)
            orders.add(tuple(*sampler))
    assert len(orders) == 64


def test_the_order_of_a_seed_stays_as_it_was() -> None:
    """Checkpoints say how much of an order is trained, so an order must not change between releases."""
    sampler = MicroBatchSampler(11, 2, 0, 1)
    assert list(sampler) == ORDER
    with torch.device("meta"):
        assert list(sampler) == ORDER


ORDER = [[1, 5], [3, 0], [4, 10], [9, 2], [6, 7], [8]]


# -- uneven ends -------------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.rows = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def small() -> nn.Module:
    return seeded(3, lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


@given(st.integers(1, 13), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3))
def test_uneven_ends_inside_join_have_the_plain_loops_bits(
    samples: int, batch_size: int, world: int, stage: int
) -> None:
    """Two epochs, in which nothing is dropped."""
    data = Rows(samples)

    def loader(sampler: MicroBatchSampler) -> Any:
        return torch.utils.data.DataLoader(data, batch_sampler=sampler)

    def program(transport: Transport) -> nn.Module:
        model = small()
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, lr=0.05)
        sampler = MicroBatchSampler(data, batch_size, transport.rank, transport.world_size)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            with optimizer.join():
                for batch in loader(sampler):
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    sampler.step()
        optimizer.close()
        return model

    plain = small()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    sampler = MicroBatchSampler(data, batch_size, 0, 1, per_step=world)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(loader(sampler))
        for begin in range(0, len(batches), world):
            plain_step(plain, optimizer, loss_of, batches[begin : begin + world], world)
            optimizer.zero_grad()
    for model in on_threads(world, program):
        assert_same_model(model, plain)


# -- errors ------------------------------------------------------------------------------------------------------------


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((8, 2, 2, 2), {}, ValueError, "rank must be less than world=2, not 2"),
        ((8, 2, -1, 2), {}, ValueError, "rank must be at least 0, not -1"),
        ((8, 2, 0, 0), {}, ValueError, "world must be at least 1, not 0"),
        ((8, 2, None, 2), {}, TypeError, "rank must be a whole number, not None"),
        ((8, 0, 0, 1), {}, ValueError, "batch_size must be at least 1, not 0"),
        ((8, 2.0, 0, 1), {}, TypeError, "batch_size must be a whole number, not 2.0"),
        ((8, 2, 0, 1), {"per_step": 0}, ValueError, "per_step must be at least 1, not 0"),
        ((8, 2, 0, 1), {"seed": None}, TypeError, "seed must be a whole number, not None"),
        ((Endless(), 2, 0, 1), {}, TypeError, "Endless has no length: give a dataset with __len__"),
        (
            (SequentialSampler(range(8)), 2, 0, 1),
            {},
            TypeError,
            "data is a SequentialSampler, whose order",
        ),
        ((0, 2, 0, 1), {}, ValueError, "data has 0 samples, too few for one step"),
        (([], 2, 0, 1), {}, ValueError, "data has 0 samples, too few for one step"),
        ((7, 2, 0, 4), {"drop_last": True}, ValueError, "data has 7 samples, too few for one step, which needs 8"),
    ],
)
def test_what_cannot_be_dealt_is_an_error_by_name(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        MicroBatchSampler(*arguments, **options)


def test_a_position_that_no_epoch_has_is_an_error_and_changes_nothing() -> None:
    sampler = MicroBatchSampler(8, 2, 0, 2)
    sampler.set_epoch(1, 2)
    for wrong, words in (((-1,), "epoch must be at least 0"), ((2, -1), "start must be"), ((2, 5), "at most 4, .* 5")):
        with pytest.raises(ValueError, match=words):
            sampler.set_epoch(*wrong)
    assert (sampler.epoch, sampler.trained) == (1, 2)


def test_a_step_too_many_and_a_forgotten_set_epoch_are_errors() -> None:
    sampler = MicroBatchSampler(8, 2, 0, 2)
    for _ in sampler:
        sampler.step()
    with pytest.raises(RuntimeError, match=r"epoch 0 is trained: call set_epoch\(1\)"):
        next(iter(sampler))
    with pytest.raises(RuntimeError, match="more often than epoch 0 has steps of 2 micro-batches"):
        sampler.step()
    sampler.set_epoch(0)
    assert len(list(sampler)) == 2


def test_a_state_without_a_counted_step_is_an_error() -> None:
    sampler = MicroBatchSampler(8, 2, 0, 2)
    assert sampler.state_dict()["trained"] == 0
    next(iter(sampler))
    with pytest.raises(RuntimeError, match="no step was counted"):
        sampler.state_dict()
    sampler.step()
    assert sampler.state_dict()["trained"] == 2


@pytest.mark.parametrize("other", [{"samples": 9}, {"batch_size": 3}, {"seed": 1}, {"shuffle": False}])
def test_a_state_of_another_order_is_an_error_by_name(other: dict[str, Any]) -> None:
    case = Case(8, 2, 0, True, False, 2)
    saved = case.rank()
    saved.set_epoch(1, 2)
    sampler = case.rank(**other)
    (name,) = other
    with pytest.raises(ValueError, match=f"saved with {name}={vars(case)[name]}, and this sampler has {name}="):
        sampler.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=f"has no '{name}': give load_state_dict"):
        sampler.load_state_dict({key: value for key, value in saved.state_dict().items() if key != name})
    assert (sampler.epoch, sampler.trained) == (0, 0)
    case.rank(per_step=4, drop_last=True).load_state_dict(saved.state_dict())  # these may change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "rank 1 of 3 has a sampler with seed=1 where seed=0 is expected"),
        ({"samples": 7}, "rank 1 of 3 has a sampler with samples=7 where samples=8 is expected"),
        ({"per_step": 4}, "rank 1 of 3 has a sampler with per_step=4 where per_step=3 is expected"),
        ({"rank": 0}, "rank 1 of 3 has a sampler with rank=0 where rank=1 is expected"),
        ({"world": 2}, "rank 1 of 3 has a sampler with world=2 where world=3 is expected"),
        ({}, None),
    ],
)
def test_ranks_whose_samplers_differ_learn_the_first_difference(change: dict[str, Any], words: str | None) -> None:
    case = Case(8, 2, 0, True, False, 3)

    def program(transport: Transport) -> str | None:
        optimizer = ZeroOptimizer(nn.Linear(1, 1), process_group=transport)
        other = change if transport.rank == 1 else {}
        sampler = case.rank(**{"rank": transport.rank, "world": 3, **other})
        try:
            sampler.check_ranks(optimizer.exchange)
        except ValueError as error:
            return str(error)
        return None

    for said in on_threads(3, program):
        assert (said is None) == (words is None)
        assert words is None or words in said


def test_a_checkpoint_that_holds_samplers_which_differ_is_an_error_on_every_rank(tmp_path: Path) -> None:
    def program(transport: Transport) -> str:
        optimizer = ZeroOptimizer(nn.Linear(1, 1), process_group=transport)
        sampler = MicroBatchSampler(8, 2, transport.rank, 2, seed=transport.rank)
        with CheckpointManager(tmp_path, optimizer) as checkpoints, pytest.raises(ValueError, match="rank 1") as raised:
            checkpoints.save(1, state={"sampler": sampler})
        return str(raised.value)

    for said in on_threads(2, program):
        assert "state['sampler'] differs between rank 0 and rank 1" in said


def test_a_checkpoint_after_an_incomplete_last_step_needs_set_epoch_and_says_so(tmp_path: Path) -> None:
    def program(transport: Transport) -> dict[str, Any]:
        optimizer = ZeroOptimizer(nn.Linear(1, 1), process_group=transport)
        sampler = MicroBatchSampler(5, 1, transport.rank, 2)
        for _ in sampler:  # three steps on rank 0, two on rank 1
            sampler.step()
        with pytest.raises(ValueError, match=r"trained=.* call set_epoch"):
            sampler.check_ranks(optimizer.exchange)
        words = r"MicroBatchSampler needs set_epoch\(epoch \+ 1\) on every rank after an epoch whose last step"
        with CheckpointManager(tmp_path, optimizer) as checkpoints, pytest.raises(ValueError, match=words):
            checkpoints.save(1, state={"sampler": sampler})
        sampler.set_epoch(1)
        with CheckpointManager(tmp_path, optimizer) as checkpoints:
            checkpoints.save(1, state={"sampler": sampler})
        return sampler.state_dict()

    for state in on_threads(2, program):
        assert (state["epoch"], state["trained"]) == (1, 0)
