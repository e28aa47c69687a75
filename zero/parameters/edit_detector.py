"""A bucket of a unit on one rank, and detection of edits of its parameters.

The other ranks do not have such an edit, so it is an error, never lost.

On the CPU a bucket is compared with its shard when it is released. On an accelerator the comparison is launched then,
and the host reads the results of all before a step, together.

A bucket of a unit on one rank: its parameters by slot, this rank's shard, and what was last seen of their data.

Knows: slots, names, the classes, versions and addresses of parameters, and how to find an edit of gathered memory that
no version counter shows. Does not know: when units are gathered, or how edits of memory that all ranks share are found.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller

import torch
from torch import Tensor

from ..core.bits import host_readable, same_bits
from ..core.layout import BucketSpec, Layout, ParameterSpec
from ..runtime.flat_buffer import Move, usable_later

_VERSION, _DATA_PTR, _DTYPE = attrgetter("_version"), methodcaller("data_ptr"), attrgetter("dtype")


@dataclass(eq=False)
class UnitBuffer:
    """A bucket on this rank, or the part of one that belongs to a unit: its parameters by slot, and this rank's
    shard."""

    bucket: BucketSpec
    layout: Layout
    parameters: list[Tensor]
    shard: Tensor
    updated: bool  # by the optimizer
    released: Sequence[type[Tensor]]  # the parameters' classes while they are released

    def __post_init__(self) -> None:
        self.offsets = [slot.offset for slot in self.bucket.slots]
        specs = self.layout.members(self.bucket)
        self._geometry = [
            (offset, tuple(spec.shape), tuple(spec.stride)) for offset, spec in zip(self.offsets, specs, strict=True)
        ]
        self.bases = [type(parameter) for parameter in self.parameters]
        self._noted: list[tuple[int, int, torch.dtype]] = []  # version, address and dtype of each slot's data
        self.note()

    def name(self, slot: int) -> str:
        return self.spec(slot).name

    def spec(self, slot: int) -> ParameterSpec:
        return self.layout.parameters[self.bucket.slots[slot].parameter]

    def slot_at(self, element: int) -> int:
        """The slot in which an element of the bucket lies."""
        return bisect.bisect_right(self.offsets, element) - 1

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield the view of each parameter in a tensor that holds the whole bucket."""
        begin = flat.storage_offset()
        for offset, shape, stride in self._geometry:
            yield flat.as_strided(shape, stride, begin + offset)

    def commit(self, slots: Sequence[int], flat: Tensor, rank: int) -> None:
        """Copy the values of these slots from a tensor that holds the whole bucket into this rank's shard."""
        self._write(self.shard, slots, flat, rank)

    def _write(self, shard: Tensor, slots: Sequence[int], flat: Tensor, rank: int) -> None:
        low, high = self.bucket.owned(rank)
        for piece in self.bucket.pieces(low, high):
            if piece.slot in slots:
                shard[piece.begin - low : piece.end - low].copy_(flat[piece.begin : piece.end])

    def apply(self, move: Move) -> None:
        """Replace this rank's shard by what ``move`` returns for it."""
        self.shard = move(self.shard)

    # -- a parameter's data: for parameters that have their own classes, or under `as_plain` ---------------------------

    def set_data(self, data: Iterable[Tensor]) -> None:
        """Give each parameter, which must have its own class, its data. This counts as no edit."""
        for parameter, tensor in zip(self.parameters, data, strict=True):
            parameter.data = tensor
        self.note()

    def edited(self) -> list[int]:
        """Return the slots whose parameter's data was edited or replaced since it was noted."""
        now = self._read()
        return [] if now == self._noted else self._differing(now)

    def _read(self) -> list[tuple[int, int, torch.dtype]]:
        """Return version, address and dtype of each slot's data: several times a step, so nothing for each in Python"""
        parameters = self.parameters
        return [*zip(map(_VERSION, parameters), map(_DATA_PTR, parameters), map(_DTYPE, parameters), strict=True)]

    def _differing(self, now: list[tuple[int, int, torch.dtype]]) -> list[int]:
        return [slot for slot, (here, noted) in enumerate(zip(now, self._noted, strict=True)) if here != noted]

    def displaced(self) -> list[int]:
        """Return the slots whose memory was replaced since it was noted."""
        return [slot for slot in self.edited() if not self.owns(slot)]

    def owns(self, slot: int) -> bool:
        """Return False if a parameter's memory is not the one that was noted."""
        parameter = self.parameters[slot]
        return (parameter.data_ptr(), parameter.dtype) == self._noted[slot][1:]

    def note(self) -> None:
        """Note the data of all slots as it is now."""
        self._noted = self._read()

    def note_slot(self, slot: int) -> None:
        """Note the data of a slot as it is now."""
        parameter = self.parameters[slot]
        self._noted[slot] = parameter._version, parameter.data_ptr(), parameter.dtype

    def count_change(self, slots: Sequence[int]) -> None:
        """Raise the versions of these slots, as an edit in place does. This counts as no edit."""
        torch.autograd.graph.increment_version([self.parameters[slot] for slot in slots])
        for slot in slots:
            version, address, dtype = self._noted[slot]
            self._noted[slot] = version + 1, address, dtype

    def set_classes(self, classes: Sequence[type[Tensor]]) -> None:
        """Set the classes of the parameters: ``bases`` or ``released``."""
        for parameter, its_class in zip(self.parameters, classes, strict=True):
            parameter.__class__ = its_class


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
            "forward), which the other ranks cannot see",
            "; where a forward moves it (a codebook), list it in ignored=: each rank then moves its own",
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

    def note(self, problem: str, remedy: str = "") -> None:
        """Record an edit. Only the first one is kept. ``remedy``: a further one."""
        self._found = self._found or f"{problem}: edit it inside gathered(write=True){remedy}"

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
