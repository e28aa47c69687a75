"""A running average of the weights: each rank has that of its own, and the bits are those of torch's AveragedModel."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import zero
from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ShardedAverage, ZeroOptimizer

from ..support.plain import assert_same_bits, assert_same_model, plain_step
from ..support.pool import GlooPool

STAGES = (0, 1, 2, 3)
TOGETHER = 12  # micro-batches of a step
KINDS: dict[str, dict[str, Any]] = {
    "mean": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.7)},
    "by tensor": {"avg_fn": lambda average, weights, count: average * 0.9 + weights * 0.1},
}


class Model(nn.Module):
    """Units with matrices and vectors, a tied one, a frozen one, one with another memory order, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 8)) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.blocks[1][2].weight = nn.Parameter(self.blocks[1][2].weight.detach().t().contiguous().t())
        self.scale, self.last = nn.Parameter(torch.tensor(1.5)), nn.Linear(8, 8)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * self.scale
        found: Tensor = self.last(x)
        return found


def model_of() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model()


def batch(step: int, number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + number))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x.to(next(model.parameters()).dtype)).float().square().mean()
    return found


def plain(steps: int, kind: str) -> tuple[Model, swa_utils.AveragedModel]:
    model = model_of()
    average = swa_utils.AveragedModel(model, **KINDS[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        plain_step(model, optimizer, loss_of, [batch(step, number) for number in range(TOGETHER)], TOGETHER)
        optimizer.zero_grad()
        average.update_parameters(model)
    return model, average


def train(model: nn.Module, optimizer: ZeroOptimizer, steps: range, *averages: ShardedAverage) -> None:
    optimizer.divisor = TOGETHER
    for step in steps:
        for number in range(optimizer.rank, TOGETHER, optimizer.world_size):
            loss_of(model, batch(step, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for average in averages:
            average.update_parameters()


def build(model: nn.Module, group: Any, stage: int, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage, process_group=group, bucket_cap_mb=0.0005, lr=0.01, **arguments
    )


def on_ranks(world_size: int, run: Callable[[nn.Module, Transport], Any]) -> list[Any]:
    models = [model_of() for _ in range(world_size)]
    return on_threads(world_size, lambda transport: run(models[transport.rank], transport), timeout=10)


def assert_same_averages(found: dict[str, Tensor], average: swa_utils.AveragedModel) -> None:
    expected = dict(average.module.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        assert_same_bits(found[name].contiguous(), value.detach().contiguous(), name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_average_is_that_of_the_plain_loop(stage: int, kind: str) -> None:
    def run(model: nn.Module, transport: Transport, **arguments: Any) -> Any:
        optimizer = build(model, transport, stage, **arguments)
        average = ShardedAverage(optimizer, **KINDS[kind])
        train(model, optimizer, range(3), average)
        assert average.n_averaged == 3
        found = average.gather(to=None)
        one = average.gather(to=0)
        assert (one is None) is (transport.rank != 0)
        optimizer.close()
        return found

    _, expected = plain(3, kind)
    for ranks, more in ((1, {}), (2, {}), (3, {}), (4, {"sharding_factor": 2} if stage else {})):
        for found in on_ranks(ranks, partial(run, **more)):
            assert_same_averages(found, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_keeps_the_average_of_what_it_updates(stage: int) -> None:
    def run(model: nn.Module, transport: Transport) -> int:
        optimizer = build(model, transport, stage)
        average = ShardedAverage(optimizer)
        average.update_parameters(model)
        held = sum(flat.data.numel() for flat in average._flat.values())
        optimizer.close()
        return held

    held, numel = on_ranks(4, run), sum(p.numel() for p in model_of().parameters())
    padding = 16 * len(list(model_of().parameters()))
    assert all(numel <= each <= numel + padding for each in held) if stage == 0 else sum(held) <= numel + padding


@pytest.mark.parametrize("precision", [None, MixedPrecision(torch.bfloat16)])
@pytest.mark.parametrize("stage", STAGES)
def test_the_model_computes_with_it_inside_a_block_and_trains_on_as_if_there_had_been_none(
    stage: int, precision: MixedPrecision | None
) -> None:
    def run(model: nn.Module, transport: Transport, applied: bool) -> Any:
        optimizer = build(model, transport, stage, mixed_precision=precision)
        average, seen = ShardedAverage(optimizer, **KINDS["ema"]), None
        train(model, optimizer, range(2), average)
        if applied:
            whole = average.gather(to=None)
            assert whole is not None
            with average.applied(), torch.no_grad():
                seen = model(batch(9, 9).to(next(model.parameters()).dtype))
                with optimizer.gathered():
                    for name, parameter in model.named_parameters():
                        assert_same_bits(parameter.contiguous(), whole[name].to(parameter.dtype).contiguous(), name)
        train(model, optimizer, range(2, 4), average)
        optimizer.close()
        return model, seen

    expected = on_ranks(1, partial(run, applied=False))[0][0]
    found = on_ranks(3, partial(run, applied=True))
    for model, _ in found:
        assert_same_model(model, expected)
    if precision is None:
        _, average = plain(2, "ema")
        assert_same_bits(found[0][1], average(batch(9, 9)).detach(), "output")


@pytest.mark.parametrize("stage", STAGES)
def test_with_mixed_precision_it_is_that_of_the_master_weights(stage: int) -> None:
    def run(model: nn.Module, transport: Transport) -> Any:
        optimizer = build(model, transport, stage, mixed_precision=MixedPrecision(torch.bfloat16))
        average, by_hand = ShardedAverage(optimizer, **KINDS["by tensor"]), dict[str, Tensor]()
        for step in range(3):
            train(model, optimizer, range(step, step + 1), average)
            for name, parameter in model.named_parameters():
                wide = optimizer.full_master(parameter)
                by_hand[name] = by_hand[name] * 0.9 + wide * 0.1 if step else wide
        found = average.gather(to=None)
        optimizer.close()
        return found, by_hand

    for found, by_hand in on_ranks(2, run):
        assert found.keys() == by_hand.keys()
        for name, value in by_hand.items():
            assert found[name].dtype is torch.float32
            assert_same_bits(found[name].contiguous(), value.contiguous(), name)


@pytest.mark.parametrize("before", [(2, 3), (1, 0), (3, 1)])
@pytest.mark.parametrize("after", [(1, 2), (4, 3), (3, 0)])
def test_checkpoints_have_it_and_training_goes_on_at_another_stage_and_number_of_ranks(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    def run(model: nn.Module, transport: Transport, stage: int, steps: range) -> Any:
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

    on_ranks(before[0], partial(run, stage=before[1], steps=range(2)))
    saved = zero.open_checkpoint(tmp_path / "saved")
    assert saved.average_names == ["average", "ema"]
    whole = saved.averages("ema")
    assert int(whole.pop("n_averaged")) == 2
    assert_same_averages(whole, plain(2, "ema")[1])
    for ema, mean in on_ranks(after[0], partial(run, stage=after[1], steps=range(2, 4))):
        assert_same_averages(ema, plain(4, "ema")[1])
        assert_same_averages(mean, plain(4, "mean")[1])


def test_checkpoints_of_several_steps_have_the_average_of_their_moment(tmp_path: Path) -> None:
    def run(model: nn.Module, transport: Transport) -> None:
        optimizer = build(model, transport, 3)
        with zero.CheckpointManager(tmp_path, optimizer) as checkpoints:
            checkpoints.save(0)
            average = ShardedAverage(optimizer, **KINDS["ema"])
            for step in range(1, 4):
                train(model, optimizer, range(step - 1, step), average)
                checkpoints.save(step)  # the thread writes while the average changes
        optimizer.close()

    on_ranks(2, run)
    assert zero.open_checkpoint(tmp_path / "step-00000000").average_names == []
    for step in range(1, 4):
        found = zero.open_checkpoint(tmp_path / f"step-{step:08}").averages("average")
        assert int(found.pop("n_averaged")) == step
        assert_same_averages(found, plain(step, "ema")[1])


def test_a_checkpoint_without_it_says_so_and_it_begins_anew(tmp_path: Path) -> None:
    model = model_of()
    optimizer = build(model, solo(), 1)
    zero.save(tmp_path / "saved", optimizer)
    average = ShardedAverage(optimizer)
    train(model, optimizer, range(2), average)
    with pytest.warns(RuntimeWarning, match="the average 'average' .none was saved: it begins anew"):
        zero.load(tmp_path / "saved", optimizer)
    assert average.n_averaged == 0
    average.update_parameters()
    zero.save(tmp_path / "with", optimizer)
    average.close()
    with pytest.warns(RuntimeWarning, match="the averages 'average' .no ShardedAverage has this name"):
        zero.load(tmp_path / "with", optimizer)
    optimizer.close()


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_have_run_out_of_batches_update_it_too(stage: int) -> None:
    counts = (3, 1)

    def run(model: nn.Module, transport: Transport) -> Any:
        optimizer = build(model, transport, stage)
        average = ShardedAverage(optimizer, **KINDS["ema"])
        with optimizer.join():
            for step in range(counts[transport.rank]):
                loss_of(model, batch(step, transport.rank)).backward()
                optimizer.step()
                average.update_parameters()
                optimizer.zero_grad()
        found = average.gather(to=None)
        optimizer.close()
        return found

    model = model_of()
    expected = swa_utils.AveragedModel(model, **KINDS["ema"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(max(counts)):
        there = [rank for rank, count in enumerate(counts) if step < count]
        plain_step(model, optimizer, loss_of, [batch(step, rank) for rank in there], len(counts))
        optimizer.zero_grad()
        expected.update_parameters(model)
    for found in on_ranks(2, run):
        assert_same_averages(found, expected)


CALLS: dict[str, Callable[[ZeroOptimizer, ShardedAverage, Path], Any]] = {
    "step": lambda optimizer, average, path: optimizer.step(),
    "clip_grad_norm_": lambda optimizer, average, path: optimizer.clip_grad_norm_(1.0),
    "save": lambda optimizer, average, path: zero.save(path / "saved", optimizer),
    "load": lambda optimizer, average, path: zero.load(path / "before", optimizer, rng=False),
    "update_parameters": lambda optimizer, average, path: average.update_parameters(),
    "applied": lambda optimizer, average, path: average.applied().__enter__(),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_would_take_the_average_for_the_weights_is_an_error_inside_a_block(
    stage: int, name: str, tmp_path: Path
) -> None:
    def run(model: nn.Module, transport: Transport) -> nn.Module:
        optimizer = build(model, transport, stage)
        average = ShardedAverage(optimizer, **KINDS["ema"])
        train(model, optimizer, range(1), average)
        zero.save(tmp_path / "before", optimizer)
        train(model, optimizer, range(1, 2), average)
        with average.applied(), pytest.raises(RuntimeError, match=rf"{name}.* inside applied\(\) of the average"):
            CALLS[name](optimizer, average, tmp_path)
        train(model, optimizer, range(2, 3), average)
        optimizer.close()
        return model

    for found in on_ranks(2, run):
        assert_same_model(found, plain(3, "ema")[0])


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_the_average_are_refused_when_the_block_ends(stage: int) -> None:
    def run(model: nn.Module, transport: Transport) -> nn.Module:
        optimizer = build(model, transport, stage)
        average = ShardedAverage(optimizer, **KINDS["ema"])
        train(model, optimizer, range(2), average)
        with pytest.raises(RuntimeError, match="a backward inside applied"), average.applied():
            loss_of(model, batch(0, 0)).backward()
        optimizer.zero_grad()
        loss_of(model, batch(0, 0)).backward()
        with pytest.raises(RuntimeError, match="with gradients that no step has used"), average.applied():
            raise AssertionError("the block is entered")
        optimizer.zero_grad()
        train(model, optimizer, range(2, 3), average)
        optimizer.close()
        return model

    for found in on_ranks(2, run):
        assert_same_model(found, plain(3, "ema")[0])


def test_ranks_with_other_averages_neither_gather_nor_restore(tmp_path: Path) -> None:
    def run(model: nn.Module, transport: Transport) -> None:
        optimizer = build(model, transport, 2)
        average = ShardedAverage(optimizer)
        average.update_parameters()
        zero.save(tmp_path / "saved", optimizer)
        if transport.rank == 0:
            average.update_parameters()
        with pytest.raises(ValueError, match=r"ranks have averaged \[2, 1\] weights"):
            average.gather(to=None)
        if transport.rank == 1:
            average.close()
        with pytest.raises(ValueError, match=r"rank 1 has the averages \[\], and rank 0 \['average'\]"):
            zero.load(tmp_path / "saved", optimizer, rng=False)
        optimizer.close()

    on_ranks(2, run)


def test_ranks_that_disagree_do_not_save(tmp_path: Path) -> None:
    def run(model: nn.Module, transport: Transport) -> None:
        optimizer = build(model, transport, 2)
        average = ShardedAverage(optimizer)
        if transport.rank == 0:
            average.update_parameters()
        with pytest.raises(ValueError, match=r"the averages is .* on rank 1"):
            zero.save(tmp_path / "saved", optimizer)
        optimizer.close()

    on_ranks(2, run)


@pytest.mark.parametrize("stage", STAGES)
def test_params_that_are_added_later_have_their_weights_until_the_next_update(stage: int, tmp_path: Path) -> None:
    def run(model: nn.Module, transport: Transport) -> None:
        optimizer = ZeroOptimizer(
            model.get_submodule("blocks").parameters(),
            torch.optim.SGD,
            module=model,
            stage=stage,
            process_group=transport,
            lr=0.1,
        )
        average = ShardedAverage(optimizer)
        average.update_parameters()
        optimizer.add_param_group({"params": list(model.get_submodule("last").parameters())})
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

    on_ranks(2, run)


def test_params_that_are_added_later_begin_with_their_weights() -> None:
    model = model_of()
    optimizer = ZeroOptimizer(model.blocks.parameters(), torch.optim.SGD, module=model, process_group=solo(), lr=0.1)
    average = ShardedAverage(optimizer)
    train(model, optimizer, range(1), average)
    model.last.zero_grad()
    optimizer.add_param_group({"params": list(model.last.parameters())})
    train(model, optimizer, range(1, 2), average)
    found = average.gather()
    assert found is not None
    assert_same_bits(found["last.weight"], model.last.weight.detach(), "last.weight")
    optimizer.close()


def largest_of_all(averages: list[Tensor], weights: list[Tensor], count: Any) -> None:
    largest = max(each.abs().max() for each in weights)
    for average, each in zip(averages, weights, strict=True):
        average.lerp_(each / largest, 0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"avg_fn": lambda a, w, n: a, "multi_avg_fn": lambda a, w, n: None}, ValueError, "not both"),
        ({"avg_fn": lambda a, w, n: a / a.norm()}, ValueError, "must be element-wise"),
        ({"avg_fn": lambda a, w, n: None}, ValueError, "failed on 1-D tensors"),
        ({"avg_fn": lambda a, w, n: a * a.shape[1]}, ValueError, "failed on 1-D tensors .IndexError"),
        ({"multi_avg_fn": largest_of_all}, ValueError, "other values for parts than for whole tensors"),
        ({"name": "a/b"}, ValueError, "bad name of averages 'a/b'"),
        ({"name": 3}, ValueError, "bad name of averages 3"),
        ({"name": "one"}, ValueError, "has an average 'one' already"),
    ],
)
def test_bad_input_is_an_error(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    optimizer = build(model_of(), solo(), 1)
    one = ShardedAverage(optimizer, name="one")
    with pytest.raises(error, match=said):
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
        ShardedAverage(torch.optim.AdamW(model_of().parameters()))
    optimizer.close()


@pytest.mark.parametrize("stage", STAGES)
def test_it_is_so_on_processes(gloo: GlooPool, stage: int) -> None:
    _, expected = plain(3, "ema")
    for found in gloo.run(averaged_on_a_process, stage, ranks=range(3)):
        assert_same_averages(found, expected)


def averaged_on_a_process(group: Any, rank: int, stage: int) -> Any:
    model = model_of()
    optimizer = build(model, group, stage)
    average = ShardedAverage(optimizer, **KINDS["ema"])
    train(model, optimizer, range(3), average)
    with average.applied():
        pass
    found = average.gather(to=None)
    optimizer.close()
    return found


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_an_average_is_refused_and_says_what_has_its_values(copied: Callable[[Any], Any]) -> None:
    average = ShardedAverage(ZeroOptimizer(model_of(), torch.optim.SGD, process_group=solo()), name="ema")
    with pytest.raises(TypeError, match=r"the ShardedAverage 'ema' cannot be copied or pickled: .*gather\(\) returns"):
        copied(average)
