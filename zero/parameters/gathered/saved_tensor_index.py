"""An index of the gathered memory of units: from a tensor to its `ParamView`, and back.

Knows: addresses. Does not know: when a unit is gathered or resharded, or which graph saves a tensor.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .buffers import GatheredBuffer

_MOST_KNOWN = 1 << 16  # views; a program that makes ever new ones would fill the memory otherwise


@dataclass(frozen=True, eq=False)
class ParamView:
    """The place of a tensor in a buffer's whole."""

    home: object  # identifies the index
    unit: int
    buffer: GatheredBuffer
    slot: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class PackedParam(NamedTuple):
    """A tensor as a graph keeps it: a place instead of memory, and how often its parameter had changed."""

    place: ParamView
    version: int


class SavedTensorIndex:
    """The buffers of gathered units, and resharded ones with external references."""

    def __init__(self) -> None:
        self.home = object()
        self._buffers: dict[int, tuple[int, GatheredBuffer]] = {}  # address of a buffer -> its unit, and the buffer
        self._low, self._high = sys.maxsize, 0  # the range of addresses that buffers have had
        self._known: dict[tuple[object, ...], ParamView] = {}  # a tensor's address and geometry -> its place

    def remember(self, unit: int, buffer: GatheredBuffer, whole: Tensor) -> None:
        """Register the memory of a unit's buffer."""
        address = _address(whole)
        if not address:  # a tensor without elements has no memory
            return
        if buffer.address != address or address not in self._buffers:  # share_memory() may have moved a storage
            self.forget(buffer)
            buffer.address = address
            self._buffers[address] = (unit, buffer)
            end = address + whole.untyped_storage().nbytes()
            self._low, self._high = min(self._low, address), max(self._high, end)

    def forget(self, buffer: GatheredBuffer) -> None:
        """Unregister a buffer: its address may be used by other tensors."""
        if self._buffers.pop(buffer.address, None) is not None:
            self._known.clear()
        buffer.address = 0

    def find(self, tensor: Tensor) -> PackedParam | None:
        """The place of a tensor in a gathered buffer; None for any other tensor."""
        try:
            begin = tensor.data_ptr()  # 0 for a tensor without elements, which may lie in a buffer
            if begin and not self._low <= begin < self._high:  # true of most tensors: a short cut
                return None
            key = (begin, tensor.dtype, tensor.shape, tensor.stride())
            place = self._known.get(key) or self._find(tensor, key)
        except (RuntimeError, NotImplementedError):  # a tensor without a storage: sparse, or a tracer's
            return None
        if place is None or tensor.is_conj() or tensor.is_neg() or not self._is_there(place.buffer):
            return None
        return PackedParam(place, place.buffer.versions[place.slot])

    def _find(self, tensor: Tensor, key: tuple[object, ...]) -> ParamView | None:
        found = self._buffers.get(_address(tensor))
        if found is None:
            return None
        unit, buffer = found
        offset = int(tensor.storage_offset())
        slot = buffer.slot_at(offset * tensor.itemsize // buffer.shard.itemsize)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        place = ParamView(self.home, unit, buffer, slot, tensor.dtype, offset, shape, stride)
        if tensor.data_ptr():
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = place
        return place

    def _is_there(self, buffer: GatheredBuffer) -> bool:
        """False after share_memory(): a buffer's address may be used by other tensors."""
        whole = buffer.externally_held if buffer.unsharded is None else buffer.unsharded
        return whole is not None and whole.data_ptr() == buffer.address

    def restore(self, saved: PackedParam) -> Tensor:
        """Return the tensor at a place. Its unit must be gathered."""
        place, buffer = saved.place, saved.place.buffer
        if buffer.versions[place.slot] != saved.version:
            raise RuntimeError(
                f"{buffer.name(place.slot)!r}, which this backward needs, was changed by a step or an edit after the "
                "forward that used it: run the backward before, or the forward again"
            )
        if buffer.unsharded is None:
            raise RuntimeError(
                f"{buffer.name(place.slot)!r}, which this backward needs, was laid out anew (by add_param_group() or "
                "close()) after the forward that used it: run the forward again"
            )
        if place.dtype is buffer.unsharded.dtype:
            return buffer.unsharded.as_strided(place.size, place.stride, place.offset)
        made = torch.empty(0, dtype=place.dtype, device=buffer.unsharded.device)
        return made.set_(buffer.unsharded.untyped_storage(), place.offset, place.size, place.stride)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
