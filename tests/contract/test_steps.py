"""At every moment of a step: what may change an update, and what none can observe."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Transport
from collectives.pool import Pool
from zero import ZeroOptimizer
from zero.core.layout import BucketSpec
from zero.parameters.sharded import ShardedStorage

from ..support.machine import program as p
from ..support.machine.ranks import Rank
from ..support.parts import parts_of
from ..support.rows import rows
from .watched import train

LOOKS = [p.Describe(), p.FullGrad(3), p.Consolidate(1), p.FullState(0, masters=True), p.Read()]


def everything_but_step(command: p.Command | None, rank: Rank) -> None:
    """Look at all there is, edit what was returned, and build another optimizer in the same group."""
    for look in LOOKS:
        rank.do(look)
    if rank.rank == 1:
        rank.optimizer.state_dict()["state"].clear()
    with rank.optimizer.gathered():
        copied = copy.deepcopy(rank.model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    if not isinstance(command, p.Keep):  # after a forward, this would edit tensors that the backward needs
        with rank.optimizer.gathered([rank.model.first.bias], write=True):
            pass
        rank.do(p.Evaluate(7, inference=command is None))
    if isinstance(command, p.Clip):
        for norm_type in (2.0, 3.0, float("inf")):
            rank.clip(float("inf"), norm_type)
    if command is None or isinstance(command, p.ZeroGrad):
        rank.clear()
        rank.divisor = float(rank.divisor)
    ZeroOptimizer(nn.ParameterList([torch.ones(3)]), process_group=rank.group, stage=rank.setting.stage).close()


@pytest.mark.law("only a step")
def test_nothing_but_a_step_changes_what_the_next_step_does() -> None:
    def ambient() -> list[Any]:
        generators = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
        modes = [torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()]
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return [*generators, *modes, torch.are_deterministic_algorithms_enabled(), hooks]

    before = ambient()
    train(3, everything_but_step)
    assert ambient() == before


def filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocated(*arguments: Any) -> Tensor:
        found = allocate(*arguments)
        found.view(torch.uint8).fill_(255)
        return found

    return allocated


def poison_padding(flat: Tensor, bucket: BucketSpec, begin: int, end: int) -> None:
    """Write NaN to all padding of ``flat``, the part [begin, end) of a bucket."""
    padding = torch.ones(end - begin, dtype=torch.bool)
    for piece in bucket.pieces(begin, end):
        padding[piece.begin - begin : piece.end - begin] = False
    flat[padding] = float("nan")


def poison(_: p.Command | None, of: Rank) -> None:
    optimizer, rank = of.optimizer, of.rank
    parts = parts_of(optimizer)
    storage: Any = parts.storage
    pools, stage = [parts.transport.pool], parts.stage
    if isinstance(storage, ShardedStorage):
        pools.append(storage.manager.gathered.pool)
        for buffer in storage.manager.buffers():
            poison_padding(buffer.shard, buffer.bucket, *buffer.bucket.owned(rank))
            if buffer.unsharded is not None:
                poison_padding(buffer.unsharded.data, buffer.bucket, 0, buffer.bucket.numel)
    else:
        for bucket in storage.buckets:
            poison_padding(bucket.weights.data, bucket.spec, 0, bucket.spec.numel)
    for bucket in storage.buckets:
        store = bucket.grad
        for tensor in [*store.tensors(), *(b.data for b in (store._local, store._saved_sum) if b is not None)]:
            whole = tensor.numel() == bucket.spec.numel
            poison_padding(tensor, bucket.spec, *((0, tensor.numel()) if whole else (store.low, store.high)))
        for flat in bucket.states.flat.values():
            poison_padding(flat.data, bucket.spec, *stage.update_interval(bucket.spec, rank))
    for pool in pools:
        for block in pool._blocks:
            if block.free:
                torch.empty(0, dtype=torch.uint8).set_(block.storage).fill_(255)


@pytest.mark.law("padding")
@pytest.mark.parametrize("stage", rows([2], [0, 1, 3]))
def test_padding_and_scratch_cannot_be_observed(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory is NaN when it is handed out.

    Between the phases NaN is written to all memory that belongs to no parameter: padding of parameters, gradients and
    states, and free buffers. Parameters, norms and states must not change.
    """
    for of, name in ((Pool, "take"), (Transport, "empty")):
        monkeypatch.setattr(of, name, filled(getattr(of, name)))
    train(stage, poison)
