"""An optimizer whose states are tensor subclasses, as those of torchao are: blocks of whole numbers of 8 bits, each
with a scale. They know how to be written and read, and not how to copy themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .updates import Updates

BLOCK, LARGE = 256, 4096  # elements of a block; of the smallest parameter that has blocks


class Blocks(Tensor):
    """Numbers of 8 bits, and a scale of each block. ``signed`` and the shape are metadata."""

    codes: Tensor
    scale: Tensor
    signed: bool

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, signed: bool, shape: torch.Size, dtype: torch.dtype) -> Blocks:
        made: Blocks = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)
        made.codes, made.scale, made.signed = codes, scale, signed
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.signed, self.shape, {"as": self.dtype})

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], facts: Any, size: Any, stride: Any) -> Blocks:
        assert facts[1] == size
        return Blocks(inner["codes"], inner["scale"], facts[0], facts[1], facts[2]["as"])

    @classmethod
    def of(cls, values: Tensor, signed: bool) -> Blocks:
        rows = values.reshape(-1, BLOCK)
        scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        return cls((rows / scale).round().to(torch.int8), scale[:, 0], signed, values.shape, values.dtype)

    def values(self) -> Tensor:
        return (self.codes * self.scale[:, None]).view(self.shape).to(self.dtype)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise NotImplementedError(f"{func} of {cls.__name__}")


class Blockwise(Updates):
    """Momentum, in blocks if a parameter consists of whole ones and is large; a learning rate that is a tensor."""

    kept = Blocks

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if not isinstance(self.param_groups[-1]["lr"], Tensor):
            self.param_groups[-1]["lr"] = torch.tensor(self.param_groups[-1]["lr"], dtype=torch.float32)

    def update(self, p: Any, group: dict[str, Any]) -> None:
        assert isinstance(group["lr"], Tensor), "it was changed to a number: fill the tensor"
        state = self.state[p]
        before = state.get("momentum")
        wide = torch.zeros_like(p) if before is None else before.values() if isinstance(before, Blocks) else before
        wide = wide * group["beta"] + p.grad
        in_blocks = p.numel() >= LARGE and p.numel() % BLOCK == 0
        state["momentum"] = self.kept.of(wide, True) if in_blocks else wide
        state["count"] = state.get("count", 0) + 1
        p.sub_(group["lr"] * wide)
