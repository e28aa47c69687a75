"""The geometry: parameters lie in slots, slots in buckets, and each rank owns an interval of each bucket.

Knows: names, shapes, strides, dtypes, param groups and the number of ranks. Does not know: values of tensors, running
ranks, stages, torch.distributed. Every class is frozen. Numbers count elements, not bytes, unless the name says so.
They are Python integers, so nothing overflows at 2^31.

    registration order     a  b  c  d  e
    layout (reversed)      e  d  c  b  a           the order in which a backward completes their gradients
    bucket 0               | e ....| d ..| c ....|      each slot starts on a boundary (`slot_bytes`); dots are padding
    cuts, 3 ranks          0         ^         ^      n   at 64-byte multiples, also inside slots; even on accelerators
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from .cuts import Cuts, EvenCuts, PartOfCuts
from .owners import step_work

MIB = 1 << 20
DEFAULT_CAP_MB = 25  # as in DistributedDataParallel
MOST_CAP_MB, MOST_CAP_MB_BETWEEN_HOSTS = 256, 128  # of a bucket that is not a unit, on accelerators
BUCKETS_OF_A_MODEL = 12  # there: few enough for the host, enough for reductions to run beside the backward
MANY_RANKS = 64  # from here on, a ring over 25 MiB spends more on its steps than on bytes, even at 10 us each
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
        dtype: torch.dtype = getattr(self, which)
        return dtype.itemsize

    @property
    def widens(self) -> bool:
        """Whether contributions are added up in another dtype than they travel in."""
        return self.accumulate_dtype is not self.reduce_dtype

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
        one_owner: whether one rank owns all of it, since the optimizer's class steps it by its shape.
        optimizer_class: the number of the class that steps it.
        offloaded, stepped_on_host: whether ranks keep their shards of it in the host's memory, and step them there.
        blocks: whether it is cut between blocks of elements alone, and each rank's piece is stepped by itself.
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
    one_owner: bool = False
    optimizer_class: int = 0
    offloaded: bool = False
    blocks: bool = False
    stepped_on_host: bool = False

    @property
    def alone(self) -> bool:
        """Whether no run has elements of this parameter and of another one."""
        return self.one_owner or self.blocks

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

    @property
    def step_work(self) -> int:
        """The `step_work` of its shape; 0 if it is frozen."""
        return step_work(self.shape) if self.trainable else 0

    def line(self) -> str:
        """Return, as text, the facts on which the ranks must agree."""
        described = ",".join(map(str, vars(self.dtypes).values()))
        state = "trainable" if self.trainable else "frozen"
        names = "=".join(self.names) or self.name
        device = self.device.split(":")[0]
        place = f"group {self.group} unit {self.unit}{' whole' if self.one_owner else ' blocks' * self.blocks}"
        place += f" class {self.optimizer_class}" if self.optimizer_class else ""
        return f"{names} {list(self.shape)} stride {list(self.stride)} {described} {device} {state} {place}"


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

    def pieces(self, begin: int, end: int) -> tuple[Piece, ...]:
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
        return tuple(found)


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

    def loads(self) -> dict[int, tuple[int, int]]:
        """Return the bytes and the `step_work` of the parameters that each rank owns as a whole, by rank."""
        found: dict[int, tuple[int, int]] = {}
        for bucket, number, slot in self.slots():
            spec = self.parameters[slot.parameter]
            if spec.one_owner:
                owner = bucket.owner(number)
                nbytes, work = found.get(owner, (0, 0))
                found[owner] = nbytes + spec.master_bytes, work + spec.step_work
        return found


def unit_cap_mb(largest_unit: int) -> int:
    """Return the MiB of buckets of which one holds any unit: at least 25. ``largest_unit``: bytes."""
    return max(-(-largest_unit // MIB), DEFAULT_CAP_MB)


@dataclass(frozen=True)
class BucketSizes:
    """The most bytes of a bucket, in the dtype of the parameters. ``first``: of the bucket that a backward completes
    first, whose reduction should begin early."""

    most: int
    first: int

    def __str__(self) -> str:
        return f"{self.most} bytes" if self.first == self.most else f"{self.most} bytes, the first {self.first}"


def bucket_sizes(
    cap_mb: float | Literal["auto"] | None,
    device: str,
    *,
    units_are_gathered: bool,
    ranks: int,
    hosts: int,
    largest_unit: int,
    total: int,
) -> BucketSizes:
    """Return the sizes of buckets for a ``bucket_cap_mb``.

    None is 25 MiB on the CPU. On an accelerator it is chosen from the model, since a bucket costs the host the same
    time, however large it is: a unit that is gathered is one bucket; else buckets have a twelfth of the model, from 25
    to 256 MiB (between hosts 128), and the first one has 25. "auto" is the same, and where ranks are many at least the
    largest unit: a ring takes a step for each rank, however few bytes it moves.

    Args:
        cap_mb: as the user gave it.
        device: the type of the parameters' device.
        units_are_gathered: whether units are gathered from other ranks, and so share no buckets.
        ranks: how many share a copy.
        hosts: on how many hosts the optimizer's ranks are.
        largest_unit: bytes of the largest unit.
        total: bytes of all parameters that are trained.
    """
    if cap_mb is not None and cap_mb != "auto":
        most = first = cap_mb
    elif device == "cpu":
        most = first = DEFAULT_CAP_MB
    elif units_are_gathered:
        most = first = unit_cap_mb(largest_unit)
    else:
        limit = MOST_CAP_MB if hosts == 1 else MOST_CAP_MB_BETWEEN_HOSTS
        most, first = max(DEFAULT_CAP_MB, min(limit, -(-total // (BUCKETS_OF_A_MODEL * MIB)))), DEFAULT_CAP_MB
    if cap_mb == "auto" and ranks >= MANY_RANKS:
        most = first = max(most, unit_cap_mb(largest_unit))
    return BucketSizes(int(most * MIB), int(first * MIB))
