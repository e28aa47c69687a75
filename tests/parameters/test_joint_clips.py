"""One clip of several optimizers, which ranks are given in other orders, or cannot make: the same for all, at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer
from zero.core.norm import PowerSum
from zero.step.update import Update

from ..support.errors import error_of
from ..support.limits import BOUND
from .apart import IN_A_RING, Case, Rank, groups_on


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(2, 6))
    some = st.lists(st.integers(0, ranks - 1), min_size=1, unique=True).map(lambda found: tuple(sorted(found)))
    groups = dict(zip("abcd", draw(st.lists(some, min_size=1, max_size=4)), strict=False))
    mine = [[name for name, members in groups.items() if rank in members] for rank in range(ranks)]
    orders = tuple("".join(draw(st.permutations(names))) for names in mine)
    stages = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    factor = draw(st.sampled_from([factor for factor in range(1, ranks + 1) if ranks % factor == 0]))
    more = {"sharding_factor": factor} if stages[0] else {}
    return Case(groups, orders, stages, draw(st.sampled_from(["", "bf16"])), more)


@pytest.mark.first(0)
@pytest.mark.hypothesis
@given(case=cases(), norm_types=st.lists(st.sampled_from([1.0, 2.0, 3.0, math.inf]), min_size=1, max_size=2))
@settings(max_examples=max(6, settings().max_examples // 8))
def test_any_further_optimizers_of_any_ranks_in_any_order_have_one_norm(case: Case, norm_types: list[float]) -> None:
    def program(transport: Transport) -> tuple[Rank, list[Tensor]]:
        rank = Rank(transport.rank, case, groups_on(transport, case))
        norms = rank.train(norm_types)
        rank.close()
        return rank, norms

    case.check(on_threads(case.ranks, program, timeout=BOUND), norm_types)


WRONG: dict[str, tuple[Callable[[Rank], dict[str, Any]], str]] = {
    "one is missing": (
        lambda rank: {"also": [rank.all["c"]] if rank.rank == 0 else rank.also},
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
    "the first one": (
        lambda rank: {"also": [rank.first]},
        "also[0] must be a further ZeroOptimizer, each once, not ZeroOptimizer",
    ),
    "one twice": (lambda rank: {"also": rank.also[:1] * 2}, "also[1] must be a further ZeroOptimizer"),
    "no norm": (
        lambda rank: {"max_norm": -1.0 if rank.rank else 1.0},
        "ValueError: max_norm must be at least 0 (math.inf to measure without clipping), not -1.0",
    ),
    "another norm": (
        lambda rank: {"norm_type": 3.0 if rank.rank == 1 else 2.0},
        "error_if_nonfinite are [0.5, 2.0, False] on rank 0, and [0.5, 3.0, False] on rank 1",
    ),
    "inside no_sync": (lambda rank: {"inside": rank.also[0].no_sync()}, "clip_grad_norm_() inside no_sync()"),
    "inside join": (lambda rank: {"inside": rank.first.join()}, "clip_grad_norm_(also=...) inside join()"),
    "another divisor": (
        lambda rank: {"inside": divides(rank.all["b"])} if rank.rank else {},
        "this optimizer divides by 3, and a further one by 1, so their gradients are not means",
    ),
    "a parameter is replaced": (
        lambda rank: {"inside": replaced(rank.model["a"].weight)} if rank.rank < 2 else {},
        "the memory of 'weight' was replaced",
    ),
}


@contextmanager
def divides(optimizer: ZeroOptimizer) -> Iterator[None]:
    optimizer.divisor = 1
    yield
    optimizer.divisor = 3


@contextmanager
def replaced(parameter: Tensor) -> Iterator[None]:
    lent = parameter.data
    parameter.data = lent.clone()
    yield
    parameter.data = lent


@pytest.mark.first(3)
@pytest.mark.parametrize("name", WRONG)
def test_a_clip_that_ranks_make_in_different_ways_is_an_error_on_all_at_once_and_training_goes_on(name: str) -> None:
    change, words = WRONG[name]

    def program(transport: Transport) -> tuple[str, Rank, list[Tensor]]:
        rank = Rank(transport.rank, IN_A_RING, groups_on(transport, IN_A_RING))
        IN_A_RING.loss_of(rank.model, 0, rank.rank).backward()  # type: ignore[no-untyped-call]
        given = {"max_norm": 0.5, "also": rank.also, **change(rank)}
        with given.pop("inside", nullcontext()):
            error = error_of(rank.first.clip_grad_norm_, **given)
        for each in (rank.first, *rank.also):
            each.zero_grad()
        norms = rank.train([2.0])
        rank.close()
        return error, rank, norms

    found = on_threads(3, program, timeout=BOUND)
    for error, _, _ in found:
        assert words in error
    IN_A_RING.check([(rank, norms) for _, rank, norms in found], [2.0])


def test_a_further_optimizer_with_ranks_outside_of_the_first_ones_group_is_an_error_on_every_rank() -> None:
    def program(transport: Transport) -> list[str]:
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        alone = ZeroOptimizer(model[0], stage=2, process_group=solo(), divisor=2)
        together = ZeroOptimizer(model[1], stage=2, process_group=transport)
        model[1](model[0](torch.ones(2, 3))).sum().backward()
        errors = [error_of(alone.clip_grad_norm_, 1.0, also=[together]) for _ in range(2)]
        assert together.clip_grad_norm_(1.0, also=[alone]) > 0
        return errors

    words = "a further optimizer of 2 ranks, that of 'weight' and 1 more parameters, but its rank"
    for errors in on_threads(2, program):
        assert all(words in error for error in errors)


@pytest.mark.law("errors")
@pytest.mark.parametrize(
    "failure", [MemoryError(), RuntimeError("file \udcff")], ids=["without a text", "a file's name"]
)
def test_a_rank_whose_further_gradients_cannot_be_summed_is_an_error_on_every_rank(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm_sum, fails = Update.norm_sum, threading.local()

    def failing(self: Update, norm_type: float) -> PowerSum:
        fails.after = getattr(fails, "after", math.inf) - 1
        if not fails.after:
            raise failure
        return norm_sum(self, norm_type)

    monkeypatch.setattr(Update, "norm_sum", failing)

    def program(transport: Transport) -> str:
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        together = ZeroOptimizer(model[0], stage=2, process_group=transport)
        alone = ZeroOptimizer(model[1], stage=2, process_group=solo(), divisor=2)
        model[1](model[0](torch.ones(2, 3))).sum().backward()
        fails.after = 2 if transport.rank == 1 else math.inf
        return error_of(together.clip_grad_norm_, 1.0, also=[alone])

    theirs, mine = on_threads(2, program, timeout=BOUND)
    assert mine == f"{type(failure).__name__}: {failure}"
    assert theirs == f"RuntimeError: clip_grad_norm_(also=...), on rank 1: {failure}"
