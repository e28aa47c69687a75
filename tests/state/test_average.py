"""A running average of the weights in inference mode, in checkpoints, inside `join`, and of later groups."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from collectives import Transport, on_threads
from zero import ShardedAverage, ZeroOptimizer

from ..support.errors import error_of
from ..support.models import build as locked_build
from ..support.models import odd_batches, odd_loss
from ..support.plain import assert_same_bits
from ..support.rows import rows
from ..support.sides import AsPlain, OnRank, Side
from .training import average_of, same, train, values


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
