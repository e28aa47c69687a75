"""The same on real processes over gloo: bits, overlap by the order of events, peaks of memory, failures."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import Collective, Kind, Pairwise, Tag, Work
from collectives.algorithms.process_group import Native
from collectives.backends.gloo import connect
from zero import ZeroOptimizer

from .. import peaks
from ..dials.loops import step
from ..dials.record import ODD, config_with
from ..peaks import BLOCKS
from ..support.machine.backends import Processes
from ..support.machine.oracle import Oracle
from ..support.machine.program import Backward, Clip, Command, Config, Describe, Setting, Step, Uneven, ZeroGrad, values
from ..support.machine.ranks import Rank
from ..support.machine.run import run
from ..support.plain import assert_same_value
from ..support.pool import GROUP_TIMEOUT, WITHOUT_GLOO, GlooPool, ProgramError, register_unmoving
from ..support.rows import rows

CLIPPED = [*step(1, Clip(0.1)), Backward(2, sync=False), *step(3), Describe()]
"""`ci/laws` has further programs on processes."""


@pytest.mark.law("group ranks")
@pytest.mark.parametrize(
    ("changes", "members"),
    rows(
        [
            ({"stage": 3, "world_size": 4, "sharding_factor": 2, "optimizer": "shampoo"}, (0, 1, 2, 3)),
            ({"stage": 2, "world_size": 2}, (1, 3)),
        ],
        [
            ({"stage": 3, "world_size": 2, "sharding_factor": 1}, (1, 3)),
            ({"stage": 3, "world_size": 3, "dtype": "bfloat16", "rounded": True, "seed": 2}, (0, 1, 2)),
        ],
    ),
)
def test_all_ranks_and_a_sub_group_give_the_bits_of_the_plain_loop(
    gloo: GlooPool, changes: dict[str, Any], members: tuple[int, ...]
) -> None:
    run(config_with(changes), *CLIPPED, backend=Processes(gloo, members))


def without_gloo(group: dist.ProcessGroup, rank: int, config: Config, commands: list[Command]) -> Any:
    """Train in process groups that overlap and have no gloo: {0, 1}, {1, 3} and {1, 2, 3}, of which rank 1 is in all.

    Return the weights in {1, 3}, and how many sockets are open after the groups that were not there before.
    """
    register_unmoving()
    gc.collect()
    before = _sockets()
    parts = [[0, 1], [1, 3], [1, 2, 3]]
    groups = [dist.new_group(part, timedelta(seconds=GROUP_TIMEOUT), WITHOUT_GLOO) for part in parts]
    found = None
    for part, of in zip(parts, groups, strict=True):
        if rank in part:
            if part == [1, 3]:
                player = Rank(config, config.setting, of, part.index(rank))
                for command in commands:
                    player.do(command)
                found = player.close()
                del player
            model = nn.Linear(2, 2)
            for _ in range(2):
                optimizer = ZeroOptimizer(model, process_group=of)
                optimizer.close()
            del optimizer
            dist.destroy_process_group(of)
    del groups, of
    gc.collect()
    return found, _sockets() - before


def _sockets() -> int:
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder itself, which is closed by now
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return found


@pytest.mark.parametrize("stage", rows([], [0, 1, 2, 3]))
def test_groups_without_gloo_get_one_beside_them_that_their_ranks_alone_make(gloo: GlooPool, stage: int) -> None:
    """Once for all optimizers of a group, whatever other groups a rank is in. It is freed with the group."""
    config = config_with({"stage": stage, "world_size": 2})
    plain = Oracle(config)
    for command in CLIPPED:
        plain.do(command)
    results = gloo.run(without_gloo, config, CLIPPED, ranks=range(4))
    for found, sockets in results:
        assert sockets == 0
        if found is not None:
            assert_same_value(found, values(plain.parameters), "weights")
    assert sum(found is not None for found, _ in results) == 2


@pytest.mark.law("every rank enters")
@pytest.mark.parametrize(("stage", "algorithm"), rows([(0, "native"), (1, "all_to_all")], [(2, "ring"), (2, "native")]))
def test_ranks_with_fewer_backwards_catch_up_with_every_algorithm(gloo: GlooPool, algorithm: str, stage: int) -> None:
    """And give the same bits on integers."""
    config = Config(Setting(stage, 3, collective=algorithm), ODD, integer=True)
    run(config, Uneven(1, (3, 2, 1)), Step(), ZeroGrad(), *step(2), backend=Processes(gloo))


# -- overlap -----------------------------------------------------------------------------------------------------------


class Recording(Pairwise):
    """Records when a bucket's reduction is launched."""

    name = "recording"
    events: ClassVar[list[str]] = []

    def reduce_scatter(self, source: Tensor, bounds: Any, out: Tensor, *, start: Tensor | None, tag: Tag) -> Work:
        self.events.append(f"launch {tag.index}")
        return super().reduce_scatter(source, bounds, out, start=start, tag=tag)


def recorded(group: dist.ProcessGroup, rank: int, stage: int) -> list[str]:
    """Return the events of the second step of six layers, one bucket each."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    inputs = torch.randn(8, 64, requires_grad=True)
    optimizer = ZeroOptimizer(model, stage=stage, process_group=group, collective=Recording, bucket_cap_mb=0.02)
    for number, layer in enumerate(model):
        layer.register_full_backward_pre_hook(lambda *_, n=number: Recording.events.append(f"backward {n}"))
    for _ in range(2):
        Recording.events.clear()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Recording.events


@pytest.mark.law("launch order")
@pytest.mark.parametrize("stage", [0, 2])
def test_buckets_are_launched_while_the_rest_of_the_backward_runs(gloo: GlooPool, stage: int) -> None:
    for events in gloo.run(recorded, stage):
        launches = [event for event in events if event.startswith("launch")]
        assert launches == [f"launch {i}" for i in range(6)]
        assert events.index("launch 0") < events.index("backward 0")
        for i in range(4):  # bucket i holds layer 5 - i; it is launched before the second layer after it begins
            assert events.index(f"launch {i}") < events.index(f"backward {3 - i}")


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.law("memory")
def test_at_no_moment_a_rank_holds_more_than_its_stage_says_and_three_buckets(gloo: GlooPool) -> None:
    for found in gloo.run(peaks.measure, 64, 2, 0.13, ranks=range(2), limit=120):
        padding = 64 * (BLOCKS + 2) * 6
        for kind, factor in (("parameters", 1), ("gradients", 1 / 2), ("optimizer", 2 / 2)):
            assert abs(found.between[kind] - factor * found.whole) <= padding, kind
        assert found.bucket < found.whole / BLOCKS
        assert found.scratch <= 3 * found.bucket
        assert found.above <= 3 * found.bucket


# -- the baseline of torch's own collectives ---------------------------------------------------------------------------


def native_collectives(group: dist.ProcessGroup, rank: int, dtype: torch.dtype, bounds: list[int]) -> Tensor:
    algorithm: Collective = Native(connect(group))
    source = torch.arange(bounds[-1], dtype=dtype) + rank
    out = torch.empty(bounds[rank + 1] - bounds[rank], dtype=dtype)
    tag = Tag(Kind.REDUCE_SCATTER, "a test")
    algorithm.reduce_scatter(source.clone(), bounds, out, start=torch.ones_like(out), tag=tag).wait()
    whole = torch.full((bounds[-1],), -1, dtype=dtype)
    whole[bounds[rank] : bounds[rank + 1]] = out
    algorithm.all_gather(whole, bounds, tag=tag).wait()
    return whole


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_native_baseline_takes_uneven_and_empty_slices(gloo: GlooPool, dtype: torch.dtype) -> None:
    expected = torch.arange(17, dtype=dtype) * 3 + 3 + 1
    for bounds in ([0, 5, 5, 17], [0, 5, 11, 17]):  # each owner broadcasts its slice; slices are padded
        for whole in gloo.run(native_collectives, dtype, bounds, ranks=range(3)):
            assert torch.equal(whole, expected)


# -- failures ----------------------------------------------------------------------------------------------------------


def different_models(group: dist.ProcessGroup, rank: int) -> None:
    ZeroOptimizer(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8 if rank == 0 else 9)), process_group=group)


def different_calls(group: dist.ProcessGroup, rank: int) -> None:
    optimizer = ZeroOptimizer(nn.Linear(4, 4), process_group=group)
    if rank == 0:
        optimizer.step()
    else:
        optimizer.consolidate_state_dict()


@pytest.mark.law("agreement at construction")
@pytest.mark.law("errors")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (different_models, ("ValueError", "1.weight [8, 8]", "1.weight [9, 8]")),
        (different_calls, ("step()", "consolidate_state_dict(to=0)")),
    ],
)
def test_ranks_that_differ_learn_of_it_at_once(gloo: GlooPool, program: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ProgramError) as caught:
        gloo.run(program, ranks=range(2))
    assert set(caught.value.errors) == {0, 1}
    for error in caught.value.errors.values():
        assert all(word in ": ".join(error) for word in words), error
        assert "no answer" not in error[1]
