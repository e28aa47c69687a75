"""A bucket of a unit on one rank: its parameters by slot, this rank's shard, and what was last seen of their data.

Knows: slots, names, and the classes, versions and addresses of parameters. Does not know: where the whole of a bucket
is, or when a unit is installed or released. Each policy, `resident_units` and `gathered`, has a subclass of it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.layout import BucketSpec, Layout, ParameterSpec
from ..runtime.flat_buffer import Move

_NOTHING: AbstractContextManager[Any] = nullcontext()


@dataclass(eq=False)
class UnitBuffer:
    """A bucket on this rank, or the part of one that belongs to a unit: its parameters by slot, and this rank's
    shard."""

    bucket: BucketSpec
    layout: Layout
    parameters: list[Tensor]
    shard: Tensor
    updated: bool  # by the optimizer
    released: Sequence[type[Tensor]]  # the parameters' classes while they are released

    def __post_init__(self) -> None:
        self.offsets = [slot.offset for slot in self.bucket.slots]
        specs = self.layout.members(self.bucket)
        self._geometry = [
            (offset, tuple(spec.shape), tuple(spec.stride)) for offset, spec in zip(self.offsets, specs, strict=True)
        ]
        self.bases = [type(parameter) for parameter in self.parameters]
        self._noted: list[tuple[int, int, torch.dtype]] = []  # version, address and dtype of each slot's data
        self.note()

    def name(self, slot: int) -> str:
        return self.spec(slot).name

    def spec(self, slot: int) -> ParameterSpec:
        return self.layout.parameters[self.bucket.slots[slot].parameter]

    def slot_at(self, element: int) -> int:
        """The slot in which an element of the bucket lies."""
        return bisect.bisect_right(self.offsets, element) - 1

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield the view of each parameter in a tensor that holds the whole bucket."""
        begin = flat.storage_offset()
        for offset, shape, stride in self._geometry:
            yield flat.as_strided(shape, stride, begin + offset)

    def commit(self, slots: Sequence[int], flat: Tensor, rank: int) -> None:
        """Copy the values of these slots from a tensor that holds the whole bucket into this rank's shard."""
        self._write(self.shard, slots, flat, rank)

    def _write(self, shard: Tensor, slots: Sequence[int], flat: Tensor, rank: int) -> None:
        low, high = self.bucket.owned(rank)
        for piece in self.bucket.pieces(low, high):
            if piece.slot in slots:
                shard[piece.begin - low : piece.end - low].copy_(flat[piece.begin : piece.end])

    def apply(self, move: Move) -> None:
        """Replace this rank's shard by what ``move`` returns for it."""
        self.shard = move(self.shard)

    # -- a parameter's data: for parameters that have their own classes, or under `as_plain` ---------------------------

    def set_data(self, data: Iterable[Tensor]) -> None:
        """Give each parameter, which must have its own class, its data. This counts as no edit."""
        for parameter, tensor in zip(self.parameters, data, strict=True):
            parameter.data = tensor
        self.note()

    def edited(self) -> list[int]:
        """Return the slots whose parameter's data was edited or replaced since it was noted."""
        now = [(parameter._version, parameter.data_ptr(), parameter.dtype) for parameter in self.parameters]
        return [] if now == self._noted else self._differing(now)

    def _differing(self, now: list[tuple[int, int, torch.dtype]]) -> list[int]:
        return [slot for slot, (here, noted) in enumerate(zip(now, self._noted, strict=True)) if here != noted]

    def displaced(self) -> list[int]:
        """Return the slots whose memory was replaced since it was noted."""
        return [slot for slot in self.edited() if not self.owns(slot)]

    def owns(self, slot: int) -> bool:
        """Return False if a parameter's memory is not the one that was noted."""
        parameter = self.parameters[slot]
        return (parameter.data_ptr(), parameter.dtype) == self._noted[slot][1:]

    def note(self) -> None:
        """Note the data of all slots as it is now."""
        self._noted = [(parameter._version, parameter.data_ptr(), parameter.dtype) for parameter in self.parameters]

    def note_slot(self, slot: int) -> None:
        """Note the data of a slot as it is now."""
        parameter = self.parameters[slot]
        self._noted[slot] = parameter._version, parameter.data_ptr(), parameter.dtype

    def count_change(self, slots: Sequence[int]) -> None:
        """Raise the versions of these slots, as an edit in place does. This counts as no edit."""
        torch.autograd.graph.increment_version([self.parameters[slot] for slot in slots])
        for slot in slots:
            version, address, dtype = self._noted[slot]
            self._noted[slot] = version + 1, address, dtype

    def set_classes(self, classes: Sequence[type[Tensor]]) -> None:
        """Set the classes of the parameters: ``bases`` or ``released``."""
        for parameter, its_class in zip(self.parameters, classes, strict=True):
            parameter.__class__ = its_class


def usable_later() -> AbstractContextManager[Any]:
    """Leave inference mode in the block: memory that is allocated in it cannot be used in a backward later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING
