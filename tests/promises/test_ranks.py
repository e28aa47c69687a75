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
from .layers import backward, build, plain, train, zero

pytestmark = pytest.mark.contract

ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def overlapping(transport: Transport) -> None:
    model = build()
    if transport.rank == 1:
        model.wide = nn.Parameter(torch.zeros(1, 4).expand(5, 4))
    zero(model, transport)


def in_another_order(transport: Transport) -> None:
    names = ("right", "left") if transport.rank else ("left", "right")
    zero(nn.ModuleDict({name: nn.Linear(3, 3) for name in names}), transport, 1)


def differing(**values: tuple[Any, Any]) -> Callable[[Transport], object]:
    def construct(transport: Transport) -> None:
        ZeroOptimizer(build(), process_group=transport, **{k: v[transport.rank > 0] for k, v in values.items()})

    return construct


CONSTRUCTIONS: dict[str, tuple[Callable[[Transport], object], tuple[str, ...]]] = {
    "model": (
        lambda transport: zero(nn.Linear(3, 3 + (transport.rank == 2)), transport, 1),
        ("rank 0 has [weight [3, 3]", "rank 2 has [weight [4, 3]"),
    ),
    "order": (in_another_order, ("the ranks built different models", "rank 0 has [left.weight [3, 3]")),
    "memory": (overlapping, ("rank 1: ", "'wide' overlaps itself")),
    "stage": (differing(stage=(1, 2)), ("different models or optimizers",)),
    "bucket_cap_mb": (differing(bucket_cap_mb=(1, 2)), ("different models or optimizers",)),
    "collective": (differing(collective=("ring", "auto")), ("different models or optimizers",)),
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_ranks_that_build_differently_learn_the_first_difference(name: str) -> None:
    construct, words = CONSTRUCTIONS[name]
    messages = errors_on(3, construct)
    for word in words:
        assert word in messages[0], messages
        assert all(word in message or word == "rank 1: " for message in messages), messages


def divided(transport: Transport, stage: int) -> None:
    model = build()
    optimizer = zero(model, transport, stage)
    optimizer.divisor = 2 + transport.rank
    backward(model)
    optimizer.step()


def cleared(transport: Transport, stage: int) -> None:
    model = build()
    optimizer = zero(model, transport, stage)
    backward(model)
    optimizer.clip_grad_norm_(1.0)
    if transport.rank == 1:
        optimizer.zero_grad()
    optimizer.step()


def frozen(transport: Transport, stage: int) -> None:
    model = build()
    optimizer = zero(model, transport, stage)
    model[2].bias.requires_grad_(transport.rank == 0)
    optimizer.step()


def edited(transport: Transport, stage: int) -> None:
    model = build()
    optimizer = zero(model, transport, stage)
    optimizer.check_replicas()
    if transport.rank == 1:
        model[2].bias.data[1] += 1
    optimizer.check_replicas()


def not_finite(transport: Transport, stage: int) -> None:
    model = build()
    optimizer = zero(model, transport, stage)
    (model(torch.ones(1, 4)).sum() * (math.inf if transport.rank == 1 else 1)).backward()
    optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def sparse(transport: Transport, stage: int) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = zero(model, transport, stage)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()


def in_other_calls(transport: Transport, stage: int) -> None:
    optimizer = zero(build(), transport, stage)
    (optimizer.step if transport.rank else optimizer.check_replicas)()


def with_fewer_batches(transport: Transport, stage: int) -> None:
    model = build()
    optimizer = zero(model, transport, stage)
    for _ in range(1 + transport.rank):
        train(model, optimizer)
    optimizer.consolidate_state_dict()


TRAININGS: list[tuple[Callable[[Transport, int], None], tuple[int, ...], tuple[str, ...]]] = [
    (divided, (0, 1, 2, 3), ("divisor", "is 2 on rank 0, but 3 on rank 1")),
    (cleared, (2,), ("step(): the gradients of rank 0 are divided, those of rank 1 open: clip, step and clear",)),
    (frozen, (2,), ("step(): '2.bias' is trainable on rank 0, but frozen on rank 1: freeze and unfreeze on every",)),
    (edited, (2,), ("'2.bias' differs between rank 0 and rank 1",)),
    (not_finite, (0, 1, 2, 3), ("non-finite",)),
    (sparse, (0, 1, 2, 3), ("'weight' is torch.sparse_coo: sparse gradients are not supported", "sparse=False")),
    (in_other_calls, (2,), ("step()", "check_replicas()")),
    (with_fewer_batches, (0, 1, 2, 3), ("Ranks with different numbers of batches train inside optimizer.join()",)),
]


@pytest.mark.parametrize(
    ("program", "stage", "words"),
    [
        pytest.param(program, stage, words, id=f"{program.__name__}-{stage}")
        for program, stages, words in TRAININGS
        for stage in stages
    ],
)
def test_ranks_that_train_differently_learn_where(
    program: Callable[[Transport, int], None], stage: int, words: tuple[str, ...]
) -> None:
    for message in errors_on(2, lambda transport: program(transport, stage)):
        assert all(word in message for word in words), message


@ALL_STAGES
def test_after_another_divisor_on_one_rank_nothing_is_lost(stage: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model = build()
        optimizer = zero(model, transport, stage)
        optimizer.divisor = 2 + transport.rank
        backward(model)
        assert "divisor" in error_of(optimizer.step)
        optimizer.divisor = 2
        optimizer.step()
        optimizer.close()
        return model

    for model in on_threads(2, program, timeout=BOUND):
        assert_same_model(model, plain())


class Rate(float):
    """A number equal to that of the other ranks, which fails in a step."""

    def __neg__(self) -> float:
        raise TypeError("this rate cannot be used")


@ALL_STAGES
def test_an_error_in_one_ranks_step_reaches_the_others_with_its_reason(stage: int) -> None:
    def program(transport: Transport) -> None:
        model = build()
        optimizer = zero(model, transport, stage)
        backward(model)
        if transport.rank == 1:
            optimizer.param_groups[0]["lr"] = Rate(0.5)
        optimizer.step()
        optimizer.check_replicas()

    messages = errors_on(3, program)
    assert messages[1] != "nothing"
    for rank in (0, 2):
        assert "rank 1 failed: rank 1, in step(): TypeError" in messages[rank]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_that_one_rank_freezes_before_a_backward_is_an_error_on_every_rank(stage: int) -> None:
    """Even if it shares a bucket with other parameters, which are reduced as usual."""

    def program(transport: Transport) -> None:
        model = build()
        optimizer = zero(model, transport, stage)
        model[2].bias.requires_grad_(transport.rank == 0)
        backward(model)
        optimizer.step()

    messages = errors_on(2, program)
    assert all("trainable" in message for message in messages), messages
    assert any("frozen on rank 1: '2.bias'" in message for message in messages), messages


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_model_that_one_rank_cast_is_an_error_on_every_rank(stage: int) -> None:
    def program(transport: Transport) -> tuple[str, str]:
        model = build()
        optimizer = zero(model, transport, stage)
        if transport.rank == 1:
            model.double()
        return error_of(backward, model), error_of(optimizer.step)

    first, second = on_threads(2, program, timeout=BOUND)
    assert first[0] == "nothing"
    assert all("rank 1: '2.bias' is now torch.float64" in message for message in (first[1], *second))


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
