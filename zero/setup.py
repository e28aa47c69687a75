"""Builds the parts of an optimizer and takes parameters in, with every rank agreeing before anything changes.

Knows: which parts there are, and in what order they take up parameters. Does not know: steps.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from collectives import Algorithm, Choice, Collective, Kind, Pairwise, Tag, Transport, check_name
from collectives import build as build_collective

from .consistency import agree_on_construction
from .core.layout import Bucket, Dtypes, ParameterSpec, build
from .core.parameter_specs import FLOATS, changed, check_buffers, check_modules, check_one_device, is_laid_out, specs
from .core.stages import Placement, Stage, check_offloaded_parameters, check_reshard, check_sharding_factor
from .core.units import Predicate
from .events import LOG, Event
from .gradients.hooks import check_free
from .gradients.reducer import Reducer
from .parameters.materialize import Materializer
from .parameters.sharded import ShardedStorage
from .parameters.storage import ParameterStorage
from .parameters.unit_hooks import check_not_in_units
from .step.elementwise import check_elementwise
from .step.flat_states import BucketStates, Options
from .step.inner import InnerOptimizer
from .step.master_weights import InputCast, Master, MixedPrecision
from .step.offload import Keeper, Offload, StateStore, keeper_of
from .step.update import Update
from .streams import Streams

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


NOTHING_TO_TRAIN = (
    "nothing of what is listed can be updated: each parameter is frozen, and none is a plain tensor of "
    f"{', '.join(map(str, FLOATS))}"
)
_MASTER = "master weights"  # among the names of states, of which none has a space


class Assembly:
    """The parts of one optimizer on one rank: `transport`, `shards`, `collective`, `inner`, `storage`, `reducer`,
    `update`."""

    def __init__(
        self,
        stage: Stage,
        module: nn.Module | None,
        inner: InnerOptimizer,
        process_group: ProcessGroup | Transport | None,
        bucket_cap_mb: float,
        collective: str | Algorithm,
        device: torch.device,
        units: Predicate | None,
        precision: MixedPrecision | None,
        sharding_factor: int | None,
        reshard: bool | int,
        offload: Offload | None,
        unborn: Callable[[], Materializer | None],
    ) -> None:
        """``device``: where the parameters are, or will be; ``unborn``: finds what has no memory yet."""
        self.stage, self.module, self.inner, self.precision = stage, module, inner, precision
        self.offload = offload
        self._bucket_bytes = _bucket_bytes(bucket_cap_mb)
        check_name(collective)
        group = _transport(process_group).fork()
        self.kept_by = _agree_on_sharing(group, sharding_factor, reshard, offload, stage)
        _warn_of_the_host(group, sharding_factor, device)
        self.streams = Streams()
        self.choice = build_collective(group, collective, device, sharding_factor)
        self.collective: Collective = self.choice.collective
        self.transport, self.shards = self.collective.transport, self.choice.shards
        self._keeper: Keeper | None = None
        nearby = self._nearby(device)
        try:
            check_modules(module)
            check_not_in_units(module)
            self._unborn = unborn()
            if offload is not None:
                if offload.parameters:
                    check_offloaded_parameters(stage, device)
                self._keeper = keeper_of(offload, device)
            self.storage = self._make_storage(units, nearby)
        except Exception as error:
            agree_on_construction(self.transport, [], error)
            raise  # pragma: no cover - the line before has raised it, which a type checker cannot know
        self.reducer = Reducer(
            self.storage.layout,
            stage,
            self.transport,
            self.shards,
            self.collective,
            self.streams,
            means_may_be_shown=precision is None,
        )
        self.update = Update(stage, self.transport, self.shards, self.collective, self.storage, self.reducer, inner)

    def _make_storage(self, units: Predicate | None, nearby: Choice | None) -> ParameterStorage:
        direct = Pairwise(self.transport)
        if self.stage.parameters is Placement.WHOLE:
            return ParameterStorage(self.transport, self.shards, direct, self.module, self.precision)
        if self.module is None:
            raise ValueError(
                f"stage {self.stage.number} gathers parameters for the forwards of their modules: pass the module "
                "itself, or parameters and module=model"
            )
        return ShardedStorage(
            self.transport,
            self.shards,
            direct,
            self.module,
            self.collective,
            units,
            self._bucket_bytes,
            self.precision,
            nearby,
            self.kept_by == 1 < self.shards.world_size,
            self._keeper if self.offload is not None and self.offload.parameters else None,
            self._unborn,
            self.streams,
        )

    def _nearby(self, device: torch.device) -> Choice | None:
        """Who shares what is kept for a backward, where that is not everybody who shares a copy. Collective."""
        shards = self.shards
        if self.kept_by in (1, shards.world_size):
            return None
        choice = build_collective(shards.sibling(3), "auto", device, self.kept_by)
        shards.attach(choice.collective.transport, range(shards.world_size))
        return choice

    def adopt(self, all_groups: Sequence[Options], first: int) -> None:
        """Lay out, check and take over the parameters of the groups from ``first`` on. Collective."""
        self.storage.begin()
        try:
            self._take_over(all_groups, first)
        finally:
            if self.storage.layout.buckets and not self.transport.broken:
                with self._failing_for_all():
                    self.storage.end()
                self._unborn = None
                self._cast_inputs()

    @contextmanager
    def _failing_for_all(self) -> Iterator[None]:
        """What one rank alone cannot do ends the others' waiting, too."""
        try:
            yield
        except BaseException as error:
            called = self.transport.rank_label
            self.transport.abort(f"{called}, while parameters were taken over: {type(error).__name__}: {error}")
            raise

    def log_choices(self) -> None:
        """Write one line at INFO: what was chosen for this optimizer, and why."""
        if not LOG.isEnabledFor(logging.INFO):
            return
        units = self.storage.units() or {}
        LOG.info(
            "%s of %d: stage %d, %s, %d buckets, %d units, sharding factor %d, collective %s (%s), common memory: %s, "
            "offload: %s",
            self.transport.rank_label,
            self.transport.world_size,
            self.stage.number,
            self.inner.name,
            len(self.storage.layout.buckets),
            len(set(units.values())),
            self.shards.world_size,
            self.collective.name,
            self.choice.reason,
            self.storage.common_memory(),
            "none" if self.offload is None else self.offload.kind,
        )

    @property
    def superseded(self) -> bool:
        """Another optimizer has taken parameters of this one over."""
        return self.reducer.hooks.superseded

    def cast_problem(self) -> str | None:
        """What is wrong where the whole model was cast or moved since: its first parameter was, too."""
        return changed(self.storage.parameters[0], self.storage.layout.parameters[0])

    def _cast_inputs(self) -> None:
        """From now on, what the module is called with has the dtype of its parameters."""
        if self.module is not None:
            InputCast.remove(self.module, self)  # also of an optimizer that this one replaces
            if self.precision is not None and self.precision.cast_forward_inputs:
                InputCast.put(self.module, self.precision.param_dtype, self)

    def release(self) -> None:
        """Make the model plain again. Collective."""
        if self.module is not None:
            InputCast.remove(self.module, self)
        self.reducer.close()
        self.inner.close()
        self.storage.release()
        if self._keeper is not None:
            self._keeper.close()

    def _take_over(self, all_groups: Sequence[Options], first: int) -> None:
        groups = all_groups[first:]
        problem: Exception | None = None
        found: list[Tensor] = []
        described: list[ParameterSpec] = []
        replicated: dict[Tensor, ParameterSpec] = {}
        try:
            check_buffers(self.module)
            known = sum(len(group["params"]) for group in all_groups[:first])
            dtypes = Dtypes.all if self.precision is None else self.precision.of
            units, meta = self.storage.units(), None if self._unborn is None else self._unborn.device
            listed, of_listed = specs(groups, self.module, known, first, units, dtypes, meta)
            for parameter, spec in zip(listed, of_listed, strict=True):
                if is_laid_out(parameter):
                    found.append(parameter)
                    described.append(spec)
                else:
                    replicated[parameter] = spec
            if not found and not self.storage.flats:
                raise ValueError(NOTHING_TO_TRAIN)
            check_one_device([*self.storage.layout.parameters, *described])
            check_free([(spec.name, parameter) for spec, parameter in zip(described, found, strict=True)])
            self.storage.prepare(found)
            self.inner.elementwise |= check_elementwise(self.inner, all_groups, described)
        except Exception as error:
            problem = error
        lines = [] if problem is not None else [*self._lines(described), *_replicated_lines(replicated)]
        agree_on_construction(self.transport, lines, problem)
        self.storage.check_replicas(replicated)
        if self._unborn is not None and self.stage.parameters is Placement.WHOLE:
            with self._failing_for_all():
                self._unborn.finish()
        buckets, across = len(self.storage.flats), self.storage.buckets_cross_units
        if buckets:
            layout = self.storage.layout.extended(described, self._bucket_bytes, across_units=across)
        else:
            layout = build(described, self.shards.world_size, self._bucket_bytes, across_units=across)
        stores = self._reserve(layout.buckets[buckets:], found)
        wide: dict[int, Tensor] = {}  # this rank's part of the values that are cast, by bucket

        def keep(bucket: Bucket, whole: Tensor) -> None:
            if layout.parameters[bucket.slots[0].parameter].trainable:  # others may never be updated
                begin, end = self.stage.stepped(bucket, self.shards.rank)
                mine, empty = whole[begin:end], self._room_for_masters(bucket, stores)
                wide[bucket.index] = mine.clone() if empty is None else empty().copy_(mine)
                if bucket.index in stores:
                    stores[bucket.index].leave()

        with self._failing_for_all():
            self.storage.replicated.update(replicated)
            self.storage.adopt(found, layout, keep)
            self.streams.use(self.storage.device)
            for bucket in layout.buckets[buckets:]:
                begin, end = self.stage.stepped(bucket, self.shards.rank)
                slot_groups = [layout.parameters[slot.parameter].group for slot in bucket.slots]
                scalars = [layout.parameters[slot.parameter].shape == () for slot in bucket.slots]
                interval = self.storage.interval(bucket, begin, end)
                master, store = None, stores.get(bucket.index)
                if bucket.dtypes.has_master:
                    master = Master(
                        interval,
                        bucket.dtypes.master,
                        wide.pop(bucket.index, None),
                        self._room_for_masters(bucket, stores),
                    )
                instance = self.inner.instance()
                states = BucketStates(instance, bucket, begin, end, interval, slot_groups, scalars, master, store)
                self.inner.add(states, all_groups)
                states.leave()
        self.reducer.extend(found, layout)
        self.update.extend()
        for parameter in self.storage.not_updated():
            self.reducer.hooks.take_over(parameter)

    def _reserve(self, buckets: Sequence[Bucket], found: Sequence[Tensor]) -> dict[int, StateStore]:
        """Where the states of new buckets are kept, by bucket, if not beside the parameters, which are ``found``.
        Collective then: every rank must have room."""
        if self._keeper is None:
            return {}
        keeper = self._keeper
        problem: Exception | None = None
        names = {bucket.index: self._names_of_states(bucket) for bucket in buckets}
        widths = {bucket.index: _length(self.stage.stepped(bucket, self.shards.rank)) for bucket in buckets}
        wanted = [(widths[bucket.index], bucket.dtypes.master) for bucket in buckets for _ in names[bucket.index]]
        try:
            keeper.reserve([*wanted, *self.storage.slices(buckets, found)])
        except (ValueError, OSError) as error:
            problem = error
        agree_on_construction(self.transport, [], problem)
        rank = self.transport.rank_label
        return {
            bucket.index: StateStore(
                keeper,
                widths[bucket.index],
                names[bucket.index],
                bucket.dtypes.master,
                Event(f"prefetch bucket {bucket.index}", rank),
                Event(f"evict bucket {bucket.index}", rank),
            )
            for bucket in buckets
        }

    def _names_of_states(self, bucket: Bucket) -> list[str]:
        """Of the tensors that are kept of a bucket."""
        masters = bucket.dtypes.has_master and torch.device(bucket.device).type == "cpu"
        return [*sorted(self.inner.elementwise), *([_MASTER] if masters else [])]

    def _room_for_masters(self, bucket: Bucket, stores: Mapping[int, StateStore]) -> Callable[[], Tensor] | None:
        """Where master weights of a bucket are kept, if not beside the parameters: those on a GPU stay there."""
        if bucket.index not in stores or torch.device(bucket.device).type != "cpu":
            return None
        return partial(stores[bucket.index].tensor, _MASTER, bucket.dtypes.master)

    def _lines(self, described: Sequence[ParameterSpec]) -> list[str]:
        """What the ranks must have built alike, as text."""
        settings = f"stage {self.stage.number}, collective {self.collective.name}, bucket {self._bucket_bytes} bytes"
        buffers = [] if self.module is None else self.module.named_buffers()
        return [
            settings,
            f"precision {self.precision}",
            f"optimizer {self.inner.name}",
            *(spec.line() for spec in described),
            *self.storage.lines(),
            *(f"buffer {name} {list(buffer.shape)} {buffer.dtype} {type(buffer).__name__}" for name, buffer in buffers),
        ]


def _replicated_lines(replicated: Mapping[Tensor, ParameterSpec]) -> list[str]:
    return [f"replicated {spec.line()} {type(parameter).__name__}" for parameter, spec in replicated.items()]


def _transport(process_group: ProcessGroup | Transport | None) -> Transport:
    if isinstance(process_group, Transport):
        return process_group
    from collectives.backends.gloo import connect

    return connect(process_group)


def backend_of(process_group: ProcessGroup | Transport | None, device: torch.device) -> str:
    """The name of what moves a device's tensors in a group; empty where nothing does."""
    if isinstance(process_group, Transport):
        return process_group.backend.device_backend(device)
    from collectives.backends.gloo import backend_of

    return backend_of(process_group, device)


def _warn_of_the_host(group: Transport, factor: int | None, device: torch.device) -> None:
    """Say once that some of the traffic goes through the host."""
    if device.type != "cpu" and factor not in (None, group.world_size) and group.rank == 0:
        warnings.warn(
            f"sharding_factor={factor} of {group.world_size} ranks on {device.type}: gradients and parameters travel "
            "through the host's memory, since NCCL's collectives are among all ranks of a process group",
            stacklevel=4,
        )


def _agree_on_sharing(
    group: Transport, factor: int | None, reshard: bool | int, offload: Offload | None, stage: Stage
) -> int:
    """Raise `ValueError`, on every rank, where the ranks cannot share copies so; else `check_reshard`. Collective."""
    elsewhere = "None" if offload is None else offload.kind
    mine = f"stage={stage.number}, sharding_factor={factor!r}, reshard_after_forward={reshard!r}, offload={elsewhere}"
    told = group.exchange(mine.encode(), Tag(Kind.EXCHANGE, "sharding factor"))
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            raise ValueError(
                f"the ranks built different models or optimizers: rank 0 asked for {told[0].decode()}, but rank {rank} "
                f"for {theirs.decode()}"
            )
    check_sharding_factor(factor, group.world_size, stage)
    return check_reshard(reshard, group.world_size if factor is None else factor, stage)


def _bucket_bytes(bucket_cap_mb: float) -> int:
    if not isinstance(bucket_cap_mb, (int, float)) or not bucket_cap_mb > 0 or math.isinf(bucket_cap_mb):
        raise ValueError(f"bucket_cap_mb must be a positive number of MiB, not {bucket_cap_mb!r}")
    return int(bucket_cap_mb * 1024 * 1024)


def _length(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]
