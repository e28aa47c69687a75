"""A running average of the weights, each rank's of its own, has the bits of torch's AveragedModel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero
from collectives import Transport, on_threads, solo
from zero import ShardedAverage, ZeroOptimizer

from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_model
from ..support.programs import locked_build
from ..support.rows import rows
from ..support.sides import AsPlain, OnRank, Side
from .training import average_of, same, train, values


@pytest.mark.parametrize(("world_size", "stage"), rows([(2, 3)], [(1, 0), (3, 1), (2, 2), (1, 3)]))
def test_what_is_made_in_inference_mode_is_used_outside_of_it(world_size: int, stage: int) -> None:
    """The optimizer itself, its loaded states, and an average. Evaluations come first, as a sanity check does."""

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


@pytest.mark.parametrize("stage", rows([0, 3], [1, 2]))
def test_an_optimizer_that_is_built_and_closed_in_inference_mode_trains_and_leaves_a_plain_model(stage: int) -> None:
    expected, model = locked_build(0), locked_build(0)
    sgd = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.5)
    with torch.inference_mode(), torch.device("meta"):
        optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=solo(), lr=0.1, momentum=0.5)
        average = ShardedAverage(optimizer)
        average.update_parameters()
    for number in range(3):
        for each, its in ((model, optimizer), (expected, sgd)):
            odd_loss(each, odd_batches(3, 9)[number]).backward()
            its.step()
            its.zero_grad()
        if number == 0:
            average.update_parameters()
            assert average.n_averaged == 2
        if number == 1:
            with torch.inference_mode():
                optimizer.close()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sgd = torch.optim.SGD(expected.parameters(), lr=0.1)
    assert_same_model(model, expected)


@pytest.mark.parametrize(
    ("world_size", "stage", "kind", "factor"),
    rows(
        [
            (3, 0, "by tensor", None),
            (2, 1, "mean", None),
        ],
        [
            (4, 2, "ema", 2),
            (3, 3, "mean", None),
            (1, 2, "by tensor", 1),
        ],
    ),
)
def test_the_average_is_that_of_the_plain_loop(world_size: int, stage: int, kind: str, factor: int | None) -> None:
    """The model computes with it inside a block, and trains on as if there had been none."""

    def loop(side: Side) -> Any:
        average = average_of(side, kind)
        train(side, range(2), average)
        assert average.n_averaged == 2
        found, model, block = values(average), side.model, nullcontext()
        if isinstance(average, ShardedAverage):
            assert (average.gather(to=0) is None) is (side.optimizer.rank != 0)
            block = average.applied()
        else:
            model = average
        with block, torch.no_grad():
            seen = model(odd_batches(1, 9)[0][0])
        train(side, range(2, 3), average)
        return found, seen

    same(loop, world_size, stage, sharding_factor=factor)


@pytest.mark.parametrize("stage", rows([0], [3]))
def test_with_mixed_precision_it_is_that_of_the_master_weights(stage: int) -> None:
    def loop(side: Side) -> Any:
        by_hand = dict[str, Tensor]()
        trained = {name: i for i, (name, p) in enumerate(side.model.named_parameters()) if p.requires_grad}
        if isinstance(side, AsPlain):
            for step in range(3):
                train(side, range(step, step + 1))
                for name, index in trained.items():
                    wide = side.numbers.updated[index].detach()
                    by_hand[name] = by_hand[name] * 0.9 + wide * 0.1 if step else wide.clone()
            return by_hand
        average = average_of(side, "by tensor")
        train(side, range(3), average)
        found = {name: value for name, (_, value) in values(average).items()}
        with average.applied(), side.gathered():
            for name, parameter in side.model.named_parameters():
                assert_same_bits(parameter, found[name].to(parameter.dtype), name)
        return {name: found[name] for name in trained}

    same(loop, 2, stage, PRECISIONS["bf16"])


@pytest.mark.parametrize(
    ("before", "after"),
    rows([pytest.param((3, 1), (2, 3), id="before1-after1")], [pytest.param((2, 3), (3, 0), id="before0-after0")]),
)
def test_checkpoints_have_it_and_training_goes_on_elsewhere(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    def begin(side: Side) -> Any:
        averages = [average_of(side, "ema", name="ema"), average_of(side, "mean")]
        train(side, range(2), *averages)
        if not isinstance(side, AsPlain):
            zero.save(tmp_path / "saved", side.optimizer)
            saved = zero.open_checkpoint(tmp_path / "saved")
            assert saved.average_names == ["average", "ema"]
            whole = saved.averages("ema")
            assert int(whole.pop("n_averaged")) == 2
            return {name: (value.stride(), value) for name, value in whole.items()}
        return values(averages[0])

    def go_on(side: Side) -> Any:
        averages, first = [average_of(side, "ema", name="ema"), average_of(side, "mean")], 0
        if not isinstance(side, AsPlain):
            restored = zero.load(tmp_path / "saved", side.optimizer, rng=False)
            assert not [text for text in restored.not_restored if "average" in text]
            first = averages[0].n_averaged
            assert [average.n_averaged for average in averages] == [2, 2]
        train(side, range(first, 4), *averages)
        return [values(average) for average in averages]

    same(begin, *before)
    same(go_on, *after)


@pytest.mark.parametrize("stage", rows([1], [3]))
def test_ranks_that_have_run_out_of_batches_update_it_too(stage: int) -> None:
    counts = (3, 1)

    def loop(side: Side) -> Any:
        average = average_of(side, "ema")
        with side.join():
            for step in range(max(counts[rank] for rank in side.ranks)):
                mine = [rank for rank in side.ranks if step < counts[rank]]
                batches = odd_batches(2, step, extra=False)
                side.train(lambda model, rank, batches=batches: odd_loss(model, batches[rank]), ranks=mine)  # type: ignore[misc]
                side.step()
                average.update_parameters(*([side.model] if isinstance(side, AsPlain) else []))
                side.clear()
        return values(average)

    same(loop, 2, stage)


CALLS: dict[str, Callable[[ZeroOptimizer, ShardedAverage, Path], Any]] = {
    "step": lambda optimizer, average, path: optimizer.step(),
    "clip_grad_norm_": lambda optimizer, average, path: optimizer.clip_grad_norm_(1.0),
    "save": lambda optimizer, average, path: zero.save(path / "saved", optimizer),
    "load": lambda optimizer, average, path: zero.load(path / "before", optimizer, rng=False),
    "update_parameters": lambda optimizer, average, path: average.update_parameters(),
    "applied": lambda optimizer, average, path: average.applied().__enter__(),
}


@pytest.mark.parametrize("stage", rows([1], [3]))
def test_what_would_take_the_average_for_weights_is_an_error(stage: int, tmp_path: Path) -> None:
    def refused(side: Side, average: ShardedAverage) -> None:
        for name, call in CALLS.items():
            with average.applied(), pytest.raises(RuntimeError, match=rf"{name}.* inside applied\(\) of the average"):
                call(side.optimizer, average, tmp_path)
        batch = odd_batches(1, 0, extra=False)[0]
        with pytest.raises(RuntimeError, match="a backward inside applied"), average.applied():
            side.train(lambda model, _: odd_loss(model, batch))
        side.clear()
        side.train(lambda model, _: odd_loss(model, batch))
        with pytest.raises(RuntimeError, match="with gradients that no step has used"), average.applied():
            raise AssertionError("the block is entered")
        side.clear()

    def loop(side: Side) -> None:
        average = average_of(side, "ema")
        train(side, range(1), average)
        if isinstance(average, ShardedAverage):
            zero.save(tmp_path / "before", side.optimizer)
            refused(side, average)
        train(side, range(1, 2), average)

    same(loop, 2, stage)


def build(listed: Any, group: Any, stage: int, **arguments: Any) -> ZeroOptimizer:
    arguments = {"stage": stage, "process_group": group, "bucket_cap_mb": 0.0005, "lr": 0.01, **arguments}
    return ZeroOptimizer(listed, torch.optim.AdamW, **arguments)


def test_ranks_with_other_averages_neither_gather_nor_save_nor_restore(tmp_path: Path) -> None:
    def run(transport: Transport) -> None:
        optimizer = build(locked_build(0), transport, 2)
        average = ShardedAverage(optimizer)
        average.update_parameters()
        zero.save(tmp_path / "saved", optimizer)
        if transport.rank == 0:
            average.update_parameters()
        with pytest.raises(ValueError, match=r"ranks have averaged \[2, 1\] weights"):
            average.gather(to=None)
        with pytest.raises(ValueError, match=r"the averages is .* on rank 1"):
            zero.save(tmp_path / "other", optimizer)
        if transport.rank == 1:
            average.close()
        with pytest.raises(ValueError, match=r"rank 1 has the averages \[\], and rank 0 \['average'\]"):
            zero.load(tmp_path / "saved", optimizer, rng=False)

    on_threads(2, run, timeout=10)


@pytest.mark.parametrize("stage", [1, 3])
def test_params_that_are_added_later_have_their_weights_until_the_next_update(stage: int, tmp_path: Path) -> None:
    def run(transport: Transport) -> None:
        model = locked_build(0)
        optimizer = build(model.layers.parameters(), transport, stage, module=model)
        average = ShardedAverage(optimizer)
        average.update_parameters()
        optimizer.add_param_group({"params": list(model.last.parameters())})
        found = average.gather(to=None)
        zero.save(tmp_path / "saved", optimizer)
        with average.applied():
            pass
        optimizer.close()
        saved = zero.open_checkpoint(tmp_path / "saved").averages("average")
        assert found is not None
        for name in ("last.weight", "last.bias"):
            assert_same_bits(found[name], model.get_parameter(name).detach(), name)
            assert_same_bits(saved[name], model.get_parameter(name).detach(), name)

    on_threads(2, run, timeout=10)


def largest_of_all(averages: list[Tensor], weights: list[Tensor], count: Any) -> None:
    largest = max(each.abs().max() for each in weights if each.numel())
    for average, each in zip(averages, weights, strict=True):
        average.lerp_(each / largest, 0.1)


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"avg_fn": lambda a, w, n: a, "multi_avg_fn": lambda a, w, n: None}, "not both"),
    ({"avg_fn": lambda a, w, n: a / a.norm()}, "must be element-wise"),
    ({"avg_fn": lambda a, w, n: None}, "failed on 1-D tensors"),
    ({"avg_fn": lambda a, w, n: a * a.shape[1]}, "failed on 1-D tensors .IndexError"),
    ({"multi_avg_fn": largest_of_all}, "other values for parts than for whole tensors"),
    ({"name": "a/b"}, "bad name of averages 'a/b'"),
    ({"name": 3}, "bad name of averages 3"),
    ({"name": "one"}, "has an average 'one' already"),
]


def test_bad_input_is_an_error() -> None:
    optimizer = build(locked_build(0), solo(), 1)
    one = ShardedAverage(optimizer, name="one")
    for arguments, said in ERRORS:
        with pytest.raises(ValueError, match=said):
            ShardedAverage(optimizer, **arguments)
    for call in (one.gather, one.applied().__enter__):
        with pytest.raises((RuntimeError, ValueError), match="'one': it has no values yet: call update_parameters"):
            call()
    one.update_parameters()
    with pytest.raises(ValueError, match="rank 7 is not one of the 1 ranks"):
        one.gather(to=7)
    one.close()
    again = ShardedAverage(optimizer, name="one")
    one.close()
    again.update_parameters()
    closed: list[Callable[[], Any]] = [one.update_parameters, one.gather, one.applied]
    for use in closed:
        with pytest.raises(RuntimeError, match="'one' is closed"):
            use()
    with pytest.raises(TypeError, match=r"not of AdamW: .*AveragedModel"):
        ShardedAverage(torch.optim.AdamW(locked_build(0).parameters()))  # type: ignore[arg-type]
