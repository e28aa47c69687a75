"""Puts parameters into buckets, and chooses which rank owns what of each.

Knows: the layout's rules. Does not know: values of tensors, running ranks, stages.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

from .cuts import BlockCuts, Cuts, EvenCuts, OwnerCuts
from .layout import BucketSpec, Layout, ParameterSpec, Slot, is_accelerator
from .owners import choose_owners


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

    A bucket is homogeneous in dtypes, device, trainability, partition (`ParameterSpec.one_owner`, `blocks`), class and,
    without ``across_units``, unit. It holds at least one whole parameter, however large. Buckets are in the order in
    which a backward completes them.

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
        unit = spec.unit if spec.one_owner or not across_units else 0
        key = (spec.dtypes, spec.device, spec.trainable, unit, spec.one_owner, spec.blocks, spec.optimizer_class)
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
    owners = _owners(layout, more)
    return [
        _bucket(layout, [(p, more[p]) for p in filling], len(layout.buckets) + number, owners)
        for number, filling in enumerate(complete)
    ]


def _owners(layout: Layout, more: Sequence[ParameterSpec]) -> dict[int, int]:
    """Return the owner of each whole parameter, by its position: trainable ones first, which have states."""
    loads = layout.loads()
    whole = [(position, spec) for position, spec in reversed(list(enumerate(more))) if spec.one_owner]
    among_ranks = range(min(layout.world_size, len(loads) + len(whole)))  # all that own any; the first ones begin
    ranks = [(*loads.get(rank, (0, 0)), rank) for rank in among_ranks]
    heapq.heapify(ranks)
    owners: dict[int, int] = {}
    for trainable in (True, False):
        among = [(position, spec) for position, spec in whole if spec.trainable is trainable]
        owners |= choose_owners([(p, spec.master_bytes, spec.step_work) for p, spec in among], ranks)
    return owners


def _bucket(
    layout: Layout, members: Sequence[tuple[int, ParameterSpec]], index: int, owners: Mapping[int, int]
) -> BucketSpec:
    """Return the bucket of ``members``, given by their positions among the further parameters of ``layout``.

    ``owners``: of the whole ones, by position. Their slots lie in this order, and the cuts between them.
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
    if spec.blocks:
        cuts = BlockCuts(numel, world_size, tuple(offsets[:-1]), tuple(slot.numel for slot in slots))
    elif not spec.one_owner:
        cuts = EvenCuts(numel, world_size, spec.dtypes.alignment)
    else:
        begins: dict[int, int] = {}  # by owner, ascending
        for (position, _), offset in zip(members, offsets, strict=False):
            begins.setdefault(owners[position], offset)
        cuts = OwnerCuts(numel, world_size, tuple(begins), tuple(begins.values()))
    return BucketSpec(index, spec.dtypes, spec.device, slots, numel, cuts, spec.offloaded, spec.stepped_on_host)


def _bucket_numel(end: int, spec: ParameterSpec, world_size: int) -> int:
    """Return the elements of a bucket whose slots, padding included, end at ``end``. ``spec``: of any of them.

    A bucket whose slots are empty gets padding, so that they have one owner, too. On an accelerator the end is padded
    until all ranks own equally much: collectives then read and write the bucket in place. Slots that have one owner
    each, or are cut between blocks, need no such padding.
    """
    align = spec.dtypes.slot_alignment(spec.device)
    if is_accelerator(spec.device) and not spec.alone:
        align = math.lcm(align, world_size * spec.dtypes.alignment)
    return -(-max(end, 1) // align) * align
