"""A model of which each rank has some experts alone, trained by two optimizers, and the plain loop over all experts.

Micro-batch j uses expert j modulo their number. So where ranks are a multiple of that, a rank needs one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from collectives import Transport
from zero import MixedPrecision, ZeroOptimizer

from ..support.models import seeded
from ..support.plain import assert_same_bits
from ..support.sides import AsPlain

EXPERTS, WIDTH, MICRO_BATCHES = 2, 6, 12


class Expert(nn.Module):
    """A layer, and a buffer that says whose it is."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH + 3)
        self.outer = nn.Linear(WIDTH + 3, WIDTH)
        self.whose = nn.Buffer(torch.tensor(float(number)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(torch.tanh(self.inner(x))) * (1 + self.whose.to(x.dtype))
        return found


class Experts(nn.Module):
    """The experts of a layer that a rank has."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.of, self.seed = nn.ModuleDict(), seed

    def hold(self, held: Sequence[int]) -> None:
        for number in held:
            torch.manual_seed(self.seed + number)  # inside `seeded`
            self.of[str(number)] = Expert(number)

    def forward(self, x: Tensor, number: int) -> Tensor:
        found: Tensor = self.of[str(number)](x)
        return found


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(seed)
        self.offset = nn.Buffer(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor, number: int) -> Tensor:
        hidden = torch.tanh(self.dense(self.norm(x)) + self.offset.to(x.dtype))
        return x + self.experts(hidden, number)


class Sparse(nn.Module):
    """Layers with experts, between dense ones. ``count``: of all experts."""

    def __init__(self, held: Sequence[int], count: int) -> None:
        super().__init__()
        self.count = count
        self.first = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([])
        self.last = nn.Linear(WIDTH, 2)
        for seed in (100, 200):
            self.layers.append(Layer(seed))
        for layer in self.layers:
            layer.experts.hold(held)  # type: ignore[union-attr, operator]

    def forward(self, x: Tensor, number: int) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, number)
        found: Tensor = self.last(x)
        return found

    def experts(self) -> nn.ModuleList:
        return nn.ModuleList([layer.experts for layer in self.layers])  # type: ignore[misc]


def sparse(held: Sequence[int] | None = None, count: int = EXPERTS) -> Sparse:
    return seeded(7, lambda: Sparse(range(count) if held is None else held, count))


def loss_of(model: Any, step: int, number: int) -> Tensor:
    """Return the loss of a micro-batch."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * step + number))
    loss: Tensor = model(x.to(model.first.weight.dtype), number % model.count).float().square().mean()
    return loss


def freeze(model: Sparse) -> None:
    """Freeze a dense parameter and one of each expert."""
    model.last.bias.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("outer.bias"):
            parameter.requires_grad_(False)


def plain_loop(
    steps: int,
    precision: MixedPrecision | None = None,
    max_norm: float = 0.1,
    *,
    frozen: bool = False,
    count: int = EXPERTS,
) -> tuple[Sparse, list[Tensor]]:
    """Train all experts, ``count`` in a layer, in one process; return the model and the norms."""
    model = sparse(count=count)
    if frozen:
        freeze(model)
    loop = AsPlain(model, lambda updated: torch.optim.AdamW(updated, lr=0.01), 1, precision, MICRO_BATCHES)
    norms = []
    for step in range(steps):
        for number in range(MICRO_BATCHES):
            loop.train(lambda model, _, number=number, step=step: loss_of(model, step, number))  # type: ignore[misc]
        norms.append(loop.clip(max_norm))
        loop.step()
        loop.clear()
    return model, norms


class Pair:
    """A rank's model, the optimizer of its dense parameters over all ranks, and that of its experts over fewer.

    A single rank has all experts."""

    def __init__(
        self, transport: Transport, stages: tuple[int, int], precision: MixedPrecision | None = None, **dense: Any
    ) -> None:
        """``stages``: of the two; ``dense``: further arguments of the first."""
        alike = [rank for rank in range(transport.world_size) if rank % EXPERTS == transport.rank % EXPERTS]
        places = {"process_group": transport}, {"process_group": transport.split(alike)}
        self.build(transport.rank, transport.world_size, places, stages, precision, **dense)

    def build(
        self,
        rank: int,
        world_size: int,
        places: tuple[dict[str, Any], dict[str, Any]],
        stages: tuple[int, int],
        precision: MixedPrecision | None = None,
        *,
        frozen: bool = False,
        count: int = EXPERTS,
        **dense: Any,
    ) -> None:
        """``places``: the arguments that name the ranks of each optimizer; ``count``: of experts in a layer."""
        self.rank, self.world_size, self.expert = rank, world_size, rank % count
        self.model = sparse([self.expert] if world_size > 1 else None, count)
        if frozen:
            freeze(self.model)
        for layer in self.model.layers:
            layer.offset += rank  # type: ignore[operator]
        experts = self.model.experts()
        common: dict[str, Any] = {"lr": 0.01, "bucket_cap_mb": 0.0003, "mixed_precision": precision}
        common["divisor"] = MICRO_BATCHES
        self.dense = ZeroOptimizer(self.model, stage=stages[0], **places[0], **{**common, "ignored": experts, **dense})
        self.own = ZeroOptimizer(experts, stage=stages[1], **places[1], **common)

    def train(self, steps: range, max_norm: float = 0.1) -> list[Tensor]:
        norms = []
        for step in steps:
            for number in range(self.rank, MICRO_BATCHES, self.world_size):
                loss_of(self.model, step, number).backward()  # type: ignore[no-untyped-call]
            norms.append(self.dense.clip_grad_norm_(max_norm, also=[self.own]))
            for optimizer in (self.dense, self.own):
                optimizer.step()
                optimizer.zero_grad()
        return norms

    def close(self) -> Sparse:
        self.dense.check_replicas()
        self.own.close()
        self.dense.close()
        return self.model


def assert_trained(model: Sparse, plain: Sparse) -> None:
    """Assert that a rank has the plain loop's dense parameters, and its experts."""
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter, theirs[name], name)
