"""The memory that a rank holds at every moment of a step, measured from live storages, on a model of equal blocks.

At each event (a layer's forward begins or ends, a gradient reaches a layer's output) the distinct live storages of the
process are added up. The same events of the plain model give the memory that forward and backward need by themselves.
All memory beyond that and beyond the rank's shards must be gathered units and gradient buckets.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.rank import live_storages
from zero import ZeroOptimizer
from zero.state.describe import Description

BLOCKS, STEPS = 12, 2


def tower(width: int) -> nn.Module:
    """Return an embedding, equal blocks of 8 * width squared parameters and a few more, and a head."""
    blocks = (nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(BLOCKS))
    return nn.Sequential(nn.Embedding(64, width), *blocks, nn.Linear(width, 64))


@dataclass(frozen=True)
class Peaks:
    """The memory of one rank, in bytes."""

    between: dict[str, int]  # by kind, between two steps
    scratch: int  # the most at any event
    above: int  # likewise, without shards, sums, states, and the plain model's memory at the same event
    whole: int  # the size of the model
    bucket: int  # that of the largest bucket


def _watch(model: nn.Module, event: Callable[[], None]) -> None:
    """Call ``event`` at every layer's forward and backward."""

    def after(_: nn.Module, __: object, output: Tensor) -> None:
        event()
        if output.requires_grad:
            output.register_hook(lambda _: event())

    for part in model.modules():
        part.register_forward_pre_hook(lambda *_: event())
        part.register_forward_hook(after)


def _loss(model: nn.Module) -> Tensor:
    tokens = torch.arange(4 * 16).view(4, 16) % 64
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _plain(width: int) -> list[int]:
    """Return the memory that a plain model holds at each event, without parameters and gradients."""
    model, held = tower(width), []

    def event() -> None:
        own = [p.untyped_storage().data_ptr() for p in model.parameters()]
        own += [p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None]
        held.append(sum(size for address, size in live_storages().items() if address not in own))

    gc.collect()
    gc.freeze()
    _watch(model, event)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):  # listed objects
        _loss(model).backward()
    return held


def _kinds(description: Description) -> dict[str, int]:
    kind_of = {address: kind for kind, addresses in description.storages.items() for address in addresses}
    sizes = dict.fromkeys([*description.storages, "other"], 0)
    for address, size in live_storages().items():
        sizes[kind_of.get(address, "other")] += size
    return sizes


def measure(group: dist.ProcessGroup, rank: int, width: int, stage: int, cap_mb: float) -> Peaks:
    """Return one rank's peaks over a step of a model of `BLOCKS` blocks."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # this loads much of torch
    gc.collect()
    gc.freeze()  # existing objects need no scan at every event
    model = tower(width)
    optimizer = ZeroOptimizer(model, stage=stage, process_group=group, bucket_cap_mb=cap_mb)
    seen: list[dict[str, int]] = []
    for step in range(STEPS):
        if step == STEPS - 1:
            _watch(model, lambda: seen.append(_kinds(optimizer.describe())))
        _loss(model).backward()
        optimizer.step()
        if step < STEPS - 1:
            optimizer.zero_grad()
    between = _kinds(optimizer.describe())
    expected = _plain(width)
    gc.unfreeze()
    assert len(seen) == len(expected)
    kept = ("parameters", "gradients", "optimizer", "common")
    above = max(
        sum(size for kind, size in kinds.items() if kind not in kept) - plain
        for kinds, plain in zip(seen, expected, strict=True)
    )
    sizes = [4 * bucket.bounds[-1] for bucket in optimizer.describe().buckets]
    optimizer.close()
    return Peaks(between, max(kinds["scratch"] for kinds in seen), above, sum(sizes), max(sizes))
