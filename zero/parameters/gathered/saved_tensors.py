"""What a graph keeps of gathered parameters: places in units, by hooks for saved tensors and an index of memory.

Knows: addresses, autograd's hooks for saved tensors. Does not know: when a unit is gathered, resharded or runs.

    pack     a tensor in a gathered buffer    -> a PackedParam
             any other                        -> the result of the hooks pushed before, or the tensor itself
    unpack   a PackedParam                    -> gather and install the unit, then a view of its buffer

Autograd checks the tensors that it saves itself for edits in place, but not those that a hook keeps. These are checked
here.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from collectives.torch_internals import top_saved_tensors_hooks

from ...runtime.compiled_calls import untraced
from .buffers import GatheredBuffer

_MOST_KNOWN = 1 << 12  # views of a buffer; a program that makes ever new ones would fill the memory otherwise


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


@dataclass(eq=False)
class _Span:
    """The memory of a buffer: addresses ``[begin, end)``, the unit, and the places found in the buffer so far."""

    begin: int
    end: int
    unit: int
    buffer: GatheredBuffer
    places: dict[tuple[object, ...], ParamView]  # by offset in bytes, dtype, shape and strides


class SavedTensorIndex:
    """The buffers of gathered units, and resharded ones with external references."""

    def __init__(self) -> None:
        self.home = object()
        self._spans: dict[int, _Span] = {}  # by address
        self._begins: list[int] = []  # the addresses, ascending
        self._places: dict[GatheredBuffer, dict[tuple[object, ...], ParamView]] = {}  # whatever a buffer's address

    def remember(self, unit: int, buffer: GatheredBuffer, whole: Tensor) -> None:
        """Register the memory of a unit's buffer."""
        address = _address(whole)
        if not address:  # a tensor without elements has no memory
            return
        if buffer.address != address or address not in self._spans:  # share_memory() may have moved a storage
            self.forget(buffer)
            buffer.address = address
            end, places = address + whole.untyped_storage().nbytes(), self._places.setdefault(buffer, {})
            self._spans[address] = _Span(address, end, unit, buffer, places)
            self._begins = sorted(self._spans)

    def forget(self, buffer: GatheredBuffer) -> None:
        """Unregister a buffer's memory: its address may be used by other tensors."""
        if self._spans.pop(buffer.address, None) is not None:
            self._begins = sorted(self._spans)
        buffer.address = 0

    def remove(self, buffer: GatheredBuffer) -> None:
        """Unregister a buffer that is gathered no more."""
        self.forget(buffer)
        self._places.pop(buffer, None)

    def find(self, tensor: Tensor) -> PackedParam | None:
        """The place of a tensor in a gathered buffer; None for any other tensor."""
        try:
            begin = tensor.data_ptr()
            if not begin:  # a tensor without elements, which may lie in a buffer
                span = self._spans.get(_address(tensor))
            else:
                begins = self._begins
                after = bisect.bisect_right(begins, begin)
                span = self._spans.get(begins[after - 1]) if after else None
            if span is None or begin >= span.end:
                return None
            key = (begin - span.begin, tensor.dtype, tensor.shape, tensor.stride())
            place = span.places.get(key) or self._find(tensor, span, key)
        except (RuntimeError, NotImplementedError):  # a tensor without a storage: sparse, or a tracer's
            return None
        if place is None or tensor.is_conj() or tensor.is_neg() or not self._is_there(place.buffer):
            return None
        return PackedParam(place, place.buffer.versions[place.slot])

    def _find(self, tensor: Tensor, span: _Span, key: tuple[object, ...]) -> ParamView | None:
        """Return the place of a tensor, which may have a storage of its own over the buffer's memory."""
        address = tensor.data_ptr() or _address(tensor) + int(tensor.storage_offset()) * tensor.itemsize
        offset, rest = divmod(address - span.begin, tensor.itemsize)
        if rest or not 0 <= offset * tensor.itemsize <= span.end - span.begin:
            return None
        buffer = span.buffer
        slot = buffer.slot_at(offset * tensor.itemsize // buffer.shard.itemsize)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        place = ParamView(self.home, span.unit, buffer, slot, tensor.dtype, offset, shape, stride)
        if tensor.data_ptr():
            if len(span.places) >= _MOST_KNOWN:
                span.places.clear()
            span.places[key] = place
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


_Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Any]]


class SavedTensorHooks:
    """The hooks of one optimizer. ``needed`` is called with a unit before a tensor of it is restored. torch has one
    stack of saved-tensor hooks per thread."""

    def __init__(self, index: SavedTensorIndex, needed: Callable[[int], None]) -> None:
        self._home = index.home
        self._index, self._needed = weakref.ref(index), weakref.WeakMethod(needed)
        self._alone = saved_tensors_hooks(*self._hooks(None))  # without others below, as almost always

    def push(self) -> bool:
        """Push these hooks on this thread's stack. Return True if the caller must `pop` them; False if they are on top
        already."""
        before = top_saved_tensors_hooks(False)
        if before is not None and self._are_ours(before[0]):
            return False
        (self._alone if before is None else saved_tensors_hooks(*self._hooks(before))).__enter__()
        return True

    def _are_ours(self, pack: Any) -> bool:
        defaults = getattr(pack, "__defaults__", None)
        return defaults is not None and len(defaults) == 1 and defaults[0] is self._home

    def pop(self) -> None:
        self._alone.__exit__()  # pops the hooks that were pushed last, whichever they are

    def _hooks(self, before: _Pair | None) -> _Pair:
        known, needed, home = self._index, self._needed, self._home  # weakly: a graph may outlive the optimizer

        @untraced
        def pack(tensor: Tensor, _owner: object = home) -> Any:  # the default identifies the function in `push`
            index = known()
            if index is not None and (saved := index.find(tensor)) is not None:
                return saved
            if before is not None:
                return before[0](tensor)
            kept = tensor.detach()  # not itself: an output that its own graph holds would never be freed
            return kept, kept._version

        @untraced
        def unpack(kept: Any) -> Any:
            if isinstance(kept, PackedParam) and kept.place.home is home:
                index, need = known(), needed()
                if index is None or need is None:
                    raise RuntimeError("this graph belongs to an optimizer that is gone: its parameters are, too")
                need(kept.place.unit)
                return index.restore(kept)
            if before is not None:
                return before[1](kept)
            tensor, version = kept
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}; expected version {version} "
                    "instead"
                )
            return tensor

        return pack, unpack
