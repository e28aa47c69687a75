"""The sum in rank order, ((a + b) + c) + ..., which is the sum of a single process that adds in that order.

Knows: tensors. Does not know: where they came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 16  # elements; the running sum of a block stays in the cache while the parts stream through it


def fold(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write ``((parts[0] + parts[1]) + parts[2]) + ...`` to ``out``, each sum rounded to ``out``'s dtype.

    All tensors are 1-D of one length. ``out`` may be one of the parts, or share memory with one exactly; parts[0] of
    ``out``'s dtype is used as scratch.
    """
    first = parts[0]
    if len(parts) == 1:
        if first.data_ptr() != out.data_ptr() or first.dtype != out.dtype:
            out.copy_(first)
        return
    if first.dtype != out.dtype:  # then no part can be out itself
        out.copy_(first)
        first = out
    block = BLOCK if len(parts) > 2 else max(1, out.numel())
    for begin in range(0, out.numel(), block):
        end = min(begin + block, out.numel())
        running = first[begin:end]
        for part in parts[1:-1]:
            running.add_(part[begin:end])
        torch.add(running, parts[-1][begin:end], out=out[begin:end])
