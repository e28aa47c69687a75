"""Programs of the tests on real gloo processes, which import them by name."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import Pairwise, Tag, Work
from zero import ZeroOptimizer

from ..support.offloaded import copied_from_the_host
from ..support.pool import GROUP_TIMEOUT, WITHOUT_GLOO, register_unmoving
from ..support.programs import Program, run_rank


def whole_program(group: dist.ProcessGroup, rank: int, program: Program) -> Any:
    return run_rank(program, group)


def with_parameters_on_the_host(group: dist.ProcessGroup, rank: int, program: Program) -> Any:
    with copied_from_the_host():
        return run_rank(program, group)


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


def integer_gradients(group: dist.ProcessGroup, rank: int, algorithm: str, stage: int) -> nn.Module:
    """Train with weights and inputs that are small integers, so that a sum has the same bits in any order.

    A rank runs fewer backwards than the one before.
    """
    model = nn.Linear(37, 11)
    nn.init.constant_(model.weight, 2)
    nn.init.constant_(model.bias, 1)
    arguments: dict[str, Any] = {"stage": stage, "process_group": group, "collective": algorithm}
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.5, bucket_cap_mb=0.0005, **arguments)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3 - rank):
        model(torch.randint(-4, 5, (5, 37), generator=generator).float()).sum().backward()
    optimizer.divisor = 4
    optimizer.step()
    optimizer.close()
    return model


def different_models(group: dist.ProcessGroup, rank: int) -> None:
    ZeroOptimizer(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8 if rank == 0 else 9)), process_group=group)


def different_calls(group: dist.ProcessGroup, rank: int) -> None:
    model = nn.Linear(4, 4)
    optimizer = ZeroOptimizer(model, process_group=group)
    model(torch.ones(2, 4)).sum().backward()
    if rank == 0:
        optimizer.step()
    else:
        optimizer.consolidate_state_dict()


def without_gloo(group: dist.ProcessGroup, rank: int, program: Program) -> Any:
    """Train in process groups that overlap and have no gloo: {0, 1}, {1, 3} and {1, 2, 3}, of which rank 1 is in all.

    Return the results in {1, 3}, and how many sockets are open after the groups that were not there before.
    """
    register_unmoving()
    gc.collect()
    before = _sockets()
    parts = [[0, 1], [1, 3], [1, 2, 3]]
    groups = [dist.new_group(part, timedelta(seconds=GROUP_TIMEOUT), WITHOUT_GLOO) for part in parts]
    result = None
    for part, of in zip(parts, groups, strict=True):
        if rank in part:
            result = run_rank(program, of) if part == [1, 3] else result
            model = nn.Linear(2, 2)
            for _ in range(2):
                optimizer = ZeroOptimizer(model, process_group=of)
                optimizer.close()
            del optimizer
            dist.destroy_process_group(of)
    del groups, of
    gc.collect()
    return result, _sockets() - before


def _sockets() -> int:
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder itself, which is closed by now
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return found
