"""A model whose parts are on several ranks, and the same model in one process.

Part k has `shared`, which every part has with the same gradient, and its own `tower`. The loss of the whole model is
the sum of the losses of its modules, so that no part needs another one's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import MixedPrecision, ZeroOptimizer

from ..support.limits import BOUND
from ..support.loops import seeded
from ..support.plain import assert_same_bits, assert_same_value
from ..support.sides import AsPlain, Loop, OnRank


def tower(number: int) -> nn.Module:
    """Return the tower of a part. They differ in size."""
    wide = 5 + 8 * number
    return seeded(10 + number, lambda: nn.Sequential(nn.Linear(3, wide), nn.Tanh(), nn.Linear(wide, 2)))


class Part(nn.Module):
    """One part; with several numbers, the whole model."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.shared = seeded(3, lambda: nn.Linear(3, 61))
        self.towers = nn.ModuleDict({f"tower {number}": tower(number) for number in numbers})

    def forward(self, batch: Tensor) -> Tensor:
        outputs = [module(batch) for module in (self.shared, *self.towers.values())]
        return torch.stack([output.float().square().sum() for output in outputs]).sum()


class Stages(nn.Module):
    """The whole of a model that is cut in two ways: stages of a pipeline, each with as many towers as ``parts``."""

    def __init__(self, stages: int, parts: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            stage_part(stage, *range(stage * parts, (stage + 1) * parts)) for stage in range(stages)
        )

    def forward(self, batch: Tensor) -> Tensor:
        return torch.stack([stage(batch) for stage in self.stages]).sum()


def stage_part(stage: int, *numbers: int) -> Part:
    """Return a part of a stage. Stages have the same names, and other values."""
    part = Part(*numbers)
    part.shared = seeded(40 + stage, lambda: nn.Linear(3, 61))
    return part


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2 + (step + rank) % 3, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    loss: Tensor = model(batch(step, rank).to(next(model.parameters()).dtype))
    return loss


def is_shared(name: str, parameter: Tensor) -> bool:
    return name.startswith("shared.")


def groups_of(transport: Transport, parts: int) -> tuple[Transport, Transport]:
    """Return the ranks that hold this rank's part, and one rank of each part, with this rank's place."""
    part, place = transport.rank % parts, transport.rank // parts
    data = transport.split(range(part, transport.world_size, parts))
    return data, transport.split(range(place * parts, (place + 1) * parts), 1)


def groups_of_stages(transport: Transport, stages: int, parts: int) -> tuple[Transport, Transport, Transport]:
    """Return the ranks that hold this rank's part, the parts of its stage, and the stages, with this rank's place."""
    size = stages * parts
    number, begin = transport.rank % size, transport.rank - transport.rank % size
    data = transport.split(range(number, transport.world_size, size))
    stage = begin + number - number % parts
    tensor = transport.split(range(stage, stage + parts), 1)
    return data, tensor, transport.split(range(begin + number % parts, begin + size, parts), 2)


class OnPart(OnRank):
    """A rank of a part, whose clip is by the norm of the whole model."""

    def __init__(self, model: Any, optimizer: ZeroOptimizer, over: Any, replicated: Any) -> None:
        super().__init__(model, optimizer)
        self.clip = lambda max_norm, norm_type=2.0: optimizer.clip_grad_norm_(
            max_norm, norm_type, over=over, replicated=replicated
        )


def assert_same_parts(
    loop: Loop, parts: int, copies: int, *, precision: MixedPrecision | None = None, **settings: Any
) -> None:
    """Assert that a loop on ``parts`` times ``copies`` ranks, as threads, has the bits of the whole model's loop."""
    whole = Part(*range(parts))
    expected = loop(AsPlain(whole, lambda updated: torch.optim.AdamW(updated, lr=0.1), copies, precision))

    def program(transport: Transport) -> tuple[nn.Module, Any]:
        data, over = groups_of(transport, parts)
        model = Part(transport.rank % parts)
        optimizer = ZeroOptimizer(
            model, torch.optim.AdamW, lr=0.1, process_group=data, mixed_precision=precision, **settings
        )
        found = loop(OnPart(model, optimizer, over, is_shared))
        optimizer.close()
        return model, found

    compare_parts(whole, expected, on_threads(parts * copies, program, timeout=BOUND))


def compare_parts(whole: nn.Module, expected: Any, results: Sequence[tuple[nn.Module, Any]]) -> None:
    """Compare the part of each rank, and what its loop returned, with the whole model."""
    for rank, (model, found) in enumerate(results):
        for name, parameter in model.named_parameters():
            assert_same_bits(parameter, whole.get_parameter(name), f"rank {rank}, {name}")
        assert_same_value(found, expected, f"rank {rank}, what the loop returns")


def clipped(steps: int = 3, norm_types: Sequence[float] = (2.0, float("inf"), 3.0)) -> Loop:
    """Return a loop that clips by another norm in each step, and returns the norms."""

    def loop(side: Any) -> list[Tensor]:
        norms = []
        for step in range(steps):
            side.train(lambda model, rank, step=step: loss_of(model, step, rank))
            norms.append(side.clip(0.5, norm_types[step % len(norm_types)]))
            side.step()
            side.clear()
        return norms

    return loop


def take_step(side: Any, step: int) -> None:
    """Take a step of two micro-batches, which the ranks of a part share."""
    for number in range(2):
        count = side.world_size if isinstance(side, AsPlain) else side.optimizer.world_size
        if number % count in side.ranks:
            side.train(lambda model, _, number=number: loss_of(model, step, number), ranks=[number % count])
    side.clip(0.5)
    side.step()
    side.clear()
