"""The memory of the parameters if a rank holds shards: the same interface as `storage`, with parameters in units.

Knows: which parameters lie in which unit, and which of them the optimizer updates. Every parameter of the module that
can lie in buckets is sharded: the listed ones in the layout's buckets, the others in buckets of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from collectives import Choice, Collective, Kind, Region, Tag, Transport

from ..consistency import broadcast, fingerprint
from ..core.bits import where
from ..core.buckets import BucketSizes, build
from ..core.layout import BucketSpec, Layout, ParameterSpec, is_accelerator
from ..core.parameter_specs import (
    Named,
    bindings,
    check_memory,
    check_memory_apart,
    give_own_counters,
    misplaced,
    replaced,
    specs,
)
from ..core.stage import Placement, keeps_masters_alone, units_share_buckets
from ..core.units import Ignored, Predicate, UnitSchedule, find_units, kept_units
from ..precision import Precisions
from ..runtime.backward_tracker import BackwardTracker
from ..runtime.bucket import StoredBucket
from ..runtime.flat_buffer import FlatBuffer
from ..runtime.flat_states import RoundedShard
from ..runtime.joining import Joining, UnitOrder
from ..runtime.offload import OffloadBackend
from ..runtime.streams import Streams
from .gathered.units import GatheredBuffer
from .materialize import Materializer, is_meta
from .released import weakly
from .resident_units import ResidentBuffer, SharedBucketMemory
from .storage import Keep, ParameterStorage
from .unit_hooks import UnitHooks
from .unit_manager import Buffer, UnitManager


@dataclass(frozen=True)
class _Request:
    """A bucket to fill, of a layout of ``parameters``. ``keep``: None if the optimizer does not update it."""

    spec: BucketSpec
    layout: Layout
    parameters: list[Tensor]  # of the bucket
    keep: Keep | None


class ShardedStorage(ParameterStorage):
    """Parameters in units, of which each rank holds its shards: the weights of its buckets are shards."""

    manager: UnitManager
    unit_hooks: UnitHooks

    def __init__(
        self,
        transport: Transport,
        shard_group: Transport,
        module: nn.Module,
        collective: Collective,
        predicate: Predicate | None,
        bucket_sizes: BucketSizes,
        precisions: Precisions,
        post_forward_group: Choice | None,
        resharded: Predicate | bool,
        prefetch_depth: int,
        materializer: Materializer | None,
        offload_backend: OffloadBackend | None,
        streams: Streams,
        backwards: BackwardTracker,
        joining: Joining,
        unit_order: UnitOrder,
        ignored: Ignored,
    ) -> None:
        """``post_forward_group``: the ranks, of those that share a copy, that share the shards kept for a backward;
        None: all of them; ``resharded``: which units are resharded after a forward; ``prefetch_depth``: how many are
        gathered ahead. ``materializer``: of tensors on the meta device; ``offload_backend``: the memory of the shards,
        if they are offloaded; ``unit_order``: of the units that this rank uses beside its training."""
        super().__init__(transport, shard_group, module, precisions, materializer, ignored)
        self._offload_backend = offload_backend
        self._root, self._bucket_sizes, self._streams, self._joining = module, bucket_sizes, streams, joining
        there = (parameter.device for parameter in module.parameters() if parameter not in ignored)
        self._on_host = not any(is_accelerator(str(self.meta_device or device)) for device in there)
        self._units = find_units(module, predicate, ignored)
        self._registered = {id(parameter): number for number, parameter in enumerate(module.parameters())}
        self.manager = UnitManager(
            shard_group,
            collective,
            self._units.names,
            post_forward_group,
            weakly(self._needed_in_backward),
            joining,
        )
        schedule = UnitSchedule(self._units.around, kept_units(self._units, resharded), prefetch_depth)
        self.unit_hooks = UnitHooks(self._units, self.manager, streams, backwards, unit_order, schedule)
        self._unlisted: Sequence[StoredBucket] | None = None  # None: these parameters are plain
        self._updated: list[tuple[int, int, Buffer]] = []  # of each buffer: its bucket, and its first slot there

    # -- construction ---------------------------------------------------------------------------------------------

    def units(self) -> dict[int, int]:
        return self._units.numbers()

    @property
    def buckets_cross_units(self) -> bool:
        in_common = self._on_host and self._shard_group.has_common
        return self._offload_backend is None and units_share_buckets(self._shard_group.world_size, in_common=in_common)

    def lines(self) -> list[str]:
        units = zip(self._units.names, self._units.parameters, strict=True)
        described = [f"unit {name}: {[(list(p.shape), str(p.dtype)) for p in members]}" for name, members in units]
        kept = [f"unit {self._units.names[number]} is kept" for number in sorted(self.unit_hooks.schedule.kept)]
        return [*described, *kept, *super().lines()]

    def prepare(self, parameters: Sequence[Named]) -> list[str]:
        rest, described = self._describe_unlisted([*self.parameters, *(parameter for _, parameter in parameters)])
        for name, parameter in self.replicas():
            check_memory(parameter, name, may_be_meta=True)
        unlisted = [(spec.name, parameter) for spec, parameter in zip(described, rest, strict=True)]
        found = check_memory_apart(parameters, unlisted, self._known())
        if self._shard_group.world_size > 1 or self._offload_backend is not None:  # else edits are kept
            give_own_counters([*parameters, *unlisted], self._known())
        return found

    def materialize(self) -> None:
        """Nothing yet: a bucket's tensors get memory just before it is filled, and all others at the end."""

    def _begin(self) -> None:
        """Parameters that were not listed so far become plain, whole ones, until `_end`."""
        self._make_plain([buffer for buffer in self.manager.buffers() if not buffer.updated])
        self._unlisted = None

    def _fill(self, layout: Layout, keep: Keep) -> Sequence[StoredBucket]:
        new = _requests(layout, self.parameters, keep, len(self.buckets))
        stored = self._fill_all([*new, *self._lay_out_unlisted()])
        self._unlisted = stored[len(new) :]
        return stored[: len(new)]

    def _end(self, *, failed: bool) -> None:
        super().materialize()
        self._bindings = bindings(self._module, self.ignored)
        if self._unlisted is None:  # nothing was adopted after all
            self._unlisted = self._fill_all(self._lay_out_unlisted())
        self._cast_others()
        self.manager.resident.announce()
        self._copy(self.replicas())
        if not self.unit_hooks.watching:
            self.unit_hooks.watch()
            self._copy(self.buffers())

    def replicas(self) -> list[tuple[str, Tensor]]:
        numbers = self.units()  # a parameter that was laid out stays so when it is frozen
        return [entry for entry in self._others() if id(entry[1]) not in numbers]

    def _describe_unlisted(self, listed: Sequence[Tensor]) -> tuple[list[Tensor], list[ParameterSpec]]:
        known = {id(parameter) for parameter in listed}
        rest = [p for members in self._units.parameters for p in members if id(p) not in known]
        dtypes, meta = self._precisions.unlisted, self.meta_device
        found, described = specs([{"params": rest}], self._module, units=self.units(), dtypes=dtypes, meta=meta)
        return found, [replace(spec, offloaded=self._offload_backend is not None) for spec in described]

    def _lay_out_unlisted(self) -> list[_Request]:
        """Lay out the parameters that are not listed."""
        parameters, described = self._describe_unlisted(self.parameters)
        most, across = self._bucket_sizes.most, self.buckets_cross_units
        self.unlisted_layout = build(described, self._shard_group.world_size, most, across_units=across)
        return _requests(self.unlisted_layout, parameters, None)

    def _fill_all(self, requests: Sequence[_Request]) -> list[StoredBucket]:
        """Fill buckets with rank 0's values, of which this rank keeps its shards. Collective."""
        specs = [request.spec for request in requests]
        on_host = not any(spec.on_accelerator for spec in specs)
        sizes = [spec.numel * spec.dtypes.param_dtype.itemsize for spec in specs]
        shared = on_host and self._shard_group.world_size > 1 and self._offload_backend is None
        self._reserve(requests)
        regions = self._agreed(self._shard_group.common(sizes) if shared else None)
        stored: dict[int, StoredBucket] = {}
        for number in self._in_registration_order(requests):
            stored[number] = self._fill_one(requests[number], None if regions is None else regions[number])
        return [stored[number] for number in range(len(requests))]

    def _reserve(self, requests: Sequence[_Request]) -> None:
        """Reserve the host's memory for this rank's shards, if they are offloaded."""
        wanted = []
        for request in requests if self._offload_backend is not None else ():
            low, high = request.spec.owned(self._shard_group.rank)
            trainable = request.keep is not None and request.layout.members(request.spec)[0].trainable
            alone, dtypes = keeps_masters_alone(request.spec, trainable=trainable), request.spec.dtypes
            wanted.append((high - low, dtypes.master_dtype if alone else dtypes.param_dtype))
        if self._offload_backend is not None:
            self._offload_backend.reserve(wanted)

    def _kept(self, shard: Tensor) -> Tensor:
        """Return a copy of a shard where this rank keeps it."""
        if self._offload_backend is None:
            return shard.clone()
        return self._offload_backend.empty(shard.numel(), shard.dtype).copy_(shard)

    def _fill_one(self, request: _Request, region: Region | None) -> StoredBucket:
        """Fill a bucket with rank 0's values, in ``region`` if all ranks share its memory. Collective."""
        spec, layout, updated = request.spec, request.layout, request.keep is not None
        specs = layout.members(spec)
        low, high = spec.owned(self._shard_group.rank)
        keep, masters = request.keep, list[Tensor]()  # master weights of this rank's shard, if it keeps them alone
        if updated and keeps_masters_alone(spec, trainable=specs[0].trainable):
            keep = partial(_take, masters, low, high, self._kept)
        whole = self._values(spec, specs, request.parameters, keep)
        common = None if region is None else SharedBucketMemory(region, whole.dtype)
        flat = whole
        if common is not None:
            flat = common.own(low, high).copy_(whole[low:high])
        elif self._offload_backend is not None and not masters:
            flat = self._kept(whole[low:high])
        elif self._shard_group.world_size > 1:
            flat = self._shard_group.empty(high - low, whole.dtype, torch.device(spec.device)).copy_(whole[low:high])
        rounded = RoundedShard(masters[0], whole.dtype, low) if masters else None
        weights = rounded or FlatBuffer(flat, Placement.SHARD, low)
        for unit, first, last in layout.unit_spans(spec):
            part, begin = spec.part(first, last), spec.slots[first].offset
            here, there = (bound + begin - low for bound in part.owned(self._shard_group.rank))
            shard = flat[here:there] if there > here else flat[:0]
            members = request.parameters[first:last]
            known = part, layout, members, shard, updated, self.manager.released_classes(members)
            buffer: Buffer
            if common is not None or (self._shard_group.world_size == 1 and not spec.offloaded):
                buffer = ResidentBuffer(*known, common, begin)
            else:
                increment_version(members)  # so that a graph from before raises: it would read what is left of them
                buffer = GatheredBuffer(*known, rounded or (weights if spec.offloaded else None))
            self.manager.add_buffer(unit, buffer)
            if updated:
                self._updated.append((spec.index, first, buffer))
        return StoredBucket(spec, specs, request.parameters, weights)

    def _agreed(self, regions: Sequence[Region] | None) -> Sequence[Region] | None:
        """Return None on all ranks if any rank lacks shared memory: replicas must issue the same collectives.
        Collective."""
        if self._transport is self._shard_group:
            return regions
        problems = self._transport.exchange(b"" if regions else b"none", Tag(Kind.EXCHANGE, "memory in common"))
        return None if any(problems) else regions

    def _in_registration_order(self, requests: Sequence[_Request]) -> Iterator[int]:
        """Places in ``requests`` in an order that is equal on all ranks, also if some tensors have no values yet.

        It is the order of each bucket's last registered parameter. Only as many meta tensors are materialized at a time
        as a bucket needs.
        """
        steps = iter(()) if self._materializer is None else self._materializer.steps()
        order = sorted((self._last_of(request.parameters), place) for place, request in enumerate(requests))
        for _, place in order:
            while any(map(is_meta, requests[place].parameters)):
                next(steps)
            yield place

    def _last_of(self, parameters: Sequence[Tensor]) -> int:
        """The number of the parameter, of these of one bucket, that the module registered last."""
        return max(self._registered[id(parameter)] for parameter in parameters)

    def _make_plain(self, buffers: Sequence[Buffer]) -> None:
        """Make the parameters of these buffers plain ones, with memory of their own. Collective."""
        self.manager.resident.find_edits()  # before edited values become the parameters' own
        for number, unit in enumerate(self.manager.units):
            leaving = [buffer for buffer in unit.buffers if buffer in buffers]
            if leaving:
                self.manager.install(number)
                for buffer in leaving:
                    self.manager.remove_buffer(number, buffer)
                self.manager.reshard(number)

    # -- access to parameters -------------------------------------------------------------------------------------

    def fingerprints(self) -> list[tuple[str, bytes]]:
        found: dict[str, bytes] = {}
        for number in range(len(self.manager.units)):
            with self.manager.unsharded([number]):
                for buffer in self.manager.units[number].buffers:
                    if buffer.updated:
                        for slot, parameter in enumerate(buffer.parameters):
                            found[buffer.name(slot)] = fingerprint(parameter)
        for parameter, spec in self.replicated.items():
            found[spec.name] = fingerprint(parameter)
        return [(spec.name, found[spec.name]) for spec in self.listed()]

    def diagnose(self, *, waits: bool = True) -> str | None:
        return self.manager.diagnose(waits=waits) or misplaced(self._bindings)

    def common_memory(self) -> str:
        if self._shard_group.world_size == 1:
            return "no (one rank holds the whole copy)"
        if not self.manager.any_gathered:
            return "yes (the ranks that share a copy are on one host)"
        if not self._on_host:
            return "no (the parameters are on a device)"
        if not self._shard_group.has_common:
            return "no (the ranks that share a copy do not all share a host's memory)"
        return "no (there is not enough of it)"

    # -- units ----------------------------------------------------------------------------------------------------

    def gather(self, unit: int) -> None:
        self.manager.unshard(unit)
        self.manager.reshard(unit)

    def _needed_in_backward(self, unit: int) -> None:
        self.unit_hooks.needed_again(unit)

    # -- from outside ---------------------------------------------------------------------------------------------

    def _numbers(self, parameters: Sequence[Tensor] | None) -> list[int]:
        if parameters is None:
            return list(range(len(self.manager.units)))
        numbers = self.units()
        others = [parameter for parameter in parameters if id(parameter) not in numbers]
        replicas = {id(parameter) for _, parameter in self.replicas()} if others else set()
        for parameter in others:
            if id(parameter) not in replicas:
                self.index(parameter)
        return sorted({numbers[id(parameter)] for parameter in parameters if id(parameter) in numbers})

    def gathered(self, parameters: Sequence[Tensor] | None) -> AbstractContextManager[None]:
        return self._gathered(self._numbers(parameters))

    @contextmanager
    def _gathered(self, numbers: Sequence[int]) -> Iterator[None]:
        self.unit_hooks.note_order(numbers)
        if self._joining.gathers_are_broadcast:
            self.manager.reshard_all()  # what a forward left for its backward: ranks without batches have nothing of it
        with self.unit_hooks.saving(), self.manager.unsharded(numbers), self._streams.block():
            yield

    def views(self, parameters: Sequence[Tensor] | None) -> Iterator[tuple[Tensor, Tensor]]:
        for number in self._numbers(parameters):
            for buffer in self.manager.units[number].buffers:
                assert buffer.unsharded is not None
                yield from zip(buffer.parameters, buffer.views(buffer.unsharded), strict=True)

    def overwrite(self, parameters: Sequence[Tensor] | None) -> None:
        chosen = None if parameters is None else {id(parameter) for parameter in parameters}
        slots = {
            buffer: [n for n, p in enumerate(buffer.parameters) if chosen is None or id(p) in chosen]
            for number in self._numbers(parameters)
            for buffer in self.manager.units[number].buffers
        }
        for buffer, written in slots.items():
            self.manager.changed(buffer, written)  # before any rank's first write
        for buffer, written in slots.items():
            assert buffer.unsharded is not None
            flats = [buffer.unsharded[buffer.bucket.slots[n].offset : buffer.bucket.slots[n].end] for n in written]
            broadcast(self._transport, flats)
            self.manager.commit(buffer, written)
        self.manager.resident.announce()
        replicas = self._chosen(self.replicas(), parameters)
        self._copy(replicas)
        self._compare(replicas)

    def stepping(self) -> None:
        for number, first, buffer in self._updated:
            used = self.buckets[number].used[first : first + len(buffer.parameters)]
            self.manager.changed(buffer, where(used))

    def loading(self) -> None:
        for buffer in self.manager.buffers():
            self.manager.changed(buffer, range(len(buffer.parameters)))

    def stepped(self) -> None:
        self.manager.resident.announce()

    def replaced(self) -> list[str]:
        return replaced(self._bindings)

    def unlisted_buckets(self) -> Sequence[StoredBucket]:
        return self._unlisted or ()

    def make_plain(self) -> None:
        self.unit_hooks.end_iteration()
        self.unit_hooks.remove()
        self._make_plain(list(self.manager.buffers()))
        self.buckets.clear()
        self._slots.clear()
        self._updated, self._unlisted = [], None


def _requests(layout: Layout, parameters: Sequence[Tensor], keep: Keep | None, first: int = 0) -> list[_Request]:
    """Return the buckets to fill of a layout, from ``first`` on. ``parameters``: all of the layout, in its order."""
    return [
        _Request(spec, layout, [parameters[slot.parameter] for slot in spec.slots], keep)
        for spec in layout.buckets[first:]
    ]


def _take(
    taken: list[Tensor], low: int, high: int, copied: Callable[[Tensor], Tensor], bucket: BucketSpec, whole: Tensor
) -> None:
    """Take a copy of elements ``[low, high)``: a `Keep`, but for the first arguments."""
    taken.append(copied(whole[low:high]))
