"""Models like those of QLoRA: a frozen, quantized base in every common form, and small trained matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .models import seeded
from .plain import assert_same_value

WIDTH = 8


class Quantised(Tensor):
    """A wrapper subclass: int8 numbers and a scale, which appear as the weight that they encode."""

    whole: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Quantised:
        made: Quantised = Tensor._make_wrapper_subclass(
            cls, whole.shape, dtype=scale.dtype, device=whole.device, requires_grad=False
        )
        made.whole, made.scale = whole, scale
        return made

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        super().__init__()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["whole", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> Quantised:
        return Quantised(inner["whole"], inner["scale"])

    def dequantised(self) -> Tensor:
        return self.whole.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].whole), func(args[0].scale))
        return func(*tree_map_only(cls, cls.dequantised, args), **(kwargs or {}))


class Packed(nn.Parameter):
    """A Python subclass with ordinary memory, whose dtype is not that of its contents."""


KINDS: dict[str, tuple[Callable[[Tensor, torch.dtype], Tensor], Callable[[Any, torch.dtype], Tensor]]] = {
    "int8": (lambda whole, _: whole, lambda weight, compute: weight.to(compute) / 64),
    "uint8": (lambda whole, _: whole.view(torch.uint8), lambda weight, compute: (weight.to(compute) - 128) / 64),
    "fp8": (lambda whole, _: (whole / 64).to(torch.float8_e4m3fn), lambda weight, compute: weight.to(compute)),
    "complex": (
        lambda whole, _: torch.polar(torch.rand(WIDTH, WIDTH), whole.float()).conj(),
        lambda weight, compute: weight.real.to(compute),
    ),
    "wrapper": (lambda whole, dtype: Quantised(whole, torch.rand(WIDTH, 1).to(dtype)), lambda weight, _: weight),
    "packed": (
        lambda whole, _: Packed(whole.view(torch.float16), requires_grad=False),
        lambda weight, compute: weight.detach().view(torch.int8).to(compute) / 100,
    ),
}
"""How a block keeps a matrix of int8 numbers, and how it computes the weight from it."""
COPIED = ("int8", "uint8", "fp8", "complex")  # the first ones: those that rank 0 can broadcast


class Block(nn.Module):
    """A quantized matrix, a frozen plain vector, and a trained matrix of rank 2 beside it."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        kept = KINDS[kind][0](torch.randint(-100, 100, (WIDTH, WIDTH), dtype=torch.int8), dtype)
        self.kind = kind
        self.weight = kept if isinstance(kept, nn.Parameter) else nn.Parameter(kept, requires_grad=False)
        self.plain = nn.Parameter(torch.rand(WIDTH), requires_grad=False)  # it is sharded, and cast
        self.down = nn.Parameter(torch.randn(2, WIDTH))
        self.up = nn.Parameter(torch.randn(WIDTH, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        added = x @ self.down.t() @ self.up.t() + self.plain.to(x.dtype)
        return torch.tanh(nn.functional.linear(x, KINDS[self.kind][1](self.weight, x.dtype)) + added)


class QLora(nn.Module):
    """A block of each kind between a frozen plain layer and a trained one. It computes in ``dtype``."""

    def __init__(self, kinds: Sequence[str] = tuple(KINDS), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(kind, dtype) for kind in kinds)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.last(x)
        return found

    def bases(self) -> dict[str, Tensor]:
        return {f"blocks.{number}.weight": block.weight for number, block in enumerate(self.blocks)}  # type: ignore[misc]


def qlora(*kinds: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Build a model that follows from a seed alone; with blocks of all kinds by default."""
    return seeded(seed, lambda: QLora(kinds or tuple(KINDS), dtype))


def inside(tensor: Tensor) -> list[Tensor]:
    if isinstance(tensor, Quantised):
        return [tensor.whole, tensor.scale]
    return [tensor.detach().resolve_conj()]


def assert_same_qlora(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert type(a) is type(b), name
        assert_same_value(inside(a), inside(b), name)
