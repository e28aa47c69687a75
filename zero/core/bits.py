"""Tensors as memory: views of flat storage, and comparisons of bits.

Knows: strides, dtypes, and which look at a value makes the host wait for a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def strided(flat: Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """The view of a parameter's slot in a flat tensor."""
    return flat.as_strided(tuple(shape), tuple(stride), flat.storage_offset() + offset)


def flattened(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """``tensor`` as 1-D in the order of ``stride`` (dense); a copy only where its own strides are others."""
    if tuple(tensor.stride()) != tuple(stride) and tensor.numel() > 1:
        tensor = torch.empty_strided(tensor.shape, tuple(stride), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a dense tensor with this one's shape and order of dimensions."""
    return tuple(torch.empty_like(tensor, device="meta").stride())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True where two tensors of one dtype are equal as bits: -0.0 and NaN count."""
    wide = torch.int64 if a.numel() * a.itemsize % 8 == 0 == (a.data_ptr() | b.data_ptr()) % 8 else torch.uint8
    return torch.equal(a.view(wide), b.view(wide))


# -- looking at values, which on an accelerator holds up the host until the device has done what it was told -----------


def host_readable(device: torch.device) -> bool:
    """True where the host reads a value without waiting for anything."""
    return device.type == "cpu"


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def first_unequal(a: Tensor, b: Tensor) -> Tensor:
    """The first element in which two 1-D tensors of one floating dtype, not empty, differ as bits, or -1: 0-dim, where
    they are. Nobody waits for it here."""
    integers = INTEGERS[a.itemsize]
    different = a.view(integers) != b.view(integers)
    return torch.where(different.any(), different.view(torch.uint8).argmax(), -1)


def read_scalars(scalars: Sequence[Tensor]) -> list[int]:
    """What 0-dim tensors say, all with one look."""
    if not scalars:
        return []
    row = torch.stack([scalar.to(scalars[0].device) for scalar in scalars])
    found: list[int] = row.tolist()  # host synchronisation: whoever calls says why
    return found


def all_zero(tensors: Sequence[Tensor]) -> list[bool]:
    """Of each tensor, all on one kind of device, whether it has no element but zeros."""
    if not tensors or host_readable(tensors[0].device):
        return [not torch.count_nonzero(tensor) for tensor in tensors]
    return [not found for found in read_scalars([tensor.any() for tensor in tensors])]
