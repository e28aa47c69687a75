"""What one rank does differently is one error on every rank, soon, that names the rank and the first difference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.errors import error_of, errors_on
from ..support.limits import BOUND
from ..support.plain import assert_same_model
from .layers import backward, build, errors_on_ranks, on_ranks, plain, train, zero

pytestmark = pytest.mark.law("errors")

ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def overlapping(transport: Transport) -> None:
    model = build()
    if transport.rank == 1:
        model.wide = nn.Parameter(torch.zeros(1, 4).expand(5, 4))
    zero(model, transport)


def in_another_order(transport: Transport) -> None:
    names = ("right", "left") if transport.rank else ("left", "right")
    zero(nn.ModuleDict({name: nn.Linear(3, 3) for name in names}), transport, 1)


def with_a_buffer(transport: Transport) -> None:
    """The line of a buffer is the last one."""
    model = nn.Linear(3, 3)
    if transport.rank == 0:
        model.register_buffer("mine", torch.zeros(2))
    zero(model, transport, 1)


CONSTRUCTIONS: dict[str, tuple[Callable[[Transport], object], tuple[str, ...]]] = {
    "model": (
        lambda transport: zero(nn.Linear(3, 3 + (transport.rank == 2)), transport, 1),
        ("rank 0 has [weight [3, 3]", "rank 2 has [weight [4, 3]"),
    ),
    "order": (in_another_order, ("the ranks built different models", "rank 0 has [left.weight [3, 3]")),
    "buffer": (with_a_buffer, ("rank 0 has [buffer mine [2]", "rank 1 has [nothing more]")),
    "memory": (overlapping, ("rank 1: ", "'wide' overlaps itself")),
}


@pytest.mark.law("agreement at construction")
@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_ranks_that_build_differently_learn_the_first_difference(name: str) -> None:
    construct, words = CONSTRUCTIONS[name]
    messages = errors_on(3, construct)
    for word in words:
        assert word in messages[0], messages
        assert all(word in message or word == "rank 1: " for message in messages), messages


def cleared(model: Any, optimizer: ZeroOptimizer) -> None:
    backward(model)
    optimizer.clip_grad_norm_(1.0)
    if optimizer.rank == 1:
        optimizer.zero_grad()
    optimizer.step()


def frozen(model: Any, optimizer: ZeroOptimizer) -> None:
    model[2].bias.requires_grad_(optimizer.rank == 0)
    optimizer.step()


def frozen_before_a_backward(model: Any, optimizer: ZeroOptimizer) -> None:
    """It shares a bucket with other parameters, which are reduced as usual."""
    model[2].bias.requires_grad_(optimizer.rank == 0)
    backward(model)
    optimizer.step()


def edited(model: Any, optimizer: ZeroOptimizer) -> None:
    optimizer.check_replicas()
    if optimizer.rank == 1:
        model[2].bias.data[1] += 1
    optimizer.check_replicas()


def not_finite(model: Any, optimizer: ZeroOptimizer) -> None:
    (model(torch.ones(1, 4)).sum() * (math.inf if optimizer.rank == 1 else 1)).backward()
    optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def sparse(model: Any, optimizer: ZeroOptimizer) -> None:
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


TRAININGS: list[tuple[Callable[[Any, ZeroOptimizer], None], tuple[int, ...], tuple[str, ...]]] = [
    (cleared, (2,), ("step(): the gradients of rank 0 are divided, those of rank 1 open: clip, step and clear",)),
    (frozen, (2,), ("step(): '2.bias' is trainable on rank 0, but frozen on rank 1: freeze and unfreeze on every",)),
    (frozen_before_a_backward, (0, 1, 2), ("trainable",)),
    (edited, (2,), ("'2.bias' differs between rank 0 and rank 1",)),
    (not_finite, (0, 1, 2, 3), ("non-finite",)),
    (sparse, (0, 1, 2, 3), ("'weight' is torch.sparse_coo: sparse gradients are not supported", "sparse=False")),
]


@pytest.mark.law("norm and overflow")
@pytest.mark.parametrize(
    ("train_apart", "stage", "words"),
    [
        pytest.param(train_apart, stage, words, id=f"{train_apart.__name__}-{stage}")
        for train_apart, stages, words in TRAININGS
        for stage in stages
    ],
)
def test_ranks_that_train_differently_learn_where(
    train_apart: Callable[[Any, ZeroOptimizer], None], stage: int, words: tuple[str, ...]
) -> None:
    def program(transport: Transport) -> None:
        model = nn.Embedding(5, 3, sparse=True) if train_apart is sparse else build()
        train_apart(model, zero(model, transport, stage))

    messages = errors_on(2, program)
    for message in messages:
        assert all(word in message for word in words), message
    if train_apart is frozen_before_a_backward:
        assert any("frozen on rank 1: '2.bias'" in message for message in messages), messages
        assert all("rank 1 is in backward 1 (frozen: '2.bias') since" in message for message in messages), messages
        assert all("rank 0 is in backward 1 since" in message for message in messages), messages


@ALL_STAGES
def test_a_rank_that_saves_alone_is_asked_whether_it_did(stage: int) -> None:
    def program(transport: Transport) -> None:
        model = build()
        optimizer = zero(model, transport, stage, collective="pairwise")
        backward(model)
        optimizer.full_state_dict() if transport.rank == 0 else optimizer.step()

    for message in errors_on(2, program):
        assert "rank 0 is in full_state_dict(to=0, masters=False)" in message
        assert "Did one rank alone evaluate, generate or save? All ranks call full_state_dict(), too" in message


@ALL_STAGES
def test_after_another_divisor_on_one_rank_nothing_is_lost(stage: int) -> None:
    def program(model: Any, optimizer: ZeroOptimizer) -> nn.Module:
        optimizer.divisor = 2 + optimizer.rank
        backward(model)
        message = error_of(optimizer.step)
        assert "divisor" in message
        assert "is 2 on rank 0, but 3 on rank 1" in message
        optimizer.divisor = 2
        optimizer.step()
        optimizer.close()
        return model

    for model in on_ranks(program, stage):
        assert_same_model(model, plain())


class Rate(float):
    """A number equal to that of the other ranks, which fails in a step."""

    def __neg__(self) -> float:
        raise TypeError("this rate cannot be used")


@pytest.mark.law("agreement before a change")
@ALL_STAGES
def test_an_error_in_one_ranks_step_reaches_the_others_with_its_reason(stage: int) -> None:
    def program(model: Any, optimizer: ZeroOptimizer) -> None:
        backward(model)
        if optimizer.rank == 1:
            optimizer.param_groups[0]["lr"] = Rate(0.5)
        optimizer.step()
        optimizer.check_replicas()

    messages = errors_on_ranks(program, stage, 3)
    assert messages[1] != "nothing"
    for rank in (0, 2):
        assert "rank 1 failed: rank 1, in step(): TypeError" in messages[rank]


def test_a_further_parameter_with_a_gradient_on_one_rank_is_refused_on_all() -> None:
    """After a step gradients are cleared before anything uses them, so there it is taken."""

    def program(transport: Transport) -> tuple[str, nn.Module]:
        model = build()
        further = model[2].weight
        known = [p for p in model.parameters() if p is not further]
        optimizer = zero(known, transport, 2, module=model)
        if transport.rank == 1:
            further.grad = torch.ones(4, 4)
        message = error_of(optimizer.add_param_group, {"params": [further]})
        assert len(optimizer.param_groups) == 1
        further.grad = None
        optimizer.add_param_group({"params": [further]})
        train(model, optimizer)
        optimizer.close()
        return message, model

    for message, model in on_threads(2, program, timeout=BOUND):
        text = message.removeprefix("ValueError: ").removeprefix("rank 1: ")
        assert text.startswith("add_param_group: '2.weight' has a gradient already")
        assert "set p.grad = None" in message
        assert_same_model(model, plain())
