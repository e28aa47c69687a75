"""How much memory there is at most in a backward as one of 8 ranks, in blocks of the model in bf16.

Every storage that an operator makes or returns is known by a weak reference, and after each operator the bytes of all
that are alive are added up. The model, its rank and its peers are those of `test_launches`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_short.peers import NARROW, answered, build, device_paths, join_fake_group, tokens
from zero import MixedPrecision, ZeroOptimizer

from .support.built_kernels import built_kernels, put_in

RANKS = 8
MOST = 14.25
"""Activations and gradients 9; the unit that runs, the next one and the root's rest, with the shards that are sent for
them, 3; a contribution, what its all-to-all brings, and the sum of the shard in fp32 2.25."""


class _Alive(TorchDispatchMode):
    """The storages that operators have returned."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(result):
            if type(each) is torch.Tensor:
                storage: Any = each.untyped_storage()
                self._made[storage._cdata] = weakref.ref(storage)
        alive = {key: storage.nbytes() for key, known in self._made.items() if (storage := known()) is not None}
        self._made = {key: self._made[key] for key in alive}
        self.peak = max(self.peak, sum(alive.values()))
        return result


@pytest.fixture(autouse=True)
def one_of_many() -> Iterator[None]:
    join_fake_group(RANKS)
    with device_paths():
        yield
    dist.destroy_process_group()


def test_a_backward_holds_a_contribution_and_what_its_all_to_all_brings_and_no_other() -> None:
    model, batch = build(NARROW, torch.device("cpu")), tokens(NARROW, 4, torch.device("cpu"))
    block = 2 * sum(parameter.numel() for parameter in model.blocks[0].parameters())
    optimizer = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=3,
        process_group=answered(),
        collective="all_to_all",
        mixed_precision=MixedPrecision(torch.bfloat16),
        bucket_cap_mb=1 << 20,
        lr=1e-4,
        fused=True,
    )
    with put_in(built_kernels()):
        for _ in range(3):
            with _Alive() as alive:
                model(batch).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    assert 0.95 * MOST < alive.peak / block <= MOST
