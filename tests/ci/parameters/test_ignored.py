"""Ignored experts on processes: the plain loop's bits and norms on meshes and groups of 1 to 6 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...parameters.experts import EXPERTS, Pair, Sparse, assert_trained
from ...support.narrowed import PRECISIONS
from ...support.pool import GlooPool


@pytest.fixture(scope="module")
def six() -> Iterator[GlooPool]:
    pool = GlooPool(size=6)
    yield pool
    pool.stop()


def train(
    group: dist.ProcessGroup, rank: int, count: int, stages: tuple[int, int], how: str, more: dict[str, Any]
) -> tuple[Sparse, list[Tensor]] | None:
    """Train on the first ``count`` processes. Return the model and the norms; None on the others.

    ``how``: the ranks of the first optimizer as "a mesh" of two dimensions, "a row" of one, or "a group".
    """
    ranks = torch.arange(count)
    of_group, row = {"process_group": dist.new_group(range(count))}, DeviceMesh("cpu", ranks)
    mesh = DeviceMesh("cpu", ranks.view(-1, min(EXPERTS, count)), mesh_dim_names=("same", "experts"))
    if rank >= count:
        return None
    first = {"a mesh": {"mesh": mesh}, "a row": {"mesh": row}, "a group": of_group}[how]
    pair = Pair(rank, count, (first, {"mesh": mesh["same"]} if count > 1 else of_group), stages, **more)
    norms = pair.train(range(2))
    return pair.close(), norms


@pytest.mark.parametrize(
    ("ranks", "stages", "how", "more"),
    [
        (6, (3, 2), "a mesh", {}),
        (6, (0, 3), "a row", {}),
        (4, (2, 0), "a mesh", {"precision": PRECISIONS["bf16"]}),
        (4, (3, 3), "a group", {"sharding_factor": 2}),
        (2, (3, 1), "a row", {"precision": PRECISIONS["bf16"]}),
        (1, (3, 2), "a group", {}),
    ],
    ids=lambda value: str(value).replace(" ", "") if isinstance(value, (int, tuple, str)) else "-".join(value),
)
def test_experts_on_processes_train_the_bits_of_one_plain_loop_with_one_norm(
    six: GlooPool, ranks: int, stages: tuple[int, int], how: str, more: dict[str, Any]
) -> None:
    found = six.run(train, ranks, stages, how, more, ranks=range(6))[:ranks]
    assert_trained(found, 2, more.get("precision"))
