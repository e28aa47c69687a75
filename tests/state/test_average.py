"""A running average of the weights in inference mode, in checkpoints, inside `join`, and of later groups."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from collectives import Transport, on_threads, solo
from zero import ShardedAverage, ZeroOptimizer

from ..support.models import build as locked_build
from ..support.models import odd_batches, odd_loss
from ..support.plain import assert_same_bits, assert_same_model
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


def build(listed: Any, group: Any, stage: int, **arguments: Any) -> ZeroOptimizer:
    arguments = {"stage": stage, "process_group": group, "bucket_cap_mb": 0.0005, "lr": 0.01, **arguments}
    return ZeroOptimizer(listed, torch.optim.AdamW, **arguments)


def test_ranks_with_other_averages_do_not_restore(tmp_path: Path) -> None:
    def run(transport: Transport) -> None:
        optimizer = build(locked_build(0), transport, 2)
        average = ShardedAverage(optimizer)
        average.update_parameters()
        zero.save(tmp_path / "saved", optimizer)
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
        assert (average.gather(to=0) is None) is (optimizer.rank != 0)
        zero.save(tmp_path / "saved", optimizer)
        with average.applied():
            pass
        optimizer.close()
        opened = zero.open_checkpoint(tmp_path / "saved")
        saved = opened.averages("average")
        assert opened.average_names == ["average"]
        assert int(saved.pop("n_averaged")) == 1
        assert found is not None
        assert saved.keys() == found.keys()
        for name in ("last.weight", "last.bias"):
            assert_same_bits(found[name], model.get_parameter(name).detach(), name)
            assert_same_bits(saved[name], model.get_parameter(name).detach(), name)

    on_threads(2, run, timeout=10)
