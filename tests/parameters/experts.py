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
from ..support.plain import assert_same_bits, assert_same_value
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
    """Layers with experts, between dense ones."""

    def __init__(self, held: Sequence[int]) -> None:
        super().__init__()
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


def sparse(held: Sequence[int] = range(EXPERTS)) -> Sparse:
    return seeded(7, lambda: Sparse(held))


def loss_of(model: Any, step: int, number: int) -> Tensor:
    """Return the loss of a micro-batch."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * step + number))
    loss: Tensor = model(x.to(model.first.weight.dtype), number % EXPERTS).float().square().mean()
    return loss


def plain_loop(steps: int, precision: MixedPrecision | None = None) -> tuple[Sparse, list[Tensor]]:
    """Train all experts in one process; return the model and the norms."""
    model, norms = sparse(), list[Tensor]()
    loop = AsPlain(model, lambda updated: torch.optim.AdamW(updated, lr=0.01), 1, precision, MICRO_BATCHES)
    for step in range(steps):
        for number in range(MICRO_BATCHES):
            loop.train(lambda model, _, number=number, step=step: loss_of(model, step, number))  # type: ignore[misc]
        norms.append(loop.clip(0.1))
        loop.step()
        loop.clear()
    return model, norms


class Pair:
    """A rank's model, the optimizer of its dense parameters over all ranks, and that of its experts over fewer.

    A single rank has all experts. ``places``: the arguments that name the ranks of each optimizer; ``stages``: of the
    two; ``dense``: further arguments of the first.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        places: tuple[dict[str, Any], dict[str, Any]],
        stages: tuple[int, int],
        precision: MixedPrecision | None = None,
        **dense: Any,
    ) -> None:
        self.rank, self.world_size, self.expert = rank, world_size, rank % EXPERTS
        self.model = sparse([self.expert]) if world_size > 1 else sparse()
        for layer in self.model.layers:
            layer.offset += rank  # type: ignore[operator]
        experts = self.model.experts()
        common: dict[str, Any] = {"lr": 0.01, "bucket_cap_mb": 0.0003, "mixed_precision": precision}
        common["divisor"] = MICRO_BATCHES
        self.dense = ZeroOptimizer(self.model, stage=stages[0], **places[0], **{**common, "ignored": experts, **dense})
        self.own = ZeroOptimizer(experts, stage=stages[1], **places[1], **common)

    def train(self, steps: range) -> list[Tensor]:
        norms = []
        for step in steps:
            for number in range(self.rank, MICRO_BATCHES, self.world_size):
                loss_of(self.model, step, number).backward()  # type: ignore[no-untyped-call]
            norms.append(self.dense.clip_grad_norm_(0.1, also=[self.own]))
            for optimizer in (self.dense, self.own):
                optimizer.step()
                optimizer.zero_grad()
        return norms

    def close(self) -> Sparse:
        self.dense.check_replicas()
        for layer in self.model.layers:
            for expert in layer.experts.of:  # type: ignore[union-attr]
                assert layer.experts.of[expert].whose == int(expert)  # type: ignore[union-attr, index]
            assert layer.offset.eq(0.5).all()  # type: ignore[operator, union-attr]
        self.own.close()
        self.dense.close()
        return self.model


def pair_on(transport: Transport, *given: Any, **dense: Any) -> Pair:
    alike = [rank for rank in range(transport.world_size) if rank % EXPERTS == transport.rank % EXPERTS]
    places = {"process_group": transport}, {"process_group": transport.split(alike)}
    return Pair(transport.rank, transport.world_size, places, *given, **dense)


def assert_trained(found: Sequence[tuple[Sparse, list[Tensor]]], steps: int, precision: Any = None) -> None:
    """Assert that ranks have the plain loop's dense parameters, their experts of it, and its last norms."""
    plain, expected = plain_loop(steps, precision)
    theirs = dict(plain.named_parameters())
    for model, norms in found:
        for name, parameter in model.named_parameters():
            assert_same_bits(parameter, theirs[name], name)
        assert_same_value(norms, expected[steps - len(norms) :], "norms")
