"""Chooses the size of buckets, puts parameters into them, and chooses which rank owns what of each.

Knows: the layout's rules, and how large a bucket should be. Does not know: values of tensors, running ranks, stages.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .grain import BY_BLOCK, BY_ELEMENT, WHOLE
from .layout import (
    BlockCuts,
    BucketSpec,
    Cuts,
    EvenCuts,
    Layout,
    OwnerCuts,
    ParameterSpec,
    Slot,
    choose_owners,
    is_accelerator,
    share_blocks,
    step_work,
)

MIB = 1 << 20
DEFAULT_CAP_MB = 25  # as in DistributedDataParallel
MOST_CAP_MB, MOST_CAP_MB_BETWEEN_HOSTS = 512, 256  # of a bucket that is not a unit, on accelerators
BUCKETS_OF_A_MODEL = 12  # there: few enough for the host, enough for reductions to run beside the backward
BUCKETS_OF_ONE_RANK = 4  # there: nothing runs beside the backward, and one bucket is copied while gradients are there
MOST_CAP_MB_OF_ONE_RANK = 2048
MANY_RANKS = 64  # from here on, a ring over 25 MiB spends more on its steps than on bytes, even at 10 us each


def build(
    parameters: Sequence[ParameterSpec],
    world_size: int,
    bucket_bytes: int,
    *,
    first_bytes: int | None = None,
    across_units: bool = False,
) -> Layout:
    """Lay out ``parameters`` (in order of registration) in buckets of at most ``bucket_bytes`` each.

    ``first_bytes``: of the bucket that a backward completes first, if it has another size.

    A bucket is homogeneous in dtypes, device, trainability, what is never cut (`Grain.unit`), class and, without
    ``across_units``, unit. It holds at least one whole parameter, however large. Buckets are in the order in which a
    backward completes them.

    With ``across_units`` units share buckets, as if there were none. The ranks' shards of a unit then differ in length.
    This is for ranks between which no unit travels: they launch fewer reductions. A bucket of whole parameters is of
    one unit even then, since its slots lie in the order of their owners.
    """
    if world_size < 1:
        raise ValueError(f"world size must be at least 1, not {world_size}")
    empty = Layout((), (), world_size)
    return extended(empty, parameters, bucket_bytes, first_bytes=first_bytes, across_units=across_units)


def extended(
    layout: Layout,
    more: Sequence[ParameterSpec],
    bucket_bytes: int,
    *,
    first_bytes: int | None = None,
    across_units: bool = False,
) -> Layout:
    """Return a layout with further parameters in further buckets. No existing slot moves."""
    first_bytes = bucket_bytes if layout.buckets or first_bytes is None else first_bytes
    added = _buckets(layout, more, bucket_bytes, first_bytes, across_units)
    return Layout((*layout.parameters, *more), (*layout.buckets, *added), layout.world_size)


def _buckets(
    layout: Layout, more: Sequence[ParameterSpec], bucket_bytes: int, first_bytes: int, across_units: bool
) -> list[BucketSpec]:
    keys: dict[tuple[object, ...], list[int]] = {}
    used: dict[tuple[object, ...], int] = {}
    complete: list[list[int]] = []
    begun = False  # the bucket that a backward completes first is full
    for position, spec in reversed(list(enumerate(more))):
        unit = spec.unit if spec.grain == WHOLE or not across_units else 0
        key = (spec.dtypes, spec.device, spec.trainable, unit, spec.grain.unit, spec.optimizer_class)
        filling, nbytes = keys.setdefault(key, []), spec.padded * spec.dtypes.param_dtype.itemsize
        if filling and used[key] + nbytes > (first_bytes if spec.trainable and not begun else bucket_bytes):
            complete.append(filling)
            begun = begun or spec.trainable
            filling, used[key] = [], 0
            keys[key] = filling
        filling.append(position)
        used[key] = used.get(key, 0) + nbytes
    complete += [filling for filling in keys.values() if filling]
    complete.sort(key=lambda filling: -filling[-1])
    owners, held = _owners(layout, more)
    return [
        _bucket(layout, [(p, more[p]) for p in filling], len(layout.buckets) + number, owners, held)
        for number, filling in enumerate(complete)
    ]


def loads(layout: Layout) -> dict[int, tuple[int, int]]:
    """Return the bytes and the `step_work` of the parameters and blocks that each rank owns as a whole, by rank."""
    found: dict[int, tuple[int, int]] = {}
    for bucket, _, slot in layout.slots():
        spec = layout.parameters[slot.parameter]
        for begin, shape in spec.owned_whole():
            owner = bisect.bisect_right(bucket.cuts, min(slot.offset + begin, bucket.numel - 1)) - 1
            nbytes, work = found.get(owner, (0, 0))
            size = math.prod(shape) * spec.dtypes.master_dtype.itemsize
            found[owner] = nbytes + size, work + step_work(shape) * spec.trainable
    return found


def _owners(layout: Layout, more: Sequence[ParameterSpec]) -> tuple[dict[int, int], list[int]]:
    """Return the owner of each whole parameter, by its position: trainable ones first, which have states. And the bytes
    that each rank then owns, if there are blocks to be shared, too."""
    owned = loads(layout)
    whole = [(position, spec) for position, spec in reversed(list(enumerate(more))) if spec.grain == WHOLE]
    among_ranks = range(min(layout.world_size, len(owned) + len(whole)))  # all that own any; the first ones begin
    ranks = [(*owned.get(rank, (0, 0)), rank) for rank in among_ranks]
    heapq.heapify(ranks)
    owners: dict[int, int] = {}
    for trainable in (True, False):
        among = [(position, spec) for position, spec in whole if spec.trainable is trainable]
        owners |= choose_owners([(p, spec.master_bytes, spec.step_work) for p, spec in among], ranks)
    if not any(spec.grain.stack for spec in more):
        return owners, []
    held = [owned.get(rank, (0, 0))[0] for rank in range(layout.world_size)]
    for nbytes, _, rank in ranks:
        held[rank] = nbytes
    return owners, held


def _bucket(
    layout: Layout,
    members: Sequence[tuple[int, ParameterSpec]],
    index: int,
    owners: Mapping[int, int],
    held: list[int],
) -> BucketSpec:
    """Return the bucket of ``members``, given by their positions among the further parameters of ``layout``.

    ``owners``: of the whole ones, by position. Their slots lie in this order, and the cuts between them. ``held``: the
    bytes that each rank owns, among which blocks are shared; updated.
    """
    first, world_size = len(layout.parameters), layout.world_size
    members = sorted(members, key=lambda member: owners.get(member[0], 0))
    offsets = list(itertools.accumulate((spec.padded for _, spec in members), initial=0))
    slots = tuple(
        Slot(first + position, offset, spec.numel) for (position, spec), offset in zip(members, offsets, strict=False)
    )
    spec = members[0][1]
    numel = _bucket_numel(offsets[-1], spec, world_size)
    cuts: Cuts
    if spec.grain == BY_BLOCK:
        cuts = BlockCuts(numel, world_size, tuple(offsets[:-1]), tuple(slot.numel for slot in slots))
    elif spec.grain.stack:
        at = [(offset, each) for (_, each), offset in zip(members, offsets, strict=False)]
        cuts = _block_cuts(at, numel, world_size, held)
    elif spec.grain == BY_ELEMENT:
        cuts = EvenCuts(numel, world_size, spec.dtypes.alignment)
    else:
        begins: dict[int, int] = {}  # by owner, ascending
        for (position, _), offset in zip(members, offsets, strict=False):
            begins.setdefault(owners[position], offset)
        cuts = OwnerCuts(numel, world_size, tuple(begins), tuple(begins.values()))
    return BucketSpec(index, spec.dtypes, spec.device, slots, numel, cuts, spec.offloaded, spec.stepped_on_host)


def _block_cuts(
    members: Sequence[tuple[int, ParameterSpec]], numel: int, world_size: int, held: list[int]
) -> OwnerCuts:
    """Return cuts between the blocks of ``members``, given with their offsets in a bucket of ``numel`` elements.

    They lie where a slot might start, so that a block is aligned on its owner as in the parameter. A block that begins
    elsewhere stays with the one before it. ``held``: as of `_bucket`.
    """
    first = members[0][1]
    align, itemsize = first.dtypes.slot_alignment(first.device), first.dtypes.master_dtype.itemsize
    begins = [offset + begin for offset, spec in members for begin, _ in spec.owned_whole()]
    begins = [begin for begin in begins if begin % align == 0]
    sizes = [(end - begin) * itemsize for begin, end in itertools.pairwise((*begins, numel))]
    firsts: dict[int, int] = {}  # by owner, ascending
    for owner, begin in zip(share_blocks(sizes, held), begins, strict=True):
        firsts.setdefault(owner, begin)
    return OwnerCuts(numel, world_size, tuple(firsts), tuple(firsts.values()))


def _bucket_numel(end: int, spec: ParameterSpec, world_size: int) -> int:
    """Return the elements of a bucket whose slots, padding included, end at ``end``. ``spec``: of any of them.

    A bucket whose slots are empty gets padding, so that they have one owner, too. On an accelerator the end is padded
    until all ranks own equally much: collectives then read and write the bucket in place. Slots that have one owner
    each, or are cut between blocks, need no such padding.
    """
    align = spec.dtypes.slot_alignment(spec.device)
    if is_accelerator(spec.device) and not spec.grain.alone:
        align = math.lcm(align, world_size * spec.dtypes.alignment)
    return -(-max(end, 1) // align) * align


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
    world_size: int,
    hosts: int,
    largest_unit: int,
    total: int,
) -> BucketSizes:
    """Return the sizes of buckets for a ``bucket_cap_mb``.

    None is 25 MiB on the CPU. On an accelerator it is chosen from the model, since a bucket costs the host the same
    time, however large it is: a unit that is gathered is one bucket; else buckets have a twelfth of the model, from 25
    to 512 MiB (between hosts 256), and the first one has 25. A single rank has about four, of at most 2048. "auto" is
    the same, and where ranks are many at least the largest unit: a ring takes a step for each rank, however few bytes
    it moves.

    Args:
        cap_mb: as the user gave it.
        device: the type of the parameters' device.
        units_are_gathered: whether units are gathered from other ranks, and so share no buckets.
        ranks: how many share a copy.
        world_size: all ranks of the optimizer.
        hosts: on how many hosts these are.
        largest_unit: bytes of the largest unit.
        total: bytes of all parameters that are trained.
    """
    if cap_mb is not None and cap_mb != "auto":
        most = first = cap_mb
    elif device == "cpu":
        most = first = DEFAULT_CAP_MB
    elif units_are_gathered:
        most = first = unit_cap_mb(largest_unit)
    elif world_size == 1:
        quarter = -(-total // (BUCKETS_OF_ONE_RANK * MIB))
        most = first = max(DEFAULT_CAP_MB, min(MOST_CAP_MB_OF_ONE_RANK, quarter))
    else:
        limit = MOST_CAP_MB if hosts == 1 else MOST_CAP_MB_BETWEEN_HOSTS
        most, first = max(DEFAULT_CAP_MB, min(limit, -(-total // (BUCKETS_OF_A_MODEL * MIB)))), DEFAULT_CAP_MB
    if cap_mb == "auto" and ranks >= MANY_RANKS:
        most = first = max(most, unit_cap_mb(largest_unit))
    return BucketSizes(int(most * MIB), int(first * MIB))
