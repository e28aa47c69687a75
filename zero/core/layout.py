"""The geometry: parameters lie in slots, slots in buckets, and each rank owns an interval of each bucket.

    registration order     a  b  c  d  e
    layout (reversed)      e  d  c  b  a           the order in which a backward completes their gradients
    bucket 0               | e ....| d ..| c ....|      each slot starts on a boundary (`slot_bytes`); dots are padding
    cuts, 3 ranks          0         ^         ^      n   at 64-byte multiples, also inside slots; even on accelerators

The cuts of a bucket: which interval of its elements each rank owns.

Which rank owns which parameter, or which block of one, where these have one owner because a class steps them by
their shapes.

Parameters are given out one after the other, the largest first, each to the rank that has the fewest bytes so far. Then
no rank has more than 1/W of the bytes and one largest parameter (Graham, "Bounds on Multiprocessing Timing Anomalies",
1969: when a rank takes its last parameter, no other has less). Among ranks with equal bytes, the one whose parameters
take the least work in a step gets the next.

Blocks lie in their parameters, so within a bucket their owners ascend. First, the rank that owns most of the bucket
owns as little of it as possible: at most 1/W and one largest block. Then each rank takes about as much as is missing to
an equal share of everything, so that one bucket evens out another.

Knows: names, shapes, strides, dtypes, param groups and the number of ranks. Does not know: values of tensors, running
ranks, stages, torch.distributed. Every class is frozen. Numbers count elements, not bytes, unless the name says so.
They are Python integers, so nothing overflows at 2^31.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import torch

from .grain import BY_ELEMENT, CUT_EVERY, Grain


class Cuts(Sequence[int]):
    """The rule of cuts. Rank r owns the elements ``[bound(r), bound(r + 1))``.

    As a sequence, it is the W + 1 bounds, ascending from 0 to the number of elements: the ``bounds`` of a `Collective`.
    """

    world_size: int

    @abstractmethod
    def bound(self, rank: int) -> int:
        """Return the first element of ``rank``, which is 0 to W. That of W is the number of elements."""

    def owned(self, rank: int) -> tuple[int, int]:
        """Return the begin and the end of the elements of ``rank``."""
        return self.bound(rank), self.bound(rank + 1)

    def largest(self) -> int:
        """Return the most elements that one rank owns."""
        return max(self.bound(rank + 1) - self.bound(rank) for rank in range(self.world_size))

    def __len__(self) -> int:
        return self.world_size + 1

    def __iter__(self) -> Iterator[int]:
        return map(self.bound, range(self.world_size + 1))

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        ranks = range(self.world_size + 1)[index]
        return self.bound(ranks) if isinstance(ranks, int) else tuple(map(self.bound, ranks))


@dataclass(frozen=True)
class EvenCuts(Cuts):
    """Nearly equal intervals of ``numel`` elements, at multiples of ``align``. ``numel`` is one."""

    numel: int
    world_size: int
    align: int

    def largest(self) -> int:
        return self.align * -(-(self.numel // self.align) // self.world_size)

    def bound(self, rank: int) -> int:
        return self.align * (self.numel // self.align * rank // self.world_size)


@dataclass(frozen=True)
class OwnerCuts(Cuts):
    """Cuts between whole things that lie in the order of their owners.

    ``owners``: the ranks that own one, ascending. ``begins``: the first element of each of them. The other ranks own
    nothing.
    """

    numel: int
    world_size: int
    owners: tuple[int, ...]
    begins: tuple[int, ...]

    def largest(self) -> int:
        return max(end - begin for begin, end in itertools.pairwise((*self.begins, self.numel)))

    def bound(self, rank: int) -> int:
        place = bisect.bisect_left(self.owners, rank)
        return self.begins[place] if place < len(self.begins) else self.numel


@dataclass(frozen=True)
class BlockCuts(Cuts):
    """Cuts between slots, and within a slot at multiples of `CUT_EVERY` elements from its start.

    The last piece of a slot has at least so many elements, too. ``offsets``, ``sizes``: the first element of each slot,
    ascending from 0, and how many it has.
    """

    numel: int
    world_size: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def bound(self, rank: int) -> int:
        if rank >= self.world_size:
            return self.numel
        even = self.numel * rank // self.world_size
        slot = bisect.bisect_right(self.offsets, even) - 1
        last = max(self.sizes[slot] // CUT_EVERY - 1, 0)
        return self.offsets[slot] + CUT_EVERY * min((even - self.offsets[slot]) // CUT_EVERY, last)


@dataclass(frozen=True)
class PartOfCuts(Cuts):
    """The cuts of the elements ``[begin, end)`` of ``whole``, counted from ``begin``. Each element keeps its owner."""

    whole: Cuts
    begin: int
    end: int

    @property
    def world_size(self) -> int:  # type: ignore[override]
        return self.whole.world_size

    def bound(self, rank: int) -> int:
        return min(max(self.whole.bound(rank), self.begin), self.end) - self.begin


def step_work(shape: Sequence[int]) -> int:
    """Return the multiplications, up to a factor, with which a class steps a matrix: m * m * n, where m <= n.

    So many has a product of a matrix with its transpose, of which Newton-Schulz iterations (Muon) and preconditioners
    (Shampoo) consist. More than two dimensions count as a matrix of the first and the rest; a vector's work is its
    size.
    """
    if len(shape) < 2:
        return math.prod(shape)
    rows = shape[0]
    columns = math.prod(shape[1:])
    return min(rows, columns) * rows * columns


def choose_owners(parameters: Iterable[tuple[int, int, int]], ranks: list[tuple[int, int, int]]) -> dict[int, int]:
    """Return the owner of each parameter.

    Args:
        parameters: of each its number, its bytes and its `step_work`, in the order in which equal ones are given out.
        ranks: a heap with, of each rank, the bytes and the work that it owns so far, and its number; updated.
    """
    owners: dict[int, int] = {}
    for number, nbytes, work in sorted(parameters, key=lambda parameter: -parameter[1]):
        held, done, rank = ranks[0]
        heapq.heapreplace(ranks, (held + nbytes, done + work, rank))
        owners[number] = rank
    return owners


def share_blocks(sizes: Sequence[int], held: list[int]) -> list[int]:
    """Return the owner of each block of a bucket, ascending.

    Args:
        sizes: of the blocks in their order, in bytes, each at least 1.
        held: the bytes that each rank owns so far; updated.
    """
    ends, world_size = list(itertools.accumulate(sizes, initial=0)), len(held)

    def after(block: int, most: int) -> int:  # the first block that a rank does not take if it begins with this one
        return bisect.bisect_right(ends, ends[block] + most) - 1

    def fits(most: int) -> bool:
        block = 0
        for _ in range(world_size):
            block = after(block, most)
        return block == len(sizes)

    least = max(*sizes, -(-ends[-1] // world_size))
    most = least + bisect.bisect_left(range(max(sizes)), True, key=lambda more: fits(least + more))
    needed = [0] * (len(sizes) + 1)  # ranks for a block and those behind it
    for block in reversed(range(len(sizes))):
        needed[block] = 1 + needed[after(block, most)]
    owners, begin, total = list[int](), 0, sum(held) + ends[-1]
    for rank in range(world_size):
        end, left, before = begin, world_size - rank, held[rank] - ends[begin]
        last = after(begin, most)
        while end < last and (needed[end] >= left or left * (2 * (before + ends[end]) + sizes[end]) <= 2 * total):
            end += 1  # other ranks cannot take it, or half of it is missing to an equal share
        total -= held[rank] + ends[end] - ends[begin]
        held[rank] += ends[end] - ends[begin]
        owners += [rank] * (end - begin)
        begin = end
    return owners


ALIGNMENT_BYTES = 64  # a cache line, and a multiple of every vector register: cuts there do not change bits
DEVICE_SLOT_BYTES = 512  # of CUDA's caching allocator


def device_type(device: str) -> str:
    """Return the type of a device that is given as text: "cuda" of "cuda:0"."""
    return device.partition(":")[0]


def is_accelerator(device: str) -> bool:
    """Return whether a device, given as text, is not the CPU."""
    return device_type(device) != "cpu"


def slot_bytes(device: str) -> int:
    """Return the boundary on which slots start, in bytes, so that a parameter is aligned as in a plain loop.

    Kernels may depend on the alignment of an address. Those of the CPU do up to a vector register. On accelerators
    libraries of matrix products choose an algorithm, and so the order of sums, by an alignment of up to 256 bytes
    (`CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES`), and their allocators' tensors lie on `DEVICE_SLOT_BYTES`.
    """
    return DEVICE_SLOT_BYTES if is_accelerator(device) else ALIGNMENT_BYTES


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a bucket.

    Attributes:
        param_dtype: of the parameters in a forward and a backward.
        reduce_dtype: of the contributions to a gradient, which travel between ranks.
        accumulate_dtype: of the sum of the contributions.
        master_dtype: of the weights and states that the owner keeps.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    accumulate_dtype: torch.dtype
    master_dtype: torch.dtype

    @classmethod
    def all(cls, dtype: torch.dtype) -> Dtypes:
        return cls(dtype, dtype, dtype, dtype)

    def itemsize(self, which: str) -> int:
        """Return the bytes of an element in the dtype of this name, for instance "reduce_dtype"."""
        return int(getattr(self, which).itemsize)

    @property
    def widens(self) -> bool:
        """Whether contributions are added up in another dtype than they travel in."""
        return self.accumulate_dtype is not self.reduce_dtype

    @property
    def step_dtype(self) -> torch.dtype:
        """The dtype in which the class steps, which may be wider than what is kept: `rounding.RoundedDtypes`."""
        return self.master_dtype

    @property
    def has_master(self) -> bool:
        """Whether the owner keeps master weights, in another dtype than the model computes in."""
        return self.master_dtype is not self.param_dtype

    @property
    def alignment(self) -> int:
        """The elements between two places where a slot may be cut: `ALIGNMENT_BYTES` of the narrowest dtype."""
        return ALIGNMENT_BYTES // self._narrowest

    def slot_alignment(self, device: str) -> int:
        """Return the elements between two places where a slot may start: `slot_bytes` of the narrowest dtype."""
        return slot_bytes(device) // self._narrowest

    def padded(self, numel: int, device: str) -> int:
        """Return the elements of a slot of ``numel`` elements, with the padding behind it."""
        align = self.slot_alignment(device)
        return -(-numel // align) * align

    @property
    def _narrowest(self) -> int:
        return min(d.itemsize for d in (self.param_dtype, self.reduce_dtype, self.accumulate_dtype, self.master_dtype))


@dataclass(frozen=True)
class ParameterSpec:
    """The description of one parameter, without its values.

    Attributes:
        names: its names in the module, ties included; else the name that the user gave, or none.
        shape, stride: its shape, and its strides in the bucket, which are dense.
        dtypes: the dtypes of its bucket.
        device: its device, as text.
        trainable: whether it requires a gradient.
        group: the number of its param group.
        index: its index in torch.optim's dicts.
        unit: the number of its unit, whose parameters are gathered together; 0 for all if nothing is gathered.
        optimizer_class: the number of the class that steps it.
        offloaded, stepped_on_host: whether ranks keep their shards of it in the host's memory, and step them there.
        grain: where ranks may cut it, and how its class steps a piece.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtypes: Dtypes
    device: str
    trainable: bool
    group: int
    index: int
    unit: int = 0
    optimizer_class: int = 0
    offloaded: bool = False
    grain: Grain = BY_ELEMENT
    stepped_on_host: bool = False

    @property
    def name(self) -> str:
        return self.names[0] if self.names else f"parameter {self.index}"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def master_bytes(self) -> int:
        """The bytes of its elements in the dtype of the master weights."""
        return self.numel * self.dtypes.master_dtype.itemsize

    @property
    def padded(self) -> int:
        """The elements of its slot, with the padding behind it."""
        return self.dtypes.padded(self.numel, self.device)

    def owned_whole(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the first element and the shape of all that has one owner: of the parameter, or of each matrix."""
        shapes = self.grain.owned(self.shape)
        yield from zip(itertools.accumulate(map(math.prod, shapes), initial=0), shapes, strict=False)

    @property
    def step_work(self) -> int:
        """The `step_work` of its shape, or of its matrices; 0 if it is frozen."""
        return sum(map(step_work, self.grain.stack or [self.shape])) if self.trainable else 0

    def line(self) -> str:
        """Return, as text, the facts on which the ranks must agree."""
        described = ",".join(map(str, vars(self.dtypes).values()))
        place = f"{device_type(self.device)} {'trainable' if self.trainable else 'frozen'} group {self.group}"
        place += f" unit {self.unit}{self.grain}"
        place += f" class {self.optimizer_class}" if self.optimizer_class else ""
        return f"{'='.join(self.names) or self.name} {list(self.shape)} stride {list(self.stride)} {described} {place}"


@dataclass(frozen=True)
class Slot:
    """The place of a parameter in its bucket: elements ``[offset, offset + numel)``.

    ``parameter`` is its position in `Layout.parameters`.
    """

    parameter: int
    offset: int
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The part ``[begin, end)`` of a bucket that belongs to one slot, given by its number, and to one rank."""

    slot: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


class Pieces(tuple[Piece, ...]):
    """Pieces of one bucket, in order."""

    @cached_property
    def joined(self) -> list[tuple[int, int]]:
        """The begin and the end of each run of pieces that touch."""
        runs: list[tuple[int, int]] = []
        for piece in self:
            begin = runs.pop()[0] if runs and runs[-1][1] == piece.begin else piece.begin
            runs.append((begin, piece.end))
        return runs


@dataclass(frozen=True)
class BucketSpec:
    """Slots side by side in one flat tensor of ``numel`` elements, padding included.

    ``cuts``: which of these elements each rank owns.

    Raises:
        ValueError: a slot is misplaced or not aligned, or the cuts are not those of ``numel`` elements.
    """

    index: int
    dtypes: Dtypes
    device: str
    slots: tuple[Slot, ...]
    numel: int
    cuts: Cuts
    offloaded: bool = False  # as of its parameters
    stepped_on_host: bool = False  # likewise

    def __post_init__(self) -> None:
        align = self.dtypes.slot_alignment(self.device)
        ends = [0, *(slot.end for slot in self.slots)]
        for slot, end in zip(self.slots, ends, strict=False):
            if slot.offset % align or slot.offset < end or slot.offset - end >= align:
                raise ValueError(f"bucket {self.index}: slot of parameter {slot.parameter} is misplaced")
        if ends[-1] > self.numel or self.numel % align:
            raise ValueError(f"bucket {self.index}: {self.numel} elements do not hold its slots, or are not aligned")
        if (self.cuts.bound(0), self.cuts.bound(self.world_size)) != (0, self.numel):
            raise ValueError(f"bucket {self.index}: {self.cuts} do not cut {self.numel} elements")

    @property
    def world_size(self) -> int:
        return self.cuts.world_size

    @property
    def on_accelerator(self) -> bool:
        return is_accelerator(self.device)

    def owned(self, rank: int) -> tuple[int, int]:
        return self.cuts.owned(rank)

    def owner(self, slot: int) -> int:
        """Return the rank that owns the first element of a slot, given by its number."""
        offset = min(self.slots[slot].offset, self.numel - 1)  # a slot without elements may lie at the end
        return bisect.bisect_right(self.cuts, offset) - 1

    def even_cuts(self, parts: int) -> EvenCuts:
        """Return the cuts of nearly equal, aligned parts."""
        return EvenCuts(self.numel, parts, self.dtypes.alignment)

    def part(self, first: int, last: int) -> BucketSpec:
        """Return the slots from ``first`` to ``last`` (exclusive) as a bucket. Every element keeps its owner."""
        if (first, last) == (0, len(self.slots)):
            return self
        begin = self.slots[first].offset
        end = self.slots[last].offset if last < len(self.slots) else self.numel
        slots = tuple(replace(slot, offset=slot.offset - begin) for slot in self.slots[first:last])
        return replace(self, slots=slots, numel=end - begin, cuts=PartOfCuts(self.cuts, begin, end))

    def pieces(self, begin: int, end: int) -> Pieces:
        """Return the pieces in ``[begin, end)``, in order.

        A slot without elements belongs to the interval that holds its offset. If its offset is the end of the bucket,
        it belongs to the interval that holds the last element.
        """
        found = []
        for number, slot in enumerate(self.slots):
            low, high = max(begin, slot.offset), min(end, slot.end)
            inside = begin <= slot.offset < end or begin < slot.offset == end == self.numel
            if low < high or (slot.numel == 0 and inside):
                found.append(Piece(number, low, max(low, high)))
        return Pieces(found)

    def within(self, piece: Piece) -> slice:
        """Return which elements of its parameter, in the order of memory, a piece has."""
        offset = self.slots[piece.slot].offset
        return slice(piece.begin - offset, piece.end - offset)


@dataclass(frozen=True)
class Layout:
    """The geometry of all listed parameters, which ``parameters`` holds in order of registration.

    Raises:
        ValueError: a parameter has no slot or several, or a slot or a bucket does not fit.
    """

    parameters: tuple[ParameterSpec, ...]
    buckets: tuple[BucketSpec, ...]
    world_size: int

    def __post_init__(self) -> None:
        placed = sorted(slot.parameter for bucket in self.buckets for slot in bucket.slots)
        if placed != list(range(len(self.parameters))):
            raise ValueError("every parameter must have exactly one slot")
        for bucket, _, slot in self.slots():
            if bucket.world_size != self.world_size:
                raise ValueError(f"bucket {bucket.index} is cut for {bucket.world_size} ranks, not {self.world_size}")
            spec = self.parameters[slot.parameter]
            if (slot.numel, bucket.dtypes, bucket.device) != (spec.numel, spec.dtypes, spec.device):
                raise ValueError(f"bucket {bucket.index}: the slot of {spec.name} is not that of its parameter")

    def slots(self) -> Iterator[tuple[BucketSpec, int, Slot]]:
        """Yield (bucket, number of the slot in it, slot), in layout order."""
        for bucket in self.buckets:
            for number, slot in enumerate(bucket.slots):
                yield bucket, number, slot

    @property
    def numel(self) -> int:
        """The number of elements of all parameters (Psi in the paper)."""
        return sum(spec.numel for spec in self.parameters)

    def unit(self, slot: Slot) -> int:
        """Return the unit of a slot's parameter."""
        return self.parameters[slot.parameter].unit

    def members(self, bucket: BucketSpec) -> list[ParameterSpec]:
        """Return the description of each slot's parameter."""
        return [self.parameters[slot.parameter] for slot in bucket.slots]

    def unit_spans(self, bucket: BucketSpec) -> list[tuple[int, int, int]]:
        """Group neighbouring slots of one unit. Returns (unit, first slot, last slot + 1) of each group, in order."""
        numbered = itertools.groupby(range(len(bucket.slots)), lambda number: self.unit(bucket.slots[number]))
        spans = ((unit, list(numbers)) for unit, numbers in numbered)
        return [(unit, numbers[0], numbers[-1] + 1) for unit, numbers in spans]
