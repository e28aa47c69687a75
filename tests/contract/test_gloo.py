"""The same on real processes over gloo: bits, overlap by the order of events, peaks of memory, failures."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import Pairwise, Tag, Work
from zero import ZeroOptimizer

from .. import peaks
from ..dials.loops import step
from ..dials.record import ODD, config_with
from ..peaks import BLOCKS
from ..support.machine.backends import Processes
from ..support.machine.program import Backward, Clip, Config, Describe, Setting, Step, Uneven, ZeroGrad
from ..support.machine.run import run
from ..support.pool import GlooPool
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
        [({"stage": 3, "world_size": 3, "dtype": "bfloat16", "rounded": True, "seed": 2}, (0, 1, 2))],
    ),
)
def test_all_ranks_and_a_sub_group_give_the_bits_of_the_plain_loop(
    gloo: GlooPool, changes: dict[str, Any], members: tuple[int, ...]
) -> None:
    run(config_with(changes), *CLIPPED, backend=Processes(gloo, members))


@pytest.mark.law("every rank enters")
@pytest.mark.parametrize(("stage", "algorithm"), rows([(0, "native"), (1, "all_to_all")], [(2, "ring"), (2, "native")]))
def test_ranks_with_fewer_backwards_catch_up_with_every_algorithm(gloo: GlooPool, algorithm: str, stage: int) -> None:
    config = Config(Setting(stage, 3, collective=algorithm), ODD, integer=True)
    run(config, Uneven(1, (3, 2, 1)), Step(), ZeroGrad(), *step(2), backend=Processes(gloo))


class Recording(Pairwise):
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


@pytest.mark.law("memory")
def test_at_no_moment_a_rank_holds_more_than_its_stage_says_and_three_buckets(gloo: GlooPool) -> None:
    for found in gloo.run(peaks.measure, 64, 2, 0.13, ranks=range(2), limit=120):
        padding = 64 * (BLOCKS + 2) * 6
        for kind, factor in (("parameters", 1), ("gradients", 1 / 2), ("optimizer", 2 / 2)):
            assert abs(found.between[kind] - factor * found.whole) <= padding, kind
        assert found.bucket < found.whole / BLOCKS
        assert found.scratch <= 3 * found.bucket
        assert found.above <= 3 * found.bucket
