"""A training, as a plan needs it: how it is trained on any cluster, and a setting of its optimizer on some ranks.

Knows: classes of optimizers by the tensors that they keep, which ranks share a host. Does not know: models, bytes,
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, cast

import torch

from collectives import algorithm_for, folds

from ..config import ShardingOptions
from ..core.buckets import DEFAULT_CAP_MB, MIB, BucketSizes
from ..core.conflicts import OF_PLAN, check
from ..core.grain import CUT_EVERY
from ..core.stage import Placement, units_share_buckets
from ..core.units import ROOT, UnitSchedule
from ..precision import PRECISIONS, MixedPrecision, Patterns, PrecisionName

Recompute = Literal["none", "selective", "full"]
STEP_COUNT_BYTES = 4  # a count is a tensor of one element, in fp32: torch/optim/optimizer.py, _get_scalar_dtype


@dataclass(frozen=True)
class Quantized:
    """How a class keeps a state in few bits: with a scale in fp32 for each block of elements, as those of torchao do.

    Attributes:
        bits: of an element.
        block: the elements of a block.
        table_bytes: of the values for which the bits stand, which each state has.
    """

    bits: int
    block: int
    table_bytes: int = 0

    def fits(self, numel: int) -> bool:
        """Return whether the class quantizes a state of ``numel`` elements: if there are enough, in whole blocks."""
        return numel >= CUT_EVERY and numel % self.block == 0

    def is_cut(self, numel: int) -> bool:
        """Return whether a parameter of ``numel`` elements is cut between blocks. Else it has one owner."""
        return numel >= 2 * CUT_EVERY and self.fits(numel)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a state of ``numel`` elements that is quantized."""
        return numel * self.bits // 8 + numel // self.block * 4 + self.table_bytes


@dataclass(frozen=True)
class OptimizerStates:
    """The states that a class of optimizers keeps.

    Attributes:
        tensors: how many as large as a parameter.
        step_counts: how many of one element for each run (see `zero.core.runs`).
        at_construction: whether its constructor makes them, also for frozen and for unused parameters.
        quantized: how it keeps them in few bits; None: in the dtype of the weights that it steps.
        orthogonalizes: whether it steps a matrix by Newton-Schulz iterations.
    """

    tensors: int
    step_counts: int = 0
    at_construction: bool = False
    quantized: Quantized | None = None
    orthogonalizes: bool = False

    @property
    def moved(self) -> float:
        """The tensors as large as a parameter, in the dtype of the weights, that have as many bytes, with scales."""
        return self.tensors * (1.0 if self.quantized is None else self.quantized.bits / 32 + 1 / self.quantized.block)


OPTIMIZERS: Mapping[str, tuple[OptimizerStates, ...]] = MappingProxyType(
    {
        "adamw": (OptimizerStates(2, step_counts=1),),
        "adam": (OptimizerStates(2, step_counts=1),),
        "momentum": (OptimizerStates(1),),
        "sgd": (OptimizerStates(0),),
        "adagrad": (OptimizerStates(1, step_counts=1, at_construction=True),),
        "muon": (OptimizerStates(2, step_counts=1), OptimizerStates(1, orthogonalizes=True)),
        "adamw8bit": (OptimizerStates(2, step_counts=1, quantized=Quantized(8, 256, 256 * 4)),),
        "adamw4bit": (OptimizerStates(2, step_counts=1, quantized=Quantized(4, 128, 16 * 4)),),
        "adamwfp8": (OptimizerStates(2, step_counts=1, quantized=Quantized(8, 256)),),
    }
)
"""The classes by number, under a name. "momentum" is SGD with momentum. "muon" is AdamW, and as number 1 Muon for the
matrices of units (`ParameterShape.is_unit_matrix`), which have one owner each.
The last three are torchao's AdamW8bit, AdamW4bit and AdamWFp8, with ``partition="block"``."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained, on any cluster. The text in the type of a field describes it; `zero plan` checks it."""

    micro: Annotated[int, "sequences per micro-batch"] = 1
    sequence: Annotated[int, "tokens per sequence"] = 2048
    global_batch: Annotated[int | None, "sequences per step, over all ranks; default: one micro-batch per rank"] = None
    recompute: Annotated[Recompute, "blocks that the backward recomputes: none, every second one, all"] = "none"
    precision: Annotated[PrecisionName, "dtype of the model's compute; bf16 and fp16 add fp32 masters"] = "bf16"
    fp32_modules: Annotated[
        str | None, "modules that compute in fp32 in a 16-bit model: patterns of their names, as in '*norm*,lm_head'"
    ] = None
    optimizer: Annotated[
        str,
        "adamw, adam, momentum, sgd, adagrad; muon: Muon for the units' matrices, AdamW for the rest; adamw8bit, "
        "adamw4bit, adamwfp8: torchao's",
    ] = "adamw"
    prefetch_depth: Annotated[int, "at stage 3: units that are gathered ahead of their use; 0: none"] = 1

    @property
    def rule(self) -> MixedPrecision | Patterns | None:
        """The precision of the modules. What those in fp32 return is cast back."""
        precision = PRECISIONS[self.precision]
        if precision is None or self.fp32_modules is None:
            return precision
        kept = MixedPrecision(torch.float32, output_dtype=precision.param_dtype)
        return Patterns((("*", precision), *((pattern, kept) for pattern in self.fp32_modules.split(","))))

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of most parameters."""
        precision = PRECISIONS[self.precision]
        return torch.float32 if precision is None else precision.of(torch.float32).param_dtype

    @property
    def products(self) -> str:
        """The dtype of most products of matrices, by the name of a peak."""
        return str(self.param_dtype).removeprefix("torch.")

    @property
    def tokens_of_micro_batch(self) -> int:
        return self.micro * self.sequence

    def blocks_recomputed(self, count: int) -> list[bool]:
        """Return which of so many blocks are recomputed in a backward; the first one is if every second one is."""
        return [self.recompute == "full" or (self.recompute == "selective" and not n % 2) for n in range(count)]

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


@dataclass(frozen=True, kw_only=True)
class PlanSetting(ShardingOptions):
    """The options of a `zero.ZeroOptimizer` over a module that was made in fp32, and the places of its ranks.

    Collectives, units and the partition are those of the plan's model. As ``bucket_cap_mb``, None is 25 on every
    device, and "auto" is refused: `Planner.bucket_sizes` finds the sizes that depend on a model.

    Attributes:
        world_size: the number of ranks.
        optimizer: one of `OPTIMIZERS`.
        fused: whether the class is fused, so that runs on the CPU are not cut.
        device: the type of the parameters' device.
        ranks_per_host: neighbouring ranks of one host; None: all ranks are on one.
        threads: whether the ranks are threads of one process (`collectives.Loopback`).
        first_bucket_bytes: of the bucket that a backward completes first; 0: as the others.

    Raises:
        ValueError: an argument is invalid; the message names it and the remedy.
    """

    world_size: int = 1
    optimizer: str = "adamw"
    fused: bool = False
    device: str = "cpu"
    ranks_per_host: int | None = None
    threads: bool = False
    first_bucket_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.world_size, bool) or not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(f"world_size must be a whole number, at least 1, not {self.world_size!r}")
        if self.bucket_cap_mb == "auto":
            raise ValueError('bucket_cap_mb="auto" depends on the model: Planner.bucket_sizes finds the number')
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(map(repr, OPTIMIZERS))}, not {self.optimizer!r}")
        if callable(self.mixed_precision):
            raise ValueError(
                "mixed_precision: a function needs modules, and a plan has names alone: give patterns of names"
            )
        self.reshard_group_size(self.world_size)
        if (self.partition == "block") is not bool(self.quantized):
            names = ", ".join(name for name, (states, *_) in OPTIMIZERS.items() if states.quantized)
            raise ValueError(
                f'partition="block" is planned for optimizers with states for blocks ({names}), and these with it: '
                f"not {self.partition!r} for {self.optimizer!r}"
            )
        check(OF_PLAN, self)
        if callable(self.reshard_after_forward):
            raise ValueError("reshard_after_forward: a plan has no modules, of which a function could decide")
        if self.ranks_per_host is not None and (self.ranks_per_host < 1 or self.world_size % self.ranks_per_host):
            raise ValueError(
                f"ranks_per_host must divide the number of ranks, {self.world_size}, not {self.ranks_per_host}"
            )

    @property
    def factor(self) -> int:
        """How many ranks share one copy."""
        return self.world_size if self.sharding_factor is None else self.sharding_factor

    @property
    def replicas(self) -> int:
        """How many groups of ranks hold one copy each."""
        return self.world_size // self.factor

    @property
    def near(self) -> int:
        """How many ranks share the copy of a unit that is kept for its backward."""
        return self.reshard_group_size(self.world_size)

    def unit_schedule(self, units: int) -> UnitSchedule:
        """Return which of so many units, the root's rest included, may be whole at once. None lies inside another."""
        kept = range(ROOT + 1, units if self.keeps_units else 0)
        return UnitSchedule(kept=frozenset(kept), depth=self.prefetch_depth)

    @property
    def per_host(self) -> int:
        """How many ranks a host has."""
        return self.world_size if self.ranks_per_host is None else self.ranks_per_host

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.world_size // self.per_host

    @property
    def folded_hosts(self) -> int:
        """Over how many hosts sums are folded; 1 if they are not."""
        by_nccl = self.device != "cpu"
        found = algorithm_for(self.factor, self.hosts, by_nccl=by_nccl, replicas=self.replicas)
        return self.hosts if folds(found) else 1

    @property
    def states_on(self) -> Literal["", "disk", "host"]:
        """The place of states (and, on the CPU, of master weights) between steps; "" is beside the parameters."""
        if self.offload is None:
            return ""
        return "host" if self.offload.on_host else "disk"

    @property
    def classes(self) -> tuple[OptimizerStates, ...]:
        """The states of the optimizer's classes, by number."""
        return OPTIMIZERS[self.optimizer]

    @property
    def quantized(self) -> Quantized | None:
        """How states are kept in few bits; None: they are not."""
        return self.classes[0].quantized

    @property
    def has_units(self) -> bool:
        """Whether parameters are in units."""
        return self.row.parameters is Placement.SHARD

    @property
    def bucket_sizes(self) -> BucketSizes:
        """The sizes of buckets."""
        return BucketSizes(self.bucket_bytes, self.first_bucket_bytes or self.bucket_bytes)

    @property
    def bucket_bytes(self) -> int:
        """The bytes of a bucket, in the dtype of the parameters."""
        return int(float(self.bucket_cap_mb or DEFAULT_CAP_MB) * MIB)

    @property
    def shares_buckets(self) -> bool:
        """Whether units share buckets."""
        in_common = self.device == "cpu" and not self.threads and self.per_host % self.factor == 0
        return not self.offloads_parameters and units_share_buckets(self.factor, in_common=in_common)

    @property
    def gathers_units(self) -> bool:
        """Whether units are gathered, since ranks do not see each other's shards of them in common memory."""
        return self.has_units and self.gathers_shards(self.factor) and not self.shares_buckets

    @property
    def keeps_units(self) -> bool:
        """Whether units that are gathered stay whole between a forward and its backward."""
        return self.gathers_units and self.reshard_after_forward is not True and self.near == 1

    @property
    def shows_means(self) -> bool:
        """Whether p.grad is the mean after each backward at stage 0, since no module has another dtype."""
        rule = cast(MixedPrecision | Patterns | None, self.mixed_precision)
        every = [precision for _, precision in rule.pairs] if isinstance(rule, Patterns) else [rule]
        return all(precision is None or precision.param_dtype is None for precision in every)
