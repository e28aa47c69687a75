"""The comparison of two sets of parameters: the first bit that differs, and the distance of the two values.

Knows: named tensors, and what a run compared. Does not know: where they come from. Elements are counted in the order of
their index, whatever their order in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.bits import INTEGERS
from ..console import counted


@dataclass(frozen=True)
class Difference:
    """The first element that differs: ``parameter[index]`` is ``plain`` in the plain loop, ``other`` elsewhere.

    ``ulps`` counts the steps from one to the other through the values of their dtype (0: zeros of two signs; None: at
    least one is NaN). ``count`` of all ``numel`` elements differ, those of the other parameters included.
    """

    parameter: str
    index: tuple[int, ...]
    dtype: str
    plain: float
    other: float
    ulps: int | None
    count: int
    numel: int

    def __str__(self) -> str:
        digits = 17 if self.dtype == "float64" else 9
        place = f"{self.parameter}{list(self.index) if self.index else ''}"
        values = f"{self.plain:.{digits}g} in the plain loop and {self.other:.{digits}g} here"
        return f"{place} is {values} ({self._distance()}); {self.count:,} of {self.numel:,} elements differ"

    def _distance(self) -> str:
        if self.ulps is None:
            both = math.isnan(self.plain) and math.isnan(self.other)
            return "NaNs of different bits" if both else "one of them is NaN"
        if self.ulps == 0:
            return "zeros of different sign"
        return f"{self.ulps:,} ulp{'s' if self.ulps > 1 else ''} apart"


@dataclass(frozen=True)
class Run:
    """One run compared with the plain loop: a stage on ``world_size`` ranks, or the plain loop again (``stage`` None).

    ``difference``: that of the first of ``ranks``, after ``step`` (0: as built), where the run ended; if it is None,
    ``step`` is the last one. ``numel``: elements of all parameters.
    """

    stage: int | None
    world_size: int
    step: int
    numel: int
    ranks: tuple[int, ...]
    difference: Difference | None
    several_backwards: bool = False  # `loss_fn` ran a backward itself, in the plain loop

    @property
    def ok(self) -> bool:
        """Whether no bit differed."""
        return self.difference is None

    def __str__(self) -> str:
        name = f"stage {self.stage}, {counted(self.world_size, 'rank')}"
        name = "the plain loop, again" if self.stage is None else name
        if self.difference is None:
            return f"{name}: same bits, {counted(self.step, 'step')}, {self.numel:,} parameters"
        when = f"after step {self.step}" if self.step else "as built, before any step"
        where = "" if len(self.ranks) == self.world_size else f" on rank {', '.join(map(str, self.ranks))} alone"
        return f"{name}: DIFFERS {when}{where}: {self.difference}"


def first_difference(plain: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Difference | None:
    """Return the first difference in the order of ``plain``, or None if all bits are the same.

    Raises:
        ValueError: the names, shapes or dtypes differ.
    """
    for name in (*plain, *other):
        ours, theirs = _kind(plain.get(name)), _kind(other.get(name))
        if ours != theirs:
            raise ValueError(
                f"{name} is {ours} in the plain loop and {theirs} here: build_model() must build one model"
            )
    first: tuple[str, int] | None = None
    count = 0
    for name in plain:
        differ = _integers(plain[name]) != _integers(other[name])
        number = int(differ.sum())
        if number and first is None:
            first = name, int(differ.int().argmax())
        count += number
    if first is None:
        return None
    name, place = first
    one, another = (tensors[name].detach().cpu().reshape(-1)[place] for tensors in (plain, other))
    return Difference(
        parameter=name,
        index=tuple(int(i) for i in torch.unravel_index(torch.tensor(place), plain[name].shape)),
        dtype=_name(plain[name].dtype),
        plain=float(one),
        other=float(another),
        ulps=ulps_between(one, another),
        count=count,
        numel=sum(tensor.numel() for tensor in plain.values()),
    )


def _kind(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{_name(tensor.dtype)} {list(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _integers(tensor: Tensor) -> Tensor:
    """The bits of each element, as integers in one dimension."""
    return tensor.detach().cpu().contiguous().view(-1).view(INTEGERS[tensor.itemsize])


def ulps_between(one: Tensor, other: Tensor) -> int | None:
    """Count the steps from one element (0-dim) to another through the values of their dtype; None if one is NaN.

    Both zeros are one value, and the largest finite number is one step from infinity.
    """
    if one.isnan() or other.isnan():
        return None
    return abs(_ordered(one) - _ordered(other))


def _ordered(element: Tensor) -> int:
    """Return the position of the element among all values of its dtype in ascending order, where 0 is at 0."""
    bits = int(_integers(element))
    return bits if bits >= 0 else -(bits + 2 ** (8 * element.itemsize - 1))
