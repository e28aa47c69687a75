"""A GPT, of bytes by default.

Knows: the shape of the network, and its initial weights (a pure function of the shape and a seed). Does not know:
data, optimizers, ranks. It is an ordinary module, with tied weights and
with biases and norms of a few elements. It has no dropout, so a step is a pure function of weights and data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY: Final = 256
INIT_STD: Final = 0.02


@dataclass(frozen=True)
class Shape:
    """The size of a GPT: `layers` blocks of `width` features in `heads` heads, over `vocabulary` tokens."""

    layers: int
    heads: int
    width: int
    vocabulary: int = VOCABULARY


class Attention(nn.Module):
    """Causal self-attention over (batch, sequence, width), with rotary positions (Su et al. 2021, section 3.4)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = _rotate(query, rotary), _rotate(key, rotary)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, sequence, width)))


class Block(nn.Module):
    """One pre-norm transformer block: attention, then a GELU network four times as wide."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the head's weight is the embedding's (one tensor, two names).

    `forward` takes int64 (batch, sequence) with sequence at most `sequence`, and returns (batch, sequence, vocabulary)
    in the parameters' dtype. Make one with `build`, which also sets the weights.
    """

    def __init__(self, shape: Shape, sequence: int) -> None:
        super().__init__()
        self.sequence = sequence
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.rotary: Tensor
        self.register_buffer("rotary", _rotary_table(sequence, shape.width // shape.heads), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rotary = self.rotary[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, rotary)
        return cast(Tensor, self.head(self.norm(x)))


def _rotary_table(sequence: int, features: int) -> Tensor:
    """float32 (2, sequence, features): cosines, and sines with the sign that `_rotate` needs."""
    frequencies = 10000.0 ** -(torch.arange(0, features, 2) / features)
    angles = torch.outer(torch.arange(sequence), frequencies)
    cosine, sine = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)])


def _rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn feature i and feature i + half of (…, sequence, features) by the angle of their position."""
    rotary = rotary.to(x.dtype)
    return x * rotary[0] + x.roll(x.shape[-1] // 2, dims=-1) * rotary[1]


def build(shape: Shape, sequence: int, seed: int) -> GPT:
    """A GPT of this shape for up to `sequence` tokens; equal arguments give equal bits.

    Matrices are drawn from N(0, 0.02), those that write to the residual stream divided by sqrt(2 * layers)
    (Radford et al. 2019, section 2.3); biases are 0 and norms 1. The global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        model = GPT(shape, sequence)
    _initialise(model, shape, torch.Generator().manual_seed(seed))
    return model


def _initialise(model: GPT, shape: Shape, generator: torch.Generator) -> None:
    residual = ("attention.out.weight", "mlp.2.weight")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                std = INIT_STD / (2 * shape.layers) ** 0.5 if name.endswith(residual) else INIT_STD
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats, float32, of (batch, sequence, vocabulary) against int64 (batch, sequence)."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
