"""The memory of the parameters where a rank holds slices: the same face as `storage`, with units that come and go.

Knows: which parameters lie in which unit, and which of them the optimizer updates: every parameter of the module that
is laid out is sharded, the listed ones in the layout's buckets, the others in buckets of their own.
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
from ..core.layout import Bucket, Dtypes, Layout, ParameterSpec, build
from ..core.parameter_specs import as_plain, bindings, check_memory, misplaced, replaced, specs
from ..core.units import Predicate, find_units
from ..streams import Streams
from .materialize import Materializer, is_meta
from .storage import Keep, ParameterStorage
from .unit_buffer import SharedBucketMemory, State, UnitBuffer
from .unit_hooks import UnitHooks
from .unit_manager import UnitManager


@dataclass
class _ParamSet:
    """Buckets of a layout, which take their values from these parameters. ``keep``: None of those that the optimizer
    does not update."""

    buckets: Sequence[Bucket]
    layout: Layout
    parameters: Sequence[Tensor]
    keep: Keep | None
    flats: dict[int, Tensor] = field(default_factory=dict)  # this rank's slices, by bucket
    shelves: list[UnitBuffer] = field(default_factory=list)  # what stands on them


class SliceMemory(Protocol):
    """Where a rank's slices are kept, if not beside the model, as in an offload's file."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor."""

    def evict(self, tensors: Iterable[Tensor]) -> None:
        """These will not be needed for a while."""

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """These are needed no more."""


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
        nearby: Choice | None,
        keeps_whole: bool,
        offload_backend: SliceMemory | None,
        unborn: Materializer | None,
        streams: Streams,
    ) -> None:
        """``nearby``: the ranks, of those that share a copy, who share what is kept for a backward; None: all;
        ``keeps_whole``: each keeps all of it.
        ``offload_backend``: where this rank's slices are kept, if not in memory; ``unborn``: what has no memory yet."""
        super().__init__(transport, shards, direct, module, precision)
        self._root, self._bucket_bytes, self._streams = module, bucket_bytes, streams
        self._unborn = unborn
        self._meta = None if unborn is None else unborn.device  # where that goes
        there = (parameter.device for parameter in module.parameters())
        self._on_host = all((self._meta or device).type == "cpu" for device in there)
        self._units = find_units(module, predicate)
        self._registered = {id(parameter): number for number, parameter in enumerate(module.parameters())}
        self._offload_backend = offload_backend
        on_idle = None if offload_backend is None else lambda shard: offload_backend.evict([shard])
        self.manager = UnitManager(shards, collective, self._units.names, nearby, on_idle)
        self._keeps_whole = keeps_whole
        self._hooks: UnitHooks | None = None
        self._rest_lot: _ParamSet | None = None

    # -- construction ---------------------------------------------------------------------------------------------

    def units(self) -> dict[int, int]:
        return self._units.numbers()

    @property
    def buckets_cross_units(self) -> bool:
        return (
            self._on_host and self._offload_backend is None and self._shards.has_common and self._shards.world_size > 1
        )

    def lines(self) -> list[str]:
        units = zip(self._units.names, self._units.parameters, strict=True)
        described = [f"unit {name}: {[(list(p.shape), str(p.dtype)) for p in members]}" for name, members in units]
        return [*described, *super().lines()]

    def prepare(self, parameters: Sequence[Tensor]) -> None:
        self._describe_rest([*self.parameters, *parameters])
        for name, parameter in self.replicas():
            check_memory(parameter, name, may_be_meta=True)

    def slices(self, buckets: Sequence[Bucket], parameters: Sequence[Tensor]) -> list[tuple[int, torch.dtype]]:
        if self._offload_backend is None:
            return []
        adopted = [*self.parameters, *parameters]
        rest, described = self._describe_rest(adopted)
        kept = [(bucket, adopted) for bucket in buckets]
        kept += [(bucket, rest) for bucket in self._layout_of(described).buckets]
        kept.sort(key=lambda entry: self._last_of(*entry))  # as they will come
        owned = [(bucket.dtypes.compute, *bucket.owned(self._shards.rank)) for bucket, _ in kept]
        return [(high - low, dtype) for dtype, low, high in owned]

    def begin(self) -> None:
        """Parameters that were not listed so far become plain, whole ones, until `end`."""
        if self._rest_lot is not None:
            self._take_out(self._rest_lot.shelves)
            if self._offload_backend is not None:
                self._offload_backend.give_back(self.rest_flats())
            self._rest_lot = None

    def adopt(self, parameters: Sequence[Tensor], layout: Layout, keep: Keep) -> None:
        new = layout.buckets[len(self.flats) :]
        self.layout = layout
        self.parameters += parameters
        lot, self._rest_lot = _ParamSet(new, layout, self.parameters, keep), self._lay_out_rest()
        self._shelve([lot, self._rest_lot])
        self.flats += [lot.flats[bucket.index] for bucket in new]

    def end(self) -> None:
        if self._unborn is not None:
            self._unborn.finish()
            self._unborn = None
        self._bindings = bindings(self._module)
        if self._rest_lot is None:  # nothing was adopted after all
            self._rest_lot = self._lay_out_rest()
            self._shelve([self._rest_lot])
        self._cast_rest()
        self.manager.announce()
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

    def _shelve(self, lots: Sequence[_ParamSet]) -> None:
        """Fill lots with rank 0's values, of which this rank keeps its slices. Collective."""
        entries = [(lot, bucket) for lot in lots for bucket in lot.buckets]
        on_host = all(bucket.device == "cpu" for _, bucket in entries)
        sizes = [bucket.numel * bucket.dtypes.compute.itemsize for _, bucket in entries]
        shared = on_host and self._offload_backend is None and self._shards.world_size > 1
        regions = self._agreed(self._shards.common(sizes) if shared else None)
        for number in self._as_they_come(entries):
            lot, bucket = entries[number]
            self._fill(lot, bucket, None if regions is None else regions[number])

    def _fill(self, lot: _ParamSet, bucket: Bucket, region: Region | None) -> None:
        """Rank 0's values of a bucket, to lie in ``region`` where all ranks see them. Collective."""
        whole = self._values(bucket, lot.layout, lot.parameters, _nothing if lot.keep is None else lot.keep)
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
        for unit, first, last in lot.layout.runs(bucket):
            part, begin = bucket.part(first, last), bucket.slots[first].offset
            here, there = (bound + begin - low for bound in part.owned(self._shards.rank))
            members = [lot.parameters[slot.parameter] for slot in part.slots]
            shard = flat[here:there] if there > here else flat[:0]
            shelf = UnitBuffer(part, lot.layout, members, shard, lot.keep is not None, common, begin)
            self.manager.put(unit, shelf)
            lot.shelves.append(shelf)
        lot.flats[bucket.index] = flat

    def _agreed(self, regions: Sequence[Region] | None) -> Sequence[Region] | None:
        """Memory in common is for all replicas or for none: a rank tells the others what travels. Collective."""
        if self._transport is self._shards:
            return regions
        told = self._transport.exchange(b"" if regions else b"none", Tag(Kind.EXCHANGE, "memory in common"))
        return None if any(told) else regions

    def _as_they_come(self, entries: Sequence[tuple[_ParamSet, Bucket]]) -> Iterator[int]:
        """Places in ``entries`` in an order that all ranks share, also where some have no values yet: as the last
        parameter of each bucket is registered. No more of what has no memory gets some than a bucket needs."""
        steps = iter(()) if self._unborn is None else self._unborn.steps()
        order = sorted((self._last_of(bucket, lot.parameters), place) for place, (lot, bucket) in enumerate(entries))
        for _, place in order:
            lot, bucket = entries[place]
            while any(is_meta(lot.parameters[slot.parameter]) for slot in bucket.slots):
                next(steps)
            yield place

    def _last_of(self, bucket: Bucket, parameters: Sequence[Tensor]) -> int:
        """Of a bucket's parameters, which are among these, the number of the one that was registered last."""
        return max(self._registered[id(parameters[slot.parameter])] for slot in bucket.slots)

    def _take_out(self, shelves: Sequence[UnitBuffer]) -> None:
        """Make the parameters of these shelves plain ones, with memory of their own. Collective."""
        self.manager.find_edits()  # before what is edited becomes what is kept
        for number, unit in enumerate(self.manager.units):
            leaving = [shelf for shelf in unit.shelves if shelf in shelves]
            if leaving:
                self.manager.install(number)
                for shelf in leaving:
                    self.manager.part(number, shelf)
                self.manager.reshard(number)

    # -- what is where --------------------------------------------------------------------------------------------

    def interval(self, bucket: Bucket, begin: int, end: int) -> Tensor:
        return self.flats[bucket.index]

    def fingerprints(self) -> list[tuple[str, bytes]]:
        found: dict[str, bytes] = {}
        for number in range(len(self.manager.units)):
            with self.manager.gathered([number]):
                for shelf in self.manager.units[number].shelves:
                    if shelf.updated:
                        for slot, parameter in enumerate(shelf.parameters):
                            found[shelf.name(slot)] = fingerprint(parameter)
        for parameter, spec in self.replicated.items():
            found[spec.name] = fingerprint(parameter)
        return [(spec.name, found[spec.name]) for spec in self.listed()]

    def problem(self) -> str | None:
        found = self.manager.edits() or self.manager.lasting
        if found is not None:
            return found
        with as_plain():
            for shelf in self.manager.shelves():
                for slot in shelf.displaced():
                    return (
                        f"the memory of {shelf.name(slot)!r} was replaced after the optimizer was built (by moving "
                        "or casting the model): move and cast it before that"
                    )
        return misplaced(self._bindings)

    def set_join_announcer(self, join_announcer: Callable[..., AbstractContextManager[None]] | None) -> None:
        self.manager.join_announcer = None if self.needs_no_gather else join_announcer
        self.reset_order()

    def reset_order(self) -> None:
        assert self._hooks is not None
        self._hooks.reset_order()

    def gather(self, unit: int) -> None:
        self.manager.unshard(unit)
        self.manager.reshard(unit)

    @property
    def needs_no_gather(self) -> bool:
        return self._shards.world_size == 1 or not self.units_need_gather

    @property
    def units_need_gather(self) -> bool:
        return all(shelf.common is None for shelf in self.manager.shelves())

    def common_memory(self) -> str:
        if not self.units_need_gather:
            return "yes (the ranks that share a copy are on one host)"
        if self._shards.world_size == 1:
            return "no (one rank holds the whole copy)"
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
        with self._hooks.saving(), self.manager.gathered(numbers):
            yield

    def overwrite(self, parameters: Sequence[Tensor] | None) -> None:
        chosen = None if parameters is None else {id(parameter) for parameter in parameters}
        for number in self._numbers(parameters):
            for shelf in self.manager.units[number].shelves:
                slots = [n for n, p in enumerate(shelf.parameters) if chosen is None or id(p) in chosen]
                assert shelf.whole is not None
                flats = [shelf.whole[shelf.bucket.slots[n].offset : shelf.bucket.slots[n].end] for n in slots]
                broadcast(self._direct, self._transport, flats)
                self.manager.commit(shelf, slots)
        self.manager.announce()
        replicas = self._chosen(self.replicas(), parameters)
        self._copy(replicas)
        self._compare(replicas)

    def busy(self) -> bool:
        return self._hooks is not None and self._hooks.busy()

    def end_iteration(self) -> bool:
        assert self._hooks is not None
        self._hooks.end_iteration()
        return all(unit.state is State.SHARDED for unit in self.manager.units)

    def evict(self, bucket: int) -> None:
        if self._offload_backend is not None:
            self._offload_backend.evict([self.flats[bucket]])

    def stepped(self, used: Sequence[bool]) -> None:
        for shelf in self.manager.shelves():
            if shelf.updated:
                slots = enumerate(shelf.bucket.slots)
                self.manager.changed(shelf, [number for number, slot in slots if used[slot.parameter]])
        self.manager.announce()

    def replaced(self) -> list[str]:
        return list(replaced(self._bindings))

    def not_updated(self) -> Sequence[Tensor]:
        return () if self._rest_lot is None else self._rest_lot.parameters

    def rest_flats(self) -> list[Tensor]:
        return [] if self._rest_lot is None else list(self._rest_lot.flats.values())

    def kept(self) -> list[Tensor]:
        return [] if self._offload_backend is None else [*self.flats, *self.rest_flats()]

    def transient(self) -> tuple[frozenset[int], int]:
        return self.manager.pool.storages(), self.manager.pool.peak_bytes

    def in_common(self) -> frozenset[int]:
        return frozenset(address for shelf in self.manager.shelves() if (address := shelf.common_address))

    def release(self) -> None:
        if self._hooks is not None:
            self._hooks.end_iteration()
            self._hooks.remove()
        self._take_out(list(self.manager.shelves()))
        self.flats, self._rest_lot = [], None


def _nothing(*_: object) -> None:
    return None
