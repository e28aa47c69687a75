"""The memory of the parameters where a rank holds slices: the same face as `storage`, with units that come and go.

Knows: which parameters lie in which unit, and which of them the optimizer updates: every parameter of the module is
sharded, the listed ones in the layout's buckets, the others in buckets of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from collectives import Collective, Transport

from .layout import Bucket, Layout, ParameterSpec, build
from .parameters import bindings, misplaced, specs
from .released import as_plain
from .replicas import broadcast, fingerprint
from .residency import Residency, State
from .shelf import Shelf
from .storage import ParameterStorage
from .unit_hooks import UnitHooks
from .units import Predicate, find_units


class ShardedStorage(ParameterStorage):
    """Parameters in units, of which each rank holds its slices. ``flats`` are this rank's slices of the layout's
    buckets."""

    def __init__(
        self,
        transport: Transport,
        direct: Collective,
        module: nn.Module,
        collective: Collective,
        predicate: Predicate | None,
        bucket_bytes: int,
    ) -> None:
        super().__init__(transport, direct, module)
        self._root, self._bucket_bytes = module, bucket_bytes
        self._units = find_units(module, predicate)
        self.residency = Residency(transport, collective, self._units.names)
        self._hooks: UnitHooks | None = None
        self._others: list[Shelf] = []  # of the rest

    # -- construction ---------------------------------------------------------------------------------------------

    def units(self) -> dict[int, int]:
        return self._units.numbers()

    def lines(self) -> list[str]:
        units = zip(self._units.names, self._units.parameters, strict=True)
        return [f"unit {name}: {[(list(p.shape), str(p.dtype)) for p in members]}" for name, members in units]

    def prepare(self, parameters: Sequence[Tensor]) -> None:
        self._describe_rest([*self.parameters, *parameters])

    def begin(self) -> None:
        """Parameters that were not listed so far become plain, whole ones, until `end`."""
        self._take_out(self._others)
        self._others = []

    def adopt(self, parameters: Sequence[Tensor], layout: Layout) -> None:
        new = layout.buckets[len(self.flats) :]
        self.layout = layout
        self.parameters += parameters
        self.flats += [shelf.shard for shelf in self._shelve(new, layout, self.parameters, updated=True)]

    def end(self) -> None:
        self._bindings = bindings(self._module)
        parameters, described = self._describe_rest(self.parameters)
        self.rest = build(described, self._transport.world_size, self._bucket_bytes)
        self._others = self._shelve(self.rest.buckets, self.rest, parameters, updated=False)
        if self._hooks is None:
            self._hooks = UnitHooks(self._units, self.residency)
            numbers = self.units()
            whole = [p.detach() for p in self._root.parameters() if id(p) not in numbers]  # of integer dtypes
            broadcast(self._direct, self._transport, [*whole, *self._buffers()])

    def _describe_rest(self, listed: Sequence[Tensor]) -> tuple[list[Tensor], list[ParameterSpec]]:
        known = {id(parameter) for parameter in listed}
        rest = [p for members in self._units.parameters for p in members if id(p) not in known]
        return specs([{"params": rest}], self._module, units=self.units())

    def _shelve(
        self, buckets: Sequence[Bucket], layout: Layout, parameters: Sequence[Tensor], *, updated: bool
    ) -> list[Shelf]:
        """Rank 0's values of buckets, of which this rank keeps its slices. Collective."""
        on_host = all(bucket.device == "cpu" for bucket in buckets)
        sizes = [bucket.numel * bucket.dtypes.compute.itemsize for bucket in buckets]
        regions = self._transport.common(sizes) if on_host else None
        shelves = []
        for number, bucket in enumerate(buckets):
            device, dtype = torch.device(bucket.device), bucket.dtypes.compute
            flat = self._transport.empty(bucket.numel, dtype, device)
            members = [parameters[slot.parameter] for slot in bucket.slots]
            shelf = Shelf(bucket, layout, members, flat, updated)
            for parameter, view in zip(members, shelf.views(flat), strict=True):
                view.copy_(parameter.detach())
            broadcast(self._direct, self._transport, [flat])
            if self._transport.world_size > 1:
                low, high = bucket.owned(self._transport.rank)
                shelf.region = None if regions is None else regions[number]
                if shelf.region is None:
                    shelf.shard = self._transport.empty(high - low, dtype, device)
                else:
                    shelf.shard = shelf.region.own(low * dtype.itemsize, high * dtype.itemsize).view(dtype)
                shelf.shard.copy_(flat[low:high])
            self.residency.put(layout.parameters[bucket.slots[0].parameter].unit, shelf)
            shelves.append(shelf)
        return shelves

    def _take_out(self, shelves: Sequence[Shelf]) -> None:
        """Make the parameters of these shelves plain ones, with memory of their own. Collective."""
        for number, unit in enumerate(self.residency.units):
            leaving = [shelf for shelf in unit.shelves if shelf in shelves]
            if leaving:
                self.residency.show(number)
                for shelf in leaving:
                    self.residency.part(number, shelf)
                self.residency.drop(number)

    # -- what is where --------------------------------------------------------------------------------------------

    def interval(self, bucket: Bucket, begin: int, end: int) -> Tensor:
        return self.flats[bucket.index]

    def fingerprints(self) -> list[tuple[str, bytes]]:
        found: dict[str, bytes] = {}
        for number in range(len(self.residency.units)):
            with self.residency.gathered([number]):
                for shelf in self.residency.units[number].shelves:
                    if shelf.updated:
                        for slot, parameter in enumerate(shelf.parameters):
                            found[shelf.name(slot)] = fingerprint(parameter)
        return [(spec.name, found[spec.name]) for spec in self.layout.parameters]

    def problem(self) -> str | None:
        found, self.residency.problem = self.residency.problem, None
        if found is not None or self.residency.lasting is not None:
            return found or self.residency.lasting
        with as_plain():
            for shelf in self.residency.shelves():
                for slot in range(len(shelf.parameters)):
                    if not shelf.owns(slot):
                        return (
                            f"the memory of {shelf.name(slot)!r} was replaced after the optimizer was built (by moving "
                            "or casting the model): move and cast it before that"
                        )
        return misplaced(self._bindings)

    @property
    def units_travel(self) -> bool:
        return all(shelf.region is None for shelf in self.residency.shelves())

    # -- from outside ---------------------------------------------------------------------------------------------

    def _numbers(self, parameters: Sequence[Tensor] | None) -> list[int]:
        if parameters is None:
            return list(range(len(self.residency.units)))
        numbers = self.units()
        for parameter in parameters:
            if id(parameter) not in numbers:
                self.index(parameter)
        return sorted({numbers[id(parameter)] for parameter in parameters})

    def gathered(self, parameters: Sequence[Tensor] | None) -> AbstractContextManager[None]:
        return self._gathered(self._numbers(parameters))

    @contextmanager
    def _gathered(self, numbers: Sequence[int]) -> Iterator[None]:
        assert self._hooks is not None
        with self._hooks.saving(), self.residency.gathered(numbers):
            yield

    def overwrite(self, parameters: Sequence[Tensor] | None) -> None:
        chosen = None if parameters is None else {id(parameter) for parameter in parameters}
        for number in self._numbers(parameters):
            for shelf in self.residency.units[number].shelves:
                slots = [n for n, p in enumerate(shelf.parameters) if chosen is None or id(p) in chosen]
                assert shelf.whole is not None
                flats = [shelf.whole[shelf.bucket.slots[n].offset : shelf.bucket.slots[n].end] for n in slots]
                broadcast(self._direct, self._transport, flats)
                self.residency.accept(shelf, slots)

    def busy(self) -> bool:
        return self._hooks is not None and self._hooks.busy()

    def retire(self) -> bool:
        assert self._hooks is not None
        self._hooks.retire()
        return all(unit.state is State.SHARDED for unit in self.residency.units)

    def stepped(self, used: Sequence[bool]) -> None:
        for shelf in self.residency.shelves():
            if shelf.updated:
                slots = enumerate(shelf.bucket.slots)
                self.residency.changed(shelf, [number for number, slot in slots if used[slot.parameter]])

    def rest_flats(self) -> list[Tensor]:
        return [shelf.shard for shelf in self._others]

    def transient(self) -> tuple[frozenset[int], int]:
        return self.residency.pool.storages(), self.residency.pool.peak_bytes

    def release(self) -> None:
        if self._hooks is not None:
            self._hooks.retire()
            self._hooks.remove()
        self._take_out(list(self.residency.shelves()))
        self.flats, self._others = [], []
