"""A mesh of two dimensions in a part of the job, replicas over its process groups, and process groups without gloo.

Meshes of all of the job's processes, and of one dimension, are those of `tests/meshes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ...dials.loops import DIALS, step
from ...dials.record import config_with
from ...meshes import jobs
from ...support.machine.program import Scaled
from ...support.machine.run import Played, run
from ...support.pool import WITHOUT_GLOO, GlooPool, ProgramError

LOOP: list[Any] = [*step(1), *DIALS[0].values["no sync"], Scaled(6, overflow=1)]


@pytest.fixture(scope="module")
def without_gloo() -> Iterator[GlooPool]:
    """Six processes whose process groups have no gloo, nor has any that they make."""
    pool = GlooPool(backend=WITHOUT_GLOO, size=6)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def six() -> Iterator[GlooPool]:
    pool = GlooPool(size=6)
    yield pool
    pool.stop()


def check(pool: GlooPool, job: Any, stage: int, ranks: Any, **changes: Any) -> None:
    """Run a program on a mesh of some of six processes, or on all of them, and compare it with the plain loop."""
    members = list(range(6)) if ranks is None else torch.tensor(ranks).flatten().tolist()
    config = config_with({"stage": stage, "world_size": len(members), "mesh": ranks is not None, **changes})
    results = pool.run(job, config, LOOP, *([] if ranks is None else [ranks]), ranks=range(6))
    run(config, *LOOP, backend=Played([results[rank] for rank in members]))


@pytest.mark.parametrize(("stage", "ranks"), [(3, [[0, 4], [1, 5]]), (1, [[0, 3], [1, 4], [2, 5]])], ids=str)
def test_replicas_that_have_process_groups_as_with_nccl_use_those_of_the_mesh(
    six: GlooPool, stage: int, ranks: Any
) -> None:
    check(six, jobs.by_groups_of_the_mesh, stage, ranks)


@pytest.mark.parametrize(
    ("stage", "ranks", "factor"), [(3, [[0, 4], [1, 5]], None), (0, [[5]], None), (2, None, 3)], ids=str
)
def test_a_mesh_and_a_process_group_without_gloo_have_the_bits_of_the_plain_loop(
    without_gloo: GlooPool, stage: int, ranks: Any, factor: int | None
) -> None:
    check(without_gloo, jobs.on_group if ranks is None else jobs.on_mesh, stage, ranks, sharding_factor=factor)


@pytest.mark.parametrize("ranks", [None, [[0, 4], [1, 5]]], ids=str)
def test_parts_of_groups_without_gloo_exchange_bytes(without_gloo: GlooPool, ranks: Any) -> None:
    found = without_gloo.run(jobs.parts_of, ranks, ranks=range(6))
    for part in ranks or [[0, 2, 4], [1, 3, 5]]:
        assert all(found[rank] == part for rank in part)


def test_a_collective_that_needs_gloo_itself_is_an_error_by_name(without_gloo: GlooPool) -> None:
    config = config_with({"stage": 1, "world_size": 2, "collective": "native"})
    with pytest.raises(ProgramError) as caught:
        without_gloo.run(jobs.on_group, config, step(1), ranks=(1, 3))
    for _, text in caught.value.errors.values():
        assert "its backend 'cuda:unmoving' moves no cpu tensors: init_process_group('cpu:gloo,cuda:nccl')" in text


def test_parts_along_two_dimensions_of_a_mesh_have_the_whole_models_norm(six: GlooPool) -> None:
    results = six.run(jobs.train_parts, 3, 2, 2, ranks=range(6))
    jobs.compare_parts(jobs.clipped, 3, 1, 2, results)
