"""What a user chooses: the arguments of an optimizer, checked, and the dials that are objects."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from collectives import Algorithm, Transport, check_name

from .core.layout import Dtypes
from .core.parameter_specs import FLOATS
from .core.stage import Stage
from .core.units import Predicate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class MixedPrecision:
    """What a model computes in, gradients travel in, and are added up in; FSDP's terms.

    The optimizer's owner of an element keeps it as a master weight, in fp32 (fp64 of an fp64 parameter).

    Args:
        param_dtype: of the parameters while the model computes; their gradients have it, too.
        reduce_dtype: of what travels to an element's owner; None: ``param_dtype``.
        accumulate_dtype: in which an owner adds up: ``reduce_dtype`` itself, or wider. 16 bits halve a gradient's
            memory, and lose what is small beside the sum.
        buffer_dtype: of the module's floating-point buffers; None: they keep theirs.
        cast_forward_inputs: cast the floating-point tensors that the module is called with to ``param_dtype``.

    Raises:
        TypeError: a dtype is not fp32, bf16 or fp16 (buffers: nor fp64).
        ValueError: ``accumulate_dtype`` is neither ``reduce_dtype`` nor wider.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype = torch.float32
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("param_dtype", FLOATS[1:]),
            ("reduce_dtype", (None, *FLOATS[1:])),
            ("accumulate_dtype", FLOATS[1:]),
            ("buffer_dtype", (None, *FLOATS)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise TypeError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}")
        wider = self.accumulate_dtype.itemsize > self.travel.itemsize
        if self.accumulate_dtype is not self.travel and not wider:
            raise ValueError(
                f"accumulate_dtype {self.accumulate_dtype} is not wider than what travels, {self.travel}, and not the "
                "same: a sum would lose more than its parts; set reduce_dtype, too"
            )

    @property
    def travel(self) -> torch.dtype:
        """What contributions travel in."""
        return self.param_dtype if self.reduce_dtype is None else self.reduce_dtype

    def of(self, dtype: torch.dtype) -> Dtypes:
        """The dtypes of a parameter that the user made in ``dtype`` and the optimizer updates."""
        master = dtype if dtype.itemsize >= 4 else torch.float32
        return Dtypes(self.param_dtype, self.travel, self.accumulate_dtype, master)

    def unlisted(self, _: torch.dtype) -> Dtypes:
        """The dtypes of a parameter that the optimizer does not update."""
        return Dtypes.all(self.param_dtype)


@dataclass(frozen=True)
class Offload:
    """What a rank keeps elsewhere than on the parameters' device, as in ``ZeroOptimizer(offload=...)``.

    Args:
        states: a folder, where each rank keeps optimizer states (and master weights of parameters on the CPU) in a file
            without a name, a bucket or two of which are in memory at once; or "cpu", pinned memory of the host, for
            parameters on a GPU.
        parameters: at stage 3, keep a rank's slices of the parameters in that file, too.
    """

    states: str | os.PathLike[str]
    parameters: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.states, (str, os.PathLike)) or not os.fspath(self.states):
            raise TypeError(f"offload: states must be 'cpu' or the path of a folder, not {self.states!r}")
        if not isinstance(self.parameters, bool):
            raise TypeError(f"offload: parameters must be True or False, not {self.parameters!r}")
        if self.on_host and self.parameters:
            raise ValueError('offload: parameters=True needs a folder, as states="/scratch"; "cpu" is for states')

    @property
    def kind(self) -> str:
        """What all ranks must ask for alike; their folders may have different names."""
        where = "states in the host's memory" if self.on_host else "states on disk"
        return f"{where} and parameters" if self.parameters else where

    @property
    def on_host(self) -> bool:
        """In memory of the host."""
        return self.states == "cpu"


@dataclass(frozen=True)
class Config:
    """The arguments of a `ZeroOptimizer` that say how it is built, checked. Ranks must have the same.

    Raises:
        TypeError, ValueError: one that cannot be; the message names it.
    """

    stage: Stage
    module: nn.Module | None
    process_group: ProcessGroup | Transport | None
    bucket_cap_mb: float
    collective: str | Algorithm
    sharding_factor: int | None
    reshard_after_forward: bool | int
    offload: Offload | None
    precision: MixedPrecision | None
    units: Predicate | None

    def __post_init__(self) -> None:
        if not isinstance(self.precision, MixedPrecision | None):
            raise TypeError(f"mixed_precision must be a zero.MixedPrecision, not {self.precision!r}")
        if not isinstance(self.offload, Offload | None):
            raise TypeError(f"offload must be a zero.Offload, not {self.offload!r}")
        cap = self.bucket_cap_mb
        if not isinstance(cap, (int, float)) or not cap > 0 or math.isinf(cap):
            raise ValueError(f"bucket_cap_mb must be a positive number of MiB, not {cap!r}")
        check_name(self.collective)

    @property
    def bucket_bytes(self) -> int:
        """The size of a bucket."""
        return int(self.bucket_cap_mb * 1024 * 1024)
