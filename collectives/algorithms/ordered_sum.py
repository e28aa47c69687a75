"""The sum in rank order, ((a + b) + c) + ...: the sum of a single process that adds in that order.

Knows: tensors. Does not know: where they came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import kernels_of

BLOCK = 1 << 16  # elements; the running sum of a block stays in the cache while the parts stream through it
DEVICE_BLOCK = 1 << 26  # on an accelerator without kernels, where a launch costs more than a cache saves


def ordered_sum(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write ``((parts[0] + parts[1]) + parts[2]) + ...`` to ``out``, each sum rounded to ``out``'s dtype.

    All tensors are 1-D of one length; a part of two dimensions stands for its rows. ``out`` may be one of the parts, or
    share exactly its memory. Nothing else is written. A device with kernels adds three parts or more, or two of
    different dtypes, in one launch.
    """
    count = sum(part.shape[0] if part.dim() == 2 else 1 for part in parts)
    in_one_launch = count > 2 or (count == 2 and parts[0].dtype != out.dtype)
    kernels = kernels_of(out.device) if in_one_launch else None
    if kernels is not None and kernels.can_sum(parts, out):
        kernels.ordered_sum(parts, out)
        return
    parts = [row for part in parts for row in (part.unbind() if part.dim() == 2 else (part,))]
    first, size = parts[0], out.numel()
    if count == 1:
        if first.data_ptr() != out.data_ptr() or first.dtype != out.dtype:
            out.copy_(first)
        return
    if not in_one_launch:
        torch.add(first, parts[1], out=out)
        return
    block = BLOCK if out.device.type == "cpu" else DEVICE_BLOCK
    running = torch.empty(min(block, size), dtype=out.dtype, device=out.device)
    if size <= block:
        _sum_block(parts, out, running)
        return
    for begin in range(0, size, block):
        end = min(begin + block, size)
        _sum_block([part[begin:end] for part in parts], out[begin:end], running[: end - begin])


def _sum_block(parts: Sequence[Tensor], out: Tensor, total: Tensor) -> None:
    if parts[0].dtype == out.dtype:
        torch.add(parts[0], parts[1], out=total)
    else:
        total.copy_(parts[0]).add_(parts[1])
    for part in parts[2:-1]:
        total.add_(part)
    if len(parts) > 2:
        torch.add(total, parts[-1], out=out)
    else:
        out.copy_(total)
