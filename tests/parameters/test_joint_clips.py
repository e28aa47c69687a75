"""One clip of several optimizers, which ranks are given in other orders, or cannot make: the same for all, at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.models import seeded
from ..support.plain import assert_same_bits
from ..support.sides import AsPlain

pytestmark = pytest.mark.contract

GROUPS = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}
"""The ranks that train a module. Each rank has two, so that each waits for another one in every order."""
IN_A_RING = ("ac", "ba", "cb")
"""The modules of each rank. If ranks entered them in this order, every rank would wait."""


def build() -> nn.ModuleDict:
    return seeded(5, lambda: nn.ModuleDict({name: nn.Linear(3, 3) for name in ("all", *GROUPS)}))


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
    for name in ("all", *sorted(IN_A_RING[rank])):
        x = x + torch.tanh(model[name](x))
    return x.square().mean()


def plain_loop(steps: int) -> tuple[nn.ModuleDict, list[Tensor]]:
    model, norms = build(), list[Tensor]()
    loop = AsPlain(model, lambda updated: torch.optim.AdamW(updated, lr=0.05), 3)
    for step in range(steps):
        loop.train(lambda model, rank, step=step: loss_of(model, step, rank))  # type: ignore[misc]
        norms.append(loop.clip(0.5))
        loop.step()
        loop.clear()
    return model, norms


class Rank:
    """A rank's model, the optimizer of what all ranks train, and those of two modules."""

    def __init__(self, transport: Transport, stage: int) -> None:
        self.rank, self.model, given = transport.rank, build(), {"stage": stage, "lr": 0.05, "divisor": 3}
        self.first = ZeroOptimizer(self.model["all"], process_group=transport, **given)
        self.of = {
            name: ZeroOptimizer(self.model[name], process_group=transport.split(GROUPS[name]), **given)
            for name in sorted(IN_A_RING[self.rank])
        }
        self.also = [self.of[name] for name in IN_A_RING[self.rank]]

    def train(self, steps: range) -> list[Tensor]:
        norms = []
        for step in steps:
            loss_of(self.model, step, self.rank).backward()  # type: ignore[no-untyped-call]
            norms.append(self.first.clip_grad_norm_(0.5, also=self.also))
            self.first.step()
            for each in self.of.values():
                each.step()
            for each in (self.first, *self.also):
                each.zero_grad()
        return norms

    def finish(self) -> None:
        for each in (*self.of.values(), self.first):
            each.close()


def assert_trained(results: list[tuple[Rank, list[Tensor]]], steps: int) -> None:
    plain, expected = plain_loop(steps)
    for rank, norms in results:
        for mine, theirs in zip(norms, expected, strict=True):
            assert_same_bits(mine, theirs, "norm")
        for name in ("all", *IN_A_RING[rank.rank]):
            for key, parameter in rank.model[name].named_parameters():
                assert_same_bits(parameter, plain[name].get_parameter(key), f"{name}.{key}")


@pytest.mark.parametrize("stage", [0, 3])
def test_further_optimizers_may_come_in_another_order_on_each_rank(stage: int) -> None:
    def program(transport: Transport) -> tuple[Rank, list[Tensor]]:
        rank = Rank(transport, stage)
        norms = rank.train(range(3))
        rank.finish()
        return rank, norms

    assert_trained(on_threads(3, program, timeout=BOUND), 3)


def test_a_rank_without_a_further_optimizer_takes_part_in_the_clip() -> None:
    def program(transport: Transport) -> Tensor:
        model = build()
        first = ZeroOptimizer(model["all"], process_group=transport)
        also = []
        if transport.rank in GROUPS["b"]:
            also = [ZeroOptimizer(model["b"], process_group=transport.split(GROUPS["b"]), divisor=3)]
        loss = model["all"](torch.ones(2, 3)).sum()
        (loss + model["b"](torch.ones(2, 3)).sum() if also else loss).backward()
        return first.clip_grad_norm_(0.5, also=also)

    model = build()
    for _ in range(3):
        model["all"](torch.ones(2, 3)).sum().backward()
    for _ in GROUPS["b"]:
        model["b"](torch.ones(2, 3)).sum().backward()
    gradients = [p.grad / 3 for name in ("all", "b") for p in model[name].parameters() if p.grad is not None]
    expected = torch.nn.utils.get_total_norm(gradients)
    for norm in on_threads(3, program, timeout=BOUND):
        torch.testing.assert_close(norm, expected)


WRONG: dict[str, tuple[Callable[[Rank], dict[str, Any]], str]] = {
    "one is missing": (
        lambda rank: {"also": [rank.of["c"]] if rank.rank == 0 else rank.also},
        "ValueError: clip_grad_norm_(also=...): rank 1 has given a further optimizer of 2 ranks, that of 'weight' and "
        "1 more parameters, but its rank 0 has not",
    ),
    "others": (
        lambda rank: {"also": [rank.also[0]]},
        "ValueError: clip_grad_norm_(also=...): rank 0 has given a further optimizer of 2 ranks",
    ),
    "no optimizer": (
        lambda rank: {"also": [*rank.also, *([3] if rank.rank == 2 else [])]},
        "TypeError: also[2] must be a further ZeroOptimizer, each once, not int",
    ),
    "no norm": (
        lambda rank: {"max_norm": -1.0 if rank.rank else 1.0},
        "ValueError: max_norm must be at least 0 (math.inf to measure without clipping), not -1.0",
    ),
    "another norm": (
        lambda rank: {"norm_type": 3.0 if rank.rank == 1 else 2.0},
        "error_if_nonfinite are [0.5, 2.0, False] on rank 0, and [0.5, 3.0, False] on rank 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_clip_that_ranks_make_in_different_ways_is_an_error_on_all_at_once_and_training_goes_on(name: str) -> None:
    change, words = WRONG[name]

    def program(transport: Transport) -> tuple[str, Rank, list[Tensor]]:
        rank = Rank(transport, 2)
        loss_of(rank.model, 0, rank.rank).backward()  # type: ignore[no-untyped-call]
        error = error_of(rank.first.clip_grad_norm_, **{"max_norm": 0.5, "also": rank.also, **change(rank)})
        for each in (rank.first, *rank.also):
            each.zero_grad()
        norms = rank.train(range(2))
        rank.finish()
        return error, rank, norms

    found = on_threads(3, program, timeout=BOUND)
    for error, _, _ in found:
        assert words in error
    assert_trained([(rank, norms) for _, rank, norms in found], 2)
