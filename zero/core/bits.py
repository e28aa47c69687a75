"""Views of flat storage, bitwise comparisons, reads of tensor values by the host, and flags in bytes.

Knows: strides, dtypes, and which reads make the host wait for a device. Does not know: layouts, ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def strided(flat: Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the view of ``flat`` with this shape and stride that begins at element ``offset``."""
    return flat.as_strided(tuple(shape), tuple(stride), flat.storage_offset() + offset)


def in_stride_order(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return the elements of ``tensor`` as a 1-D tensor in the memory order of ``stride``, which must be dense.

    The result is a view if the tensor has these strides already, otherwise a copy.
    """
    if tuple(tensor.stride()) != tuple(stride) and tensor.numel() > 1:
        tensor = torch.empty_strided(tensor.shape, tuple(stride), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a dense tensor with the shape and the order of dimensions of ``tensor``."""
    return tuple(torch.empty_like(tensor, device="meta").stride())


def row_major_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(tuple(shape), device="meta").stride()


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements with these strides lie side by side, each once. Dimensions of stride 0 do not count."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1 and step):
        if step != expected:
            return False
        expected *= size
    return True


def kept_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides with which ``tensor`` is kept: its own, or dense ones if it has gaps or partial overlaps."""
    own = tuple(tensor.stride())
    return own if is_dense(tensor.shape, own) else dense_stride(tensor)


def other_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """Return ``stride``, or None if they are those of a row-major tensor, or if there is one element at most."""
    expected, numel = [], 1
    for size in reversed(shape):
        expected.append(numel)
        numel *= size
    return None if numel <= 1 or tuple(stride) == tuple(reversed(expected)) else tuple(stride)


def noted_stride(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides to note beside the row-major values of ``tensor``; None if there is nothing to note."""
    return other_stride(tensor.shape, kept_stride(tensor))


def laid_out(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a copy of ``tensor`` with these strides, for which `is_dense` holds."""
    once = [min(size, 1) if step == 0 else size for size, step in zip(tensor.shape, stride, strict=True)]
    made = torch.empty_strided(once, tuple(stride), dtype=tensor.dtype, device=tensor.device)
    made.copy_(tensor[tuple(slice(size) for size in once)])
    return made.as_strided(tensor.shape, tuple(stride))


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of ``tensor`` that has the strides of `kept_stride`."""
    made = tensor.clone()
    if tensor.layout is not torch.strided or tuple(made.stride()) == (stride := kept_stride(tensor)):
        return made
    return laid_out(made, stride)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one dtype have equal bits: -0.0 differs from 0.0, and a NaN can equal a NaN."""
    wide = torch.int64 if a.numel() * a.itemsize % 8 == 0 == (a.data_ptr() | b.data_ptr()) % 8 else torch.uint8
    return torch.equal(a.view(wide), b.view(wide))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a contiguous tensor as 1-D uint8, a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # of one element strides say nothing


def memory_of(data: Tensor) -> memoryview:
    """Return the memory of a 1-D uint8 tensor on the CPU."""
    memory: memoryview = data.numpy().data
    return memory


# -- reading values: on an accelerator the host then waits until the device has finished all enqueued work -------------


def is_launched(device: torch.device) -> bool:
    """Return whether work on ``device`` is launched: a call takes the host as long whatever the size of its tensors."""
    return device.type != "cpu"


def host_readable(device: torch.device) -> bool:
    """Return whether the host can read values on ``device`` without waiting."""
    return device.type == "cpu"


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Return whether the bits of ``a`` and ``b`` differ in any element.

    Both are 1-D and of one floating dtype. The result is 0-dim, bool, on their device; the host does not wait.
    """
    integers = INTEGERS[a.itemsize]
    return (a.view(integers) != b.view(integers)).any()


def read_scalars(scalars: Sequence[Tensor]) -> list[int]:
    """Return the values of 0-dim tensors with a single transfer from the device."""
    if not scalars:
        return []
    row = torch.stack([scalar.to(scalars[0].device) for scalar in scalars])
    found: list[int] = row.tolist()  # host synchronisation: the caller states why
    return found


def all_zero(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether all its elements are zero. All tensors are on one type of device."""
    if not tensors or host_readable(tensors[0].device):
        return [not torch.count_nonzero(tensor) for tensor in tensors]
    return [not found for found in read_scalars([tensor.any() for tensor in tensors])]


_CHUNK = 1 << 16  # elements, whose integers stay in a cache
_FACTORS = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))  # odd, as signed numbers


def digest_of_part(part: Tensor, first: int) -> int:
    """Return a number of 64 bits that depends on each element's bits and place. The sum over the parts of a tensor,
    modulo 2**64, is the same however it is cut.

    ``part``: 1-D, contiguous, of a floating dtype; its elements are ``first``, ``first + 1``, ... of the tensor.
    """
    total = 0
    for begin in range(0, part.numel(), _CHUNK):
        bits = part[begin : begin + _CHUNK].view(INTEGERS[part.itemsize]).to(torch.int64)
        places = torch.arange(first + begin, first + begin + len(bits), device=part.device)
        total += int(_mixed(_mixed(places) ^ bits).sum())  # host synchronisation: ranks compare it
    return total % (1 << 64)


def _mixed(numbers: Tensor) -> Tensor:
    """Return other integers, one for each, in which every bit depends on all bits."""
    for factor in _FACTORS:
        numbers = (numbers ^ (numbers >> 31)) * factor
    return numbers ^ (numbers >> 29)


# -- flags in a `bytearray`: one byte, 0 or 1, for each slot of a bucket; nothing here loops over them in Python -------


def either(one: bytes | bytearray, other: bytes | bytearray) -> bytearray:
    """Return the flags that are set in ``one`` or in ``other``, which are equally long."""
    return _flags(_number(one) | _number(other), len(one))


def without(one: bytes | bytearray, other: bytes | bytearray) -> bytearray:
    """Return the flags that are set in ``one`` and not in ``other``, which are equally long."""
    return _flags(_number(one) & ~_number(other), len(one))


def where(flags: bytes | bytearray) -> list[int]:
    """Return the places of the flags that are set, in order."""
    return list(itertools.compress(range(len(flags)), flags))


def _number(flags: bytes | bytearray) -> int:
    return int.from_bytes(flags, "little")


def _flags(number: int, length: int) -> bytearray:
    return bytearray(number.to_bytes(length, "little"))
