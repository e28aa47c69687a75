"""FSDP2's policies give here what they give there, where no order of a sum can matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

from zero import ZeroOptimizer

from ...support.models import seeded
from ...support.plain import assert_same_value
from ...support.pool import GlooPool

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


def under_fsdp2(group: dist.ProcessGroup, rank: int) -> Ended:
    model, mesh = build(), DeviceMesh.from_group(group, "cpu")
    units = [(name, part) for name, part in model.named_modules() if isinstance(part, (nn.LayerNorm, nn.Sequential))]
    for name, part in reversed([*units[1:], ("5", model.get_submodule("5"))]):
        fully_shard(part, mesh=mesh, mp_policy=policy_of(name, part))
    fully_shard(model, mesh=mesh, mp_policy=BODY)
    losses = train(model, rank, torch.optim.AdamW(model.parameters(), lr=1e-2))
    whole: Any = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return losses, {name: parameter.full_tensor() for name, parameter in whole.items()}


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


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["1", "2"])
def test_policies_by_module_train_the_bits_of_fsdp2(gloo: GlooPool, ranks: tuple[int, ...]) -> None:
    """Two contributions have one sum, and half of it is exact."""
    expected = gloo.run(under_fsdp2, ranks=ranks)
    for stage in range(4):
        assert_same_value(gloo.run(under_zero, stage, ranks=ranks), expected, f"stage {stage}")
