"""The setting of a training, as a plan needs it: the optimizer's arguments, and the places of its ranks.

Knows: the arguments of `zero.ZeroOptimizer`, classes of optimizers by the tensors that they keep, which ranks share a
host. Does not know: models, bytes, seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from ..core.layout import BucketSizes, Dtypes
from ..core.stage import (
    Placement,
    Stage,
    check_reshard,
    check_sharding_factor,
    stage_of,
    units_share_buckets,
)

STEP_COUNT_BYTES = 4  # a count is a tensor of one element, in fp32: torch/optim/optimizer.py, _get_scalar_dtype


@dataclass(frozen=True)
class OptimizerStates:
    """The states that a class of optimizers keeps.

    Attributes:
        tensors: how many as large as a parameter.
        step_counts: how many of one element for each run (see `zero.core.runs`).
        at_construction: whether its constructor makes them, also for frozen and for unused parameters.
    """

    tensors: int
    step_counts: int = 0
    at_construction: bool = False


OPTIMIZERS: Mapping[str, tuple[OptimizerStates, ...]] = MappingProxyType(
    {
        "adamw": (OptimizerStates(2, step_counts=1),),
        "adam": (OptimizerStates(2, step_counts=1),),
        "momentum": (OptimizerStates(1),),
        "sgd": (OptimizerStates(0),),
        "adagrad": (OptimizerStates(1, step_counts=1, at_construction=True),),
        "muon": (OptimizerStates(2, step_counts=1), OptimizerStates(1)),
    }
)
"""The classes by number, under a name. "momentum" is SGD with momentum. "muon" is AdamW, and as number 1 Muon for the
matrices of units (`ParameterShape.is_unit_matrix`), which have one owner each, as in `zero train --optimizer muon`."""

_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16
PRECISIONS: Mapping[str, Dtypes] = MappingProxyType(
    {
        "fp32": Dtypes.all(_F32),
        "bf16": Dtypes(_BF16, _BF16, _F32, _F32),
        "bf16, added up in bf16": Dtypes(_BF16, _BF16, _BF16, _F32),
        "fp16": Dtypes(_F16, _F16, _F32, _F32),
        "pure bf16": Dtypes.all(_BF16),
    }
)
"""The precisions by name: `zero.MixedPrecision` of a model that was made in fp32. "fp32" is without it, and so is "pure
bf16", a model that was made in bf16 and has no master weights."""


@dataclass(frozen=True)
class PlanSetting:
    """The arguments of a `zero.ZeroOptimizer` over a module, and the places of its ranks.

    Attributes:
        stage: 0 to 3.
        world_size: the number of ranks.
        sharding_factor: ranks that share one copy; None: all.
        reshard: ``reshard_after_forward``.
        offload: the place of states (and, on the CPU, of master weights) between steps; "" is beside the parameters.
        bucket_bytes: of a bucket, in the dtype of the parameters.
        precision: one of `PRECISIONS`.
        optimizer: one of `OPTIMIZERS`.
        fused: whether the class is fused, so that runs on the CPU are not cut.
        device: the type of the parameters' device.
        ranks_per_host: neighbouring ranks of one host; None: all ranks are on one.
        threads: whether the ranks are threads of one process (`collectives.Loopback`).
        first_bucket_bytes: of the bucket that a backward completes first; 0: as the others.

    Raises:
        ValueError: an argument is invalid; the message names it and the remedy.
    """

    stage: int = 0
    world_size: int = 1
    sharding_factor: int | None = None
    reshard: bool | int = True
    offload: Literal["", "disk", "host"] = ""
    bucket_bytes: int = 25 << 20
    precision: str = "fp32"
    optimizer: str = "adamw"
    fused: bool = False
    device: str = "cpu"
    ranks_per_host: int | None = None
    threads: bool = False
    first_bucket_bytes: int = 0

    def __post_init__(self) -> None:
        row = stage_of(self.stage)
        for name in ("world_size", "bucket_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number, at least 1, not {value!r}")
        _check_known("precision", self.precision, PRECISIONS)
        _check_known("optimizer", self.optimizer, OPTIMIZERS)
        _check_known("offload", self.offload, ("", "disk", "host"))
        check_sharding_factor(self.sharding_factor, self.world_size, row)
        check_reshard(self.reshard, self.factor, row)
        if self.offload == "host" and self.device == "cpu":
            raise ValueError('offload="host" with parameters on the CPU, where states are there already: leave it away')
        if self.ranks_per_host is not None and (self.ranks_per_host < 1 or self.world_size % self.ranks_per_host):
            raise ValueError(
                f"ranks_per_host must divide the number of ranks, {self.world_size}, not {self.ranks_per_host}"
            )

    @property
    def row(self) -> Stage:
        """The row of the stage table."""
        return stage_of(self.stage)

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
        return check_reshard(self.reshard, self.factor, self.row)

    @property
    def per_host(self) -> int:
        """How many ranks a host has."""
        return self.world_size if self.ranks_per_host is None else self.ranks_per_host

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.world_size // self.per_host

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes of every parameter."""
        return PRECISIONS[self.precision]

    @property
    def classes(self) -> tuple[OptimizerStates, ...]:
        """The states of the optimizer's classes, by number."""
        return OPTIMIZERS[self.optimizer]

    @property
    def has_units(self) -> bool:
        """Whether parameters are in units."""
        return self.row.parameters is Placement.SHARD

    @property
    def bucket_sizes(self) -> BucketSizes:
        """The sizes of buckets."""
        return BucketSizes(self.bucket_bytes, self.first_bucket_bytes or self.bucket_bytes)

    @property
    def shares_buckets(self) -> bool:
        """Whether units share buckets."""
        in_common = self.device == "cpu" and not self.threads and self.per_host % self.factor == 0
        return units_share_buckets(self.factor, in_common=in_common)

    @property
    def gathers_units(self) -> bool:
        """Whether units are gathered, since ranks do not see each other's shards of them in common memory."""
        return self.has_units and self.factor > 1 and not self.shares_buckets

    @property
    def exposes_slices(self) -> bool:
        """Whether peers read a rank's shards in its memory while units are gathered."""
        mapped = self.threads or (self.device == "cpu" and (self.per_host > 1 or self.replicas > 1))
        return self.gathers_units and mapped

    @property
    def shows_means(self) -> bool:
        """Whether p.grad is the mean after each backward at stage 0: its dtype must be that of the parameters."""
        return self.dtypes.accumulate_dtype is self.dtypes.param_dtype


def _check_known(name: str, value: str, known: object) -> None:
    names = list(known)  # type: ignore[call-overload]
    if value not in names:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, names))}, not {value!r}")
