"""Builds the parts of an optimizer, and extends them by the parameters of param groups.

All ranks agree before anything changes. The order of an extension, which is that of a construction, too:

    describe    each rank checks and describes the new parameters        alone
    agree       every rank has found the same, or all raise              all ranks
    store       the parameters get their memory, with rank 0's values    all ranks
    Bucket      weights, gradients and states: whole from the start      each rank alone
    watch       hooks on the parameters

Knows: these orders. Does not know: steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from collectives import Choice, Transport, as_a_whole
from collectives import build as build_collective
from collectives.kernels import kernels_of

from .config import Config
from .consistency import agree_on_construction, agree_on_sharing
from .core.buckets import extended
from .core.grain import stacked
from .core.layout import BucketSpec, Layout, ParameterSpec
from .core.parameter_specs import FLOATS, check_buffers, check_one_device, is_laid_out, specs
from .core.rounding import RoundedDtypes
from .core.stage import Placement, why_one_device
from .core.units import check_modules
from .gradients.hooks import check_free, check_no_gradients
from .gradients.reducer import Reducer
from .parameters.materialize import Materializer
from .parameters.module_hooks import check_not_in_units
from .parameters.sharded import ShardedStorage
from .parameters.storage import TAKING_OVER, ParameterStorage
from .parts import Parts
from .runtime.accumulator import GradAccumulator
from .runtime.backward_tracker import BackwardTracker
from .runtime.bucket import Bucket, StoredBucket
from .runtime.flat_buffer import FlatBuffer, usable_later
from .runtime.flat_states import BucketStates, MastersAlone, MasterWeights, Options, RoundedShard, WideCopies
from .runtime.joining import Joining, UnitOrder
from .runtime.offload import OffloadedStates, backend_for
from .runtime.profiler_ranges import ProfilerRange
from .runtime.streams import Streams
from .step.classes import UserOptimizers
from .step.partition import check_partitions, choose_partitions, stack_of
from .step.update import Update
from .step.user_optimizer import step_groups

NOTHING_TO_TRAIN = (
    f"no listed parameter can be trained: all are frozen, and none is a plain tensor of {', '.join(map(str, FLOATS))}. "
    "Unfreeze one with requires_grad_(True), or list other parameters"
)
_MASTER = "master weights"  # a key among the names of states; it has a space, which no state's name has


def build(
    config: Config,
    user_optimizers: UserOptimizers,
    listed: Sequence[Tensor],
    device: torch.device,
    find_meta: Callable[[], Materializer | None],
) -> Parts:
    """Return the parts of an optimizer, which has no parameters yet. Collective.

    Args:
        config: the checked arguments of the optimizer. Nothing keeps it: its functions may refer to whoever holds this
            optimizer.
        user_optimizers: the user's optimizer classes.
        listed: the parameters that they will train.
        device: the device of the parameters; for meta parameters, the one on which they will get memory.
        find_meta: returns the materializer of the module's meta tensors, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the module, the device or the group, on every rank.
    """
    group = config.transport(device).fork()
    reshard_group_size, reshard = agree_on_sharing(group, config), config.reshard_after_forward
    streams, backwards, joining = Streams(), BackwardTracker(), Joining()
    unit_order = UnitOrder(joining)
    choice = build_collective(group, config.collective, device, config.copy_ranks)
    transport, shard_group = choice.collective.transport, choice.shard_group
    if config.collective == "auto" and not choice.collective.exact and transport.rank == 0:
        inexact = "NCCL chooses the order of sums, so parameters do not have the bits of the plain loop"
        warnings.warn(f"{inexact}; {choice.reason}", stacklevel=2)
    post_forward_group = _post_forward_group(shard_group, device, reshard_group_size)
    resharded = reshard is True or reshard_group_size > 1 or not config.gathers_shards(shard_group.world_size)
    transport.advise(
        ". Did one rank alone evaluate, generate or save? All ranks call full_state_dict(), too. Ranks with different "
        "numbers of batches train inside optimizer.join()"
    )
    try:
        check_modules(config.module, config.ignored)
        check_not_in_units(config.module, config.ignored)
        precisions = config.precisions()
        ranks = {"ranks": shard_group.world_size, "world_size": transport.world_size, "hosts": choice.hosts}
        bucket_sizes = config.bucket_sizes(listed, device, precisions, **ranks)
        offload_backend = None if config.offload is None else backend_for(config.offload, device)
        if config.row.parameters is Placement.WHOLE:
            storage = ParameterStorage(transport, shard_group, config.module, precisions, find_meta(), config.ignored)
        else:
            storage = ShardedStorage(
                transport,
                shard_group,
                config.module_of_units(),
                choice.collective,
                config.units,
                bucket_sizes,
                precisions,
                post_forward_group,
                reshard if callable(reshard) else resharded,
                config.prefetch_depth,
                find_meta(),
                offload_backend if config.offloads_parameters else None,
                streams,
                backwards,
                joining,
                unit_order,
                config.ignored,
            )
    except Exception as error:
        agree_on_construction(transport, [], error)
        raise  # pragma: no cover - the line before raises it, which a type checker cannot see
    reducer = Reducer(
        storage.buckets,
        config.row,
        transport,
        shard_group,
        choice.collective,
        streams,
        backwards,
        joining,
        unit_order,
        means_may_be_shown=precisions.keeps_dtypes,
    )
    return Parts(
        stage=config.row,
        module=config.module,
        precisions=precisions,
        offload=config.offload,
        partition=config.partition,
        rounding=config.rounding,
        mesh=config.mesh_place(),
        job_size=config.job_size(),
        choice=choice,
        reshard_group_size=reshard_group_size,
        bucket_sizes=bucket_sizes,
        offload_backend=offload_backend,
        streams=streams,
        joining=joining,
        user_optimizers=user_optimizers,
        storage=storage,
        reducer=reducer,
        update=Update(config.row, transport, shard_group, choice.collective, storage, reducer.means, user_optimizers),
    )


def _post_forward_group(shard_group: Transport, device: torch.device, size: int) -> Choice | None:
    """Return the ``size`` ranks that share a unit between its forward and its backward. Collective.

    Returns None if that is a single rank, or all ranks that share one copy.
    """
    if size in (1, shard_group.world_size):
        return None
    choice = build_collective(shard_group.sibling(3), "auto", device, size)
    shard_group.attach(choice.collective.transport, range(shard_group.world_size))
    return choice


def extend(parts: Parts, all_groups: Sequence[Options], first: int, problem: Exception | None) -> None:
    """Take over the parameters of the groups from ``first`` on. Collective.

    ``problem``: an error that this rank found in them, which every rank then raises. The model is as it was then.
    """
    storage = parts.storage
    with usable_later(), storage.registration():
        with parts.user_optimizers.unchanged_on_error(parts.precisions):
            new = _agree(parts, all_groups, first, problem)
            storage.check_replicas(new.replicated)
        parts.user_optimizers.note_trial(all_groups, first, new.elementwise)
        with as_a_whole(parts.transport, TAKING_OVER):
            storage.materialize()
        sizes, across = parts.bucket_sizes, storage.buckets_cross_units
        layout = extended(storage.layout, new.specs, sizes.most, first_bytes=sizes.first, across_units=across)
        states = _NewStates(parts, all_groups, layout, len(storage.buckets))
        with as_a_whole(parts.transport, TAKING_OVER):
            storage.replicated.update(new.replicated)
            stored = storage.store(new.parameters, layout, states.keep)
            devices = {torch.device(bucket.spec.device) for bucket in (*storage.buckets, *stored)}
            parts.streams.use(devices)
            for device in devices:
                kernels_of(device)  # compiles and checks them now, and not inside a first backward
            buckets: list[Bucket] = []
            for bucket in stored:
                home, group = parts.offload_backend if bucket.spec.offloaded else None, parts.shard_group
                grad = GradAccumulator(bucket.spec, bucket.specs, parts.stage, group, parts.streams, home)
                buckets.append(Bucket(bucket, grad, states.of(bucket, [*storage.buckets, *buckets])))
            storage.add(buckets, layout)
        parts.reducer.watch(buckets)
        for rest in storage.unlisted_buckets():
            for parameter in rest.parameters:
                parts.reducer.hooks.take_over(parameter)
    parts.cast_at_borders()
    parts.user_optimizers.lists.keep(all_groups, storage.listed())


@dataclass(frozen=True)
class _NewParameters:
    """The parameters of further param groups.

    Attributes:
        parameters: those that will lie in buckets.
        specs: their descriptions.
        replicated: the others.
        elementwise: for each class, the names of states that are as large as their parameters.
    """

    parameters: Sequence[Tensor]
    specs: Sequence[ParameterSpec]
    replicated: Mapping[Tensor, ParameterSpec]
    elementwise: Mapping[int, frozenset[str]]


def _agree(parts: Parts, all_groups: Sequence[Options], first: int, problem: Exception | None) -> _NewParameters:
    """Return the parameters of the groups from ``first`` on, if all ranks have the same. Collective.

    Raises the same error on every rank otherwise, or if a rank found a ``problem``.
    """
    try:
        if problem is not None:
            raise problem
        new = _describe(parts, all_groups, first)
    except Exception as error:
        agree_on_construction(parts.transport, [], error)
        raise  # pragma: no cover - the line before raises it, which a type checker cannot see
    agree_on_construction(parts.transport, _lines(parts, new), None)
    return new


def _describe(parts: Parts, all_groups: Sequence[Options], first: int) -> _NewParameters:
    """Check and describe the parameters of the groups from ``first`` on. Local; changes no parameter."""
    storage, groups = parts.storage, all_groups[first:]
    numbers = range(first, len(all_groups))
    requested = {number: parts.user_optimizers.requested_partition(number, parts.partition) for number in numbers}
    blocks = {number: parts.user_optimizers.requested_blocks(number) for number in numbers}
    requested = check_partitions(requested, blocks)
    check_buffers(storage.buffers())
    known = sum(len(group["params"]) for group in all_groups[:first])
    parts.precisions.resolve_again()
    dtypes, meta = parts.precisions.of, storage.meta_device
    listed, of_listed = specs(groups, parts.module, known, first, storage.units(), dtypes, meta)
    on_host, stepped = parts.offloads_parameters, parts.steps_on_host
    found: list[Tensor] = []
    described: list[ParameterSpec] = []
    replicated: dict[Tensor, ParameterSpec] = {}
    for parameter, spec in zip(listed, of_listed, strict=True):
        if is_laid_out(parameter):
            found.append(parameter)
            grain = stacked(stack_of(spec, blocks[spec.group]))
            described.append(replace(spec, offloaded=on_host, stepped_on_host=stepped, grain=grain))
        else:
            replicated[parameter] = spec
    if not found and not storage.buckets:
        raise ValueError(NOTHING_TO_TRAIN)
    check_one_device([*storage.layout.parameters, *described], why_one_device(parts.stage, parts.offload is not None))
    named = [(spec.name, parameter) for spec, parameter in zip(described, found, strict=True)]
    check_free(named)
    if first and parts.reducer.schedule.is_open:  # else zero_grad() is due, which clears them, too
        check_no_gradients(named)
    parts.check_rounding(described, requested.values(), first)
    of_memory = storage.prepare(named)
    described, lines, states = choose_partitions(parts.user_optimizers, all_groups, described, requested)
    for line in [*lines, *of_memory] if parts.transport.rank == 0 else ():
        warnings.warn(line, stacklevel=5)  # here, where an error that a warning is made to reaches all ranks
    return _NewParameters(found, described, replicated, states)


def _lines(parts: Parts, new: _NewParameters) -> list[str]:
    """Return, as text, the facts that must be equal on all ranks."""
    settings = f"stage {parts.stage.number}, collective {parts.collective.name}, bucket {parts.bucket_sizes}"
    buffers = parts.storage.buffers()
    return [
        settings,
        *parts.precisions.lines,
        f"optimizer {parts.user_optimizers.names()}",
        *(spec.line() for spec in new.specs),
        *parts.storage.lines(),
        *(f"buffer {name} {list(buffer.shape)} {buffer.dtype} {type(buffer).__name__}" for name, buffer in buffers),
        *(f"replicated {spec.line()} {type(parameter).__name__}" for parameter, spec in new.replicated.items()),
    ]


class _NewStates:
    """Makes the states of the buckets of a layout from ``first`` on.

    With offload this is collective: it is an error on every rank if one rank has no room.
    """

    def __init__(self, parts: Parts, all_groups: Sequence[Options], layout: Layout, first: int) -> None:
        self._parts, self._groups, self._layout, self._later = parts, all_groups, layout, first > 0
        self._masters: dict[int, Tensor] = {}  # bucket -> this rank's interval of the values before the cast
        self._stores: dict[int, OffloadedStates] = {}  # bucket -> the place of its states, if they are offloaded
        offloads = parts.offload_backend is not None
        self._step_groups = step_groups(layout, first, parts.stage, offloads=offloads)
        self._instances: dict[Hashable, torch.optim.Optimizer] = {}  # of each step group
        if offloads:
            self._reserve(layout.buckets[first:])

    def keep(self, bucket: BucketSpec, whole: Tensor) -> None:
        """Keep this rank's interval of a bucket's values, before they are cast, as its master weights."""
        if self._is_trained(bucket):
            begin, end = self._interval(bucket)
            mine, empty = whole[begin:end], self._room_for_masters(bucket)
            self._masters[bucket.index] = mine.clone() if empty is None else empty().copy_(mine)
            if bucket.index in self._stores:
                self._stores[bucket.index].evict({})

    def of(self, bucket: StoredBucket, before: Sequence[Bucket]) -> BucketStates:
        """Return the states of a bucket. ``before``: the buckets that there are already; the class's own counters are
        those of the first one of them."""
        spec, weights = bucket.spec, bucket.updated_weights(self._parts.stage, self._parts.shard_group.rank)
        master: MasterWeights | None = None
        if isinstance(weights, RoundedShard):
            master = MastersAlone(weights)
            weights = FlatBuffer(weights.master, weights.placement, weights.begin)
        elif spec.dtypes.has_master:
            wide, room = self._masters.pop(spec.index, None), self._room_for_masters(spec)
            master = MasterWeights(weights.data, spec.dtypes.master_dtype, wide, room)
        classes, number = self._parts.user_optimizers, bucket.specs[0].optimizer_class
        alike = (each.states.instance for each in before if each.specs[0].optimizer_class == number)
        store, group = self._stores.get(spec.index), self._step_groups[spec.index]
        if group not in self._instances:
            self._instances[group] = classes[number].instance(next(alike, None))
        copies = None
        if self._parts.rounding is not None and isinstance(spec.dtypes, RoundedDtypes):
            copies = WideCopies(self._parts.rounding, spec, bucket.specs, weights.begin)
        states = BucketStates(self._instances[group], spec, weights, bucket.specs, master, store, copies)
        classes[number].create_states(states, classes.groups_of(number, self._groups), later=self._later)
        states.evict()
        return states

    def _reserve(self, buckets: Sequence[BucketSpec]) -> None:
        """Reserve the memory of the states of buckets, and of the sums of gradients that lie there. Collective."""
        backend, rank = self._parts.offload_backend, self._parts.transport.rank_label
        assert backend is not None
        problem: Exception | None = None
        names = {bucket.index: self._names(bucket) for bucket in buckets}
        widths = {bucket.index: end - begin for bucket in buckets for begin, end in [self._interval(bucket)]}
        wanted = [(widths[bucket.index], bucket.dtypes.master_dtype) for bucket in buckets for _ in names[bucket.index]]
        sums = (bucket for bucket in buckets if bucket.offloaded and self._is_trained(bucket))
        wanted += [(widths[bucket.index], bucket.dtypes.accumulate_dtype) for bucket in sums]
        try:
            backend.reserve(wanted)
        except (ValueError, OSError) as error:
            problem = error
        agree_on_construction(self._parts.transport, [], problem)
        for bucket in buckets:
            self._stores[bucket.index] = OffloadedStates(
                backend,
                widths[bucket.index],
                names[bucket.index],
                bucket.dtypes.master_dtype,
                torch.device(bucket.device),
                ProfilerRange(f"prefetch bucket {bucket.index}", rank),
                ProfilerRange(f"evict bucket {bucket.index}", rank),
                stepped_in_place=bucket.stepped_on_host,
            )

    def _is_trained(self, bucket: BucketSpec) -> bool:
        """Return whether its parameters require gradients now. Frozen ones may never be updated."""
        return self._layout.members(bucket)[0].trainable

    def _interval(self, bucket: BucketSpec) -> tuple[int, int]:
        """Return the interval of a bucket that this rank updates."""
        return self._parts.stage.update_interval(bucket, self._parts.shard_group.rank)

    def _names(self, bucket: BucketSpec) -> list[str]:
        """Return the names of the tensors for which room is reserved."""
        backend = self._parts.offload_backend
        if backend is not None and not (backend.is_for_frozen or self._is_trained(bucket)):
            return []
        inner = self._parts.user_optimizers[self._layout.members(bucket)[0].optimizer_class]
        masters = bucket.dtypes.has_master and not (bucket.on_accelerator or bucket.offloaded)
        return [*sorted(inner.elementwise), *([_MASTER] if masters else [])]

    def _room_for_masters(self, bucket: BucketSpec) -> Callable[[], Tensor] | None:
        """Return a function that allocates the master weights of a bucket in offloaded memory.

        Returns None if they stay beside the parameters, as those on a GPU do.
        """
        if bucket.index not in self._stores or bucket.on_accelerator or bucket.offloaded:
            return None
        return partial(self._stores[bucket.index].tensor, _MASTER, bucket.dtypes.master_dtype)


def error_of(call: Callable[[], object]) -> Exception | None:
    """Return the exception that a call raises, else None."""
    try:
        call()
    except Exception as error:
        return error
    return None
