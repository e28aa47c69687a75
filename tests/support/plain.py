"""The plain loop with which every test of exactness compares.

It uses `zero.clip_grad_norm_`, and nothing else of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero import clip_grad_norm_

LossFunction = Callable[[nn.Module, Any], Tensor]


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: LossFunction,
    batches: Iterable[Any],
    divisor: float,
    max_norm: float | None = None,
    norm_type: float = 2.0,
) -> Tensor | None:
    """Run micro-batches in turn, one division, clip and step. Return the norm; gradients stay."""
    for batch in batches:
        loss = loss_of(model, batch)
        if loss.requires_grad:
            loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(divisor)
    norm = None
    if max_norm is not None:
        norm = clip_grad_norm_(model.parameters(), max_norm, norm_type)
    optimizer.step()
    return norm


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes, so that a comparison respects -0.0 and NaN."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def assert_same_bits(ours: Tensor, theirs: Tensor, what: str = "tensor") -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), what
    if not torch.equal(bits(ours), bits(theirs)):
        different = (ours.detach().cpu() != theirs.detach().cpu()).nonzero()
        raise AssertionError(f"{what} differs in {len(different)} of {ours.numel()} elements, first {different[:1]}")


def assert_same_model(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert_same_bits(a, b, name)


def assert_same_states(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Assert that two torch.optim dicts hold the same states, bit for bit."""
    assert set(ours["state"]) == set(theirs["state"]), (sorted(ours["state"]), sorted(theirs["state"]))
    for index, state in theirs["state"].items():
        mine = {k: v for k, v in ours["state"][index].items() if v is not None}
        other = {k: v for k, v in state.items() if v is not None}
        assert set(mine) == set(other), (index, sorted(mine), sorted(other))
        for name, value in other.items():
            _assert_same_value(mine[name], value, f"state {name} of parameter {index}")


def _assert_same_value(mine: Any, other: Any, what: str) -> None:
    if is_traceable_wrapper_subclass(other):
        assert (type(mine), mine.shape, mine.dtype) == (type(other), other.shape, other.dtype), what
        (names, facts), (_, theirs) = mine.__tensor_flatten__(), other.__tensor_flatten__()
        assert facts == theirs, what
        for name in names:
            _assert_same_value(getattr(mine, name), getattr(other, name), f"{what}, {name}")
    elif isinstance(other, Tensor):
        assert isinstance(mine, Tensor), what
        assert_same_bits(mine, other, what)
    elif isinstance(other, (list, tuple)):
        assert type(mine) is type(other), what
        for number, (one, value) in enumerate(zip(mine, other, strict=True)):
            _assert_same_value(one, value, f"{what}, {number}")
    elif isinstance(other, dict):
        assert type(mine) is type(other), what
        assert mine.keys() == other.keys(), what
        for key, value in other.items():
            _assert_same_value(mine[key], value, f"{what}, {key!r}")
    else:
        assert mine == other, what


def share(batches: Sequence[Any], rank: int, world_size: int) -> Sequence[Any]:
    """Return the micro-batches of a rank: j goes to rank j mod world_size."""
    return batches[rank::world_size]
