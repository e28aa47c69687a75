"""A transformer with the parameters of Llama's: nine tensors a block, and an embedding, a norm and a head around them.

It has no rotary positions, which have no parameters.

Knows: modules. Does not know: systems, devices, clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


@dataclass(frozen=True)
class Llama:
    """The shape of a model. ``hidden``: the width between the matrices of the feed-forward part."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int


SEVEN_BILLION = Llama(32, 4096, 11008, 32, 32000)
NARROW = Llama(32, 128, 352, 4, 512)  # about 1/32 of that in each direction: the calls take most of the time
TINY = Llama(2, 128, 352, 4, 512)


class Block(nn.Module):
    """Attention and a gated feed-forward part, each behind a norm."""

    def __init__(self, shape: Llama) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.heads = shape.heads
        self.before_attention, self.before_feed_forward = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.before_attention(x))
        y = self.before_feed_forward(x)
        down: Tensor = self.down(functional.silu(self.gate(y)) * self.up(y))
        return x + down

    def _attention(self, y: Tensor) -> Tensor:
        query, key, value = (
            made.unflatten(-1, (self.heads, -1)).transpose(1, 2) for made in (self.query(y), self.key(y), self.value(y))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Model(nn.Module):
    """The whole model. It takes tokens and returns the loss of each next one."""

    def __init__(self, shape: Llama) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def build(shape: Llama, device: torch.device) -> Model:
    """Build a model with the same weights at each call."""
    torch.manual_seed(0)
    with device:
        return Model(shape)


def tokens(shape: Llama, count: int, device: torch.device) -> Tensor:
    """Return one sequence of ``count`` tokens, and the one that follows the last."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocabulary, (1, count + 1), generator=generator).to(device)
