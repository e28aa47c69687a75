"""Describes one rank: the bytes that it holds, read from its tensors, next to those of the formulas.

Knows: every part's tensors. Changes none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from collectives import Choice, Fold, folds

from ..core.formulas import KeptStates, formula_bytes, formula_traffic, peak_bounds, spread_of_owners
from ..core.parameter_specs import parts_of
from ..core.stage import FOLDS_IN_FLIGHT, Stage, sums_under_way
from ..gradients.reducer import Reducer
from ..parameters.storage import ParameterStorage
from ..runtime.bucket import Bucket


@dataclass(frozen=True)
class BucketDescription:
    """A bucket on this rank. Bytes are those of the buffers that exist now."""

    names: tuple[str, ...]
    dtype: str
    trainable: bool
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    bounds: tuple[int, ...]
    collective: str

    def owners(self) -> str:
        """Return, as text, the interval of elements that each rank owns."""
        cuts = zip(self.bounds, self.bounds[1:], strict=False)
        return " ".join(f"{rank}:[{low},{high})" for rank, (low, high) in enumerate(cuts))


@dataclass(frozen=True)
class Description:
    """The result of `ZeroOptimizer.describe`. ``print`` shows it as a table.

    ``bytes`` has the bytes of the buffers that exist now, read from the tensors, by kind: "parameters", "gradients",
    "optimizer", "gathered_peak", "scratch_peak". ``formula_bytes`` has the same, calculated.
    """

    stage: int
    rank: int
    world_size: int
    sharding_factor: int  # ranks that share one copy
    collective: str
    why: str  # the reason for this collective
    buckets: tuple[BucketDescription, ...]
    storages: dict[str, frozenset[int]]
    bytes: dict[str, int]
    formula_bytes: dict[str, int]
    replicated_bytes: dict[str, int]  # by name, of the parameters that every rank holds whole at every stage
    offloaded_bytes: int  # the part of all these that is on disk or in the host's memory
    by_parameter: str  # how parameters with one owner each are spread over the ranks; empty if there are none
    formula_traffic_bytes: Callable[[int, int], int]
    """(backwards, synchronised backwards) of the rank that has most in a step -> payload bytes that the step sends,
    summed over the ranks. A rank that has fewer takes part without a contribution."""
    mesh: str = ""  # the dimensions of the mesh that the user gave, with their sizes

    def __str__(self) -> str:
        shared, replicas = "", self.world_size // self.sharding_factor
        if replicas > 1:
            sums = f"sums of up to {sums_under_way(replicas)} buckets under way between {replicas} replicas"
            shared = f"sharding factor {self.sharding_factor} ({sums}), "
        if folds(self.collective):
            shared = f"sums of up to {FOLDS_IN_FLIGHT} buckets under way between hosts, "
        mesh = f"{self.mesh}, " if self.mesh else ""
        lines = [
            f"stage {self.stage}, rank {self.rank} of {self.world_size}, {mesh}{shared}collective {self.collective} "
            f"({self.why})",
            f"{'':>4} {'bytes':>14} {'formula':>14}",
        ]
        lines += [f"{kind:<14} {self.bytes[kind]:>14,} {self.formula_bytes[kind]:>14,}" for kind in self.bytes]
        if self.replicated_bytes:
            names = _few(list(self.replicated_bytes))
            lines.append(f"{'replicated':<14} {sum(self.replicated_bytes.values()):>14,}  {', '.join(names)}")
        if self.offloaded_bytes:
            lines.append(f"{'elsewhere':<14} {self.offloaded_bytes:>14,}")
        lines += self.by_parameter.splitlines()
        for number, bucket in enumerate(self.buckets):
            names = _few(bucket.names)
            state = "" if bucket.trainable else ", frozen"
            lines.append(
                f"bucket {number}: {bucket.dtype}{state}, parameters {bucket.parameter_bytes:,} B, gradients "
                f"{bucket.gradient_bytes:,} B, states {bucket.optimizer_bytes:,} B, {bucket.collective}, owners "
                f"{bucket.owners()}: {', '.join(names)}"
            )
        return "\n".join(lines)


def describe(
    stage: Stage,
    choice: Choice,
    storage: ParameterStorage,
    reducer: Reducer,
    reshard_group_size: int,
    mesh: str,
) -> Description:
    """Describe one rank. Local; changes nothing. ``reshard_group_size`` is the result of `check_reshard`."""
    layout, collective = storage.layout, choice.collective
    transport, shard_group = collective.transport, choice.shard_group
    hosts = collective.hosts if isinstance(collective, Fold) else 1
    buckets, stored = storage.buckets, (*storage.buckets, *storage.unlisted_buckets())
    parameters = [kept for bucket in stored for kept in bucket.weights.kept()]
    units = storage.manager
    gathered = None if units is None else units.gathered.pool
    gradients = [tensor for bucket in buckets for tensor in bucket.grad.tensors()]
    states = [tensor for bucket in buckets for tensor in bucket.states.tensors()]
    units_need_gather, means_are_shown = storage.unit_hooks.needs_gather, reducer.means_are_shown  # as they are now
    formula = formula_bytes(
        layout, stage, shard_group.rank, lambda spec: _kept(buckets[spec.index]), storage.unlisted_layout
    )
    formula |= peak_bounds(
        layout,
        stage,
        storage.unlisted_layout,
        reshard_group_size,
        schedule=storage.unit_hooks.schedule,
        shards_are_exposed=bool(stage.gathers(1)) and units_need_gather and shard_group.memory is not None,
        host_ranks=transport.world_size // hosts if hosts > 1 else 0,
    )
    formula["optimizer"] += sum(bucket.states.large_bytes() for bucket in buckets)  # the class alone knows their shapes
    return Description(
        stage.number,
        transport.rank,
        transport.world_size,
        shard_group.world_size,
        collective.name,
        choice.reason,
        tuple(_bucket(bucket, collective.name) for bucket in buckets),
        {
            "parameters": _storages(parameters),
            "gradients": _storages(gradients),
            "optimizer": _storages(states),
            "gathered": frozenset() if gathered is None else gathered.storages(),
            "scratch": shard_group.pool.storages(),
            "common": frozenset() if units is None else units.resident.in_common(),
        },
        {
            "parameters": _bytes(parameters),
            "gradients": _bytes(gradients),
            "optimizer": _bytes(states),
            "gathered_peak": 0 if gathered is None else gathered.peak_bytes,
            "scratch_peak": shard_group.pool.peak_bytes,
        },
        formula,
        {name: sum(part.nbytes for part in parts_of(parameter)) for name, parameter in storage.replicas()},
        _bytes(tensor for bucket in stored for tensor in bucket.offloaded()),
        spread_of_owners(layout, stage),
        lambda backwards, synchronised: formula_traffic(
            layout,
            stage,
            backwards,
            synchronised,
            storage.unlisted_layout,
            units_need_gather=units_need_gather,
            means_are_shown=means_are_shown,
            replicas=transport.world_size // shard_group.world_size,
            reshard_group_size=reshard_group_size,
            schedule=storage.unit_hooks.schedule,
            hosts=hosts,
        ),
        mesh,
    )


def _kept(bucket: Bucket) -> KeptStates:
    """Return what the class keeps for a bucket."""
    states = bucket.states
    stepped, cut = states.stepped()
    return KeptStates(
        sum(flat.data.itemsize for flat in states.flat.values()),
        bool(states.master.kept()),
        states.scalar_bytes(),
        stepped,
        cut,
    )


def _bucket(bucket: Bucket, collective: str) -> BucketDescription:
    return BucketDescription(
        tuple(spec.name for spec in bucket.specs),
        str(bucket.spec.dtypes.param_dtype),
        any(parameter.requires_grad for parameter in bucket.parameters),
        _bytes(bucket.weights.kept()),
        _bytes(bucket.grad.tensors()),
        _bytes(bucket.states.tensors()),
        tuple(bucket.spec.cuts),
        collective,
    )


def _few(names: Sequence[str]) -> Sequence[str]:
    return names if len(names) < 5 else (*names[:2], "...", names[-1])


def _storages(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each counted once: they may lie beside others in blocks of memory."""
    found: dict[int, int] = {}
    for tensor in tensors:
        nbytes = min(tensor.nbytes, tensor.untyped_storage().nbytes())  # an expanded one has fewer than elements
        found[tensor.data_ptr()] = max(nbytes, found.get(tensor.data_ptr(), 0))
    return sum(found.values())
