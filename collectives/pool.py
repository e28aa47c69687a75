"""Scratch memory that returns to a pool when its last holder lets go.

Knows: byte blocks, whether a block is still held (by the reference count of its storage), and how much was held at
most. Does not know: what the bytes mean, ranks, or when a transfer ends. A transfer under way holds its tensor, so the
pool cannot hand out a block too early, even after an exception.

On CUDA a block is free when the work on it is enqueued, not when it is done, as in torch's own allocator. So the next
user of the block must enqueue on the same stream, or on one that was ordered behind it: an optimizer's calls and hooks
order the current stream behind the one before. A block that the pool drops goes back to the stream that allocated it,
which need not be ordered behind anything: the allocator must keep it until the work of the current stream is done.

On an accelerator torch's caching allocator gives memory back in microseconds, so nothing that is free is kept there
(`worth_keeping`), except by an exact pool, whose blocks keep their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from .torch_internals import TESTED_VERSION, storage_use_count

Allocate = Callable[[int, torch.device], UntypedStorage]


@dataclass(eq=False)
class _Block:
    storage: UntypedStorage
    requested: int

    def __post_init__(self) -> None:
        self.device, self.nbytes = self.storage.device, self.storage.nbytes()  # known, they cost no call of torch
        self.number = self.storage._cdata  # as torch counts its holders
        self.is_kept = worth_keeping(self.device)

    @property
    def free(self) -> bool:
        return storage_use_count(self.number) == 1


def _uses(storage: UntypedStorage) -> int:
    return int(storage_use_count(storage._cdata))


def holders(tensor: Tensor) -> int:
    """Return how many others hold a tensor's memory, besides ``tensor`` itself and the pool if it comes from one."""
    return _uses(tensor.untyped_storage()) - 2  # one of the two is the storage object, which the pool shares


def worth_keeping(device: torch.device) -> bool:
    """Return whether free memory of a device is kept for later: not on an accelerator. On the CPU the kernel faults in
    each page of a fresh block."""
    return device.type in ("cpu", "meta")


def _private(nbytes: int, device: torch.device) -> UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def _check_use_counts() -> None:
    """Raise `RuntimeError` if torch counts the holders of a storage in another way than this module expects: the pool
    would hand out a block that is in use, and no error would follow."""
    storage = _private(1, torch.device("cpu"))
    alone = _uses(storage)
    tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (1,), (1,))
    of_tensor = _uses(storage), holders(tensor)
    view = tensor.detach()
    of_both = _uses(storage), holders(tensor)
    del tensor
    of_view = _uses(storage), holders(view)
    del view
    counted = alone, *of_tensor, *of_both, *of_view, _uses(storage)
    expected = 1, *(2, 0), *(3, 1), *(2, 0), 1
    if counted != expected:
        raise RuntimeError(
            f"torch {torch.__version__} counts the holders of a storage as {counted}, not as {expected}: memory in use "
            f"could be handed out again; use torch {TESTED_VERSION}, with which this library is tested"
        )


class Pool:
    """Blocks of scratch memory, reused as soon as only the pool holds their storage.

    A warm block is several times cheaper than a fresh one, whose pages the kernel has to fault in. So the pool keeps as
    many blocks as were ever in use at once, and no more. If a free block is too small, a larger one replaces it. A
    caller that asks for the same sizes again and again soon gets warm blocks only, and k buffers at once never take
    more than k times the largest.
    """

    def __init__(self, *, exact: bool = False, allocate: Allocate = _private) -> None:
        """``exact``: a block serves only requests of its own length, and the pool keeps no more bytes than were ever
        requested at once. ``allocate(nbytes, device)``: makes a block."""
        _check_use_counts()
        self._allocate, self._exact = allocate, exact
        self._blocks: list[_Block] = []
        self._most_requested = 0
        self.peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks, in use or free."""
        return sum(block.nbytes for block in self._blocks)

    def storages(self) -> frozenset[int]:
        """Return the addresses of the blocks."""
        return frozenset(block.storage.data_ptr() for block in self._blocks)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a 1-D tensor of ``numel`` elements with undefined content. Its block is free again when its last
        holder lets go."""
        need = numel * dtype.itemsize
        result = torch.empty(0, dtype=dtype, device=device)
        if need == 0:
            return result
        block = self._same_block(need, device) or self._other_block(need, device)
        block.requested = need
        return result.set_(block.storage, 0, (numel,), (1,))

    def _same_block(self, need: int, device: torch.device) -> _Block | None:
        """Return a free block of just this length; None if there is none."""
        for block in self._blocks:  # the same lengths are asked for again and again
            if block.nbytes == need and block.device == device and (self._exact or block.is_kept) and block.free:
                return block
        return None

    def _other_block(self, need: int, device: torch.device) -> _Block:
        """Return a longer block, or a new one."""
        in_use = sum(block.requested for block in self._blocks if not block.free)
        self._most_requested = max(self._most_requested, in_use + need)
        if not self._exact:
            self.drop_cheap()
            fitting = [block for block in self._blocks if block.nbytes > need and block.device == device and block.free]
            if fitting:
                return min(fitting, key=lambda block: block.nbytes)
        # nothing here, or in a caller, refers to a block that is dropped: old and new would exist at once
        self._make_room(need, device)
        block = _Block(self._allocate(need, device), need)
        self._blocks.append(block)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return block

    def drop_cheap(self) -> None:
        """Drop every free block that is not worth keeping, unless the pool is exact."""
        if not self._exact:
            self._drop([block for block in self._blocks if not block.is_kept and block.free])

    def trim(self) -> None:
        """Drop every free block."""
        self._drop([block for block in self._blocks if block.free])

    def _make_room(self, need: int, device: torch.device) -> None:
        """Drop the free blocks that a new block replaces."""
        free = [block for block in self._blocks if block.device == device and block.free]
        by_size = sorted(free, key=lambda block: block.nbytes)
        if not self._exact:
            self._drop(by_size[-1:])
            return
        for block in by_size:
            if self.held_bytes + need <= self._most_requested:
                return
            self._drop([block])

    def _drop(self, blocks: Sequence[_Block]) -> None:
        """Give the memory of free blocks back to the allocator."""
        for block in blocks:
            self._blocks.remove(block)
            stream = _current_stream(block.device)
            if stream is not None:
                whole = torch.empty(0, dtype=torch.uint8, device=block.device).set_(block.storage)
                whole.record_stream(stream)


def _current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream on which work is enqueued; None on the CPU, which has no streams."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
