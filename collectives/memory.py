"""Scratch memory that comes back by itself.

Knows: byte blocks, who still holds one (by the reference count of its storage), and how much was held at most.
Does not know: what the bytes mean, ranks, or when a transfer ends. A transfer that is still under way holds its
tensor, so a block cannot be handed out again too early, also not after an exception.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

SLACK, SPARE = 1.25, 1.5  # see Pool
Allocate = Callable[[int, torch.device], UntypedStorage]


@dataclass(eq=False)
class _Block:
    storage: UntypedStorage
    asked: int

    @property
    def free(self) -> bool:
        return _uses(self.storage) == 1


def _uses(storage: UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def holders(tensor: Tensor) -> int:
    """How many besides ``tensor`` itself, and the pool where it comes from one, hold its memory."""
    return _uses(tensor.untyped_storage()) - 2  # of which one is the object that is asked here, the pool's own


def _private(nbytes: int, device: torch.device) -> UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


class Pool:
    """Blocks of scratch memory, reused as soon as nobody but the pool holds their storage.

    A warm block is several times cheaper than a fresh one, whose pages the kernel has to fault in.
    """

    def __init__(self, slack: float = SLACK, spare: float = SPARE, allocate: Allocate = _private) -> None:
        """``slack``: a block may be this much larger than what is asked of it; ``spare``: the pool keeps at most this
        times what was ever asked for at once; ``allocate(nbytes, device)``: where blocks come from."""
        self._allocate = allocate
        self._slack, self._spare = slack, spare
        self._blocks: list[_Block] = []
        self._most_asked = 0
        self.peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks, in use or waiting for their next use."""
        return sum(block.storage.nbytes() for block in self._blocks)

    def storages(self) -> frozenset[int]:
        """Addresses of the blocks."""
        return frozenset(block.storage.data_ptr() for block in self._blocks)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D tensor of ``numel`` elements with undefined content; it returns when its last holder lets go."""
        need = numel * dtype.itemsize
        result = torch.empty(0, dtype=dtype, device=device)
        if need == 0:
            return result
        free = [block for block in self._blocks if block.free]
        in_use = sum(block.asked for block in self._blocks) - sum(block.asked for block in free)
        self._most_asked = max(self._most_asked, in_use + need)
        fitting = [b for b in free if need <= b.storage.nbytes() <= self._slack * need and b.storage.device == device]
        if fitting:
            block = min(fitting, key=lambda b: b.storage.nbytes())
            block.asked = need
        else:
            self._drop(free, need)
            block = _Block(self._allocate(need, device), need)
            self._blocks.append(block)
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return result.set_(block.storage, 0, (numel,), (1,))

    def trim(self) -> None:
        """Let go of every block that nobody else holds."""
        self._blocks = [block for block in self._blocks if not block.free]

    def _drop(self, free: list[_Block], need: int) -> None:
        """Make room for ``need`` more bytes: the smallest free blocks go first."""
        for block in sorted(free, key=lambda b: b.storage.nbytes()):
            if self.held_bytes + need <= self._spare * self._most_asked:
                return
            self._blocks.remove(block)
