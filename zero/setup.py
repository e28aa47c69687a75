"""Builds the parts of an optimizer and registers parameters. All ranks agree before anything changes.

Knows: which parts there are, and in which order they register parameters. Does not know: steps.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from collectives import Choice, Collective
from collectives import build as build_collective

from .config import Config
from .consistency import agree_on_construction, agree_on_sharing
from .core.buckets import build, extended
from .core.layout import MIB, BucketSpec, Dtypes, Layout, ParameterSpec
from .core.names import named_buffers
from .core.parameter_specs import FLOATS, changed, check_buffers, check_modules, check_one_device, is_laid_out, specs
from .core.stage import Placement, why_one_device
from .gradients.free_parameters import check_free, check_no_gradients
from .gradients.reducer import Reducer
from .parameters.casting import InputCast
from .parameters.materialize import Materializer
from .parameters.module_hooks import check_not_in_units
from .parameters.sharded import ShardedStorage
from .parameters.storage import ParameterStorage
from .runtime.bucket import Bucket
from .runtime.events import LOG, Event
from .runtime.flat_states import BucketStates, Options
from .runtime.joining import Joining
from .runtime.master_weights import MasterWeights
from .runtime.offload import OffloadBackend, OffloadedStates, backend_for
from .runtime.streams import Streams
from .runtime.unit_order import UnitOrder
from .step.classes import InnerOptimizers
from .step.partition import check_partitions, choose_partitions
from .step.update import Update

NOTHING_TO_TRAIN = (
    "nothing of what is listed can be updated: each parameter is frozen, and none is a plain tensor of "
    f"{', '.join(map(str, FLOATS))}"
)
_MASTER = "master weights"  # a key among the names of states; it has a space, which no state's name has


class Builder:
    """The parts of one optimizer on one rank.

    They are `transport`, `shards`, `collective`, `inners`, `storage`, `reducer` and `update`.
    """

    def __init__(
        self,
        config: Config,
        inners: InnerOptimizers,
        listed: Sequence[Tensor],
        device: torch.device,
        find_meta: Callable[[], Materializer | None],
    ) -> None:
        """Build the parts. Collective.

        Args:
            config: the checked arguments of the optimizer.
            inners: the user's optimizer classes.
            listed: the parameters that they train.
            device: the device of the parameters; for meta parameters, the one on which they will get memory.
            find_meta: returns the materializer of the module's meta tensors, or None.

        Raises:
            ValueError, TypeError: an argument does not fit the module, the device or the group, on every rank.
        """
        # not the config itself: its functions may refer to whoever holds this optimizer
        self.stage, self.module, self.inners = config.stage, config.module, inners
        self.precision, self.offload, self._partition = config.precision, config.offload, config.partition
        group = config.transport().fork()
        self.reshard_group_size = agree_on_sharing(group, config)
        self.streams, self.joining = Streams(), Joining()
        unit_order = UnitOrder(self.joining)
        self.choice = build_collective(group, config.collective, device, config.sharding_factor)
        self.collective: Collective = self.choice.collective
        self.transport, self.shards = self.collective.transport, self.choice.shards
        self._offload_backend: OffloadBackend | None = None
        post_forward_group = self._post_forward_group(device)
        self.transport.advise(". Ranks with different numbers of batches train inside optimizer.join()")
        try:
            check_modules(self.module)
            check_not_in_units(self.module)
            self.bucket_sizes = config.bucket_sizes(listed, device, self.shards.world_size, self.choice.hosts)
            self._materializer = find_meta()
            if self.offload is not None:
                self._offload_backend = backend_for(self.offload, device)
            self.storage = self._make_storage(config, post_forward_group, unit_order)
        except Exception as error:
            agree_on_construction(self.transport, [], error)
            raise  # pragma: no cover - the line before raises it, which a type checker cannot see
        self.reducer = Reducer(
            self.storage.buckets,
            self.stage,
            self.transport,
            self.shards,
            self.collective,
            self.streams,
            self.joining,
            unit_order,
            means_may_be_shown=config.precision is None,
        )
        self.update = Update(
            self.stage, self.transport, self.shards, self.collective, self.storage, self.reducer.means, inners
        )

    def _make_storage(
        self, config: Config, post_forward_group: Choice | None, unit_order: UnitOrder
    ) -> ParameterStorage:
        if self.stage.parameters is Placement.WHOLE:
            return ParameterStorage(self.transport, self.shards, config.module, config.precision)
        if config.module is None:
            raise ValueError(
                f"stage {self.stage.number} gathers parameters for the forwards of their modules: pass the module "
                "itself, or parameters and module=model"
            )
        return ShardedStorage(
            self.transport,
            self.shards,
            config.module,
            self.collective,
            config.units,
            self.bucket_sizes,
            config.precision,
            post_forward_group,
            self.reshard_group_size == 1 < self.shards.world_size,
            self._materializer,
            self.streams,
            self.joining,
            unit_order,
        )

    def _post_forward_group(self, device: torch.device) -> Choice | None:
        """Return the group of ranks that share a unit between its forward and its backward. Collective.

        Returns None if that is a single rank, or all ranks that share one copy.
        """
        shards = self.shards
        if self.reshard_group_size in (1, shards.world_size):
            return None
        choice = build_collective(shards.sibling(3), "auto", device, self.reshard_group_size)
        shards.attach(choice.collective.transport, range(shards.world_size))
        return choice

    def register(self, all_groups: Sequence[Options], first: int, problem: Exception | None) -> None:
        """Lay out, check and take over the parameters of the groups from ``first`` on. Collective.

        ``problem``: an error that this rank found in them, which every rank then raises.
        """
        self.storage.begin()
        try:
            self._take_over(all_groups, first, problem)
        finally:
            if self.storage.layout.buckets and not self.transport.broken:
                with self._failing_for_all():
                    self.storage.end()
                self._materializer = None
                self._cast_inputs()
        self.inners.lists.keep(all_groups, self.storage.listed())

    @contextmanager
    def _failing_for_all(self) -> Iterator[None]:
        """Abort the transport if the block raises, so that no other rank keeps waiting for this one."""
        try:
            yield
        except BaseException as error:
            called = self.transport.rank_label
            self.transport.abort(f"{called}, while parameters were taken over: {type(error).__name__}: {error}")
            raise

    def log_choices(self) -> None:
        """Write one line at INFO: the choices that were made for this optimizer, and their reasons."""
        if not LOG.isEnabledFor(logging.INFO):
            return
        units = self.storage.units() or {}
        LOG.info(
            "%s of %d: stage %d, %s, %d buckets of at most %s, %d units, sharding factor %d, collective %s (%s), "
            "common memory: %s, offload: %s",
            self.transport.rank_label,
            self.transport.world_size,
            self.stage.number,
            self.inners.names(),
            len(self.storage.layout.buckets),
            f"{self.bucket_sizes.most / MIB:.4g} MiB",
            len(set(units.values())),
            self.shards.world_size,
            self.collective.name,
            self.choice.reason,
            self.storage.common_memory(),
            "none" if self.offload is None else self.offload.kind,
        )

    @property
    def superseded(self) -> bool:
        """Whether another optimizer has taken over parameters of this one."""
        return self.reducer.hooks.superseded

    def cast_problem(self) -> str | None:
        """Return an error text if the whole model was cast or moved since construction, else None.

        Only the first parameter is inspected: it changes with the whole model. At stage 3 `diagnose` finds a cast, and
        a compiler could not trace a use of a released parameter.
        """
        if self.stage.parameters is Placement.SHARD:
            return None
        return changed(self.storage.parameters[0], self.storage.layout.parameters[0])

    def _cast_inputs(self) -> None:
        """If the precision asks for it, cast the module's inputs to the dtype of its parameters from now on."""
        if self.module is not None:
            InputCast.remove(self.module, self)  # also the hook of an optimizer that this one replaces
            if self.precision is not None and self.precision.cast_forward_inputs:
                InputCast.put(self.module, self.precision.param_dtype, self)

    def release(self) -> None:
        """Make the model plain again. Collective."""
        if self.module is not None:
            InputCast.remove(self.module, self)
        self.reducer.close()
        self.storage.release()
        if self._offload_backend is not None:
            self._offload_backend.close()

    def _take_over(self, all_groups: Sequence[Options], first: int, problem: Exception | None) -> None:
        groups = all_groups[first:]
        asked = {number: group.pop("partition", self._partition) for number, group in enumerate(groups, start=first)}
        found: list[Tensor] = []
        described: list[ParameterSpec] = []
        replicated: dict[Tensor, ParameterSpec] = {}
        said: list[str] = []
        states: dict[int, frozenset[str]] = {}
        try:
            if problem is not None:
                raise problem
            check_partitions(asked)
            check_buffers(self.module)
            known = sum(len(group["params"]) for group in all_groups[:first])
            dtypes = Dtypes.all if self.precision is None else self.precision.of
            units, meta = self.storage.units(), None if self._materializer is None else self._materializer.device
            listed, of_listed = specs(groups, self.module, known, first, units, dtypes, meta)
            for parameter, spec in zip(listed, of_listed, strict=True):
                if is_laid_out(parameter):
                    found.append(parameter)
                    described.append(spec)
                else:
                    replicated[parameter] = spec
            if not found and not self.storage.buckets:
                raise ValueError(NOTHING_TO_TRAIN)
            check_one_device(
                [*self.storage.layout.parameters, *described], why_one_device(self.stage, self.offload is not None)
            )
            named = [(spec.name, parameter) for spec, parameter in zip(described, found, strict=True)]
            check_free(named)
            if first and self.reducer.is_open:  # else zero_grad() is due, which clears them, too
                check_no_gradients(named)
            self.storage.prepare(found)
            described, said, states = choose_partitions(self.inners, all_groups, described, asked)
        except Exception as error:
            problem = error
        lines = [] if problem is not None else [*self._lines(described), *_replicated_lines(replicated)]
        agree_on_construction(self.transport, lines, problem)
        for line in said if self.transport.rank == 0 else ():
            warnings.warn(line, stacklevel=4)
        for number, names in states.items():
            self.inners[number].elementwise |= names
        self.storage.check_replicas(replicated)
        if self._materializer is not None and self.stage.parameters is Placement.WHOLE:
            with self._failing_for_all():
                self._materializer.finish()
        buckets, across = len(self.storage.buckets), self.storage.buckets_cross_units
        most, first = self.bucket_sizes.most, self.bucket_sizes.first
        if buckets:
            layout = extended(self.storage.layout, described, most, across_units=across)
        else:
            layout = build(described, self.shards.world_size, most, first_bytes=first, across_units=across)
        stores = self._reserve(layout, buckets)
        wide: dict[Bucket, Tensor] = {}  # this rank's interval of the values before the cast

        def keep(bucket: Bucket, whole: Tensor) -> None:
            if bucket.specs[0].trainable:  # frozen ones may never be updated
                begin, end = self.stage.update_interval(bucket.spec, self.shards.rank)
                mine, empty = whole[begin:end], self._room_for_masters(bucket.spec, stores)
                wide[bucket] = mine.clone() if empty is None else empty().copy_(mine)
                if bucket.spec.index in stores:
                    stores[bucket.spec.index].evict({})

        with self._failing_for_all():
            self.storage.replicated.update(replicated)
            new = self.storage.register(found, layout, keep)
            self.streams.use({bucket.weights.data.device for bucket in self.storage.buckets})
            for bucket in new:
                bucket.states = self._states_of(bucket, wide.pop(bucket, None), stores)
                number = bucket.specs[0].optimizer_class
                self.inners[number].begin(bucket.states, self.inners.groups_of(number, all_groups))
                bucket.states.evict()
        self.reducer.extend(new)
        for parameter in self.storage.not_updated():
            self.reducer.hooks.take_over(parameter)

    def _states_of(self, bucket: Bucket, wide: Tensor | None, stores: Mapping[int, OffloadedStates]) -> BucketStates:
        """Return the states of a new bucket. ``wide``: its master weights, if they are known more precisely than from
        the parameters."""
        spec, weights = bucket.spec, bucket.updated_weights(self.stage, self.shards.rank)
        master = None
        if spec.dtypes.has_master:
            master = MasterWeights(weights.data, spec.dtypes.master_dtype, wide, self._room_for_masters(spec, stores))
        number = bucket.specs[0].optimizer_class
        first = next(each for each in self.storage.buckets if each.specs[0].optimizer_class == number)
        instance = self.inners[number].instance(None if bucket is first else first.states.instance)
        groups, shapes = [each.group for each in bucket.specs], [(each.shape, each.stride) for each in bucket.specs]
        store, whole = stores.get(spec.index), bucket.specs[0].whole
        return BucketStates(instance, spec, weights, groups, shapes, master, store, whole=whole)

    def _reserve(self, layout: Layout, first: int) -> dict[int, OffloadedStates]:
        """Return the place of the states of each bucket from ``first`` on, if they are offloaded; else an empty dict.

        With offload this is collective: it is an error on every rank if one rank has no room.
        """
        if self._offload_backend is None:
            return {}
        offload_backend, buckets = self._offload_backend, layout.buckets[first:]
        problem: Exception | None = None
        names = {bucket.index: self._names_of_states(bucket, layout) for bucket in buckets}
        widths = {bucket.index: _length(self.stage.update_interval(bucket, self.shards.rank)) for bucket in buckets}
        wanted = [(widths[bucket.index], bucket.dtypes.master_dtype) for bucket in buckets for _ in names[bucket.index]]
        try:
            offload_backend.reserve(wanted)
        except (ValueError, OSError) as error:
            problem = error
        agree_on_construction(self.transport, [], problem)
        rank = self.transport.rank_label
        return {
            bucket.index: OffloadedStates(
                offload_backend,
                widths[bucket.index],
                names[bucket.index],
                bucket.dtypes.master_dtype,
                torch.device(bucket.device),
                Event(f"prefetch bucket {bucket.index}", rank),
                Event(f"evict bucket {bucket.index}", rank),
            )
            for bucket in buckets
        }

    def _names_of_states(self, bucket: BucketSpec, layout: Layout) -> list[str]:
        """Return the names of the tensors that are kept for a bucket."""
        inner = self.inners[layout.parameters[bucket.slots[0].parameter].optimizer_class]
        masters = bucket.dtypes.has_master and torch.device(bucket.device).type == "cpu"
        return [*sorted(inner.elementwise), *([_MASTER] if masters else [])]

    def _room_for_masters(
        self, bucket: BucketSpec, stores: Mapping[int, OffloadedStates]
    ) -> Callable[[], Tensor] | None:
        """Return a function that allocates the master weights of a bucket in offloaded memory.

        Returns None if they stay beside the parameters, as those on a GPU do.
        """
        if bucket.index not in stores or torch.device(bucket.device).type != "cpu":
            return None
        return partial(stores[bucket.index].tensor, _MASTER, bucket.dtypes.master_dtype)

    def _lines(self, described: Sequence[ParameterSpec]) -> list[str]:
        """Return, as text, the facts that must be equal on all ranks."""
        settings = f"stage {self.stage.number}, collective {self.collective.name}, bucket {self.bucket_sizes}"
        buffers = [] if self.module is None else named_buffers(self.module)
        return [
            settings,
            f"precision {self.precision}",
            f"optimizer {self.inners.names()}",
            *(spec.line() for spec in described),
            *self.storage.lines(),
            *(f"buffer {name} {list(buffer.shape)} {buffer.dtype} {type(buffer).__name__}" for name, buffer in buffers),
        ]


def error_of(call: Callable[[], object]) -> Exception | None:
    """Return the exception that a call raises, else None."""
    try:
        call()
    except Exception as error:
        return error
    return None


def _replicated_lines(replicated: Mapping[Tensor, ParameterSpec]) -> list[str]:
    return [f"replicated {spec.line()} {type(parameter).__name__}" for parameter, spec in replicated.items()]


def _length(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]
