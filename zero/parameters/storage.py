"""The memory of the parameters if every rank holds them whole: one flat tensor per bucket, with the parameters as
views. `sharded` is its counterpart for ranks that hold shards.

Knows: the layout and the user's parameters, whose ``data`` it sets. Does not know: gradients, states, steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from collectives import Transport, as_a_whole

from ..consistency import broadcast, compare_subclasses, fingerprint
from ..core.bits import strided
from ..core.layout import BucketSpec, Layout, ParameterSpec
from ..core.parameter_specs import (
    COPY,
    HELD_ELSEWHERE,
    Named,
    bindings,
    changed,
    check_memory,
    check_memory_apart,
    is_copied,
    is_laid_out,
    is_released,
    misplaced,
    named_buffers,
    named_tensors,
    replaced,
)
from ..core.stage import Placement
from ..core.units import Ignored
from ..precision import Precisions
from ..runtime.bucket import Bucket, StoredBucket, slots_of
from ..runtime.flat_buffer import FlatBuffer
from .casting import cast
from .materialize import Materializer
from .unit_hooks import UnitHooks
from .unit_manager import NoUnitHooks, UnitManager

TAKING_OVER = "while parameters were taken over"
Keep = Callable[[BucketSpec, Tensor], None]  # called with whole values in the master's dtype, before the cast


_DTYPE = attrgetter("dtype")


def _addresses_of(parameters: Sequence[Tensor]) -> list[tuple[int, torch.dtype]]:
    """Return the address and the dtype of each: at each step, so nothing for each in Python."""
    return [*zip(map(methodcaller("data_ptr"), parameters), map(_DTYPE, parameters), strict=True)]


class ParameterStorage:
    """Parameters, by index in the layout, and their memory. Identity, name, shape and strides of a parameter stay."""

    manager: UnitManager | None = None  # of units; None at stages without units
    unit_hooks: UnitHooks | NoUnitHooks = NoUnitHooks()

    def __init__(
        self,
        transport: Transport,
        shard_group: Transport,
        module: nn.Module | None,
        precisions: Precisions,
        materializer: Materializer | None,
        ignored: Ignored,
    ) -> None:
        """``shard_group``: the ranks that own the shards of buckets; ``materializer``: of tensors on the meta
        device."""
        self._transport, self._shard_group = transport, shard_group
        self._module, self._precisions, self.ignored = module, precisions, ignored
        self._materializer = materializer  # until every tensor has memory
        self.layout = Layout((), (), shard_group.world_size)
        self.unlisted_layout = self.layout  # of parameters that are stored here and not updated
        self.parameters: list[Tensor] = []
        self.replicated: dict[Tensor, ParameterSpec] = {}  # listed, and in no bucket; by identity, as torch does
        self.buckets: list[Bucket] = []  # of the layout
        self._slots: dict[int, tuple[Bucket, int]] = {}  # parameter -> bucket and slot, in the layout's order
        self._addresses: list[tuple[int, torch.dtype]] = []  # of each parameter's memory, where it was put
        self._bindings = bindings(module, ignored)
        self._indices: dict[Tensor, int] = {}

    # -- construction ---------------------------------------------------------------------------------------------

    def units(self) -> dict[int, int] | None:
        """id of a parameter -> its unit; None at stages without units."""
        return None

    @property
    def buckets_cross_units(self) -> bool:
        """True if units need no gather, provided that shared memory can be allocated. Shards of a unit may then differ
        in length."""
        return False

    def lines(self) -> list[str]:
        """Facts beside the layout that must be equal on all ranks, as text."""
        return [
            f"replicated {name} {list(parameter.shape)} {parameter.dtype} {type(parameter).__name__}"
            for name, parameter in self.replicas()
        ]

    def prepare(self, parameters: Sequence[Named]) -> list[str]:
        """Return warnings of parameters that will be stored. Raise `ValueError` or `TypeError` if they cannot be."""
        for binding in self._bindings:
            if is_released(binding.parameter):
                raise ValueError(HELD_ELSEWHERE.format(what=repr(binding.name)))
        for name, parameter in self.replicas():
            check_memory(parameter, name, may_be_meta=True)
        return check_memory_apart(parameters, (), self._known())

    def _known(self) -> list[Named]:
        known = [(spec.name, p) for spec, p in zip(self.layout.parameters, self.parameters, strict=True)]
        return known if self._module is None else [*known, *named_tensors(self._module)]

    @property
    def meta_device(self) -> torch.device | None:
        """Where tensors of the meta device get memory; None if there are none."""
        return None if self._materializer is None else self._materializer.device

    def materialize(self) -> None:
        """Give all tensors on the meta device memory and values. Collective."""
        if self._materializer is not None:
            self._materializer.finish()
            self._materializer = None

    @contextmanager
    def registration(self) -> Iterator[None]:
        """Return a context for `store` and `add`. Collective. After the block, also if it raises, all is stored here
        that belongs here, unless no parameter was ever stored or the ranks' communication has failed."""
        self._begin()
        failed = True
        try:
            yield
            failed = False
        finally:
            if self.layout.buckets and not self._transport.broken:
                with as_a_whole(self._transport, TAKING_OVER):
                    self._end(failed=failed)

    def _begin(self) -> None:
        """Prepare the registration of further parameters. Collective."""

    def store(self, parameters: Sequence[Tensor], layout: Layout, keep: Keep) -> Sequence[StoredBucket]:
        """Store further parameters, which ``layout`` has in further buckets, with rank 0's values. Collective. Returns
        these buckets, which `add` takes."""
        self.parameters += parameters
        return self._fill(layout, keep)

    def add(self, buckets: Sequence[Bucket], layout: Layout) -> None:
        """Add the buckets of the parameters that were stored last."""
        self.layout = layout
        self.buckets += buckets
        self._slots.update(slots_of(buckets))

    def _fill(self, layout: Layout, keep: Keep) -> Sequence[StoredBucket]:
        """Lay out the parameters that are in no bucket yet, with rank 0's values. Collective."""
        new = []
        for spec in layout.buckets[len(self.buckets) :]:
            specs, parameters = layout.members(spec), [self.parameters[slot.parameter] for slot in spec.slots]
            # Memory of this rank alone: no other rank sees its writes, and a forked process reads its own copy.
            weights = FlatBuffer(self._values(spec, specs, parameters, keep), Placement.WHOLE)
            new.append(StoredBucket(spec, specs, parameters, weights))
            for parameter, view in new[-1].views():
                parameter.data = view
        self._addresses += _addresses_of(self.parameters[len(self._addresses) :])
        return new

    def _values(
        self, bucket: BucketSpec, specs: Sequence[ParameterSpec], parameters: Sequence[Tensor], keep: Keep | None
    ) -> Tensor:
        """Rank 0's values of a bucket's parameters, in the dtype with which the model computes. Collective."""
        dtypes = bucket.dtypes
        # Zero, because padding is sent, too, and must not disclose old contents of the memory.
        whole = torch.zeros(bucket.numel, dtype=dtypes.master_dtype, device=bucket.device)
        for parameter, slot, spec in zip(parameters, bucket.slots, specs, strict=True):
            strided(whole, slot.offset, spec.shape, spec.stride).copy_(parameter.detach())
        broadcast(self._transport, [whole])
        if dtypes.has_master and keep is not None:
            keep(bucket, whole)
        return whole.to(dtypes.param_dtype)

    def _end(self, *, failed: bool) -> None:
        """Complete the registration of parameters: cast and copy the module's other tensors. Collective."""
        if failed:
            return
        self._bindings = bindings(self._module, self.ignored)
        self._cast_others()
        self._copy([*self._others(), *self.buffers()])

    def check_replicas(self, listed: Mapping[Tensor, ParameterSpec]) -> None:
        """Raise `ValueError`, on every rank, if replicated tensors that cannot be copied from rank 0 differ.
        Collective; ``listed``: replicated parameters that are about to be registered."""
        known = [*((spec.name, tensor) for tensor, spec in listed.items()), *self.replicas(), *self.buffers()]
        self._compare(list({id(tensor): (name, tensor) for name, tensor in known}.values()))

    def _copy(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy rank 0's values of replicated tensors to all ranks. Collective."""
        broadcast(self._transport, [tensor.detach() for _, tensor in tensors if is_copied(tensor)])

    def _compare(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Raise `ValueError`, on every rank, if tensors that are not copied differ. Collective."""
        compare_subclasses(self._transport, [entry for entry in tensors if not is_copied(entry[1])])

    def _cast_others(self) -> None:
        """Cast the parameters that are in no bucket, and the module's buffers."""
        for _, parameter in () if self._precisions.keeps_dtypes else self._others():
            cast(parameter, self._precisions.unlisted(parameter).param_dtype)
        for buffer, dtype in self._precisions.buffers():
            cast(buffer, dtype)

    def _others(self) -> list[tuple[str, Tensor]]:
        """Name and parameter of all that are not in the layout: the module's that are not listed, and those that are
        listed and replicated."""
        placed = {id(p) for p in self.parameters}
        known = [(binding.name, binding.parameter) for binding in bindings(self._module, self.ignored)]
        known += [(spec.name, parameter) for parameter, spec in self.replicated.items()]
        named: dict[int, tuple[str, Tensor]] = {}
        for name, parameter in known:
            if id(parameter) not in placed:
                named.setdefault(id(parameter), (name, parameter))
        return list(named.values())

    def replicas(self) -> list[tuple[str, Tensor]]:
        """Name and parameter of all that are replicated, listed or not."""
        return [entry for entry in self._others() if not is_laid_out(entry[1])]

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Name and buffer of the module's, but for those that are ignored, or are parameters, too."""
        found = () if self._module is None else named_buffers(self._module)
        parameters = {id(binding.parameter) for binding in self._bindings}
        return [entry for entry in found if entry[1] not in self.ignored and id(entry[1]) not in parameters]

    # -- access to parameters -------------------------------------------------------------------------------------

    def slot_of(self, index: int) -> tuple[Bucket, int]:
        """A parameter's bucket, and the number of its slot there."""
        return self._slots[index]

    def index(self, parameter: Any) -> int:
        """The parameter's place in the layout. Raises `ValueError` or `TypeError` if it is none of the optimizer."""
        if not isinstance(parameter, Tensor):
            what = repr(parameter) if isinstance(parameter, str) else f"a {type(parameter).__name__}"
            raise TypeError(f"{what} is no parameter: give the tensor itself, as the model has it")
        if len(self._indices) < len(self.parameters):
            self._indices = {known: index for index, known in enumerate(self.parameters)}  # by identity, as torch does
        if parameter in self._indices:
            return self._indices[parameter]
        raise ValueError(f"a tensor of shape {tuple(parameter.shape)} is not one of this optimizer's parameters")

    def listed(self) -> list[ParameterSpec]:
        """The listed parameters, in no order: in buckets or replicated."""
        return [*self.layout.parameters, *self.replicated.values()]

    def owners(self, index: int) -> list[int]:
        """The ranks that own a part of a parameter, of those that share this rank's copy."""
        bucket, number = self._slots[index]
        first, spec = self._transport.rank - self._shard_group.rank, bucket.spec
        places = range(self._shard_group.world_size)
        return [first + r for r in places if any(piece.slot == number for piece in spec.pieces(*spec.owned(r)))]

    def _flat_of(self, index: int) -> Tensor:
        """A parameter's elements in memory order, 1-D."""
        bucket, number = self._slots[index]
        slot = bucket.spec.slots[number]
        return bucket.weights.interval(slot.offset, slot.end)

    def positions(self, parameters: Sequence[Tensor] | None) -> list[int] | None:
        """The positions of parameters among all that are stored here, updated or not: the argument of
        `parameters_at`."""
        known = {id(parameter): place for place, parameter in enumerate(self._all())}
        for parameter in parameters or ():
            if id(parameter) not in known:
                self.index(parameter)
        return None if parameters is None else [known[id(parameter)] for parameter in parameters]

    def parameters_at(self, positions: Sequence[int] | None) -> list[Tensor] | None:
        """The parameters at these positions."""
        known = self._all()
        return None if positions is None else [known[position] for position in positions]

    def _all(self) -> list[Tensor]:
        return [*self.parameters, *(parameter for _, parameter in self._others())]

    def fingerprints(self) -> list[tuple[str, bytes]]:
        """Name and SHA-256 of each listed parameter, whole. Collective."""
        known = [*zip(self.parameters, self.layout.parameters, strict=True), *self.replicated.items()]
        return [(spec.name, fingerprint(parameter)) for parameter, spec in known]

    def broadcast_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks. Collective."""
        self._copy(self.buffers())
        self._compare(self.buffers())

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return torch.device(self.buckets[0].spec.device)

    def common_memory(self) -> str:
        """Return whether units lie in shared memory, and the reason, as a text."""
        return "no (every rank holds whole parameters)"

    # -- units ----------------------------------------------------------------------------------------------------

    def gather(self, unit: int) -> None:
        """Take part in the other ranks' gather of a unit. Collective."""

    # -- from outside ---------------------------------------------------------------------------------------------

    def gathered(self, parameters: Sequence[Tensor] | None) -> AbstractContextManager[None]:
        """``parameters``, or all, whole inside the block. Collective; here they always are."""
        self.positions(parameters)  # raises if one is a stranger
        return nullcontext()

    def views(self, parameters: Sequence[Tensor] | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``parameters``, or all, that lie in buckets, with the view that each is. Inside `gathered`."""
        chosen = {id(parameter) for parameter in (self.parameters if parameters is None else parameters)}
        for bucket in self.buckets:
            yield from (entry for entry in bucket.views() if id(entry[0]) in chosen)

    def overwrite(self, parameters: Sequence[Tensor] | None) -> None:
        """Copy rank 0's values to all ranks, inside `gathered`. Collective."""
        others = self._chosen(self._others(), parameters)
        known = {id(parameter) for _, parameter in others}
        if parameters is None:
            flats = [bucket.weights.data for bucket in self.buckets]
        else:
            flats = [self._flat_of(self.index(parameter)) for parameter in parameters if id(parameter) not in known]
        broadcast(self._transport, flats)
        self._copy(others)
        self._compare(others)

    def _chosen(self, entries: Sequence[Named], parameters: Sequence[Tensor] | None) -> list[Named]:
        """Return the entries whose parameters are among ``parameters``; None: all."""
        chosen = None if parameters is None else {id(parameter) for parameter in parameters}
        return [entry for entry in entries if chosen is None or id(entry[1]) in chosen]

    def stepping(self) -> None:
        """Note that a step changes the parameters that some rank used. Every rank calls it before its first write."""

    def loading(self) -> None:
        """Note that every parameter will change. Every rank calls it before its first write."""

    def stepped(self) -> None:
        """Return when every rank has changed its shards. Collective."""

    def diagnose(self, *, waits: bool = True) -> str | None:
        """Return an error's text if a parameter was moved, cast or replaced since; else None. ``waits``: for devices"""
        addresses = _addresses_of(self.parameters)
        if addresses != self._addresses:
            for index in self._slots:
                problem = self._misplacement(index)
                if problem is not None:
                    return problem
            self._addresses = addresses  # share_memory() moves a bucket with all its parameters
        return misplaced(self._bindings)

    def diagnose_unfrozen(self) -> str | None:
        """Return an error's text if a replicated parameter is trained; else None."""
        for parameter, spec in self.replicated.items():
            if parameter.requires_grad:
                return (
                    f"{spec.name!r} requires a gradient now, but was frozen when the optimizer was built, and is not "
                    f"sharded ({type(parameter).__name__}, {parameter.dtype}): it cannot be updated; freeze it again "
                    "with requires_grad_(False)"
                )
        return None

    def _misplacement(self, index: int) -> str | None:
        parameter, spec, flat = self.parameters[index], self.layout.parameters[index], self._flat_of(index)
        problem = changed(parameter, spec)
        if problem is not None:
            return problem
        if flat.numel() and parameter.data_ptr() != flat.data_ptr():
            return (
                f"the memory of {spec.name!r} was replaced after the optimizer was built (by p.data = t, "
                f"vector_to_parameters or moving the model): edit it in place, by {COPY}"
            )
        return None

    def replaced(self) -> list[str]:
        """Return the names of parameters that were replaced: `make_plain` cannot give them this optimizer's values."""
        names = replaced(self._bindings)
        for index in self._slots:
            parameter, spec = self.parameters[index], self.layout.parameters[index]
            has_values = changed(parameter, spec) is not None  # it was cast or moved with them
            if not has_values and self._misplacement(index) is not None:
                names.append(spec.name)
        return names

    def unlisted_buckets(self) -> Sequence[StoredBucket]:
        """The buckets of `unlisted_layout`."""
        return ()

    def make_plain(self) -> None:
        """Give every parameter memory of its own. Collective."""
        for index, parameter in enumerate(self.parameters):
            if self._lies_here(index):
                parameter.data = parameter.detach().clone()
        self.buckets.clear()
        self._slots.clear()

    def _lies_here(self, index: int) -> bool:
        parameter = self.parameters[index]  # another optimizer may have released it, or its bucket was never added
        flat = self._flat_of(index) if index in self._slots else parameter
        return not is_released(parameter) and 0 <= parameter.data_ptr() - flat.data_ptr() < max(flat.nbytes, 1)
