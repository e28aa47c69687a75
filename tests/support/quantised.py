"""Models like those of QLoRA: a frozen, quantized base in every common form, and small trained matrices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .loops import seeded

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
    """A Python subclass with ordinary memory, whose dtype is not that of its contents, and a scale of its own."""

    scale: float


class Tagged(nn.Parameter):
    """A Python subclass that adds nothing."""


class Base:
    """One form of a quantized matrix: how a block stores int8 numbers, and how it computes the weight from them."""

    @staticmethod
    def keep(block: Block, whole: Tensor, dtype: torch.dtype) -> Tensor:
        return nn.Parameter(whole, requires_grad=False)

    @staticmethod
    def weight(block: Block, compute: torch.dtype) -> Tensor:
        return block.weight.to(compute)


class Int8(Base):
    @staticmethod
    def keep(block: Block, whole: Tensor, dtype: torch.dtype) -> Tensor:
        block.scale = nn.Parameter(torch.rand(WIDTH, 1), requires_grad=False)  # plain and frozen: sharded and cast
        return nn.Parameter(whole, requires_grad=False)

    @staticmethod
    def weight(block: Block, compute: torch.dtype) -> Tensor:
        return block.weight.to(compute) * block.get_parameter("scale").to(compute)


class UInt8(Base):
    """A matrix with two 4-bit numbers in each byte."""

    @staticmethod
    def keep(block: Block, whole: Tensor, dtype: torch.dtype) -> Tensor:
        halves = (whole.view(torch.uint8) & 15).view(WIDTH, WIDTH // 2, 2)
        return nn.Parameter(halves[..., 0] | halves[..., 1] << 4, requires_grad=False)

    @staticmethod
    def weight(block: Block, compute: torch.dtype) -> Tensor:
        both = torch.stack([block.weight & 15, block.weight >> 4], dim=-1).view(WIDTH, WIDTH)
        return (both.to(compute) - 8) / 16


class Float8(Base):
    @staticmethod
    def keep(block: Block, whole: Tensor, dtype: torch.dtype) -> Tensor:
        return nn.Parameter((whole / 64).to(torch.float8_e4m3fn), requires_grad=False)


class Complex(Base):
    @staticmethod
    def keep(block: Block, whole: Tensor, dtype: torch.dtype) -> Tensor:
        return nn.Parameter(torch.polar(torch.rand(WIDTH, WIDTH), whole.float()).conj(), requires_grad=False)

    @staticmethod
    def weight(block: Block, compute: torch.dtype) -> Tensor:
        return block.weight.real.to(compute)


class Wrapper(Base):
    @staticmethod
    def keep(block: Block, whole: Tensor, dtype: torch.dtype) -> Tensor:
        return nn.Parameter(Quantised(whole, torch.rand(WIDTH, 1).to(dtype)), requires_grad=False)

    @staticmethod
    def weight(block: Block, compute: torch.dtype) -> Tensor:
        return block.weight


class Subclass(Base):
    @staticmethod
    def keep(block: Block, whole: Tensor, dtype: torch.dtype) -> Tensor:
        packed = Packed(whole.view(torch.float16), requires_grad=False)
        packed.scale = 0.01
        return packed

    @staticmethod
    def weight(block: Block, compute: torch.dtype) -> Tensor:
        packed: Any = block.weight
        found: Tensor = packed.detach().view(torch.int8).to(compute) * packed.scale
        return found


KINDS: dict[str, type[Base]] = {
    "int8": Int8,
    "uint8": UInt8,
    "fp8": Float8,
    "complex": Complex,
    "wrapper": Wrapper,
    "subclass": Subclass,
}


class Block(nn.Module):
    """A quantized matrix, and a trained matrix of rank 2 beside it."""

    weight: Tensor
    scale: Tensor | None

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        whole = torch.randint(-100, 100, (WIDTH, WIDTH), dtype=torch.int8)
        self.kind = kind
        self.register_parameter("scale", None)
        self.weight = KINDS[kind].keep(self, whole, dtype)
        self.down = nn.Parameter(torch.randn(2, WIDTH))
        self.up = nn.Parameter(torch.randn(WIDTH, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        added = x @ self.down.t() @ self.up.t()
        return torch.tanh(nn.functional.linear(x, KINDS[self.kind].weight(self, x.dtype)) + added)


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
        """Return the replicated parameters, by name."""
        return {
            name: p for name, p in self.named_parameters() if name.endswith(".weight") and name.startswith("blocks")
        }


def qlora(*kinds: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> QLora:
    """Build a model that follows from a seed alone; with blocks of all kinds by default."""
    made = seeded(seed, lambda: QLora(kinds or tuple(KINDS), dtype))
    assert isinstance(made, QLora)
    return made


def inside(tensor: Tensor) -> list[Tensor]:
    """Return the ordinary tensors of which a parameter consists."""
    if isinstance(tensor, Quantised):
        return [tensor.whole, tensor.scale]
    return [tensor.detach().resolve_conj()]


def assert_same_qlora(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert type(a) is type(b), name
        for mine, other in itertools.zip_longest(inside(a), inside(b)):
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype), name
            flat, plain = (t.contiguous().view(-1).view(torch.uint8) for t in (mine, other))
            assert torch.equal(flat, plain), name
