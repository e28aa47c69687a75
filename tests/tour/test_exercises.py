"""The exercises of zero/TOUR.md: a class has the plain loop's bits or is refused, a collective has its sums."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Algorithm, Kind, Loopback, Ring, Tag, Transport, on_threads
from zero import ZeroOptimizer

from ..support.carried import MIXED, SAME, awkward, plain_sum, reduction
from ..support.limits import BOUND, at_once
from ..support.models import seeded
from ..support.plain import assert_same_bits
from ..support.sides import Side, same_as_plain
from .optimizers import GloballyNormalized, Lion, Normalized
from .page import unfinished
from .relay import Relay

SMALL = 1e-4  # MiB of a bucket: several buckets, with cuts inside parameters
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def build() -> nn.Sequential:
    return seeded(0, lambda: nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11)))


def loop(side: Side) -> list[Tensor]:
    """Take steps of two backwards each. The second backward adds to the sums of the first."""
    norms = []
    for step in range(4):
        for turn in range(2):
            batches = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(2 * step + turn))
            side.train(lambda model, rank, batches=batches: model(batches[rank]).square().sum())  # type: ignore[misc]
        norms.append(side.clip(1.0))
        side.step()
        side.clear()
    return norms


def train(cls: type[torch.optim.Optimizer], stage: int, algorithm: str | Algorithm = "auto", **arguments: Any) -> None:
    """Assert that three ranks end with the bits of the plain loop."""
    settings = {"stage": stage, "bucket_cap_mb": SMALL, "collective": algorithm}
    same_as_plain(loop, build, cls, 3, settings=settings, **arguments)


@STAGES
def test_an_elementwise_optimizer_class_needs_nothing(stage: int) -> None:
    train(Lion, stage, lr=0.01, weight_decay=0.1)


@STAGES
@pytest.mark.filterwarnings("ignore:Normalized is not element-wise")
def test_an_optimizer_class_that_needs_whole_gradients_gets_one_owner_for_each_parameter(stage: int) -> None:
    train(Normalized, stage, lr=0.01)


def test_the_trial_of_an_optimizer_class_finds_what_its_step_looks_at(every_trial_runs: None) -> None:
    with pytest.warns(UserWarning, match="Normalized is not element-wise"):
        assert "4 parameters" in ZeroOptimizer(build(), Normalized).describe().by_parameter
    with pytest.raises(ValueError, match="Normalized is not element-wise: stepping shards of a parameter"):
        ZeroOptimizer(build(), Normalized, partition="element")
    with pytest.raises(ValueError, match="GloballyNormalized cannot be sharded: stepping a parameter"):
        ZeroOptimizer(build(), GloballyNormalized)


def check_sums(algorithm: Algorithm, world_size: int) -> None:
    """Assert that a collective has the sums of one process, and gathers, with uneven and empty shards."""
    bounds = list(itertools.accumulate([16, 0, 257, 3, 1][:world_size], initial=0))
    for seed, (travels, dtype) in enumerate([*SAME, *MIXED]):
        given = [awkward(bounds[-1], travels, 10 * seed + rank) for rank in range(world_size)]
        before = awkward(bounds[-1], dtype, 10 * seed + world_size)

        def program(t: Transport, given: list[Tensor] = given, before: Tensor = before, seed: int = seed) -> Tensor:
            collective, whole, own = algorithm(t), torch.zeros_like(before), slice(*bounds[t.rank : t.rank + 2])
            for start in (None, before[own].clone()):
                out = torch.zeros_like(before[own]) if start is None else start
                tag = reduction(round_=seed)
                collective.reduce_scatter(given[t.rank].clone(), bounds, out, start=start, tag=tag).wait()
                expected = plain_sum(None if start is None else before[own], [g[own] for g in given], out.dtype)
                assert_same_bits(out, expected, "a sum")
            whole[own] = out
            collective.all_gather(whole, bounds, tag=Tag(Kind.ALL_GATHER, "whole")).wait()
            return whole

        cuts = [slice(*cut) for cut in itertools.pairwise(bounds)]  # a NaN's bits depend on its place in a tensor
        expected = torch.cat([plain_sum(before[own], [each[own] for each in given], dtype) for own in cuts])
        for whole in on_threads(world_size, program, timeout=BOUND):
            assert_same_bits(whole, expected, "the gathered whole")


@pytest.mark.parametrize("world_size", range(1, 6))
def test_the_collective_has_the_sums_of_one_process(world_size: int) -> None:
    check_sums(Relay, world_size)


@STAGES
def test_training_with_the_collective_has_the_plain_loops_bits(stage: int) -> None:
    train(torch.optim.AdamW, stage, Relay, lr=0.01)


def test_a_collective_that_adds_in_another_order_is_found() -> None:
    with pytest.raises(AssertionError, match="a sum differs"):
        check_sums(Ring, 3)


def test_an_unfinished_collective_raises_on_every_rank_at_once() -> None:
    module = ModuleType("skeleton")
    exec(unfinished(), module.__dict__)

    def program(transport: Transport) -> str:
        model = build()
        optimizer = ZeroOptimizer(model, process_group=transport, collective=module.Relay)
        with pytest.raises(NotImplementedError) as caught:
            model(torch.ones(7)).sum().backward()
        del optimizer
        return str(caught.value)

    with at_once():
        assert set(Loopback[str](2).run(program)) == {"exercise 2: the sum of a shard, in rank order, at its owner"}
