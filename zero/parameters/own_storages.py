"""Storages of their own for parameters that are views of a bucket, for as long as a block of `gathered` lasts.

Knows: tensors and their storages. Does not know: buckets, units, ranks.

Tools that write files (safetensors, accelerate, huggingface_hub) take tensors of one storage for tied ones, and
`torch.save` writes the storage of a tensor as a whole. Inside the block a parameter's storage has the parameter's
elements and no others, over the same memory. It holds the bucket's storage, which thus counts it as a holder.

Parameters are views outside of the block, because a storage is what processes share: `share_memory_()` would move the
memory of one parameter out of its bucket, and CUDA shares no memory that begins inside an allocation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..core.parameter_specs import is_released
from ..runtime.flat_buffer import usable_later

_Lent = tuple[Tensor, Tensor, Tensor]  # a parameter, the view that it was, and its data with a storage of its own


@contextmanager
def own_storages(views: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Return a context in which parameters have storages of their own. ``views``: of each, the view that it is."""
    lent = _lend(views)
    try:
        yield
    finally:
        _take_back(lent)
        lent.clear()  # the frame of an exception would hold the memory


def _lend(views: Iterable[tuple[Tensor, Tensor]]) -> list[_Lent]:
    with usable_later():
        lent = [(parameter, view, _alone(view)) for parameter, view in views if _is(parameter, view) and _shares(view)]
        for parameter, _, own in lent:
            parameter.data = own
    return lent


def _take_back(lent: Sequence[_Lent]) -> None:
    """Make the parameters views again, unless their data was replaced, which is reported where views are expected."""
    with usable_later(), torch.no_grad():
        for parameter, view, own in lent:
            if is_released(parameter) or not _is(parameter, own):
                continue
            if own.data_ptr() != view.data_ptr():  # moved, by share_memory_() or a queue between processes
                view.copy_(own)
            parameter.data = view


def _is(parameter: Tensor, data: Tensor) -> bool:
    """Return whether a parameter's data is ``data``."""
    return _place(parameter) == _place(data)


def _place(tensor: Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes(), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _nbytes(view: Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    steps = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return (steps + 1) * view.itemsize if view.numel() else 0


def _shares(view: Tensor) -> bool:
    """Return whether a storage has more than this tensor."""
    return view.untyped_storage().nbytes() != _nbytes(view)


def _alone(view: Tensor) -> Tensor:
    """Return the same memory as a tensor whose storage has nothing else."""
    begin = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[begin : begin + _nbytes(view)]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride())
