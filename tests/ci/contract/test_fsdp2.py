"""FSDP2's policies give here what they give there, where no order of a sum can matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from zero import ZeroOptimizer

from ...contract.recipes import EXAMPLES
from ...support.loops import mean_loss
from ...support.models import take_steps
from ...support.plain import assert_same_value
from ...support.pool import GlooPool

EXAMPLE, BF16, FP32 = EXAMPLES["Norms and heads in fp32"], torch.bfloat16, torch.float32
POLICIES = {
    "*": MixedPrecisionPolicy(BF16, reduce_dtype=FP32),
    "norm": MixedPrecisionPolicy(FP32, output_dtype=BF16),
    "head": MixedPrecisionPolicy(FP32),
}


def trained(group: dist.ProcessGroup, rank: int, stage: int | None) -> list[Tensor]:
    """Train at a stage, or under FSDP2. Return the whole weights in fp32."""
    model: Any = EXAMPLE.model()
    if stage is None:
        for name, policy in reversed(POLICIES.items()):
            part = model if name == "*" else model.get_submodule(name)
            fully_shard(part, mesh=DeviceMesh.from_group(group, "cpu"), mp_policy=policy)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        given = {"stage": stage, "process_group": group, "mixed_precision": POLICIES, "lr": 1e-2}
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, **given)
    take_steps(model, optimizer, EXAMPLE.micro_batches(rank, dist.get_world_size(group)), mean_loss)
    if stage is None:
        return [parameter.detach().full_tensor() for parameter in model.parameters()]
    weights = [optimizer.full_master(parameter) for parameter in model.parameters()]
    optimizer.close()
    return weights


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["1", "2"])
def test_policies_by_module_train_the_bits_of_fsdp2(gloo: GlooPool, ranks: tuple[int, ...]) -> None:
    """Two contributions have one sum, and half of it is exact."""
    expected = gloo.run(trained, None, ranks=ranks)
    for stage in range(4):
        assert_same_value(gloo.run(trained, stage, ranks=ranks), expected, f"stage {stage}")
