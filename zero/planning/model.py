"""The description of a model that a plan is made for: named shapes in units, and the work of each unit.

Knows: names, shapes, units, and how much a unit computes and keeps for one micro-batch. Does not know: where the
description comes from, ranks, stages, hardware. Nothing here has values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core.layout import Dtypes, ParameterSpec


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
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True)
class Work:
    """What a unit does for one micro-batch.

    Attributes:
        matmul_flops: floating-point operations of the forward's matrix products, attention left out.
        attention_flops: those of the forward's attention, of a causal one the half that is needed.
        moved_bytes: bytes that element-wise operations of the forward read and write.
        saved_bytes: bytes that the forward keeps for the backward, parameters and the unit's input left out.
        input_bytes: bytes of the unit's input.
        kernels: operations that the forward launches.
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    saved_bytes: int = 0
    input_bytes: int = 0
    kernels: int = 0


@dataclass(frozen=True)
class Model:
    """A model without values.

    Attributes:
        name: what its source calls it.
        parameters: in order of registration.
        units: the name of each unit; the root's rest is first.
        hidden: features of a token between units; 0 if unknown.
        vocabulary: classes of the output; 0 if unknown.
    """

    name: str
    parameters: tuple[ParameterShape, ...]
    units: tuple[str, ...] = ("the root's rest",)
    hidden: int = 0
    vocabulary: int = 0

    @property
    def numel(self) -> int:
        """The number of elements of all parameters (Psi in the paper)."""
        return sum(parameter.numel for parameter in self.parameters)

    def unit_numels(self) -> list[int]:
        """Return the number of elements of each unit."""
        found = [0] * len(self.units)
        for parameter in self.parameters:
            found[parameter.unit] += parameter.numel
        return found

    def specs(
        self,
        dtypes: Callable[[torch.dtype], Dtypes] = Dtypes.all,
        dtype: torch.dtype = torch.float32,
        *,
        with_units: bool,
        device: str = "cpu",
    ) -> list[ParameterSpec]:
        """Return the specs of all parameters, as `zero.ZeroOptimizer` over the module would make them.

        Args:
            dtypes: maps ``dtype`` to the dtypes of a bucket, as `MixedPrecision.of` does.
            dtype: the dtype in which the model is made.
            with_units: whether parameters are gathered in units (stage 3).
            device: their device, as text.
        """
        return [
            ParameterSpec(
                parameter.names,
                parameter.shape,
                _stride(parameter.shape),
                dtypes(dtype),
                device,
                parameter.trainable,
                parameter.group,
                index,
                parameter.unit if with_units else 0,
            )
            for index, parameter in enumerate(self.parameters)
        ]


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
