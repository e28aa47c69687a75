"""The description of a model that a plan is made for: named shapes in units, and the work of each unit.

Knows: names, shapes, units, and how much a unit computes and keeps for one micro-batch. Does not know: where the
description comes from, ranks, stages, hardware. Nothing here has values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core.layout import Dtypes
from ..precision import Rule, dtypes_by_name

ROOT_NAME = "the root's rest"


@dataclass(frozen=True)
class ParameterShape:
    """A parameter without values.

    Attributes:
        names: its names in the module, ties included.
        shape: its shape.
        unit: the number of its unit; 0 is the root's rest.
        trainable: whether it requires a gradient.
        group: the number of its param group.
        used: whether a backward gives it a gradient.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    unit: int = 0
    trainable: bool = True
    group: int = 0
    used: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_unit_matrix(self) -> bool:
        """Whether it is a matrix of a unit: embeddings and heads, which the root has, are none."""
        return self.unit > 0 and len(self.shape) == 2


@dataclass(frozen=True)
class Transformer:
    """The plain numbers of a transformer, from which `reference` builds blocks to count.

    Attributes:
        layers: blocks, of an encoder and a decoder those of the encoder.
        hidden: features of a token between blocks.
        heads: heads of queries.
        ffn: features inside the feed-forward network.
        vocabulary: tokens.
        kv_heads: heads of keys and values; 0: as many as of queries.
        head_dim: features of a head; 0: ``hidden // heads``.
        positions: rows of a table of learned positions; 0: there is none.
        decoder_layers: blocks of a decoder that attends to an encoder; 0: there is none.
        gated: whether the feed-forward network multiplies two projections.
        activation: "gelu", "silu" or "relu".
        norm: "layer", "rms", or "plain" for a LayerNorm without parameters.
        norms: of a block; 1: attention and feed-forward network share one.
        norm_bias, qkv_bias, out_bias, mlp_bias: whether these layers have a bias.
        head_norms: whether queries and keys are normalised by head.
        rotary: whether queries and keys are rotated by position.
        tied: whether the head's weight is the embedding's.
        attention: "flash", which keeps no scores, or "eager", which keeps them all.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    kv_heads: int = 0
    head_dim: int = 0
    positions: int = 0
    decoder_layers: int = 0
    gated: bool = False
    activation: str = "gelu"
    norm: str = "layer"
    norms: int = 2
    norm_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    rotary: bool = False
    tied: bool = False
    attention: str = "flash"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"a transformer has {name} {getattr(self, name)}: it must be at least 1")
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not divide hidden {self.hidden}: choose numbers that do")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} do not divide {self.heads} heads: choose a divisor")


@dataclass(frozen=True)
class UnitWork:
    """What a unit does for one micro-batch.

    Attributes:
        matmul_flops: floating-point operations of the forward's matrix products, attention left out.
        fp32_flops: those of ``matmul_flops`` that are in fp32 in a model that computes in 16 bits.
        attention_flops: those of the forward's attention, of a causal one the half that is needed.
        moved_bytes: bytes that element-wise operations of the forward read and write.
        saved_bytes: bytes that the forward keeps for the backward, parameters and the unit's input left out.
        input_bytes: bytes of the unit's input.
        kernels: operations that the forward launches.
        peak_bytes: the most that forward and backward hold at one moment, ``saved_bytes`` and the gradients of
            activations included, parameters, their gradients and the unit's input left out; 0 if not counted.
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    saved_bytes: int = 0
    input_bytes: int = 0
    kernels: int = 0
    peak_bytes: int = 0
    fp32_flops: float = 0.0


@dataclass(frozen=True)
class Model:
    """A model without values.

    Attributes:
        name: what its source calls it.
        parameters: in order of registration.
        units: the name of each unit; the root's rest is first.
        transformer: its plain numbers; None if they are not known.
    """

    name: str
    parameters: tuple[ParameterShape, ...]
    units: tuple[str, ...] = (ROOT_NAME,)
    transformer: Transformer | None = None

    @property
    def numel(self) -> int:
        """The number of elements of all parameters (Psi in the paper)."""
        return sum(parameter.numel for parameter in self.parameters)

    def unit_numels(self) -> list[int]:
        """Return the number of elements of each unit."""
        return self.by_unit(lambda parameter: parameter.numel)

    def by_unit(self, count: Callable[[ParameterShape], int]) -> list[int]:
        """Return the sum of ``count`` over the parameters of each unit."""
        found = [0] * len(self.units)
        for parameter in self.parameters:
            found[parameter.unit] += count(parameter)
        return found

    def dtypes(self, rule: Rule) -> list[Dtypes]:
        """Return the dtypes of each parameter. Raises `ValueError` as `dtypes_by_name` does."""
        return dtypes_by_name(rule, [parameter.names for parameter in self.parameters], torch.float32)
