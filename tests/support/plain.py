"""The plain loop with which every test of exactness compares, and comparisons of bits.

It uses `zero.clip_grad_norm_`, and nothing else of the library. `plain_step` lets autograd add up gradients; a
`PlainRanks` adds them up itself, in the contract's order, and knows ranks, `no_sync`, mixed precision and loss scaling.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero import clip_grad_norm_

from .narrowed import Narrowed

Gradients = dict[int, Tensor]  # by the parameter's index
Clear = Literal["zero_grad", "zeros", "module", "module zeros", "none", "another's zeros"]


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    divisor: float,
    max_norm: float | None = None,
) -> None:
    """Run micro-batches in turn, one division, clip and step; gradients stay."""
    for batch in batches:
        loss_of(model, batch).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(divisor)
    if max_norm is not None:
        clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()


class PlainRanks:
    """The plain loop that plays all ranks in turn.

    A rank's i-th contribution is the gradient of its i-th backward outside `no_sync`, added to the gradients of the
    `no_sync` blocks before it. The sum takes every rank's first contribution, rank by rank, then every rank's second
    one, and so on. Gradients of blocks after the last such backward come last. Where the ranks meet, one that ran fewer
    backwards catches up with empty contributions, the first of which takes along its `no_sync` gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_of: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
        world_size: int = 1,
        precision: Any = None,
        divisor: float | None = None,
        rounding: Any = None,
    ) -> None:
        """``optimizer_of``: builds an optimizer of what is updated, the model's parameters or master weights."""
        self.model, self.world_size = model, world_size
        self.numbers = Narrowed(model, precision, rounding)
        self.held = self.numbers.held  # what a loop clips
        self.optimizer = optimizer_of(self.numbers.updated)
        self.divisor = world_size if divisor is None else divisor
        self.forget()

    @property
    def parameters(self) -> list[Tensor]:
        return self.numbers.parameters

    def forget(self, before: Gradients | None = None) -> None:
        """Forget all gradients. ``before``: zeros, to which later contributions are added."""
        self.rounds: list[list[Gradients]] = [[] for _ in range(self.world_size)]  # of each rank
        self.local: list[Gradients] = [{} for _ in range(self.world_size)]
        self.before = before or {}
        self.settled = False
        self.replaced: dict[int, Tensor | None] = {}

    def backward(self, rank: int, backward: Callable[[], object], sync: bool = True) -> None:
        shown = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        backward()
        local = self.local[rank]
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                local[index] = self.numbers.contributed(index, local.get(index), parameter.grad, travels=sync)
                self.replaced.pop(index, None)  # it was, but there is a gradient again
        for parameter, gradient in zip(self.parameters, shown, strict=True):
            parameter.grad = gradient
        if sync:
            self.rounds[rank].append(local)
            self.local[rank] = {}

    def meet(self) -> None:
        longest = max(map(len, self.rounds))
        for rank, of_rank in enumerate(self.rounds):
            while len(of_rank) < longest:
                of_rank.append(self.local[rank])
                self.local[rank] = {}

    def sums(self) -> Gradients:
        total = dict(self.before)
        for round_ in [*zip(*self.rounds, strict=True), self.local]:
            for contribution in round_:
                for index, contributed in contribution.items():
                    gradient = self.numbers.travelling(index, contributed)
                    total[index] = total[index] + gradient if index in total else gradient
        return total

    def settle(self) -> None:
        """Divide the sums, once; from now on the means are the ``grad`` of what is updated."""
        self.meet()
        if self.settled:
            return
        self.settled, total = True, self.sums()
        places = range(len(self.parameters))
        self.numbers.show([total[index].clone().div_(self.divisor) if index in total else None for index in places])

    def replace(self, index: int, gradient: Tensor | None) -> None:
        self.settle()
        self.replaced[index] = gradient
        self.numbers.held[index].grad = None if gradient is None else gradient.clone()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        self.settle()
        return clip_grad_norm_(self.held, max_norm, norm_type)

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        self.settle()
        self.numbers.step(self.optimizer, scaler)

    def clear(self, how: Clear = "zero_grad") -> None:
        self.meet()
        held = {**self.sums(), **self.replaced} if "zeros" in how else {}
        clear(self.model, self.optimizer, how)
        self.forget({index: torch.zeros_like(gradient) for index, gradient in held.items() if gradient is not None})


def clear(model: nn.Module, optimizer: torch.optim.Optimizer, how: Clear) -> None:
    if how == "none":
        for parameter in model.parameters():
            parameter.grad = None
    elif how == "another's zeros":  # which torch.optim sets in all gradients at once
        torch.optim.SGD(model.parameters(), foreach=True).zero_grad(set_to_none=False)
    else:
        cleared = model if how.startswith("module") else optimizer
        cleared.zero_grad(set_to_none="zeros" not in how)


def bits(tensor: Tensor) -> Tensor:
    dense = tensor.detach().cpu().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one element may have any strides


def assert_same_bits(ours: Tensor, theirs: Tensor, what: str = "tensor") -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), what
    if not torch.equal(bits(ours), bits(theirs)):
        different = (ours.detach().cpu() != theirs.detach().cpu()).nonzero()
        raise AssertionError(f"{what} differs in {len(different)} of {ours.numel()} elements, first {different[:1]}")


def assert_same_model(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert_same_bits(a, b, name)


def assert_same_states(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert_same_value(ours["state"], theirs["state"], "states")


def assert_same_value(mine: Any, other: Any, what: str, *, any_nan: bool = False) -> None:
    """Assert that two nested values are equal as bits. A value of a dict that is None counts as absent.

    ``any_nan``: all NaNs are equal, for weights that are cast. The bits of a NaN that is cast to 16 bits depend on its
    place in a tensor, in torch itself.
    """
    if is_traceable_wrapper_subclass(other):
        assert (type(mine), mine.shape, mine.dtype) == (type(other), other.shape, other.dtype), what
        (names, facts), (_, theirs) = mine.__tensor_flatten__(), other.__tensor_flatten__()
        assert facts == theirs, what
        for name in names:
            assert_same_value(getattr(mine, name), getattr(other, name), f"{what}, {name}")
    elif isinstance(other, Tensor):
        assert isinstance(mine, Tensor), f"{what}: {mine!r} where a tensor is expected"
        if any_nan and other.is_floating_point():
            mine, other = (torch.where(side.isnan(), float("nan"), side.detach()) for side in (mine, other))
        assert_same_bits(mine, other, what)
    elif isinstance(other, (list, tuple)):
        assert (type(mine), len(mine)) == (type(other), len(other)), what
        for number, (one, value) in enumerate(zip(mine, other, strict=True)):
            assert_same_value(one, value, f"{what}, {number}", any_nan=any_nan)
    elif isinstance(other, dict):
        mine, other = ({k: v for k, v in side.items() if v is not None} for side in (mine, other))
        assert mine.keys() == other.keys(), f"{what}: {sorted(mine, key=str)} instead of {sorted(other, key=str)}"
        for key, value in other.items():
            assert_same_value(mine[key], value, f"{what}, {key!r}", any_nan=any_nan)
    elif isinstance(other, float):
        assert struct.pack("d", mine) == struct.pack("d", other), f"{what}: {mine!r} instead of {other!r}"
    else:
        assert mine == other, f"{what}: {mine!r} instead of {other!r}"


def share(batches: Sequence[Any], rank: int, world_size: int) -> Sequence[Any]:
    return batches[rank::world_size]
