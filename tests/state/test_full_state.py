"""The whole state dict of the model: the plain loop's values and names, on the host, and back at any topology."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads, solo
from zero import ShardedAverage, ZeroOptimizer

from ..support.errors import error_of, errors_on
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
        else:
            saved = side.optimizer.full_state_dict(None, masters=False)
        train(side, range(1, 2))
        if isinstance(side, AsPlain):
            side.model.load_state_dict(saved)
        else:  # the last rank alone has it
            side.optimizer.load_full_state_dict(saved if side.optimizer.rank == 1 else None)
        train(side, range(2, 3))

    same(loop, 2, 0, BF16)


def trained(transport: Transport, stage: int, precision: Any = None, **more: Any) -> tuple[Odd, ZeroOptimizer]:
    model = locked_build(0)
    with torch.no_grad():
        model.offset += transport.rank  # a buffer of each rank's own, after construction
    listed = [parameter for name, parameter in model.named_parameters() if not name.startswith("first")]
    arguments = {"module": model, "stage": stage, "process_group": transport, "mixed_precision": precision, **more}
    optimizer = ZeroOptimizer(listed, lr=1e-2, bucket_cap_mb=0.0005, **arguments)
    odd_loss(model, odd_batches(1, 1)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(("stage", "run"), rows([(1, on_threads), (3, on_sockets)], [(0, on_threads), (3, on_threads)]))
def test_it_is_on_one_rank_in_memory_of_its_own_and_fits_plain_models_at_any_topology(stage: int, run: Any) -> None:
    """Also parameters that are not trained. Ties stay ties, buffers are those of the rank, and no step changes it."""

    def save(transport: Transport) -> Any:
        model, optimizer = trained(transport, stage)
        model.offset.fill_(transport.rank)
        with optimizer.gathered():
            expected = {name: value.clone() for name, value in model.state_dict().items()}
        before = optimizer.traffic.payload_sent
        found = optimizer.full_state_dict(to=1)
        if found is not None:
            assert list(found) == list(expected)
            assert found["head.weight"] is found["embed.weight"]
            assert (
                len({value.untyped_storage().data_ptr() for value in found.values() if value.numel()})
                == sum(value.numel() > 0 for value in found.values()) - 1
            )
            assert {name: value.stride() for name, value in found.items()} == {
                name: value.stride() for name, value in expected.items()
            }
        odd_loss(model, odd_batches(1, 2)[0]).backward()
        optimizer.step()
        optimizer.close()
        model.offset.fill_(9.0)
        assert_same_value(found if transport.rank == 1 else expected, expected, "the dict after a step")
        return found, optimizer.traffic.payload_sent - before

    results = run(3, save)
    (kept,) = [found for found, _ in results if found is not None]
    plain = Odd()
    plain.load_state_dict(kept)

    def load(transport: Transport) -> Any:
        model, optimizer = trained(transport, 3 - stage)
        optimizer.load_full_state_dict(kept if transport.rank else None)
        optimizer.check_replicas()
        optimizer.close()
        return model.state_dict()

    for found in on_threads(2, load):
        assert_same_value(found, plain.state_dict(), "what was loaded")


@pytest.mark.parametrize(("stage", "ranks"), rows([(3, 4)], [(2, 3), (3, 1)]))
def test_what_is_sent_are_the_shards_of_the_other_ranks(stage: int, ranks: int) -> None:
    def program(transport: Transport) -> list[int]:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, bucket_cap_mb=0.0005)
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


def test_a_quantised_base_is_in_it_as_it_is_and_is_not_loaded() -> None:
    def program(transport: Transport) -> str:
        model = qlora()
        optimizer = ZeroOptimizer(model, stage=3, process_group=transport, lr=0.1)
        found = optimizer.full_state_dict(to=None)
        assert found is not None
        for name, value in model.bases().items():
            assert_same_value(inside(found[name]), inside(value), name)
        return error_of(optimizer.load_full_state_dict, found)

    for message in on_threads(2, program):
        assert "is a Quantised, which is not copied from one rank to another: load it on every rank before" in message


def test_inside_applied_it_is_the_average_and_inside_join_a_rank_without_batches_takes_part() -> None:
    def program(transport: Transport) -> None:
        model, optimizer = trained(transport, 3, BF16)
        average = ShardedAverage(optimizer)
        average.update_parameters(model)
        expected = optimizer.full_state_dict(to=None)
        odd_loss(model, odd_batches(1, 3)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with average.applied():
            assert_same_value(optimizer.full_state_dict(to=None), expected, "the average")
        with optimizer.join():
            for step in range(transport.rank):
                odd_loss(model, odd_batches(1, step)[0]).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert (optimizer.full_state_dict(to=2) is None) == (transport.rank != 2)

    on_threads(3, program)


def test_it_needs_the_module() -> None:
    def program(transport: Transport) -> None:
        ZeroOptimizer(nn.Linear(2, 2).parameters(), process_group=transport).full_state_dict()

    for message in errors_on(2, program):
        assert message.startswith("ValueError: full_state_dict() needs the module whose parameters these are: build")


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

    def program(transport: Transport) -> tuple[int, str]:
        model = Counting()
        model.count = 5 + transport.rank
        optimizer = ZeroOptimizer(model, process_group=transport)
        found = optimizer.full_state_dict(to=None)
        assert found is not None
        assert found["_extra_state"] == 5 + transport.rank
        model.count = 1
        optimizer.load_full_state_dict(found if transport.rank == 0 else None)
        wrong = {name: value for name, value in found.items() if name != "bias"}
        error = error_of(optimizer.load_full_state_dict, wrong if transport.rank == 0 else None)
        return model.count, error

    for count, error in on_threads(2, program):
        assert count == 1
        assert 'Missing key(s) in state_dict: "bias"' in error
