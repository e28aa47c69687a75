"""Meshes of six processes have the plain loop's bits, and FSDP2's where no order of a sum can matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ...meshes import jobs
from ...meshes.spread import Part, Stages, clipped, compare_parts
from ...support.narrowed import PRECISIONS
from ...support.plain import assert_same_bits
from ...support.pool import WITHOUT_GLOO, GlooPool, ProgramError
from ...support.programs import Program, Round, Step, compare
from ...support.sides import AsPlain

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


@pytest.mark.parametrize(
    ("stage", "ranks", "more"),
    [
        (3, [[0, 2, 4], [1, 3, 5]], {"steps": CLIPPED}),
        (2, [[0, 3], [1, 4], [2, 5]], {"steps": FEWER}),
        (1, [[0, 1, 2], [3, 4, 5]], {"steps": CLIPPED, "precision": PRECISIONS["fp16"], "scaled": True}),
        (3, [[0, 1], [2, 3], [4, 5]], {"steps": CLIPPED, "precision": PRECISIONS["bf16"], "reshard": False}),
        (0, [[0, 1, 2], [3, 4, 5]], {"steps": FEWER}),
        (3, [1, 2, 5], {"steps": CLIPPED, "collective": "pairwise"}),
    ],
    ids=lambda value: str(value).replace(" ", "") if isinstance(value, (int, list)) else "-".join(value),
)
def test_a_mesh_of_six_processes_has_the_bits_of_the_plain_loop(
    six: GlooPool, stage: int, ranks: Any, more: dict[str, Any]
) -> None:
    members = torch.tensor(ranks).flatten().tolist()
    program = Program(len(members), stage, **more)
    results = six.run(jobs.on_mesh, program, ranks, ranks=range(6))
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


@pytest.mark.parametrize(
    ("stage", "ranks"), [(3, [[0, 4], [1, 5]]), (1, [[0, 3], [1, 4], [2, 5]]), (2, [[0, 2, 3], [1, 4, 5]])], ids=str
)
def test_replicas_by_process_groups_use_those_of_the_mesh(six: GlooPool, stage: int, ranks: Any) -> None:
    """As with NCCL; there gloo's own collectives, which are exact here, too."""
    members = torch.tensor(ranks).flatten().tolist()
    program = Program(len(members), stage, steps=CLIPPED)
    results = six.run(jobs.by_groups_of_the_mesh, program, ranks, ranks=range(6))
    compare(program, [results[rank] for rank in members])


@pytest.mark.parametrize(("parts", "stage"), [(2, 0), (2, 3), (3, 2)])
def test_parts_on_six_processes_have_the_whole_models_norm(six: GlooPool, parts: int, stage: int) -> None:
    whole = Part(*range(parts))
    expected = clipped()(AsPlain(whole, lambda updated: torch.optim.AdamW(updated, lr=0.1), 6 // parts))
    compare_parts(whole, expected, six.run(jobs.train_parts, parts, stage, "a mesh", ranks=range(6)))


@pytest.mark.parametrize(("parts", "stage"), [(3, 2), (1, 3)])
def test_stages_in_parts_on_six_processes_have_the_whole_models_norm(six: GlooPool, parts: int, stage: int) -> None:
    whole = Stages(2, parts)
    expected = clipped()(AsPlain(whole, lambda updated: torch.optim.AdamW(updated, lr=0.1), 3 // parts))
    results = six.run(jobs.train_stages, stage, parts, ranks=range(6))
    for number, part in enumerate(whole.stages):
        of_part = [each for rank, each in enumerate(results) if rank % (2 * parts) // parts == number]
        compare_parts(part, expected, of_part)


def test_fsdp2_on_the_same_mesh_has_the_same_losses_and_parameters_on_integers(gloo: GlooPool) -> None:
    """Sums of small integers, divided by a power of two, are exact in any order."""
    for ours, theirs, losses, their_losses in gloo.run(jobs.beside_fsdp2, ranks=range(4)):
        assert losses == their_losses
        assert len(set(losses)) == len(losses), "each step changes the loss"
        for name, value in ours.items():
            assert_same_bits(value, theirs[name], name)
