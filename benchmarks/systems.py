"""Every system that trains one model side by side: this library, its peers, and a floor below all of them.

    plain    the plain loop, in one process, with nothing around the model
    floor    each rank alone: forward, backward, and fused AdamW on 1/W of one flat buffer; nothing is communicated,
             and the model does not train. No sharded optimizer can be faster, if each rank computes as much

In bf16 all keep fp32 master weights: DDP computes under autocast, the others have 16-bit parameters.

With Muon, matrices of blocks are stepped by torch.optim.Muon, and the rest by a fused AdamW. Under DDP every rank steps
all of them. FSDP2 gives Muon DTensors, whose products gather what they need.

Knows: how each system is put around a model and its optimizers. Does not know: models, batches, clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LEARNING_RATE = 1e-3
DDP_CAP_MB = 25.0  # its default


@dataclass
class Training:
    """A model under a system.

    ``forward`` returns the model's output; ``backward`` takes the loss. ``states``: the optimizer states that this rank
    holds. ``learns``: False if the system does not train. ``buckets``: the number of buckets of the gradients, 0 if the
    system does not report it. ``common``: addresses of memory that all ranks share, of which this rank's own part is
    among its parameters.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], None]
    step: Callable[[], object]
    clear: Callable[[], object]
    parameters: Callable[[], Iterable[Tensor]]
    states: Callable[[], Iterable[Tensor]]
    learns: bool = True
    buckets: Callable[[], int] = lambda: 0
    common: Callable[[], frozenset[int]] = frozenset


@dataclass(frozen=True)
class How:
    """Options of all systems.

    ``bucket_cap_mb``: MiB of a bucket, for systems with such buckets; None: their default. ``narrow``: compute and
    communicate in bf16. ``muon``: step the matrices of blocks by Muon.
    """

    bucket_cap_mb: float | None
    narrow: bool = False
    muon: bool = False


Build = Callable[[nn.Module, How], Training]


@dataclass(frozen=True)
class System:
    """A system.

    ``stage``: the ZeRO stage to which it is equivalent. ``needs``: a package that it needs beside torch. ``alone``: it
    trains on one rank. ``in_bf16``: it can also train in bf16. ``with_muon``: it can also train with Muon.
    """

    name: str
    build: Build
    stage: int | None
    needs: str = ""
    alone: bool = False
    in_bf16: bool = False
    with_muon: bool = False

    @property
    def is_here(self) -> bool:
        return not self.needs or find_spec(self.needs) is not None


def _plain_backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that FSDP2 shards."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _training(model: nn.Module, forward: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Training:
    def states() -> list[Tensor]:
        found = [value for state in optimizer.state.values() for value in state.values()]
        return [_local(value) for value in found if isinstance(value, Tensor)]

    return Training(
        forward,
        _plain_backward,
        optimizer.step,
        optimizer.zero_grad,
        lambda: [_local(parameter.detach()) for parameter in model.parameters()],
        states,
    )


def _arguments(fused: bool) -> dict[str, Any]:
    return {"lr": LEARNING_RATE, "fused": True} if fused else {"lr": LEARNING_RATE, "foreach": False}


class _Two(torch.optim.Optimizer):
    """Two optimizers as one."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        super().__init__([*first.param_groups, *second.param_groups], {})
        self._both = first, second

    def step(self, closure: Any = None) -> Any:
        for each in self._both:
            each.step()
            self.state.update(each.state)


def matrices_and_rest(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the matrices of the blocks of a model, and its other parameters."""
    named = [(name, p, name.startswith("blocks.") and p.dim() == 2) for name, p in model.named_parameters()]
    return [p for _, p, is_matrix in named if is_matrix], [p for _, p, is_matrix in named if not is_matrix]


def _optimizer(model: nn.Module, how: How, fused: bool = True) -> torch.optim.Optimizer:
    if not how.muon:
        return torch.optim.AdamW(model.parameters(), **_arguments(fused))
    matrices, rest = matrices_and_rest(model)
    return _Two(torch.optim.Muon(matrices, lr=LEARNING_RATE), torch.optim.AdamW(rest, **_arguments(fused)))


def _plain(model: nn.Module, how: How) -> Training:
    return _training(model, model, _optimizer(model, how))


def _floor(model: nn.Module, how: How) -> Training:
    numel = sum(parameter.numel() for parameter in model.parameters())
    flat = torch.zeros(numel // dist.get_world_size()).requires_grad_()
    flat.grad = torch.zeros_like(flat)
    optimizer = torch.optim.AdamW([flat], **_arguments(True))
    training = _training(model, model, optimizer)
    if how.narrow:
        model.to(torch.bfloat16)
        narrow = torch.zeros_like(flat, dtype=torch.bfloat16)

        def step_and_cast() -> None:
            optimizer.step()
            narrow.copy_(flat.detach())

        training.step = step_and_cast
    training.clear, training.learns = lambda: model.zero_grad(), False
    return training


def _ddp(fused: bool) -> Build:
    def build(model: nn.Module, how: How) -> Training:
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=how.bucket_cap_mb or DDP_CAP_MB)

        def forward(inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=how.narrow):
                return cast(Tensor, wrapped(inputs))

        training = _training(model, forward, _optimizer(model, how, fused))
        facts: Callable[[], dict[str, Any]] = wrapped._get_ddp_logging_data
        training.buckets = lambda: len(facts()["rebuilt_bucket_sizes"].split(", "))
        return training

    return build


def _redundancy(model: nn.Module, how: How) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=how.bucket_cap_mb or DDP_CAP_MB)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **_arguments(True))
    training = _training(model, wrapped, optimizer)
    inner = _training(model, wrapped, optimizer.optim)
    training.states = inner.states
    return training


def fully_sharded(model: nn.Module, units: Iterable[nn.Module], **named: Any) -> nn.Module:
    """Apply FSDP2 to the units and to the model, which all ranks shard. ``named``: arguments of `fully_shard`."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    for unit in units:
        fully_shard(unit, mesh=mesh, **named)
    fully_shard(model, mesh=mesh, **named)
    return model


def _fsdp2(reshard: bool) -> Build:
    def build(model: Any, how: How) -> Training:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if how.narrow else MixedPrecisionPolicy()
        fully_sharded(model, model.blocks, reshard_after_forward=reshard, mp_policy=policy)
        return fsdp2_training(model, how)

    return build


def fsdp2_training(model: nn.Module, how: How) -> Training:
    """Return the training of a model that FSDP2 shards."""
    return _training(model, model, _optimizer(model, how))


def _deepspeed(stage: int) -> Build:
    def build(model: nn.Module, how: How) -> Training:
        import deepspeed  # type: ignore[import-not-found]

        elements = int((how.bucket_cap_mb or DDP_CAP_MB) * 1024 * 1024) // 4
        config = {
            "train_micro_batch_size_per_gpu": 1,
            # its default of 500 million elements is two gigabytes, far more than the buckets of the others
            "zero_optimization": {"stage": stage, "reduce_bucket_size": elements, "allgather_bucket_size": elements},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,  # its default is a norm of 1
            "bf16": {"enabled": how.narrow},
        }
        optimizer = torch.optim.AdamW(model.parameters(), **_arguments(True))
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        training = _training(model, engine, optimizer)
        training.backward, training.step, training.clear = engine.backward, engine.step, lambda: None
        return training

    return build


def _fairscale(model: nn.Module, how: How) -> Training:
    from fairscale.nn.data_parallel import ShardedDataParallel  # type: ignore[import-not-found]
    from fairscale.optim.oss import OSS  # type: ignore[import-not-found]

    optimizer = OSS(model.parameters(), torch.optim.AdamW, **_arguments(True))
    wrapped = ShardedDataParallel(model, optimizer)
    training = _training(model, wrapped, optimizer.optim)
    training.step = optimizer.step
    # Not the optimizer's `zero_grad`: it sets gradients to None, which are views of the reduced buffers. Then each rank
    # would train only on its own batches.
    training.clear = wrapped.zero_grad
    return training


def _ours(stage: int, fused: bool) -> Build:
    def build(model: nn.Module, how: How) -> Training:
        from zero import MixedPrecision, ZeroOptimizer

        precision = MixedPrecision(torch.bfloat16) if how.narrow else None
        arguments = {"bucket_cap_mb": how.bucket_cap_mb, **_arguments(fused)}
        params: Any = model
        if how.muon:
            matrices, rest = matrices_and_rest(model)
            muon = {"optimizer_class": torch.optim.Muon, "partition": "parameter", "lr": LEARNING_RATE}
            params = [{"params": matrices, **muon}, {"params": rest}]
        optimizer = ZeroOptimizer(
            params, torch.optim.AdamW, module=model, stage=stage, mixed_precision=precision, **arguments
        )
        return zero_training(model, optimizer, shared=stage == 3)

    return build


def zero_training(model: nn.Module, optimizer: Any, *, shared: bool) -> Training:
    """Return the training of a model under this library. ``shared``: its ranks may share the memory of parameters."""
    training = _training(model, model, optimizer)
    storage: Any = optimizer._storage
    training.parameters = lambda: [b.weights.data for b in (*storage.buckets, *storage.unlisted_buckets())]
    training.states = lambda: [tensor for bucket in storage.buckets for tensor in bucket.states.tensors()]
    training.buckets = lambda: len(storage.buckets)
    if shared:
        training.common = lambda: storage.manager.resident.in_common()
    return training


PLAIN, FLOOR, DDP, FSDP2 = "plain", "floor", "DDP", "FSDP2"
SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(PLAIN, _plain, None, alone=True, with_muon=True),
        System(FLOOR, _floor, None, in_bf16=True),
        System(DDP, _ddp(True), 0, in_bf16=True, with_muon=True),
        System("DDP, for-loop", _ddp(False), 0),
        System("ZeroRedundancyOptimizer", _redundancy, 1),
        System(FSDP2, _fsdp2(True), 3, in_bf16=True, with_muon=True),
        System("FSDP2, kept", _fsdp2(False), 3, in_bf16=True, with_muon=True),
        *(System(f"DeepSpeed {stage}", _deepspeed(stage), stage, "deepspeed", in_bf16=True) for stage in (1, 2, 3)),
        System("FairScale OSS", _fairscale, 2, "fairscale"),
        *(System(f"zero {stage}", _ours(stage, True), stage, in_bf16=True, with_muon=True) for stage in range(4)),
        *(System(f"zero {stage}, for-loop", _ours(stage, False), stage) for stage in range(4)),
    )
}
ON_A_DEVICE = {name: SYSTEMS[name] for name in (PLAIN, DDP, FSDP2, *(f"zero {stage}" for stage in range(4)))}
