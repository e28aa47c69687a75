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

import torch

from ..core.buckets import MIB, BucketSizes, bucket_sizes, unit_cap_mb
from ..core.formulas import spread_of_owners
from ..core.stage import STAGES
from ..precision import MixedPrecision, Patterns, PrecisionName, named_precision, param_dtype_of
from .hardware import Cluster
from .memory import MemoryPlan, RankBytes
from .model import Model, UnitWork
from .models.works import kept_bytes, recomputed
from .seconds.compute import Compute, Wires
from .seconds.schedule import BucketLoad, TraceEvent, UnitLoad, bucket_loads, program_of
from .seconds.simulate import simulate
from .setting import OPTIMIZERS, PlanSetting

USABLE_SHARE = 0.93  # fragments take 4 to 7 %; this share and 2 GiB did well on published runs that fit and did not
RESERVED = 2 << 30  # bytes: CUDA's context 0.6 to 1.0 GiB, NCCL's buffers 0.2 to 1.5 GiB


@dataclass(frozen=True)
class Training:
    """A model and how it is trained, on any cluster.

    Attributes:
        model: without values.
        works: of each unit for one micro-batch, the root's rest first.
        micro: sequences of a micro-batch.
        sequence: tokens of a sequence.
        global_batch: sequences of a step over all ranks; None: one micro-batch of each rank.
        recompute: which blocks are recomputed, as `works.recomputed` has it.
        precision: one of `PRECISIONS`.
        fp32_modules: patterns of names of modules that compute in fp32, whatever the precision is.
        optimizer: as `PlanSetting` has it.
        counts_activations: whether ``works`` say what the units keep; if not, activations count as none.
        prefetch_depth: at stage 3, units that are gathered ahead of their use.
    """

    model: Model
    works: Sequence[UnitWork]
    micro: int = 1
    sequence: int = 2048
    global_batch: int | None = None
    recompute: str = "none"
    precision: PrecisionName = "bf16"
    optimizer: str = "adamw"
    counts_activations: bool = True
    fp32_modules: tuple[str, ...] = ()
    prefetch_depth: int = 1

    def __post_init__(self) -> None:
        for name in ("micro", "sequence", "global_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        recomputed(0, self.recompute)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro * self.sequence

    @property
    def flops(self) -> float:
        """Operations of forward and backward of a micro-batch; what is recomputed is not counted."""
        return 3 * sum(work.matmul_flops + work.attention_flops for work in self.works)

    @property
    def rule(self) -> MixedPrecision | Patterns | None:
        """The precision of the modules."""
        return named_precision(self.precision, self.fp32_modules)

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of most parameters."""
        return param_dtype_of(self.precision)

    def micro_batches(self, ranks: int) -> int:
        """Return the micro-batches of a rank in a step. Raises `ValueError` if ranks do not divide the global batch."""
        together = self.micro * ranks
        total = together if self.global_batch is None else self.global_batch
        if total % together:
            below = total // together * together
            choices = f"{below} or {below + together}" if below else f"{together}"
            raise ValueError(
                f"a global batch of {total} sequences is not divisible by {ranks} ranks with micro-batches of "
                f"{self.micro}: use {choices}, or another micro-batch or number of ranks"
            )
        return total // together

    def repeated(self, work: UnitWork) -> UnitWork:
        """Return what a backward repeats of a block that is recomputed.

        torch's recompute stops at the last tensor that a backward needs, and the last product of a transformer's block
        is none.
        """
        numbers = self.model.transformer
        last = 0.0 if numbers is None else 2.0 * numbers.ffn * numbers.hidden * self.tokens
        return replace(work, matmul_flops=work.matmul_flops - last)

    def bucket_sizes(self, setting: PlanSetting, cap_mb: float | Literal["auto"] | None) -> BucketSizes:
        """Return the sizes of buckets in a setting for a ``bucket_cap_mb``."""
        return bucket_sizes(
            cap_mb,
            setting.device,
            units_are_gathered=setting.gathers_units,
            ranks=setting.factor,
            hosts=setting.hosts,
            largest_unit=max(self._unit_bytes(setting.device), default=0),
            total=sum(self._padded_bytes(setting.device).values()),
        )

    def unit_cap_mb(self, device: str) -> int:
        """Return the ``bucket_cap_mb`` of which one bucket holds any unit; 25 if units are smaller."""
        return unit_cap_mb(max(self._unit_bytes(device), default=0))

    def _unit_bytes(self, device: str) -> list[int]:
        """Return the bytes of each unit in buckets, without the root's rest."""
        sizes = self._padded_bytes(device)
        return self.model.by_unit(lambda parameter: sizes[id(parameter)])[1:]

    def _padded_bytes(self, device: str) -> dict[int, int]:
        """Return the bytes of each parameter in buckets, by its id."""
        return {
            id(parameter): dtypes.padded(parameter.numel, device) * dtypes.param_dtype.itemsize
            for parameter, dtypes in zip(self.model.parameters, self.model.dtypes(self.rule), strict=True)
        }

    def activation_bytes(self) -> int:
        """Return the most that activations take at one moment, without the parameters."""
        if not self.counts_activations:
            return 0
        root, *blocks = self.works
        again = recomputed(len(blocks), self.recompute)
        kept = sum(kept_bytes(work, is_again) for work, is_again in zip(blocks, again, strict=True))
        rest = (
            work.peak_bytes - (0 if is_again else work.saved_bytes)
            for work, is_again in zip(blocks, again, strict=True)
        )
        logits = self.tokens * self.model.vocabulary * self.param_dtype.itemsize  # a loop holds them in its backward
        return kept + max(root.peak_bytes, logits + max((0, *rest)))


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
    events: tuple[TraceEvent, ...] = field(default=(), repr=False)


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
    """Plans one training. What settings and clusters share is computed once."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._memory = MemoryPlan(training.model)
        self._activations = training.activation_bytes()
        self._ranks: dict[PlanSetting, RankBytes] = {}
        self._loads: dict[int, list[BucketLoad]] = {}
        self._units = training.model.unit_numels()
        self._tensors = training.model.by_unit(lambda _: 1)

    def recomputing(self, recompute: str) -> Planner:
        """Return the plan of the same training with another choice of what blocks recompute."""
        other = copy.copy(self)
        other.training = replace(self.training, recompute=recompute)
        other._activations = other.training.activation_bytes()
        return other

    def setting(self, cluster: Cluster, stage: int, cap_mb: float | None = None) -> PlanSetting:
        """Return a setting of this training, in which all ranks share one copy. ``cap_mb``: ``bucket_cap_mb``."""
        found = PlanSetting(
            stage=stage,
            world_size=cluster.ranks,
            prefetch_depth=self.training.prefetch_depth if STAGES[stage].gathers(1) else 1,
            mixed_precision=self.training.rule,
            optimizer=self.training.optimizer,
            fused=self.training.optimizer != "muon",  # whose update is planned; torch.optim.Muon has no such argument
            partition="block" if OPTIMIZERS[self.training.optimizer][0].quantized else None,
            device="cuda" if cluster.gpu.family != "cpu" else "cpu",
            ranks_per_host=cluster.per_host,
        )
        sizes = self.training.bucket_sizes(found, cap_mb)
        return replace(found, bucket_cap_mb=sizes.most / MIB, first_bucket_bytes=sizes.first)

    def peak(self, setting: PlanSetting) -> PeakBytes:
        """Return the bytes of the rank that holds most."""
        found = self._largest(setting)
        buckets = found.scratch_peak + found.staged_peak
        return PeakBytes(found.resident, self._activations, found.gathered_peak, buckets)

    def spread(self, setting: PlanSetting) -> str:
        """Return, as text, how parameters that have one owner each are spread over the ranks; "" if there are none."""
        return spread_of_owners(self._memory.laid_out(setting).layout, setting.row)

    def held(self, setting: PlanSetting, cluster: Cluster) -> PlannedSetting:
        """Return the bytes that a setting takes, without seconds."""
        return PlannedSetting(setting, cluster, self.peak(setting), self._largest(setting).offloaded)

    def _largest(self, setting: PlanSetting) -> RankBytes:
        if setting not in self._ranks:
            self._ranks[setting] = self._memory.of_largest(setting)
        return self._ranks[setting]

    def step(self, setting: PlanSetting, cluster: Cluster, *, micro_batches: int = 0, trace: bool = False) -> Step:
        """Return a step. ``micro_batches``: of each rank; 0: what the global batch asks for."""
        training = self.training
        micro_batches = micro_batches or training.micro_batches(cluster.ranks)
        compute = Compute(cluster, str(training.param_dtype).removeprefix("torch."))
        program = program_of(
            self.unit_loads(compute),
            self._bucket_loads(setting),
            Wires(cluster),
            setting,
            compute,
            micro_batches,
        )
        found = simulate(program, trace=trace)
        tokens = micro_batches * training.tokens * cluster.ranks
        peak = cluster.gpu.peak(str(training.param_dtype).removeprefix("torch."))
        return Step(
            found.seconds,
            found.parts,
            tokens / found.seconds,
            micro_batches * training.flops / found.seconds / peak,
            self._memory.sent(setting, micro_batches, setting.row.reduced_backwards(micro_batches)),
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

    def choice(self, setting: PlanSetting, cluster: Cluster, *, always: bool = False) -> PlannedSetting:
        """Return what a setting takes. ``always``: seconds also if it does not fit."""
        held = self.held(setting, cluster)
        return replace(held, step=self.step(setting, cluster)) if always or held.fits else held

    def unit_loads(self, compute: Compute) -> list[UnitLoad]:
        training = self.training
        again = (False, *recomputed(len(training.works) - 1, training.recompute))
        hidden = training.model.hidden
        return [
            UnitLoad(compute.passes(work, hidden, training.repeated(work) if is_again else None), numel, tensors)
            for work, is_again, numel, tensors in zip(training.works, again, self._units, self._tensors, strict=True)
        ]

    def _bucket_loads(self, setting: PlanSetting) -> list[BucketLoad]:
        layout = self._memory.laid_out(setting).layout
        if id(layout) not in self._loads:  # the plan of memory keeps every layout
            units = [each.unit for each in self.training.model.parameters]
            self._loads[id(layout)] = bucket_loads(layout, units, setting.classes)
        return self._loads[id(layout)]


def usable_bytes(cluster: Cluster) -> int:
    """Return the bytes of a GPU that a training can use, without context, communicators and fragments."""
    if cluster.gpu.family == "cpu":
        return int(cluster.gpu.memory)
    return int(USABLE_SHARE * cluster.gpu.memory) - RESERVED
