"""The options of an optimizer: one record that declares, describes and checks each of them.

Knows: what a user may pass, and what a process group is. Does not know: the parts of an optimizer. The arguments of
`ZeroOptimizer`, the flags of `zero train` and the fields of a `PlanSetting` are those of the record: a new option is a
field here, and an argument there.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from collectives import Algorithm, Transport, check_name
from collectives.backend import NCCL
from collectives.torch_internals import DeviceContext, get_function_modes

from .core.buckets import BucketSizes, bucket_sizes
from .core.conflicts import GATHERS, OF_CONFIG, OF_OFFLOAD, OF_OPTIONS, OF_SHARDING, check
from .core.parameter_specs import FLOATS
from .core.rounding import StochasticRounding
from .core.stage import Placement, Stage, check_prefetch_depth, check_reshard, check_sharding_factor, stage_of
from .core.units import ROOT, Ignored, Predicate, check_scripted, find_units
from .precision import PrecisionOption, Precisions, Rule, checked

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # noqa: TID251 - the type alone
    from torch.distributed.device_mesh import DeviceMesh  # noqa: TID251 - the type alone

    from collectives.backends.device_mesh import MeshPlace


@dataclass(frozen=True)
class Offload:
    """Which tensors a rank keeps on disk or in the host's memory: ``ZeroOptimizer(offload=zero.Offload(...))``.

    Args:
        states: a folder, or "cpu". In a folder each rank keeps its optimizer states (and the master weights of
            parameters on the CPU) in an unnamed file, with one or two buckets of it in memory at a time. "cpu" keeps
            the states of parameters on a GPU in the host's pinned memory.
        parameters: "cpu" keeps a GPU's shards of parameters there, too, with their gradients: at stage 3, with
            ``states="cpu"``. A unit's shard is copied to the GPU before its gather; buckets are stepped on the GPU, one
            after the other. One rank alone then gathers units, too.
        step: "cpu" lets the optimizer class step there, too, with ``parameters="cpu"``: weights, gradients and states
            stay in the host's memory. The plain loop is then the one that steps copies of the parameters on the CPU.

    Raises:
        TypeError, ValueError: an argument is none of these, or needs another one; the message names it.
    """

    states: str | os.PathLike[str]
    parameters: Literal["cpu"] | None = None
    step: Literal["cpu"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.states, (str, os.PathLike)) or not os.fspath(self.states):
            raise TypeError(f"offload: states must be 'cpu' or the path of a folder, not {self.states!r}")
        if self.parameters not in (None, "cpu"):
            raise TypeError(f"offload: parameters must be 'cpu' or None, not {self.parameters!r}")
        if self.step not in (None, "cpu"):
            raise TypeError(f"offload: step must be 'cpu' or None, not {self.step!r}")
        check(OF_OFFLOAD, self)

    @property
    def kind(self) -> str:
        """The kind of offload, on which all ranks must agree. Their folders may have different names. Internal."""
        what = "states and parameters" if self.parameters else "states"
        place = f"{what} in the host's memory" if self.on_host else "states on disk"
        return f"{place}, stepped there" if self.step else place

    @property
    def on_host(self) -> bool:
        """Whether states are kept in the host's memory. Internal."""
        return self.states == "cpu"


def _meant_by(given: object) -> str:
    """Return the `Offload` that a user may have meant, as text."""
    if type(given).__name__ == "CPUOffloadPolicy":  # of FSDP2
        return 'zero.Offload("cpu", parameters="cpu", step="cpu")'
    return 'zero.Offload("cpu") or zero.Offload(folder)'


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
    offload: Annotated[
        Offload | None,
        "folder on disk for each rank's optimizer states; cpu: the host's memory for a GPU's; cpu,parameters=cpu: for "
        "parameters, too, at stage 3; cpu,parameters=cpu,step=cpu: the CPU steps them",
    ] = None
    mixed_precision: Annotated[
        PrecisionOption, "dtype of the model's compute; bf16 and fp16 add fp32 masters, fp16 also loss scaling"
    ] = None
    bucket_cap_mb: Annotated[
        float | Literal["auto"] | None, "size of a bucket in MiB, or auto; default on the CPU: 25"
    ] = None
    collective: Annotated[str | Algorithm, "algorithm that moves the buckets"] = "auto"
    units: Annotated[Predicate | None, "at stage 3: selects the modules that are gathered as a whole"] = None
    partition: Annotated[
        Literal["element", "parameter", "block"] | None,
        "whether ranks own pieces of parameters, or parameters have one owner each; block: pieces of whole blocks",
    ] = None
    rounding: Annotated[
        StochasticRounding | None, "with bf16: seed of stochastic rounding of weights and states, without fp32 masters"
    ] = None

    def __post_init__(self) -> None:
        stage_of(self.stage)
        object.__setattr__(self, "mixed_precision", checked(self.mixed_precision))
        if not isinstance(self.offload, Offload | None):
            raise TypeError(f"offload must be a zero.Offload, not {self.offload!r}: give {_meant_by(self.offload)}")
        if not isinstance(self.rounding, StochasticRounding | None):
            raise TypeError(f"rounding must be a zero.StochasticRounding, not {self.rounding!r}")
        check_prefetch_depth(self.prefetch_depth)
        check(OF_OPTIONS, self)
        cap = self.bucket_cap_mb
        is_number = isinstance(cap, (int, float)) and 0 < cap < math.inf
        if cap is not None and cap != "auto" and not is_number:
            raise ValueError(f'bucket_cap_mb must be a positive number of MiB, None or "auto", not {cap!r}')
        check_name(self.collective)

    @property
    def row(self) -> Stage:
        """The row of the stage table."""
        return stage_of(self.stage)

    @property
    def offloads_parameters(self) -> bool:
        """Whether shards of parameters on a device lie in the host's memory."""
        return self.offload is not None and self.offload.parameters is not None

    @property
    def steps_on_host(self) -> bool:
        """Whether the classes step parameters of a device in the host's memory."""
        return self.offload is not None and self.offload.step is not None

    def gathers_shards(self, ranks: int) -> bool:
        """Return whether whole parameters are made of shards that lie elsewhere: on other ones of the ``ranks`` that
        share a copy, or in the host's memory."""
        return ranks > 1 or self.offloads_parameters

    @property
    def copy_ranks(self) -> int | None:
        """The number of ranks that share one copy of what is sharded; None: all."""
        return self.sharding_factor

    def reshard_group_size(self, world_size: int) -> int:
        """Return how many of ``world_size`` ranks share the copy of a unit between its forward and its backward.

        Raises `ValueError` if so many ranks cannot share copies as the options ask.
        """
        check(OF_SHARDING, self)
        check_sharding_factor(self.copy_ranks, world_size)
        factor = world_size if self.copy_ranks is None else self.copy_ranks
        return check_reshard(self.reshard_after_forward, factor)

    def at_stage(self, stage: int) -> ShardingOptions:
        """Return the options at another stage. The options of units have their defaults where it gathers none, and
        ``sharding_factor`` where it shards nothing."""
        row, changes = stage_of(stage), dict[str, Any](stage=stage)
        if row.parameters is Placement.WHOLE:
            changes |= {"units": None, "reshard_after_forward": True, "prefetch_depth": 1}
        if row.states is Placement.WHOLE:
            changes["sharding_factor"] = None
        return replace(self, **changes)

    def arguments(self) -> dict[str, Any]:
        """Return the options as keyword arguments of `ZeroOptimizer`."""
        return {option.name: getattr(self, option.name) for option in fields(ShardingOptions)}


@dataclass(frozen=True, kw_only=True)
class Config(ShardingOptions):
    """The options of a `ZeroOptimizer`, with its module, what it ignores of that, and its process group or its mesh."""

    module: nn.Module | None
    process_group: ProcessGroup | Transport | None
    mesh: DeviceMesh | None = None
    ignored: Ignored = field(default_factory=Ignored)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(OF_CONFIG, self)
        self.mesh_place()

    def mesh_place(self) -> MeshPlace | None:
        """Return the place of this rank in the mesh; None without a mesh. Raises `ValueError` if it cannot be used."""
        if self.mesh is None:
            return None
        from collectives.backends.device_mesh import place_in

        return place_in(self.mesh)

    @property
    def copy_ranks(self) -> int | None:
        """The number of ranks that share one copy of what is sharded; None: all."""
        place = self.mesh_place()
        if place is None:
            return self.sharding_factor
        return place.shard_ranks if len(place.shape) == 2 and self.row.states is Placement.SHARD else None

    def bucket_sizes(
        self,
        listed: Sequence[Tensor],
        device: torch.device,
        precisions: Precisions,
        *,
        ranks: int,
        world_size: int,
        hosts: int,
    ) -> BucketSizes:
        """Return the sizes of buckets. ``listed``: the parameters that are trained; for others see `bucket_sizes`."""
        by_model = self.bucket_cap_mb == "auto" or (self.bucket_cap_mb is None and device.type != "cpu")
        module = self.module if by_model else None
        units = [] if module is None else find_units(module, self.units, self.ignored).parameters[ROOT + 1 :]
        return bucket_sizes(
            self.bucket_cap_mb,
            device.type,
            units_are_gathered=self.row.parameters is Placement.SHARD and self.gathers_shards(ranks),
            ranks=ranks,
            world_size=world_size,
            hosts=hosts,
            largest_unit=max((_bytes(unit, device, precisions) for unit in units), default=0),
            total=_bytes(listed, device, precisions),
        )

    def module_of_units(self) -> nn.Module:
        """Return the module whose units are gathered. Raises `ValueError` if none was passed."""
        if self.module is None:
            raise ValueError(GATHERS.text(o=self))
        return self.module

    def precisions(self) -> Precisions:
        """Return the precision of each module. Raises as `Precisions.resolve` and `check_scripted` do."""
        rounds = self.rounding is not None
        found = Precisions(cast(Rule, self.mixed_precision), self.module, self.ignored, rounds=rounds)
        check_scripted(self.module, {id(border.module) for border in found.borders})
        return found

    def transport(self, device: torch.device) -> Transport:
        """Return the transport of the process group, or of the mesh. Collective. ``device``: of the parameters."""
        if self.mesh is not None and self.mesh.device_type != device.type:
            raise ValueError(
                f"the mesh is for {self.mesh.device_type}, but parameters are on {device}: make the mesh by "
                f"init_device_mesh({device.type!r}, ...), or move the model to {self.mesh.device_type} first"
            )
        return transport_of(self.process_group if self.mesh is None else self.mesh)

    def job_size(self) -> int:
        """Return the number of processes of the job in which torch has made the group; 0 if it has made none. Local."""
        if self.mesh is None and (self.process_group is None or isinstance(self.process_group, Transport)):
            return 0
        from collectives.backends.gloo import job_size

        return job_size()

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

        return backend_of(self.process_group if self.mesh is None else self.mesh.get_group(0), device)


def transport_of(group: ProcessGroup | Transport | DeviceMesh | None) -> Transport:
    """Return the transport of a group; None is torch's default group, or one rank. Collective for a mesh."""
    if isinstance(group, Transport):
        return group
    if hasattr(group, "mesh_dim_names"):
        from collectives.backends.device_mesh import connect_mesh, place_in

        mesh: Any = group
        place_in(mesh)
        return connect_mesh(mesh)
    from collectives.backends.gloo import connect

    process_group: Any = group
    return connect(process_group)


def _bytes(parameters: Iterable[Tensor], device: torch.device, precisions: Precisions) -> int:
    """Return the bytes of parameters in buckets, in the dtype with which the model computes."""
    plain = [parameter for parameter in parameters if parameter.dtype in FLOATS and not is_lazy(parameter)]
    described = [(parameter.numel(), precisions.of(parameter)) for parameter in plain]
    return sum(dtypes.padded(numel, device.type) * dtypes.param_dtype.itemsize for numel, dtypes in described)


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
        raise ValueError("params and module are two different modules: pass the one that is trained, as params alone")
    return params
