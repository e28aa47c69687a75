"""The memory of the parameters if a rank holds slices: the same interface as `storage`, with units that are gathered.

Knows: which parameters lie in which unit, and which of them the optimizer updates. Every parameter of the module that
can lie in buckets is sharded: the listed ones in the layout's buckets, the others in buckets of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from collectives import Choice, Collective, Kind, Region, Tag, Transport

from ..config import MixedPrecision
from ..consistency import broadcast, fingerprint
from ..core.layout import BucketSpec, Dtypes, Layout, ParameterSpec, build
from ..core.parameter_specs import bindings, check_memory, misplaced, replaced, specs
from ..core.units import Predicate, find_units
from ..streams import Streams
from .gathered.buffers import GatheredBuffer
from .materialize import Materializer, is_meta
from .resident_units import ResidentBuffer, SharedBucketMemory
from .storage import Keep, ParameterStorage
from .unit_hooks import UnitHooks
from .unit_manager import Buffer, UnitManager


@dataclass
class _ParamSet:
    """Buckets of a layout, which get their values from these parameters. ``keep``: None for those that the optimizer
    does not update."""

    buckets: Sequence[BucketSpec]
    layout: Layout
    parameters: Sequence[Tensor]
    keep: Keep | None
    flats: dict[int, Tensor] = field(default_factory=dict)  # this rank's slices, by bucket
    buffers: list[Buffer] = field(default_factory=list)  # of these slices


class SliceMemory(Protocol):
    """Memory for a rank's slices that is not beside the model, as an offload's file."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor."""

    def evict(self, tensors: Iterable[Tensor]) -> None:
        """Evict tensors that will not be needed for a while."""

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Release tensors."""


class ShardedStorage(ParameterStorage):
    """Parameters in units, of which each rank holds its slices. ``flats`` are this rank's slices of the layout's
    buckets."""

    def __init__(
        self,
        transport: Transport,
        shards: Transport,
        direct: Collective,
        module: nn.Module,
        collective: Collective,
        predicate: Predicate | None,
        bucket_bytes: int,
        precision: MixedPrecision | None,
        post_forward_group: Choice | None,
        keeps_whole: bool,
        offload_backend: SliceMemory | None,
        materializer: Materializer | None,
        streams: Streams,
    ) -> None:
        """``post_forward_group``: the ranks, of those that share a copy, that share the slices kept for a backward;
        None: all of them; ``keeps_whole``: each keeps the whole. ``offload_backend``: the memory of this rank's slices,
        if not beside the model; ``materializer``: of tensors on the meta device."""
        super().__init__(transport, shards, direct, module, precision)
        self._root, self._bucket_bytes, self._streams = module, bucket_bytes, streams
        self._materializer = materializer
        self._meta = None if materializer is None else materializer.device  # where meta tensors get memory
        there = (parameter.device for parameter in module.parameters())
        self._on_host = all((self._meta or device).type == "cpu" for device in there)
        self._units = find_units(module, predicate)
        self._registered = {id(parameter): number for number, parameter in enumerate(module.parameters())}
        self._offload_backend = offload_backend
        on_idle = None if offload_backend is None else lambda shard: offload_backend.evict([shard])
        self.manager = UnitManager(shards, collective, self._units.names, post_forward_group, on_idle)
        self._keeps_whole = keeps_whole
        self._hooks: UnitHooks | None = None
        self._unlisted: _ParamSet | None = None

    # -- construction ---------------------------------------------------------------------------------------------

    def units(self) -> dict[int, int]:
        return self._units.numbers()

    @property
    def buckets_cross_units(self) -> bool:
        if self._offload_backend is not None:  # of a bucket, which a step has in memory, no more than a unit
            return False
        return self._shards.world_size == 1 or (self._on_host and self._shards.has_common)

    def lines(self) -> list[str]:
        units = zip(self._units.names, self._units.parameters, strict=True)
        described = [f"unit {name}: {[(list(p.shape), str(p.dtype)) for p in members]}" for name, members in units]
        return [*described, *super().lines()]

    def prepare(self, parameters: Sequence[Tensor]) -> None:
        self._describe_rest([*self.parameters, *parameters])
        for name, parameter in self.replicas():
            check_memory(parameter, name, may_be_meta=True)

    def slices(self, buckets: Sequence[BucketSpec], parameters: Sequence[Tensor]) -> list[tuple[int, torch.dtype]]:
        if self._offload_backend is None:
            return []
        adopted = [*self.parameters, *parameters]
        rest, described = self._describe_rest(adopted)
        kept = [(bucket, adopted) for bucket in buckets]
        kept += [(bucket, rest) for bucket in self._layout_of(described).buckets]
        kept.sort(key=lambda entry: self._last_of(*entry))  # in the order in which they are filled
        owned = [(bucket.dtypes.param_dtype, *bucket.owned(self._shards.rank)) for bucket, _ in kept]
        return [(high - low, dtype) for dtype, low, high in owned]

    def begin(self) -> None:
        """Parameters that were not listed so far become plain, whole ones, until `end`."""
        if self._unlisted is not None:
            self._take_out(self._unlisted.buffers)
            if self._offload_backend is not None:
                self._offload_backend.give_back(self.rest_flats())
            self._unlisted = None

    def register(self, parameters: Sequence[Tensor], layout: Layout, keep: Keep) -> None:
        new = layout.buckets[len(self.flats) :]
        self.layout = layout
        self.parameters += parameters
        params, self._unlisted = _ParamSet(new, layout, self.parameters, keep), self._lay_out_rest()
        self._fill_all([params, self._unlisted])
        self.flats += [params.flats[bucket.index] for bucket in new]

    def end(self) -> None:
        if self._materializer is not None:
            self._materializer.finish()
            self._materializer = None
        self._bindings = bindings(self._module)
        if self._unlisted is None:  # nothing was adopted after all
            self._unlisted = self._lay_out_rest()
            self._fill_all([self._unlisted])
        self._cast_rest()
        self.manager.resident.announce()
        self._copy(self.replicas())
        if self._hooks is None:
            self._hooks = UnitHooks(self._units, self.manager, self._streams, keeps_whole=self._keeps_whole)
            self._copy(self._buffers())

    def replicas(self) -> list[tuple[str, Tensor]]:
        numbers = self.units()  # a parameter that was laid out stays so when it is frozen
        return [entry for entry in self._others() if id(entry[1]) not in numbers]

    def _layout_of(self, described: Sequence[ParameterSpec]) -> Layout:
        return build(described, self._shards.world_size, self._bucket_bytes, across_units=self.buckets_cross_units)

    def _describe_rest(self, listed: Sequence[Tensor]) -> tuple[list[Tensor], list[ParameterSpec]]:
        known = {id(parameter) for parameter in listed}
        rest = [p for members in self._units.parameters for p in members if id(p) not in known]
        dtypes = Dtypes.all if self._precision is None else self._precision.unlisted
        return specs([{"params": rest}], self._module, units=self.units(), dtypes=dtypes, meta=self._meta)

    def _lay_out_rest(self) -> _ParamSet:
        parameters, described = self._describe_rest(self.parameters)
        self.rest = self._layout_of(described)
        return _ParamSet(self.rest.buckets, self.rest, parameters, None)

    def _fill_all(self, param_sets: Sequence[_ParamSet]) -> None:
        """Fill buckets with rank 0's values, of which this rank keeps its slices. Collective."""
        entries = [(params, bucket) for params in param_sets for bucket in params.buckets]
        on_host = all(bucket.device == "cpu" for _, bucket in entries)
        sizes = [bucket.numel * bucket.dtypes.param_dtype.itemsize for _, bucket in entries]
        shared = on_host and self._offload_backend is None and self._shards.world_size > 1
        regions = self._agreed(self._shards.common(sizes) if shared else None)
        for number in self._in_registration_order(entries):
            params, bucket = entries[number]
            self._fill(params, bucket, None if regions is None else regions[number])

    def _fill(self, params: _ParamSet, bucket: BucketSpec, region: Region | None) -> None:
        """Fill a bucket with rank 0's values, in ``region`` if all ranks share its memory. Collective."""
        whole = self._values(bucket, params.layout, params.parameters, _nothing if params.keep is None else params.keep)
        low, high = bucket.owned(self._shards.rank)
        common = None if region is None else SharedBucketMemory(region, whole.dtype)
        flat = whole
        if common is not None:
            flat = common.own(low, high).copy_(whole[low:high])
        elif self._offload_backend is not None:
            flat = self._offload_backend.empty(high - low, whole.dtype).copy_(whole[low:high])
            self._offload_backend.evict([flat])
        elif self._shards.world_size > 1:
            flat = self._shards.empty(high - low, whole.dtype, torch.device(bucket.device)).copy_(whole[low:high])
        for unit, first, last in params.layout.runs(bucket):
            part, begin = bucket.part(first, last), bucket.slots[first].offset
            here, there = (bound + begin - low for bound in part.owned(self._shards.rank))
            members = [params.parameters[slot.parameter] for slot in part.slots]
            shard = flat[here:there] if there > here else flat[:0]
            buffer: Buffer
            if common is not None or self._shards.world_size == 1:
                buffer = ResidentBuffer(part, params.layout, members, shard, params.keep is not None, common, begin)
            else:
                buffer = GatheredBuffer(part, params.layout, members, shard, params.keep is not None)
            self.manager.put(unit, buffer)
            params.buffers.append(buffer)
        params.flats[bucket.index] = flat

    def _agreed(self, regions: Sequence[Region] | None) -> Sequence[Region] | None:
        """Return None on every rank if a rank has no shared memory: all replicas of a model must send alike.
        Collective."""
        if self._transport is self._shards:
            return regions
        told = self._transport.exchange(b"" if regions else b"none", Tag(Kind.EXCHANGE, "memory in common"))
        return None if any(told) else regions

    def _in_registration_order(self, entries: Sequence[tuple[_ParamSet, BucketSpec]]) -> Iterator[int]:
        """Places in ``entries`` in an order that is equal on all ranks, also if some tensors have no values yet.

        It is the order of each bucket's last registered parameter. Only as many meta tensors are materialized at a time
        as a bucket needs.
        """
        steps = iter(()) if self._materializer is None else self._materializer.steps()
        order = sorted(
            (self._last_of(bucket, params.parameters), place) for place, (params, bucket) in enumerate(entries)
        )
        for _, place in order:
            params, bucket = entries[place]
            while any(is_meta(params.parameters[slot.parameter]) for slot in bucket.slots):
                next(steps)
            yield place

    def _last_of(self, bucket: BucketSpec, parameters: Sequence[Tensor]) -> int:
        """The number of the bucket's parameter, among these, that was registered last."""
        return max(self._registered[id(parameters[slot.parameter])] for slot in bucket.slots)

    def _take_out(self, buffers: Sequence[Buffer]) -> None:
        """Make the parameters of these buffers plain ones, with memory of their own. Collective."""
        self.manager.resident.find_edits()  # before edited values become the parameters' own
        for number, unit in enumerate(self.manager.units):
            leaving = [buffer for buffer in unit.buffers if buffer in buffers]
            if leaving:
                self.manager.install(number)
                for buffer in leaving:
                    self.manager.part(number, buffer)
                self.manager.reshard(number)

    # -- access to parameters -------------------------------------------------------------------------------------

    def interval(self, bucket: BucketSpec, begin: int, end: int) -> Tensor:
        return self.flats[bucket.index]

    def fingerprints(self) -> list[tuple[str, bytes]]:
        found: dict[str, bytes] = {}
        for number in range(len(self.manager.units)):
            with self.manager.whole([number]):
                for buffer in self.manager.units[number].buffers:
                    if buffer.updated:
                        for slot, parameter in enumerate(buffer.parameters):
                            found[buffer.name(slot)] = fingerprint(parameter)
        for parameter, spec in self.replicated.items():
            found[spec.name] = fingerprint(parameter)
        return [(spec.name, found[spec.name]) for spec in self.listed()]

    def diagnose(self) -> str | None:
        return self.manager.diagnose() or misplaced(self._bindings)

    def set_join_announcer(self, join_announcer: Callable[..., AbstractContextManager[None]] | None) -> None:
        self.manager.gathered.join_announcer = None if self.needs_no_gather else join_announcer
        self.reset_order()

    def reset_order(self) -> None:
        assert self._hooks is not None
        self._hooks.reset_order()

    def gather(self, unit: int) -> None:
        self.manager.unshard(unit)
        self.manager.reshard(unit)

    @property
    def needs_no_gather(self) -> bool:
        return not self.units_need_gather

    @property
    def units_need_gather(self) -> bool:
        return self.manager.some_travel

    def common_memory(self) -> str:
        if self._shards.world_size == 1:
            return "no (one rank holds the whole copy)"
        if not self.units_need_gather:
            return "yes (the ranks that share a copy are on one host)"
        if self._offload_backend is not None:
            return "no (the slices are on disk)"
        if not self._on_host:
            return "no (the parameters are on a device)"
        if not self._shards.has_common:
            return "no (the ranks that share a copy do not all share a host's memory)"
        return "no (there is not enough of it)"

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
        assert self._hooks is not None
        with self._hooks.saving(), self.manager.whole(numbers):
            yield

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
            assert buffer.whole is not None
            flats = [buffer.whole[buffer.bucket.slots[n].offset : buffer.bucket.slots[n].end] for n in written]
            broadcast(self._direct, self._transport, flats)
            self.manager.commit(buffer, written)
        self.manager.resident.announce()
        replicas = self._chosen(self.replicas(), parameters)
        self._copy(replicas)
        self._compare(replicas)

    def busy(self) -> bool:
        return self._hooks is not None and self._hooks.busy()

    def end_iteration(self) -> bool:
        assert self._hooks is not None
        self._hooks.end_iteration()
        return self.manager.all_released()

    def evict(self, bucket: int) -> None:
        if self._offload_backend is not None:
            self._offload_backend.evict([self.flats[bucket]])

    def stepping(self, used: Sequence[bool]) -> None:
        for buffer in self.manager.buffers():
            if buffer.updated:
                slots = enumerate(buffer.bucket.slots)
                self.manager.changed(buffer, [number for number, slot in slots if used[slot.parameter]])

    def stepped(self) -> None:
        self.manager.resident.announce()

    def replaced(self) -> list[str]:
        return list(replaced(self._bindings))

    def not_updated(self) -> Sequence[Tensor]:
        return () if self._unlisted is None else self._unlisted.parameters

    def rest_flats(self) -> list[Tensor]:
        return [] if self._unlisted is None else list(self._unlisted.flats.values())

    def kept(self) -> list[Tensor]:
        return [] if self._offload_backend is None else [*self.flats, *self.rest_flats()]

    def transient(self) -> tuple[frozenset[int], int]:
        return self.manager.gathered.pool.storages(), self.manager.gathered.pool.peak_bytes

    def in_common(self) -> frozenset[int]:
        return self.manager.resident.in_common()

    def release(self) -> None:
        if self._hooks is not None:
            self._hooks.end_iteration()
            self._hooks.remove()
        self._take_out(list(self.manager.buffers()))
        self.flats, self._unlisted = [], None


def _nothing(*_: object) -> None:
    return None
