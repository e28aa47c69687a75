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

from ...parameters.experts import EXPERTS, Sparse, loss_of, sparse
from ...support.models import seeded

BF16, FP32 = torch.bfloat16, torch.float32
BODY = MixedPrecisionPolicy(BF16, reduce_dtype=FP32)
NORM = MixedPrecisionPolicy(FP32, output_dtype=BF16)
HEAD = MixedPrecisionPolicy(FP32)
WIDTH, CLASSES, STEPS = 32, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + torch.tanh(self.inner(self.norm(x)))
        return found


class Model(nn.Module):
    """A residual stream in bf16, with norms and a head in fp32. It records the dtypes that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.seen: list[torch.dtype] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        normed = self.norm(x)
        logits: Tensor = self.head(normed)
        self.seen = [x.dtype, normed.dtype, logits.dtype]
        return logits


def policy_of(name: str, module: nn.Module) -> MixedPrecisionPolicy:
    if isinstance(module, nn.LayerNorm):
        return NORM
    return HEAD if name == "head" else BODY


def under_fsdp2(group: dist.ProcessGroup, rank: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of this rank, and the whole parameters in fp32."""
    model, mesh = seeded(0, Model), DeviceMesh.from_group(group, "cpu")
    chosen = [(n, part) for n, part in model.named_modules() if isinstance(part, (nn.LayerNorm, Block)) or n == "head"]
    for name, part in reversed(chosen):
        fully_shard(part, mesh=mesh, mp_policy=policy_of(name, part))
    fully_shard(model, mesh=mesh, mp_policy=BODY)
    losses = _train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), group)
    whole: Any = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return losses, {name: parameter.full_tensor() for name, parameter in whole.items()}


def under_zero(
    group: dist.ProcessGroup, rank: int, stage: int, precision: Any = policy_of
) -> tuple[list[float], dict[str, Tensor]]:
    """The same, with the master weights of parameters that have some."""
    model = seeded(0, Model)
    optimizer = ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage, process_group=group, mixed_precision=precision, lr=1e-2
    )
    losses = _train(model, optimizer, group)
    weights = {name: optimizer.full_master(parameter) for name, parameter in model.named_parameters()}
    optimizer.close()
    return losses, weights


def _train(model: Model, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> list[float]:
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank(group))
        tokens = torch.randint(CLASSES, (9,), generator=generator)
        loss = cross_entropy(model(tokens[:-1]), tokens[1:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert model.seen == [BF16, BF16, FP32]
    return losses


def experts_under_fsdp2(group: dist.ProcessGroup, rank: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train dense parameters by FSDP2, and each rank's own expert beside it. Return losses, and whole parameters."""
    model, mesh = sparse([rank % EXPERTS]), DeviceMesh.from_group(group, "cpu")
    experts = list(model.experts().parameters())
    ids = {id(parameter) for parameter in experts}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=set(experts))
    fully_shard(model, mesh=mesh, ignored_params=set(experts))
    dense = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    optimizers = [torch.optim.AdamW(params, lr=0.01) for params in (dense, experts)]

    def step() -> None:
        for parameter in experts:
            assert parameter.grad is not None
            parameter.grad.div_(dist.get_world_size(group))  # FSDP2 leaves them as this rank's
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    losses = _train_experts(model, rank, step)
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return losses, {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}


def experts_under_zero(group: dist.ProcessGroup, rank: int, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    model = sparse([rank % EXPERTS])
    given: dict[str, Any] = {"stage": stage, "lr": 0.01, "divisor": dist.get_world_size(group)}
    dense = ZeroOptimizer(model, process_group=group, ignored=model.experts(), **given)
    own = ZeroOptimizer(model.experts(), process_group=solo(), **given)

    def step() -> None:
        for optimizer in (dense, own):
            optimizer.step()
            optimizer.zero_grad()

    losses = _train_experts(model, rank, step)
    own.close()
    dense.close()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _train_experts(model: Sparse, rank: int, step: Callable[[], None]) -> list[float]:
    losses = []
    for number in range(STEPS):
        loss = loss_of(model, number, rank)
        loss.backward()  # type: ignore[no-untyped-call]
        step()
        losses.append(loss.item())
    return losses
