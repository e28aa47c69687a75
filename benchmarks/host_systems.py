"""The plain loop, FSDP2 and this library's stage 3 around one model, in a process that is one rank of a fake group.

FSDP2 and ours compute in bf16, with fp32 master weights. The plain loop has bf16 parameters.

Knows: how each system is put around the model. Does not know: clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero import MixedPrecision, ZeroOptimizer
from zero.commands.sweep.baselines import fully_sharded

from .answered import answered
from .host_job import FSDP2, PLAIN, HostJob, Variant
from .llama import build

MAX_NORM = 1.0
NARROW = torch.bfloat16
ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}


@dataclass(frozen=True)
class Loop:
    """A model under a system. The phases of a step are called in their order, and then ``clear``.

    ``buckets`` and ``messages`` (sent so far) are 0 where the system has none.
    """

    forward: Callable[[Tensor], Tensor]
    clip: Callable[[], Tensor]
    step: Callable[[], object]
    clear: Callable[[], object]
    close: Callable[[], object] = lambda: None
    buckets: Callable[[], int] = lambda: 0
    messages: Callable[[], int] = lambda: 0


def loop(job: HostJob, variant: Variant) -> Loop:
    """Put the system around a new model."""
    device = torch.device(job.device)
    model = build(job.shape, device)
    if variant.system == PLAIN:
        return _torch_loop(model.to(NARROW))
    if variant.system == FSDP2:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=NARROW)
        return _torch_loop(fully_sharded(model, model.blocks, dist.get_world_size(), mp_policy=policy))
    optimizer = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=3,
        process_group=answered(),
        collective="all_to_all",  # what "auto" chooses among the GPUs of a host
        mixed_precision=MixedPrecision(NARROW),
        bucket_cap_mb=variant.cap_mb(job.shape),
        **ADAMW,
    )
    return Loop(
        model,
        lambda: optimizer.clip_grad_norm_(MAX_NORM),
        optimizer.step,
        optimizer.zero_grad,
        optimizer.close,
        lambda: len(optimizer._storage.buckets),
        lambda: optimizer.traffic.messages,
    )


def _torch_loop(model: nn.Module) -> Loop:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Loop(
        model, lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM), optimizer.step, optimizer.zero_grad
    )
