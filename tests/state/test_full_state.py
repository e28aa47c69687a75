"""The whole state dict of the model: the plain loop's values and names, on the host, and back at any topology."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads, solo
from zero import ShardedAverage, ZeroOptimizer

from ..support.errors import error_of
from ..support.models import Odd, odd_batches, odd_loss
from ..support.models import build as locked_build
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_value
from ..support.quantised import inside, qlora
from ..support.rows import rows
from ..support.sides import AsPlain, Side
from ..support.sockets import on_sockets
from .training import same, train

BF16 = PRECISIONS["bf16"]


def test_a_load_of_weights_alone_is_an_edit_of_the_model() -> None:
    """The master weights follow it. With them every digit is back, as `laws/test_goes_on` asserts."""

    def loop(side: Side) -> None:
        train(side, range(1))
        if isinstance(side, AsPlain):
            saved = {name: value.detach().clone() for name, value in side.model.state_dict().items()}
            train(side, range(1, 2))
            side.model.load_state_dict(saved)
        else:
            saved = side.optimizer.full_state_dict(None, masters=False)
            train(side, range(1, 2))
            side.optimizer.load_full_state_dict(
                saved if side.optimizer.rank == 1 else None
            )  # the last rank alone has it
        train(side, range(2, 3))

    same(loop, 2, 0, BF16)


def take_step(model: nn.Module, optimizer: ZeroOptimizer, seed: int = 1) -> None:
    odd_loss(model, odd_batches(1, seed)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(transport: Transport, stage: int, precision: Any = None) -> tuple[Odd, ZeroOptimizer]:
    model = locked_build(0)
    listed = [parameter for name, parameter in model.named_parameters() if not name.startswith("first")]
    given = {"module": model, "stage": stage, "process_group": transport, "mixed_precision": precision}
    optimizer = ZeroOptimizer(listed, lr=1e-2, bucket_cap_mb=0.0005, **given)
    take_step(model, optimizer)
    model.offset.fill_(transport.rank)
    return model, optimizer


@pytest.mark.parametrize(("stage", "run"), rows([(1, on_threads), (3, on_sockets)], [(0, on_threads)]))
def test_it_is_on_one_rank_in_memory_of_its_own_with_ties_and_strides(stage: int, run: Any) -> None:
    """No step changes it. What is loaded and goes on: `laws/test_goes_on`."""

    def save(transport: Transport) -> Any:
        model, optimizer = trained(transport, stage)
        with optimizer.gathered():
            expected = {name: value.clone() for name, value in model.state_dict().items()}
        found = optimizer.full_state_dict(to=1)
        take_step(model, optimizer)
        optimizer.close()
        model.offset.fill_(9.0)
        assert (found is None) is (transport.rank != 1)
        if found is not None:
            assert list(found) == list(expected)
            assert found["head.weight"] is found["embed.weight"]
            places = [value.untyped_storage().data_ptr() for value in found.values() if value.numel()]
            assert len(set(places)) == len(places) - 1
            assert_same_value(found, expected, "the dict after a step")
            for name, value in expected.items():
                assert found[name].stride() == value.stride(), name
            Odd().load_state_dict(found)

    run(3, save)


@pytest.mark.parametrize(("stage", "ranks"), rows([(3, 4)], [(2, 3), (3, 1)]))
def test_what_is_sent_are_the_shards_of_the_other_ranks(stage: int, ranks: int) -> None:
    def program(transport: Transport) -> list[int]:
        optimizer = ZeroOptimizer(locked_build(0), stage=stage, process_group=transport, bucket_cap_mb=0.0005)
        bounds = [bucket.bounds for bucket in optimizer.describe().buckets]
        begin, last = optimizer.traffic, transport.world_size - 1
        optimizer.full_state_dict(to=last)
        middle = optimizer.traffic
        optimizer.full_state_dict(to=None)
        sent = [(middle - begin).payload_sent, (optimizer.traffic - middle).payload_sent]
        return [*sent, 4 * sum(each[last] for each in bounds), 4 * last * sum(each[-1] for each in bounds)]

    one, every, *formula = (sum(column) for column in zip(*on_threads(ranks, program), strict=True))
    assert [one, every] == [total // ranks if stage == 3 else 0 for total in formula]


def test_names_are_those_of_the_module_without_wrappers() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = ZeroOptimizer(torch.compile(model), stage=3, process_group=solo())
    found = optimizer.full_state_dict()
    assert found is not None
    assert list(found) == list(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict())
    found["0.weight"].fill_(2.0)
    optimizer.load_full_state_dict(found)
    optimizer.load_full_state_dict({f"_orig_mod.{name}": value for name, value in found.items()})
    optimizer.close()
    assert_same_bits(model[0].weight, torch.full((3, 2), 2.0))
    without = ZeroOptimizer(nn.Linear(2, 2).parameters(), process_group=solo())
    assert "full_state_dict() needs the module whose parameters these are: build" in error_of(without.full_state_dict)


def test_a_quantised_base_is_in_it_as_it_is_and_is_not_loaded() -> None:
    def program(transport: Transport) -> None:
        model = qlora()
        optimizer = ZeroOptimizer(model, stage=3, process_group=transport, lr=0.1)
        found = optimizer.full_state_dict(to=None)
        assert found is not None
        for name, value in model.bases().items():
            assert_same_value(inside(found[name]), inside(value), name)
        words = "is a Quantised, which is not copied from one rank to another: load it on every rank before"
        assert words in error_of(optimizer.load_full_state_dict, found)

    on_threads(2, program)


def test_inside_applied_it_is_the_average_and_inside_join_a_rank_without_batches_takes_part() -> None:
    def program(transport: Transport) -> None:
        model, optimizer = trained(transport, 3, BF16)
        average = ShardedAverage(optimizer)
        average.update_parameters(model)
        expected = optimizer.full_state_dict(to=None)
        take_step(model, optimizer, 3)
        with average.applied():
            assert_same_value(optimizer.full_state_dict(to=None), expected, "the average")
        with optimizer.join():
            for step in range(transport.rank):
                take_step(model, optimizer, step)
                assert (optimizer.full_state_dict(to=2) is None) == (transport.rank != 2)

    on_threads(3, program)


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count = 0

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def test_extra_state_of_a_module_is_in_the_dict_and_is_not_loaded() -> None:
    """It is each rank's own, and no rank unpickles what another one sends."""

    def program(transport: Transport) -> None:
        model = Counting()
        model.count = 5 + transport.rank
        optimizer = ZeroOptimizer(model, process_group=transport)
        found = optimizer.full_state_dict(to=None)
        assert found is not None
        assert found.pop("_extra_state") == 5 + transport.rank
        model.count = 1
        optimizer.load_full_state_dict({**found, "_extra_state": 7} if transport.rank == 0 else None)
        assert model.count == 1

    on_threads(2, program)
