"""Programs for `zero.verify`, right and wrong, which its processes import by name."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from zero import Verification, verify

from ..support.models import Odd, build, odd_batches, odd_loss

MICRO_BATCHES, STEPS = 6, 2
_builds = itertools.count()


def build_odd() -> Odd:
    return build(seed=3)


def batches() -> list[Any]:
    return odd_batches(MICRO_BATCHES * STEPS, seed=5)


def rank_one_of_two() -> bool:
    return (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")


def wrong_on_rank_one_of_two(model: nn.Module, batch: Any) -> Tensor:
    return odd_loss(model, batch) * (1 + 2**-20 * rank_one_of_two())


def fails_on_rank_one_of_two(model: nn.Module, batch: Any) -> Tensor:
    if rank_one_of_two():
        raise ArithmeticError("a rank's\nown trouble")
    return odd_loss(model, batch)


class Squares(nn.Module):
    """A model that returns its loss, with dropout, buffers and a frozen mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(dropout), nn.Linear(5, 2))
        self.masks = nn.ParameterList([nn.Parameter(torch.full((5,), float("-inf")), requires_grad=False)])

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        return self.layers(inputs).square().mean() * scale


class Predicts(Squares):
    def forward(self, inputs: Tensor, scale: float = 1.0) -> Any:
        return {"loss": super().forward(inputs, scale)}


def with_dropout() -> Squares:
    torch.manual_seed(7)
    return Squares(dropout=0.5)


def other_at_each_call() -> Squares:
    model = Squares()
    with torch.no_grad():
        model.layers[3].bias[1] += 2 * next(_builds)
    return model


def the_scale(model: Odd) -> list[Tensor]:
    return [model.scale]


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def answers_nothing(module: nn.Module) -> None:
    return None


def other_in_each_process(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch) * os.getpid()


def seeded_by_the_batch(model: nn.Module, batch: tuple[Tensor, float]) -> Tensor:
    torch.manual_seed(int(batch[1] * 100))
    return model(*batch)


def two_losses(model: nn.Module, batch: tuple[Tensor, float]) -> Tensor:
    model(*batch).backward()
    return model(batch[0].flip(0) * 3, batch[1])


def sum_of_two_losses(model: nn.Module, batch: tuple[Tensor, float]) -> Tensor:
    return model(*batch) + model(batch[0].flip(0) * 3, batch[1])


def penalty(model: nn.Module, batch: tuple[Tensor, float]) -> Tensor:
    """A loss with a gradient with respect to the inputs, which is no backward of its own."""
    inputs = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs, batch[1]), inputs, create_graph=True)
    return model(*batch) + slope.square().sum()


def changes_its_batch(model: nn.Module, batch: list[Any]) -> Tensor:
    """A loss that takes the scale out of its micro-batch, and doubles the inputs in place."""
    return model(batch[0].mul_(2), batch.pop())


def no_loss(model: nn.Module, batch: tuple[Tensor, float]) -> Tensor:
    return model(*batch).detach()


def pairs(count: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=generator), 1.0 + j) for j in range(count)]


def muon_and_the_rest(model: nn.Module) -> list[dict[str, Any]]:
    """Muon for matrices, Adagrad with an argument of its constructor for a vector, and the main class for the rest."""
    named = list(model.named_parameters())
    last = {"optimizer_class": torch.optim.Adagrad, "initial_accumulator_value": 0.5}
    matrices = {"optimizer_class": torch.optim.Muon, "partition": "parameter", "lr": 0.02}
    return [
        {"params": [(name, p) for name, p in named if p.dim() == 2], **matrices},
        {"params": [(name, p) for name, p in named if p.dim() != 2][:1]},
        {"params": [(name, p) for name, p in named if p.dim() != 2][1:], **last},
    ]


class Experts(Squares):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.linspace(-1, 1, 48).view(1, 2, 3, 8))

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(inputs, scale) + (inputs @ self.experts[0]).square().mean()


def the_last_layer_alone(model: Squares) -> list[dict[str, Any]]:
    return [{"params": list(model.layers[3].parameters())}]


def in_blocks_of_the_main_class(model: nn.Module) -> list[dict[str, Any]]:
    """Return a group of one parameter, and one whose parameters are an iterator."""
    named = dict(model.named_parameters())
    return [{"params": named.pop("layers.0.weight"), "blocks": [2, 3]}, {"params": iter(named.values())}]


def in_blocks(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    muon = {"optimizer_class": torch.optim.Muon, "lr": 0.02}
    stack, fused = (("experts", named.pop("experts")), ("layers.0.weight", named.pop("layers.0.weight")))
    return [
        {"params": [stack], "blocks": -3, **muon},
        {"params": [fused], "blocks": [2, 3], **muon},
        {"params": list(named.items())},
    ]


def leaves() -> Any:
    sys.exit(0)


def right_arguments() -> dict[str, Any]:
    return {"build_model": Squares, "batches": pairs(), "world_sizes": (1,), "micro_batches": 2, "lr": 1e-2}


def not_deterministic() -> dict[str, Any]:
    return {**right_arguments(), "build_model": with_dropout}


def build_misnamed() -> dict[str, Any]:
    given = right_arguments()
    return {"build": given.pop("build_model"), **given}


def failing_arguments() -> dict[str, Any]:
    failing = {"build_model": build_odd, "batches": batches, "loss_fn": fails_on_rank_one_of_two}
    return {**failing, "stages": [1], "world_sizes": [2], "lr": 1e-2}


def alone(**changes: Any) -> Verification:
    """Run a proof that needs only one process."""
    return verify(**{**right_arguments(), **changes})
