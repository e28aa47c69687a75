"""Detection of edits of a unit's parameters. The other ranks do not have such an edit, so it is an error, never lost.

On the CPU a bucket is compared with its shard when it is released. On an accelerator the comparison is launched then,
and the host reads the results of all before a step, together.

Knows: an error's text, and how to find an edit of gathered memory that no version counter shows. Does not know: when
units are gathered, or how edits of memory that all ranks share are found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.bits import host_readable, same_bits
from .unit_buffer import UnitBuffer, usable_later

MOST_UNREAD = 4096  # comparisons that were launched and whose results the host has not read


class EditDetector:
    """Collects the edits of one rank until `take` returns the first of them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._found: str | None = None  # the first edit, as an error's text
        self.lasting: str | None = None  # an error that cannot be undone; reported at every agreement
        self._comparisons: _Comparisons | None = None

    def take(self, *, waits: bool = True) -> str | None:
        """Return the first edit since the last call, as an error's text, or None. ``waits``: for devices; without it an
        edit there may be found by a later call."""
        if waits:
            self._read()
        problem, self._found = self._found, None
        return problem

    def forget_memory(self) -> None:
        """Free the memory of comparisons, all of which `take` has read."""
        self._comparisons = None

    def _read(self) -> None:
        for buffer, element in self._comparisons.read() if self._comparisons else ():
            low, _ = buffer.bucket.owned(self._rank)
            self.note_slot(buffer, buffer.slot_at(low + element))

    def note_slot(self, buffer: UnitBuffer, slot: int) -> None:
        """Record that the parameter of a slot was edited or cast while it was installed."""
        now = buffer.parameters[slot].dtype
        if now is not buffer.bucket.dtypes.param_dtype:
            self._found = self._found or (
                f"{buffer.name(slot)!r} was cast to {now} while its unit was gathered, which was undone: cast the "
                "model before the optimizer is built"
            )
            return
        self.note(
            f"{buffer.name(slot)!r} was edited while its unit was gathered (as an Embedding with max_norm does in its "
            "forward), which the other ranks cannot see"
        )

    def note_released(self, buffer: UnitBuffer, slot: int) -> None:
        """Record that the parameter of a slot was edited, or swapped for another tensor, while it was released."""
        if type(buffer.parameters[slot]) is not buffer.released[slot]:
            self.note_lasting(f"{buffer.name(slot)!r} was swapped for another tensor")
        else:
            self.note(f"{buffer.name(slot)!r} was edited while it was released")

    def note_lasting(self, problem: str) -> None:
        """Record what cannot be undone."""
        self.lasting = f"{problem}: build a new model and optimizer"

    def note(self, problem: str) -> None:
        """Record an edit. Only the first one is kept."""
        self._found = self._found or f"{problem}: edit it inside gathered(write=True)"

    def compare(self, buffer: UnitBuffer, whole: Tensor) -> None:
        """Compare this rank's part of an unsharded buffer with its shard, which no edit has reached."""
        low, high = buffer.bucket.owned(self._rank)
        if not host_readable(buffer.shard.device):
            self._launch(buffer, whole[low:high])
            return
        if same_bits(whole[low:high], buffer.shard):
            return
        for piece in buffer.bucket.pieces(low, high):
            kept = buffer.shard[piece.begin - low : piece.end - low]
            if not same_bits(whole[piece.begin : piece.end], kept):
                self.note_slot(buffer, piece.slot)

    def _launch(self, buffer: UnitBuffer, copy: Tensor) -> None:
        """Launch the comparison on a device, where the host would have to wait for the result."""
        if not copy.numel():
            return
        if self._comparisons is None:
            self._comparisons = _Comparisons(copy.device)
        elif self._comparisons.full:
            self._read()
        self._comparisons.launch(buffer, copy)


class _Comparisons:
    """Comparisons of buckets with their shards on one device, in two launches each.

    Elements are compared as 64-bit integers, of which a shard has a whole number. So NaNs count, too. The result is the
    index of the first byte of ``unequal`` that is 1. The last byte always is.

        unequal   | of larger shards | 0 0 0 0 1 0 ... 0 | 1 |
                                     0                   n       n integers of this shard; n: none is unequal
    """

    def __init__(self, device: torch.device) -> None:
        with usable_later():
            self._results = torch.empty(MOST_UNREAD, dtype=torch.int64, device=device)
            self._unequal = torch.ones(1, dtype=torch.uint8, device=device)
        self._flags: dict[int, tuple[Tensor, Tensor]] = {}  # by n: the last n + 1 bytes, and n of them as booleans
        self._compared: list[tuple[UnitBuffer, int]] = []  # and the result if nothing was edited
        self._outgrown: list[Tensor] = []  # may be in use, on any stream, until results are read

    @property
    def full(self) -> bool:
        return len(self._compared) == MOST_UNREAD

    def launch(self, buffer: UnitBuffer, copy: Tensor) -> None:
        """Launch the comparison of ``copy`` with the shard of ``buffer``, both of at least one element."""
        copied, kept = copy.view(torch.int64), buffer.shard.view(torch.int64)
        count = copied.numel()
        flags = self._flags.get(count)
        if flags is None:
            flags = self._flags[count] = self._flags_of(count)
        unequal, differ = flags
        torch.ne(copied, kept, out=differ)
        torch.argmax(unequal, dim=0, out=self._results[len(self._compared)])
        self._compared.append((buffer, count))

    def _flags_of(self, count: int) -> tuple[Tensor, Tensor]:
        with usable_later():
            if self._unequal.numel() <= count:
                self._outgrown.append(self._unequal)
                self._unequal = torch.ones(count + 1, dtype=torch.uint8, device=self._unequal.device)
                self._flags.clear()
            unequal = self._unequal[-count - 1 :]
            return unequal, unequal[:-1].view(torch.bool)

    def read(self) -> list[tuple[UnitBuffer, int]]:
        """Return the buffers that were edited, with the index of an edited element of the shard each."""
        if not self._compared:
            return []
        # host synchronisation: one before a step, for all units, and one behind `MOST_UNREAD` releases without a step
        results: list[int] = self._results[: len(self._compared)].tolist()
        found = [
            (buffer, result * 8 // buffer.shard.itemsize)
            for (buffer, count), result in zip(self._compared, results, strict=True)
            if result < count
        ]
        self._compared, self._outgrown = [], []
        return found
