"""The options of an optimizer: one record that declares, describes and checks each of them.

Knows: what a user may pass, and what a process group is. Does not know: the parts of an optimizer. The arguments of
`ZeroOptimizer`, the flags of `zero train` and the fields of a `PlanSetting` are those of the record: a new option is a
field here, and an argument there.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from collectives import Algorithm, Transport, check_name
from collectives.backend import NCCL
from collectives.torch_internals import DeviceContext, get_function_modes

from .core.layout import BucketSizes, Dtypes, bucket_sizes
from .core.parameter_specs import FLOATS
from .core.stage import Placement, Stage, check_prefetch_depth, check_reshard, check_sharding_factor, stage_of
from .core.units import ROOT, Predicate, find_units

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # noqa: TID251 - the type alone


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of the model's compute, of the gradients that are sent, and of their sums, named as in FSDP.

    The owner of an element keeps a master weight of it, in fp32 (fp64 for an fp64 parameter).

    Args:
        param_dtype: dtype of the parameters in the forward and the backward, and of their gradients.
        reduce_dtype: dtype of the gradients that a rank sends to an element's owner. None: ``param_dtype``.
        accumulate_dtype: dtype in which the owner adds them up: ``reduce_dtype`` itself, or a wider one. 16 bits halve
            a gradient's memory, but lose addends that are small relative to the sum.
        buffer_dtype: dtype of the module's floating-point buffers. None: they keep their own.
        cast_forward_inputs: cast the floating-point inputs of the module's forward to ``param_dtype``.

    Raises:
        TypeError: a dtype is not fp32, bf16 or fp16 (for buffers, fp64 is allowed, too).
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
                f"accumulate_dtype {self.accumulate_dtype} must be {self.travel}, in which contributions travel "
                "(reduce_dtype), or wider: a sum would lose more than its parts"
            )

    @property
    def travel(self) -> torch.dtype:
        """The dtype in which contributions travel."""
        return self.param_dtype if self.reduce_dtype is None else self.reduce_dtype

    def of(self, dtype: torch.dtype) -> Dtypes:
        """Return the dtypes of a parameter that the user made in ``dtype`` and that the optimizer updates. Internal."""
        master = dtype if dtype.itemsize >= 4 else torch.float32
        return Dtypes(self.param_dtype, self.travel, self.accumulate_dtype, master)

    def unlisted(self, _: torch.dtype) -> Dtypes:
        """Return the dtypes of a parameter that the optimizer does not update. Internal."""
        return Dtypes.all(self.param_dtype)


PrecisionName = Literal["fp32", "bf16", "fp16"]
PRECISIONS: Mapping[str, MixedPrecision | None] = MappingProxyType(
    {"fp32": None, "bf16": MixedPrecision(torch.bfloat16), "fp16": MixedPrecision(torch.float16)}
)
"""The precisions that have a name on a command line, of a model that was made in fp32."""


def dtypes_of(dtype: torch.dtype, precision: MixedPrecision | None) -> Dtypes:
    """Return the dtypes of a parameter that the user made in ``dtype`` and that the optimizer updates."""
    return Dtypes.all(dtype) if precision is None else precision.of(dtype)


@dataclass(frozen=True)
class Offload:
    """Which tensors a rank keeps on disk or in the host's memory: ``ZeroOptimizer(offload=zero.Offload(...))``.

    Args:
        states: a folder, or "cpu". In a folder each rank keeps its optimizer states (and the master weights of
            parameters on the CPU) in an unnamed file, with one or two buckets of it in memory at a time. "cpu" keeps
            the states of parameters on a GPU in the host's pinned memory.
    """

    states: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if not isinstance(self.states, (str, os.PathLike)) or not os.fspath(self.states):
            raise TypeError(f"offload: states must be 'cpu' or the path of a folder, not {self.states!r}")

    @property
    def kind(self) -> str:
        """The kind of offload, on which all ranks must agree. Their folders may have different names. Internal."""
        return "states in the host's memory" if self.on_host else "states on disk"

    @property
    def on_host(self) -> bool:
        """Whether states are kept in the host's memory. Internal."""
        return self.states == "cpu"


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """The options that decide how a `ZeroOptimizer` is built. All ranks must have the same.

    The text in the type of a field is its short description; the docstring of `ZeroOptimizer` has the long one.

    Raises:
        TypeError, ValueError: an option is invalid by itself; the message names it.
    """

    stage: Annotated[int, "what is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too"] = 2
    sharding_factor: Annotated[
        int | None, "ranks that share one copy of what is sharded; a divisor of the number of ranks; default: all"
    ] = None
    reshard_after_forward: Annotated[
        bool | int | Predicate,
        "at stage 3: true; false keeps parameters for the backward; a number: so many ranks share them",
    ] = True
    prefetch_depth: Annotated[int, "at stage 3: units that are gathered ahead of their use; 0: none"] = 1
    offload: Annotated[Offload | None, "folder on disk for each rank's optimizer states"] = None
    mixed_precision: Annotated[
        MixedPrecision | None, "dtype of the model's compute; bf16 and fp16 add fp32 masters, fp16 also loss scaling"
    ] = None
    bucket_cap_mb: Annotated[
        float | Literal["auto"] | None, "size of a bucket in MiB, or auto; default on the CPU: 25"
    ] = None
    collective: Annotated[str | Algorithm, "algorithm that moves the buckets"] = "auto"
    units: Annotated[Predicate | None, "at stage 3: selects the modules that are gathered as a whole"] = None
    partition: Annotated[
        Literal["element", "parameter"] | None,
        "whether ranks own pieces of parameters, or parameters have one owner each",
    ] = None

    def __post_init__(self) -> None:
        stage_of(self.stage)
        if not isinstance(self.mixed_precision, MixedPrecision | None):
            raise TypeError(f"mixed_precision must be a zero.MixedPrecision, not {self.mixed_precision!r}")
        if not isinstance(self.offload, Offload | None):
            raise TypeError(f"offload must be a zero.Offload, not {self.offload!r}")
        check_prefetch_depth(self.prefetch_depth, self.row)
        cap = self.bucket_cap_mb
        is_number = isinstance(cap, (int, float)) and 0 < cap < math.inf
        if cap is not None and cap != "auto" and not is_number:
            raise ValueError(f'bucket_cap_mb must be a positive number of MiB, None or "auto", not {cap!r}')
        check_name(self.collective)

    @property
    def row(self) -> Stage:
        """The row of the stage table."""
        return stage_of(self.stage)

    def reshard_group_size(self, world_size: int) -> int:
        """Return how many of ``world_size`` ranks share the copy of a unit between its forward and its backward.

        Raises `ValueError` if so many ranks cannot share copies as the options ask.
        """
        check_sharding_factor(self.sharding_factor, world_size, self.row)
        factor = world_size if self.sharding_factor is None else self.sharding_factor
        return check_reshard(self.reshard_after_forward, factor, self.row)

    def arguments(self) -> dict[str, Any]:
        """Return the options as keyword arguments of `ZeroOptimizer`."""
        return {option.name: getattr(self, option.name) for option in fields(ShardingOptions)}


@dataclass(frozen=True, kw_only=True)
class Config(ShardingOptions):
    """The options of a `ZeroOptimizer`, with its module and its process group."""

    module: nn.Module | None
    process_group: ProcessGroup | Transport | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_cap_mb == "auto" and self.module is None:
            raise ValueError(
                'bucket_cap_mb="auto" asks how large a unit of the module is: pass the module itself, or parameters '
                "and module=model, or a number of MiB"
            )

    def bucket_sizes(self, listed: Sequence[Tensor], device: torch.device, ranks: int, hosts: int) -> BucketSizes:
        """Return the sizes of buckets.

        ``listed``: the parameters that are trained; ``ranks``: how many share a copy; ``hosts``: of all ranks.
        """
        by_model = self.bucket_cap_mb == "auto" or (self.bucket_cap_mb is None and device.type != "cpu")
        module = self.module if by_model else None
        units = [] if module is None else find_units(module, self.units).parameters[ROOT + 1 :]
        return bucket_sizes(
            self.bucket_cap_mb,
            device.type,
            units_are_gathered=self.row.parameters is Placement.SHARD and ranks > 1,
            ranks=ranks,
            hosts=hosts,
            largest_unit=max((self._bytes(unit, device) for unit in units), default=0),
            total=self._bytes(listed, device),
        )

    def _bytes(self, parameters: Iterable[Tensor], device: torch.device) -> int:
        """Return the bytes of parameters in buckets, in the dtype with which the model computes."""
        plain = [parameter for parameter in parameters if parameter.dtype in FLOATS and not is_lazy(parameter)]
        described = [(parameter.numel(), dtypes_of(parameter.dtype, self.mixed_precision)) for parameter in plain]
        return sum(dtypes.padded(numel, device.type) * dtypes.param_dtype.itemsize for numel, dtypes in described)

    def transport(self) -> Transport:
        """Return the transport of the process group."""
        if isinstance(self.process_group, Transport):
            return self.process_group
        from collectives.backends.gloo import connect

        return connect(self.process_group)

    def default_device(self) -> torch.device:
        """Return the device on which meta tensors get memory.

        It is the default device if the user set one; else the current accelerator, if the group has NCCL for it; else
        the CPU.
        """
        default, there = torch.get_default_device(), torch.accelerator.current_accelerator(check_available=True)
        modes = get_function_modes()
        was_set = default.type != "cpu" or any(isinstance(mode, DeviceContext) for mode in modes)
        if was_set or there is None or self._backend_of(there) not in NCCL:
            return default
        return torch.device(there.type, torch.accelerator.current_device_index())

    def _backend_of(self, device: torch.device) -> str:
        """Return the name of the backend that moves a device's tensors in the group; empty if there is none."""
        if isinstance(self.process_group, Transport):
            return self.process_group.backend.device_backend(device)
        from collectives.backends.gloo import backend_of

        return backend_of(self.process_group, device)


def check_divisor(value: float, rank: int) -> float:
    """Return a divisor as an int or a float. Raises `ValueError` if it is not a finite number other than 0."""
    given: Any = value  # numpy's numbers are allowed, too
    if isinstance(given, bool) or not isinstance(given, numbers.Real) or not math.isfinite(value) or value == 0:
        raise ValueError(f"rank {rank}: the divisor must be a finite number other than 0, not {value!r}")
    return value if isinstance(value, (int, float)) else float(value)


def module_of(params: object, module: nn.Module | None) -> nn.Module | None:
    """Return the module that the parameters belong to. Raises `ValueError` if two different ones are given."""
    if not isinstance(params, nn.Module):
        return module
    if module is not None and module is not params:
        raise ValueError("params and module are two different modules")
    return params
