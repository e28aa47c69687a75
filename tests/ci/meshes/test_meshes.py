"""Meshes of six processes have the plain loop's bits, and FSDP2's where no order of a sum can matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ...meshes import jobs
from ...support.narrowed import PRECISIONS
from ...support.pool import WITHOUT_GLOO, GlooPool, ProgramError
from ...support.programs import Program, Round, Step, compare

FEWER = (Step((Round(), Round(ranks=1))), Step((Round(ranks=1),)), Step(clips=((0.1, 3.0),)))
CLIPPED = (Step(clips=((0.1, 2.0),)), Step((Round(sync=False), Round())))


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


ROWS: list[tuple[int, Any, dict[str, Any]]] = [
    (3, [[0, 2, 4], [1, 3, 5]], {"steps": CLIPPED}),
    (2, [[0, 3], [1, 4], [2, 5]], {"steps": FEWER}),
    (1, [[0, 1, 2], [3, 4, 5]], {"steps": CLIPPED, "precision": PRECISIONS["fp16"], "scaled": True}),
    (3, [[0, 1], [2, 3], [4, 5]], {"steps": CLIPPED, "precision": PRECISIONS["bf16"], "reshard": False}),
    (3, [1, 2, 5], {"steps": CLIPPED, "collective": "pairwise"}),
]
WITH_NCCL = [(3, [[0, 4], [1, 5]]), (1, [[0, 3], [1, 4], [2, 5]]), (2, [[0, 2, 3], [1, 4, 5]])]  # in its place is gloo


@pytest.mark.parametrize(
    ("job", "stage", "ranks", "more"),
    [
        *((jobs.on_mesh, *row) for row in ROWS),
        *((jobs.by_groups_of_the_mesh, *row, {"steps": CLIPPED}) for row in WITH_NCCL),
    ],
    ids=lambda value: (
        getattr(value, "__name__", None)
        or (str(value).replace(" ", "") if isinstance(value, (int, list)) else "-".join(value))
    ),
)
def test_a_mesh_of_six_processes_has_the_bits_of_the_plain_loop(
    six: GlooPool, job: Any, stage: int, ranks: Any, more: dict[str, Any]
) -> None:
    """Also where replicas have process groups, as with NCCL: they are those of the mesh."""
    members = torch.tensor(ranks).flatten().tolist()
    program = Program(len(members), stage, **more)
    results = six.run(job, program, ranks, ranks=range(6))
    compare(program, [results[rank] for rank in members])


@pytest.mark.parametrize(
    ("stage", "ranks", "factor"),
    [(3, [[0, 4], [1, 5]], None), (2, [[0, 3], [1, 4], [2, 5]], None), (1, [1, 2, 5], None), (0, [[5]], None)]
    + [(stage, None, 3 if stage else None) for stage in range(4)],
    ids=str,
)
def test_so_has_one_whose_process_groups_have_no_gloo(
    without_gloo: GlooPool, stage: int, ranks: Any, factor: int | None
) -> None:
    """The mesh's ranks alone make a gloo group; the job's other processes do nothing. So do groups, and replicas."""
    members = list(range(6)) if ranks is None else torch.tensor(ranks).flatten().tolist()
    program = Program(len(members), stage, sharding_factor=factor, steps=CLIPPED)
    arguments = (jobs.on_group, program) if ranks is None else (jobs.on_mesh, program, ranks)
    results = without_gloo.run(*arguments, ranks=range(6))
    compare(program, [results[rank] for rank in members])


@pytest.mark.parametrize("ranks", [None, [[0, 4], [1, 5]]], ids=str)
def test_so_have_parts_of_groups_without_gloo(without_gloo: GlooPool, ranks: Any) -> None:
    found = without_gloo.run(jobs.parts_of, ranks, ranks=range(6))
    for part in ranks or [[0, 2, 4], [1, 3, 5]]:
        assert all(found[rank] == part for rank in part)


def test_a_collective_that_needs_gloo_itself_is_an_error_by_name(without_gloo: GlooPool) -> None:
    program = Program(2, 1, collective="native")
    with pytest.raises(ProgramError) as caught:
        without_gloo.run(jobs.on_group, program, ranks=(1, 3))
    for _, text in caught.value.errors.values():
        assert "its backend 'cuda:unmoving' moves no cpu tensors: init_process_group('cpu:gloo,cuda:nccl')" in text


@pytest.mark.parametrize(("parts", "stages", "stage"), [(2, 1, 0), (2, 1, 3), (3, 1, 2), (3, 2, 2), (1, 2, 3)])
def test_parts_on_six_processes_have_the_whole_models_norm(six: GlooPool, parts: int, stages: int, stage: int) -> None:
    results = six.run(jobs.train_parts, parts, stages, stage, ranks=range(6))
    jobs.compare_parts(jobs.clipped, parts, 6 // (parts * stages), stages, results)
