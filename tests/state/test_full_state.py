"""The whole state dict of the model and running averages: the plain loop's values and names, at any topology."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from collectives import Transport, on_threads, solo
from zero import ShardedAverage, ZeroOptimizer

from ..support.errors import assert_in_order, error_of
from ..support.models import Odd, odd_batches, odd_loss, take_steps
from ..support.models import build as locked_build
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_value
from ..support.quantised import inside, qlora
from ..support.rows import rows
from ..support.sides import AsPlain, OnRank, Side
from ..support.sockets import on_sockets
from .training import average_of, same, train, values

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


def trained(transport: Transport, stage: int, precision: Any = None, **more: Any) -> tuple[Odd, ZeroOptimizer]:
    model = locked_build(0)
    listed = [parameter for name, parameter in model.named_parameters() if not name.startswith("first")]
    given = {"module": model, "stage": stage, "process_group": transport, "mixed_precision": precision}
    optimizer = ZeroOptimizer(listed, lr=1e-2, bucket_cap_mb=0.0005, **given, **more)
    take_steps(model, optimizer, odd_batches(1, 1))
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
        take_steps(model, optimizer, odd_batches(1, 1))
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


def test_buffers_are_loaded_from_the_rank_that_has_the_dict() -> None:
    def load(transport: Transport) -> None:
        model, optimizer = trained(transport, 2)
        found = optimizer.full_state_dict(to=1)
        model.offset.fill_(7.0)
        optimizer.load_full_state_dict(found)
        assert_same_bits(model.offset, torch.full_like(model.offset, 1.0), "of rank 1")

    on_threads(3, load)


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


@pytest.mark.parametrize(
    ("stage", "ranks", "more"),
    rows(
        [(3, 3, {"precision": BF16}), (1, 2, {})],
        [(3, 4, {"sharding_factor": 2}), (3, 1, {}), (2, 3, {"precision": BF16})],
    ),
)
def test_whole_tensors_come_one_bucket_after_the_other_on_one_rank_or_on_all(
    stage: int, ranks: int, more: dict[str, Any]
) -> None:
    def program(transport: Transport) -> None:
        model, optimizer = trained(transport, stage, **more)
        for to in (None, ranks - 1):
            whole = optimizer.full_state_dict(to)
            begin = optimizer.traffic
            pairs = optimizer.full_tensors(to)
            first, seen = [*itertools.islice(pairs, 1)], optimizer.traffic
            found = dict([*first, *pairs])
            received = [(at - begin).payload_received for at in (seen, optimizer.traffic)]
            again = [value.clone() for value in found.values()]
            for value in found.values():
                value.fill_(1)  # a copy
            after = optimizer.full_state_dict(to)
            if whole is None or after is None:
                assert (whole, after, found) == (None, None, {})
                continue
            assert {id(whole[name]) for name in found} == {id(value) for value in whole.values()}, "each tensor once"
            assert_same_value(dict(zip(found, again, strict=True)), {name: whole[name] for name in found}, f"to={to}")
            assert_same_value(after, whole, "nothing has changed")
            assert received[0] < received[1] or stage != 3 or ranks == 1
        take_steps(model, optimizer, odd_batches(1, 1))

    on_threads(ranks, program)


@pytest.mark.parametrize("stage", rows([3], [1]))
def test_a_rank_that_leaves_the_loop_takes_part_for_the_others_and_a_step_in_between_is_an_error(stage: int) -> None:
    def program(transport: Transport) -> tuple[int, list[str]]:
        model, optimizer = trained(transport, stage)
        count = 0
        for _ in optimizer.full_tensors():
            count += 1
            if transport.rank == 1:
                break
        if transport.rank == 1:
            optimizer.full_tensors().close()
        else:
            assert len([*optimizer.full_tensors()]) == count
        pairs = optimizer.full_tensors()
        next(pairs)
        take_steps(model, optimizer, odd_batches(1, 1))
        said = [error_of(list, pairs), error_of(optimizer.full_tensors, 2)]
        with optimizer.gathered():
            said.append(error_of(optimizer.full_tensors))
        take_steps(model, optimizer, odd_batches(1, 1))
        loss = odd_loss(model, odd_batches(1, 1)[0])
        if transport.rank == 0:
            said.append(error_of(optimizer.full_tensors, 2))  # it ends no forward of this rank alone
        loss.backward()
        optimizer.step()
        return count, said

    every, one = on_threads(2, program)
    assert (every[0] > 10, one[0]) == (True, 1)
    for words in (every[1], one[1]):
        assert_in_order(
            "RuntimeError: full_tensors(to=None): a backward or another call … the last tensor … finish the loop",
            words[0],
        )
        assert words[1] == "ValueError: full_tensors: rank 2 is not one of the 2 ranks"
        assert "full_tensors(to=None) inside gathered() or inside a forward: leave it first" in words[2]


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
        take_steps(model, optimizer, odd_batches(1, 3))
        with average.applied():
            assert_same_value(optimizer.full_state_dict(to=None), expected, "the average")
        with optimizer.join():
            for step in range(transport.rank):
                take_steps(model, optimizer, odd_batches(1, step))
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


@pytest.mark.parametrize(("world_size", "stage"), rows([(2, 3)], [(1, 0), (3, 1)]))
def test_what_is_made_in_inference_mode_is_used_outside_of_it(world_size: int, stage: int) -> None:
    """Loaded states, and an average. Evaluations come first, as a sanity check does."""

    def loop(side: Side) -> Any:
        average = None
        for step in range(4):
            with torch.inference_mode(step % 2 == 0) if isinstance(side, OnRank) else nullcontext():
                if isinstance(side, OnRank) and step == 2:
                    side.optimizer.consolidate_state_dict(to=None)
                    side.optimizer.load_state_dict(side.optimizer.state_dict())
                if step == 1:
                    average = average_of(side, "mean")
                with torch.no_grad():
                    side.model(odd_batches(1, 9)[0][0])
            train(side, range(step, step + 1))
            with torch.inference_mode(step == 1 and isinstance(side, OnRank)):
                if average is not None:
                    average.update_parameters(side.model)
        return values(average)

    same(loop, world_size, stage)


@pytest.mark.parametrize("stage", rows([1], [3]))
def test_ranks_that_have_run_out_of_batches_update_it_too(stage: int) -> None:
    def loop(side: Side) -> Any:
        average = average_of(side, "ema")
        with side.join():
            for step in range(max((3, 1)[rank] for rank in side.ranks)):
                mine = [rank for rank in side.ranks if step < (3, 1)[rank]]
                batches = odd_batches(2, step, extra=False)
                side.train(lambda model, rank, batches=batches: odd_loss(model, batches[rank]), ranks=mine)  # type: ignore[misc]
                side.step()
                average.update_parameters(*([side.model] if isinstance(side, AsPlain) else []))
                side.clear()
        return values(average)

    same(loop, 2, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_params_that_are_added_later_have_their_weights_until_the_next_update(stage: int, tmp_path: Path) -> None:
    """Ranks with other averages do not restore."""

    def run(transport: Transport) -> None:
        model = locked_build(0)
        given: dict[str, Any] = {"module": model, "stage": stage, "process_group": transport, "bucket_cap_mb": 0.0005}
        optimizer = ZeroOptimizer(model.layers.parameters(), **given)
        average = ShardedAverage(optimizer)
        average.update_parameters()
        optimizer.add_param_group({"params": list(model.last.parameters())})
        found = average.gather(to=None)
        assert (average.gather(to=0) is None) is (optimizer.rank != 0)
        zero.save(tmp_path / "saved", optimizer)
        with average.applied():
            pass
        if transport.rank == 1:
            average.close()
        words = "rank 1 has the averages [], and rank 0 ['average']"
        assert words in error_of(zero.load, tmp_path / "saved", optimizer, rng=False)
        optimizer.close()
        saved = zero.open_checkpoint(tmp_path / "saved").averages("average")
        assert int(saved.pop("n_averaged")) == 1
        assert found is not None
        assert saved.keys() == found.keys()
        for name in ("last.weight", "last.bias"):
            assert_same_bits(found[name], model.get_parameter(name).detach(), name)
            assert_same_bits(saved[name], model.get_parameter(name).detach(), name)

    on_threads(2, run, timeout=10)
