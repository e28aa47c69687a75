"""Programs on real processes, under FSDP2 and under this library: precisions by module, and ignored experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from collectives import solo
from zero import ZeroOptimizer

from ...parameters.experts import EXPERTS, loss_of, sparse
from ...support.models import seeded

BF16, FP32 = torch.bfloat16, torch.float32
BODY = MixedPrecisionPolicy(BF16, reduce_dtype=FP32)
NORM = MixedPrecisionPolicy(FP32, output_dtype=BF16)
HEAD = MixedPrecisionPolicy(FP32)
WIDTH, CLASSES, STEPS = 32, 16, 4
Ended = tuple[list[float], dict[str, Tensor]]  # the losses of this rank, and the whole parameters in fp32


def layers() -> nn.Module:
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Embedding(CLASSES, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))


def build() -> nn.Module:
    """Return a model in bf16, with norms and a head in fp32."""
    return seeded(0, layers)


def policy_of(name: str, module: nn.Module) -> MixedPrecisionPolicy:
    if isinstance(module, nn.LayerNorm):
        return NORM
    return HEAD if name == "5" else BODY


def whole(model: nn.Module) -> dict[str, Tensor]:
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}


def under_fsdp2(group: dist.ProcessGroup, rank: int) -> Ended:
    model, mesh = build(), DeviceMesh.from_group(group, "cpu")
    units = [(name, part) for name, part in model.named_modules() if isinstance(part, (nn.LayerNorm, nn.Sequential))]
    for name, part in reversed([*units[1:], ("5", model.get_submodule("5"))]):
        fully_shard(part, mesh=mesh, mp_policy=policy_of(name, part))
    fully_shard(model, mesh=mesh, mp_policy=BODY)
    losses = train(model, rank, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return losses, whole(model)


def under_zero(group: dist.ProcessGroup, rank: int, stage: int) -> Ended:
    """The same, with the master weights of parameters that have some."""
    model, given = build(), {"stage": stage, "process_group": group, "mixed_precision": policy_of, "lr": 1e-2}
    optimizer: Any = ZeroOptimizer(model, torch.optim.AdamW, **given)
    losses = train(model, rank, optimizer)
    weights = {name: optimizer.full_master(parameter) for name, parameter in model.named_parameters()}
    optimizer.close()
    return losses, weights


def train(model: nn.Module, rank: int, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(CLASSES, (9,), generator=torch.Generator().manual_seed(10 * step + rank))
        logits = model(tokens[:-1])
        assert logits.dtype is FP32
        loss = cross_entropy(logits, tokens[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def experts_under_fsdp2(group: dist.ProcessGroup, rank: int) -> Ended:
    """Train dense parameters by FSDP2, and each rank's own expert beside it."""
    model, mesh = sparse([rank % EXPERTS]), DeviceMesh.from_group(group, "cpu")
    experts = list(model.experts().parameters())
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh, ignored_params=set(experts))
    dense = [parameter for parameter in model.parameters() if all(parameter is not each for each in experts)]
    optimizers = [torch.optim.AdamW(params, lr=0.01) for params in (dense, experts)]

    def before_step() -> None:
        for parameter in experts:
            assert parameter.grad is not None
            parameter.grad.div_(dist.get_world_size(group))  # FSDP2 leaves them as this rank's

    return train_experts(model, rank, optimizers, before_step), whole(model)


def experts_under_zero(group: dist.ProcessGroup, rank: int, stage: int) -> Ended:
    model = sparse([rank % EXPERTS])
    given: dict[str, Any] = {"stage": stage, "lr": 0.01, "divisor": dist.get_world_size(group)}
    dense = ZeroOptimizer(model, process_group=group, ignored=model.experts(), **given)
    own = ZeroOptimizer(model.experts(), process_group=solo(), **given)
    losses = train_experts(model, rank, [dense, own], lambda: None)
    own.close()
    dense.close()
    return losses, whole(model)


def train_experts(
    model: Any, rank: int, optimizers: list[torch.optim.Optimizer], before_step: Callable[[], None]
) -> list[float]:
    losses = []
    for number in range(STEPS):
        loss = loss_of(model, number, rank)
        loss.backward()  # type: ignore[no-untyped-call]
        before_step()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses
