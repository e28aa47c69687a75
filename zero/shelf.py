"""A bucket of a unit on one rank, and what stands in the ``data`` of its parameters.

Knows: the slots, this rank's slice, the buffer while there is one. Does not know: when, or why, anything changes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives import Region

from .layout import Bucket, Layout
from .stages import strided


@dataclass(eq=False)
class Shelf:
    """A bucket on this rank: its parameters by slot, this rank's slice, and the whole while it is here."""

    bucket: Bucket
    layout: Layout
    parameters: list[Tensor]
    shard: Tensor
    updated: bool  # by the optimizer
    region: Region | None = None  # where every rank sees every slice, the whole; None where slices must travel
    whole: Tensor | None = None
    lent: Tensor | None = None  # a buffer that was dropped while somebody else held it
    estranged: bool = False  # somebody else has held what is lent
    address: int = 0  # of the whole or lent buffer's memory, when it came

    def __post_init__(self) -> None:
        self.accepted: set[int] = set()  # slots where what was written into the whole is everybody's
        self.noted = [(0, 0)] * len(self.parameters)  # of each slot: version and address of what was put into its data
        self.offsets = [slot.offset for slot in self.bucket.slots]
        self.versions = [0] * len(self.parameters)  # of each slot: how often its values were changed
        self.bases = [type(parameter) for parameter in self.parameters]
        self.nans = [nan_like(parameter) for parameter in self.parameters]

    @property
    def moved(self) -> bool:
        """True where the whole lies in common memory no more: `share_memory_` takes a storage elsewhere."""
        if self.region is None or self.whole is None:
            return False
        return self.whole.data_ptr() != self.region.whole().data_ptr()

    def name(self, slot: int) -> str:
        return self.layout.parameters[self.bucket.slots[slot].parameter].name

    def slot_at(self, element: int) -> int:
        """The slot in which an element of the bucket lies."""
        return bisect.bisect_right(self.offsets, element) - 1

    def owns(self, slot: int) -> bool:
        """False where a parameter's memory is not what was put there."""
        parameter, nan = self.parameters[slot], self.nans[slot]
        same = parameter.dtype is nan.dtype and parameter.device == nan.device
        return same and parameter.data_ptr() == self.noted[slot][1]

    def note(self, slot: int) -> None:
        """Remember what is in a parameter's data."""
        self.noted[slot] = (self.parameters[slot]._version, self.parameters[slot].data_ptr())

    def is_untouched(self, slot: int) -> bool:
        """True where nobody has edited or replaced what was put into a parameter's data."""
        return (self.parameters[slot]._version, self.parameters[slot].data_ptr()) == self.noted[slot]

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        for slot in self.bucket.slots:
            spec = self.layout.parameters[slot.parameter]
            yield strided(flat, slot.offset, spec.shape, spec.stride)


@dataclass(frozen=True, eq=False)
class Saved:
    """A tensor in a gathered buffer, as a graph keeps it: a place instead of memory."""

    home: object
    unit: int
    shelf: Shelf
    slot: int
    version: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def nan_like(parameter: Tensor) -> Tensor:
    nan = torch.full((1,), float("nan"), dtype=parameter.dtype, device=parameter.device)
    return nan.expand(parameter.shape) if parameter.dim() else nan.view(())
