"""An independent oracle: PyTorch's FSDP2.

On two ranks with one micro-batch each, a sum has two terms, whose order cannot matter, and a mean divides by two, which
is exact. So FSDP2, stage 3 of this library and the plain loop must all have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zero import ZeroOptimizer

from ..support.cases import Net
from ..support.plain import assert_same_bits, bits
from ..support.pool import GlooPool

STEPS = 4


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def fsdp2_and_zero(group: Any, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train both on the same micro-batches; return their parameters."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    theirs, ours = make(), make()
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in theirs.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    peer = torch.optim.AdamW(theirs.parameters(), lr=0.05)
    optimizer = ZeroOptimizer(ours, torch.optim.AdamW, stage=3, process_group=group, lr=0.05)
    for step in range(STEPS):
        for model, each in ((theirs, peer), (ours, optimizer)):
            model(batch_of(step, rank)).square().mean().backward()
            each.step()
            each.zero_grad()
    optimizer.close()
    whole = {name: parameter.full_tensor().detach() for name, parameter in theirs.named_parameters()}
    return whole, {name: parameter.detach() for name, parameter in ours.named_parameters()}


def test_fsdp2_and_stage_3_have_the_same_bits_where_no_order_can_matter(gloo: GlooPool) -> None:
    plain = make()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for step in range(STEPS):
        for rank in range(2):
            plain(batch_of(step, rank)).square().mean().backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(2)
        optimizer.step()
        optimizer.zero_grad()
    for fsdp2, zero in gloo.run(fsdp2_and_zero):
        for name, parameter in plain.named_parameters():
            assert_same_bits(zero[name], parameter, f"zero, {name}")
            assert_same_bits(fsdp2[name], parameter, f"FSDP2, {name}")
    assert not torch.equal(bits(plain.head.weight), bits(make().head.weight)), "nothing was trained"
