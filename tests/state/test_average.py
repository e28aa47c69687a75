"""A running average of the weights, each rank's of its own, has the bits of torch's AveragedModel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import zero
from collectives import Transport, on_threads, solo
from zero import ShardedAverage, ZeroOptimizer

from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_model, plain_step
from ..support.programs import locked_build
from .average import KINDS, assert_same_averages, build, plain, train

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(
    ("world_size", "stage", "kind", "factor"),
    [(3, 0, "by tensor", None), (2, 1, "mean", None), (4, 2, "ema", 2), (3, 3, "mean", None), (1, 2, "by tensor", 1)],
)
def test_the_average_is_that_of_the_plain_loop(world_size: int, stage: int, kind: str, factor: int | None) -> None:
    """The model computes with it inside a block, and trains on as if there had been none."""

    def run(transport: Transport) -> Any:
        model = locked_build(0)
        optimizer = build(model, transport, stage, sharding_factor=factor)
        average = ShardedAverage(optimizer, **KINDS[kind])
        train(model, optimizer, range(2), average)
        assert average.n_averaged == 2
        found, one = average.gather(to=None), average.gather(to=0)
        assert (one is None) is (transport.rank != 0)
        with average.applied(), torch.no_grad():
            seen = model(odd_batches(1, 9)[0][0])
        train(model, optimizer, range(2, 3), average)
        optimizer.close()
        return model, found, seen

    _, expected = plain(2, kind)
    whole, _ = plain(3, kind)
    for model, found, seen in on_threads(world_size, run, timeout=10):
        assert_same_averages(found, expected)
        assert_same_bits(seen, expected(odd_batches(1, 9)[0][0]).detach())
        assert_same_model(model, whole)


@pytest.mark.parametrize("stage", [0, 3])
def test_with_mixed_precision_it_is_that_of_the_master_weights(stage: int) -> None:
    def run(transport: Transport) -> None:
        model = locked_build(0)
        optimizer = build(model, transport, stage, mixed_precision=PRECISIONS["bf16"])
        average, by_hand = ShardedAverage(optimizer, **KINDS["by tensor"]), dict[str, Tensor]()
        for step in range(3):
            train(model, optimizer, range(step, step + 1), average)
            for name, parameter in model.named_parameters():
                wide = optimizer.full_master(parameter) if parameter.requires_grad else by_hand.get(name)
                if wide is not None:
                    by_hand[name] = by_hand[name] * 0.9 + wide * 0.1 if step else wide
        found = average.gather(to=None)
        assert found is not None
        for name, value in by_hand.items():
            assert found[name].dtype is torch.float32
            assert_same_bits(found[name], value, name)
        with average.applied(), optimizer.gathered():
            for name, parameter in model.named_parameters():
                assert_same_bits(parameter, found[name].to(parameter.dtype), name)
        optimizer.close()

    on_threads(2, run, timeout=10)


@pytest.mark.parametrize(("before", "after"), [((2, 3), (3, 0)), ((3, 1), (2, 3))])
def test_checkpoints_have_it_and_training_goes_on_elsewhere(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    def run(transport: Transport, stage: int, steps: range) -> Any:
        model = locked_build(0)
        optimizer = build(model, transport, stage)
        averages = [ShardedAverage(optimizer, **KINDS["ema"], name="ema"), ShardedAverage(optimizer)]
        if steps.start:
            restored = zero.load(tmp_path / "saved", optimizer, rng=False)
            assert not [text for text in restored.not_restored if "average" in text]
            assert [average.n_averaged for average in averages] == [2, 2]
        train(model, optimizer, steps, *averages)
        if not steps.start:
            zero.save(tmp_path / "saved", optimizer)
        found = [average.gather(to=None) for average in averages]
        optimizer.close()
        return found

    on_threads(before[0], lambda transport: run(transport, before[1], range(2)), timeout=10)
    saved = zero.open_checkpoint(tmp_path / "saved")
    assert saved.average_names == ["average", "ema"]
    whole = saved.averages("ema")
    assert int(whole.pop("n_averaged")) == 2
    assert_same_averages(whole, plain(2, "ema")[1])
    for ema, mean in on_threads(after[0], lambda transport: run(transport, after[1], range(2, 4)), timeout=10):
        assert_same_averages(ema, plain(4, "ema")[1])
        assert_same_averages(mean, plain(4, "mean")[1])


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_have_run_out_of_batches_update_it_too(stage: int) -> None:
    counts = (3, 1)

    def run(transport: Transport) -> Any:
        model = locked_build(0)
        optimizer = build(model, transport, stage)
        average = ShardedAverage(optimizer, **KINDS["ema"])
        with optimizer.join():
            for step in range(counts[transport.rank]):
                odd_loss(model, odd_batches(2, step, False)[transport.rank]).backward()
                optimizer.step()
                average.update_parameters()
                optimizer.zero_grad()
        found = average.gather(to=None)
        optimizer.close()
        return found

    model = locked_build(0)
    expected = swa_utils.AveragedModel(model, **KINDS["ema"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(max(counts)):
        there = [rank for rank, count in enumerate(counts) if step < count]
        plain_step(model, optimizer, odd_loss, [odd_batches(2, step, False)[rank] for rank in there], len(counts))
        optimizer.zero_grad()
        expected.update_parameters(model)
    for found in on_threads(2, run, timeout=10):
        assert_same_averages(found, expected)


CALLS: dict[str, Callable[[ZeroOptimizer, ShardedAverage, Path], Any]] = {
    "step": lambda optimizer, average, path: optimizer.step(),
    "clip_grad_norm_": lambda optimizer, average, path: optimizer.clip_grad_norm_(1.0),
    "save": lambda optimizer, average, path: zero.save(path / "saved", optimizer),
    "load": lambda optimizer, average, path: zero.load(path / "before", optimizer, rng=False),
    "update_parameters": lambda optimizer, average, path: average.update_parameters(),
    "applied": lambda optimizer, average, path: average.applied().__enter__(),
}


@pytest.mark.parametrize("stage", [1, 3])
def test_what_would_take_the_average_for_weights_is_an_error(stage: int, tmp_path: Path) -> None:
    def run(transport: Transport) -> nn.Module:
        model = locked_build(0)
        optimizer = build(model, transport, stage)
        average = ShardedAverage(optimizer, **KINDS["ema"])
        train(model, optimizer, range(1), average)
        zero.save(tmp_path / "before", optimizer)
        train(model, optimizer, range(1, 2), average)
        for name, call in CALLS.items():
            with average.applied(), pytest.raises(RuntimeError, match=rf"{name}.* inside applied\(\) of the average"):
                call(optimizer, average, tmp_path)
        batch = odd_batches(1, 0, False)[0]
        with pytest.raises(RuntimeError, match="a backward inside applied"), average.applied():
            odd_loss(model, batch).backward()
        optimizer.zero_grad()
        odd_loss(model, batch).backward()
        with pytest.raises(RuntimeError, match="with gradients that no step has used"), average.applied():
            raise AssertionError("the block is entered")
        optimizer.zero_grad()
        train(model, optimizer, range(2, 3), average)
        optimizer.close()
        return model

    for found in on_threads(2, run, timeout=10):
        assert_same_model(found, plain(3, "ema")[0])


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
        optimizer = build(model.layers.parameters(), transport, stage, module=model)  # type: ignore[arg-type]
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
    with pytest.raises(RuntimeError, match="'one' is closed"):
        one.update_parameters()
    with pytest.raises(TypeError, match=r"not of AdamW: .*AveragedModel"):
        ShardedAverage(torch.optim.AdamW(locked_build(0).parameters()))  # type: ignore[arg-type]
