"""A transformer as an ordinary module, built from its plain numbers, so that its work can be counted on meta tensors.

Knows: blocks, embedding, head and loss, and which tensors an efficient implementation keeps: attention and norms are
the fused functions of `torch.nn.functional`. Does not know: how they are counted. It is made to be counted, not
trained: weights are torch's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..model import Transformer

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu": functional.relu,
}


def make_norm(numbers: Transformer, features: int) -> nn.Module:
    """Return the norm that a transformer uses, over so many features."""
    if numbers.norm == "rms":
        return nn.RMSNorm(features)
    return nn.LayerNorm(features, elementwise_affine=numbers.norm == "layer", bias=numbers.norm_bias)


class SelfAttention(nn.Module):
    """Attention of (batch, sequence, hidden) to itself, or to ``memory`` of the same shape.

    ``causal`` and ``crossed`` are fixed at construction. Queries have `heads` heads, keys and values `kv_heads`.
    """

    def __init__(self, numbers: Transformer, causal: bool, crossed: bool = False) -> None:
        super().__init__()
        self.numbers, self.causal, self.crossed = numbers, causal, crossed
        queries, others = numbers.heads * numbers.head_dim, numbers.kv_heads * numbers.head_dim
        self.query = nn.Linear(numbers.hidden, queries, bias=numbers.qkv_bias)
        self.key = nn.Linear(numbers.hidden, others, bias=numbers.qkv_bias)
        self.value = nn.Linear(numbers.hidden, others, bias=numbers.qkv_bias)
        self.out = nn.Linear(queries, numbers.hidden, bias=numbers.out_bias)
        if numbers.head_norms:
            self.query_norm, self.key_norm = (make_norm(numbers, numbers.head_dim) for _ in range(2))

    def forward(self, x: Tensor, rotary: Tensor | None, memory: Tensor | None = None) -> Tensor:
        other = memory if self.crossed and memory is not None else x
        query, key, value = self._heads(self.query(x)), self._heads(self.key(other)), self._heads(self.value(other))
        if self.numbers.head_norms:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        if self.numbers.attention == "eager":
            mixed = attend_eagerly(query, key, value, self.causal)
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal, enable_gqa=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> Tensor:
        """Return (batch, heads, sequence, head_dim)."""
        return x.view(*x.shape[:2], -1, self.numbers.head_dim).transpose(1, 2)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate feature i and feature i + half of (..., sequence, features) by the angle of their position.

    ``rotary``: (2, sequence, features) of cosines, and of sines with their signs (Su et al. 2021, section 3.4).
    """
    half = x.shape[-1] // 2
    return x * rotary[0] + torch.cat([x[..., half:], x[..., :half]], -1) * rotary[1]


def attend_eagerly(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Return softmax(q k^T) v with all scores in memory and the softmax in float32, as T5 of transformers does."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(ones.triu(1), -math.inf)
    return scores.float().softmax(-1).to(value.dtype) @ value


class FeedForward(nn.Module):
    """The feed-forward network of a block, gated or not."""

    def __init__(self, numbers: Transformer) -> None:
        super().__init__()
        if numbers.activation not in ACTIVATIONS:
            raise ValueError(f"activation {numbers.activation!r} is unknown: it is one of {', '.join(ACTIVATIONS)}")
        self.gated, self.activation = numbers.gated, ACTIVATIONS[numbers.activation]
        if numbers.gated:
            self.gate = nn.Linear(numbers.hidden, numbers.ffn, bias=numbers.mlp_bias)
        self.up = nn.Linear(numbers.hidden, numbers.ffn, bias=numbers.mlp_bias)
        self.down = nn.Linear(numbers.ffn, numbers.hidden, bias=numbers.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.activation(self.gate(x)) * self.up(x) if self.gated else self.activation(self.up(x))
        return cast(Tensor, self.down(inside))


class TransformerBlock(nn.Module):
    """A block with norms before its attention and its feed-forward network.

    ``crossed``: it attends to an encoder, too.
    """

    def __init__(self, numbers: Transformer, causal: bool = True, crossed: bool = False) -> None:
        super().__init__()
        self.shared = numbers.norms == 1
        self.attention_norm = make_norm(numbers, numbers.hidden)
        self.attention = SelfAttention(numbers, causal)
        self.crossed = crossed
        if crossed:
            self.cross_norm = make_norm(numbers, numbers.hidden)
            self.cross_attention = SelfAttention(numbers, causal=False, crossed=True)
        if not self.shared:
            self.mlp_norm = make_norm(numbers, numbers.hidden)
        self.mlp = FeedForward(numbers)

    def forward(self, x: Tensor, rotary: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        normed = self.attention_norm(x)
        if self.shared:
            return cast(Tensor, x + self.attention(normed, rotary) + self.mlp(normed))
        x = x + self.attention(normed, rotary)
        if self.crossed:
            x = x + self.cross_attention(self.cross_norm(x), None, memory)
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class ReferenceModel(nn.Module):
    """Embedding, blocks, last norm and head. An encoder has blocks and a last norm of its own."""

    def __init__(self, numbers: Transformer) -> None:
        super().__init__()
        self.numbers = numbers
        self.embedding = nn.Embedding(numbers.vocabulary, numbers.hidden)
        if numbers.positions:
            self.positions = nn.Embedding(numbers.positions, numbers.hidden)
        layers = numbers.layers
        if numbers.decoder_layers:
            self.encoder = nn.ModuleList(TransformerBlock(numbers, causal=False) for _ in range(layers))
            self.encoder_norm = make_norm(numbers, numbers.hidden)
            layers = numbers.decoder_layers
        crossed = bool(numbers.decoder_layers)
        self.blocks = nn.ModuleList(TransformerBlock(numbers, crossed=crossed) for _ in range(layers))
        self.norm = make_norm(numbers, numbers.hidden)
        self.head = nn.Linear(numbers.hidden, numbers.vocabulary, bias=False)
        if numbers.tied:
            self.head.weight = self.embedding.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Return (batch, sequence, hidden) of int64 (batch, sequence)."""
        x = self.embedding(tokens)
        if self.numbers.positions:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return cast(Tensor, x)

    def logits(self, x: Tensor) -> Tensor:
        """Return (batch, sequence, vocabulary) of the last block's output."""
        return cast(Tensor, self.head(self.norm(x)))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in float32."""
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
