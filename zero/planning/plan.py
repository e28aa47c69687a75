"""Plan a training: the bytes of a rank and the seconds of a step, for one setting on one cluster.

    states        parameters, gradients, optimizer states and masters of a rank, exact (`memory`)
    activations   what the units keep, and the largest peak among them; the loss has its own
    gathered      units that are whole at one time, an upper bound
    buckets       buckets in flight and offloaded states on their way, an upper bound
    seconds       the library's own schedule, simulated (`seconds.schedule`, `seconds.simulate`)

A setting fits if the sum of the four is at most `usable_bytes`. The sum is an upper bound, since the kinds do not all
peak at one moment.

Knows: what a setting takes. Does not know: which settings there are, how a model or a cluster is read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..core.buckets import MIB, BucketSizes, bucket_sizes, unit_cap_mb
from ..core.stage import STAGES
from .hardware import Cluster
from .memory import MemoryPlan, RankBytes
from .model import Model, UnitWork
from .seconds.compute import Compute, PassSeconds
from .seconds.schedule import BucketLoad, TraceEvent, bucket_loads, program_of
from .seconds.simulate import simulate
from .setting import OPTIMIZERS, PlanSetting, Recompute, Training

USABLE_SHARE = 0.93  # fragments take 4 to 7 %; this share and 2 GiB did well on published runs that fit and did not
RESERVED = 2 << 30  # bytes: CUDA's context 0.6 to 1.0 GiB, NCCL's buffers 0.2 to 1.5 GiB


@dataclass(frozen=True)
class PeakBytes:
    """The bytes of the rank that holds most, by kind: see the module."""

    states: int
    activations: int
    gathered: int
    buckets: int

    @property
    def total(self) -> int:
        return self.states + self.activations + self.gathered + self.buckets


@dataclass(frozen=True)
class Step:
    """A step of a setting on a cluster.

    Attributes:
        seconds: of the step; their ``parts`` are by the names of `program.PARTS`.
        tokens_per_second: of all ranks.
        utilization: operations of the model, without what is recomputed, as a share of the GPUs' peak. Causal attention
            counts the half that is computed; 12 L h s a token, as some count it, is twice that.
        sent: payload bytes of all ranks, as `optimizer.traffic` counts them.
        left_host: bytes that one host sends to others.
        events: for a trace; empty unless asked for.
    """

    seconds: float
    parts: Mapping[str, float]
    tokens_per_second: float
    utilization: float
    sent: int
    left_host: float
    events: Sequence[TraceEvent] = field(default=(), repr=False)


@dataclass(frozen=True)
class PlannedSetting:
    """A setting with what it takes on a cluster. ``step`` is None where nothing was simulated.

    ``offloaded``: bytes on the host or on a disk, which are no part of ``peak``.
    """

    setting: PlanSetting
    cluster: Cluster
    peak: PeakBytes
    offloaded: int
    step: Step | None = None

    @property
    def usable(self) -> int:
        return usable_bytes(self.cluster)

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.usable

    @property
    def seconds(self) -> float:
        return math.inf if self.step is None else self.step.seconds


class Planner:
    """Plans one training of a model. What settings and clusters share is computed once.

    Args:
        model: without values.
        works: of each unit for one micro-batch, the root's rest first.
        training: how it is trained.
    """

    def __init__(self, model: Model, works: Sequence[UnitWork], training: Training) -> None:
        self.model, self.works, self.training = model, works, training
        self.memory = MemoryPlan(model)
        self._ranks: dict[PlanSetting, RankBytes] = {}
        self._loads: dict[int, list[BucketLoad]] = {}

    def recomputing(self, recompute: Recompute) -> Planner:
        """Return the plan of the same training with another choice of what blocks recompute."""
        other = copy.copy(self)
        other.training = replace(self.training, recompute=recompute)
        return other

    @property
    def counts_activations(self) -> bool:
        """Whether the works say what the units keep; if not, activations count as none."""
        return any(work.kernels for work in self.works)

    def activation_bytes(self) -> int:
        """Return the most that activations take at one moment, without the parameters."""
        root, *blocks = self.works
        kept, peak = 0, 0
        for work, again in zip(blocks, self.training.blocks_recomputed(len(blocks)), strict=True):
            saved = 0 if again else work.saved_bytes
            kept, peak = kept + work.input_bytes + saved, max(peak, work.peak_bytes - saved)
        training = self.training  # whose loop holds the logits in its backward
        vocabulary = 0 if self.model.transformer is None else self.model.transformer.vocabulary
        logits = training.tokens_of_micro_batch * vocabulary * training.param_dtype.itemsize
        return kept + max(root.peak_bytes, logits + peak)

    def setting(self, cluster: Cluster, stage: int, cap_mb: float | None = None) -> PlanSetting:
        """Return a setting of this training, in which all ranks share one copy. ``cap_mb``: ``bucket_cap_mb``."""
        training = self.training
        found = PlanSetting(
            stage=stage,
            world_size=cluster.ranks,
            prefetch_depth=training.prefetch_depth if STAGES[stage].gathers(1) else 1,
            mixed_precision=training.rule,
            optimizer=training.optimizer,
            fused=training.optimizer != "muon",  # whose update is planned; torch.optim.Muon has no such argument
            partition="block" if OPTIMIZERS[training.optimizer][0].quantized else None,
            device="cuda" if cluster.gpu.family != "cpu" else "cpu",
            ranks_per_host=cluster.per_host,
        )
        sizes = self.bucket_sizes(found, cap_mb)
        return replace(found, bucket_cap_mb=sizes.most / MIB, first_bucket_bytes=sizes.first)

    def bucket_sizes(self, setting: PlanSetting, cap_mb: float | Literal["auto"] | None) -> BucketSizes:
        """Return the sizes of buckets in a setting for a ``bucket_cap_mb``."""
        units = self._unit_bytes(setting.device)
        return bucket_sizes(
            cap_mb,
            setting.device,
            units_are_gathered=setting.gathers_units,
            ranks=setting.factor,
            world_size=setting.world_size,
            hosts=setting.hosts,
            largest_unit=max(units[1:], default=0),
            total=sum(units),
        )

    def unit_cap_mb(self, device: str) -> int:
        """Return the ``bucket_cap_mb`` of which one bucket holds any unit; 25 if units are smaller."""
        return unit_cap_mb(max(self._unit_bytes(device)[1:], default=0))

    def _unit_bytes(self, device: str) -> list[int]:
        """Return the bytes of each unit in buckets, the root's rest first."""
        found = [0] * len(self.model.units)
        dtypes = self.model.dtypes(self.training.rule)
        for parameter, each in zip(self.model.parameters, dtypes, strict=True):
            found[parameter.unit] += each.padded(parameter.numel, device) * each.param_dtype.itemsize
        return found

    def held(self, setting: PlanSetting, cluster: Cluster) -> PlannedSetting:
        """Return the bytes that a setting takes, on the rank that holds most, without seconds."""
        if setting not in self._ranks:
            self._ranks[setting] = self.memory.of_largest(setting)
        found = self._ranks[setting]
        buckets = found.scratch_peak + found.staged_peak
        peak = PeakBytes(found.resident, self.activation_bytes(), found.gathered_peak, buckets)
        return PlannedSetting(setting, cluster, peak, found.offloaded)

    def step(self, setting: PlanSetting, cluster: Cluster, *, micro_batches: int = 0, trace: bool = False) -> Step:
        """Return a step. ``micro_batches``: of each rank; 0: what the global batch asks for."""
        training = self.training
        micro_batches = micro_batches or training.micro_batches(cluster.ranks)
        compute, tensors = Compute(cluster, training.products), self.model.by_unit(lambda _: 1)
        loads = self._bucket_loads(setting)
        program = program_of(self.passes(compute), tensors, loads, setting, compute, micro_batches)
        found = simulate(program, trace=trace)
        tokens = micro_batches * training.tokens_of_micro_batch * cluster.ranks
        flops = 3 * sum(work.matmul_flops + work.attention_flops for work in self.works)
        return Step(
            found.seconds,
            found.parts,
            tokens / found.seconds,
            micro_batches * flops / found.seconds / cluster.gpu.peak(training.products),
            self.memory.sent(setting, micro_batches, setting.row.reduced_backwards(micro_batches)),
            found.crossed / cluster.hosts,
            found.events,
        )

    def over_fabrics(
        self, setting: PlanSetting, cluster: Cluster, fabrics: Mapping[str, float], *, micro_batches: int = 0
    ) -> list[Step]:
        """Return the step on the cluster, and then on each fabric if it has several hosts."""
        ring_steps = [cluster.network.ring_step, *(fabrics.values() if cluster.hosts > 1 else ())]
        clusters = [replace(cluster, network=replace(cluster.network, ring_step=each)) for each in ring_steps]
        return [self.step(setting, each, micro_batches=micro_batches) for each in clusters]

    def passes(self, compute: Compute) -> list[PassSeconds]:
        """Return the seconds of each unit.

        torch's recompute stops at the last tensor that a backward needs, and the last product of a transformer's block
        is none.
        """
        numbers, hidden, last = self.model.transformer, 0, 0.0
        if numbers is not None:
            hidden, last = numbers.hidden, 2.0 * numbers.ffn * numbers.hidden * self.training.tokens_of_micro_batch
        again = (False, *self.training.blocks_recomputed(len(self.works) - 1))
        found = []
        for work, is_again in zip(self.works, again, strict=True):
            repeated = replace(work, matmul_flops=work.matmul_flops - last) if is_again else None
            found.append(compute.passes(work, repeated, hidden))
        return found

    def _bucket_loads(self, setting: PlanSetting) -> list[BucketLoad]:
        layout = self.memory.laid_out(setting).layout
        if id(layout) not in self._loads:  # the plan of memory keeps every layout
            units = [each.unit for each in self.model.parameters]
            self._loads[id(layout)] = bucket_loads(layout, units, setting.classes)
        return self._loads[id(layout)]


def usable_bytes(cluster: Cluster) -> int:
    """Return the bytes of a GPU that a training can use, without context, communicators and fragments."""
    if cluster.gpu.family == "cpu":
        return int(cluster.gpu.memory)
    return int(USABLE_SHARE * cluster.gpu.memory) - RESERVED
