"""`mesh=`: the plain loop's bits on meshes of one and two dimensions, and errors of meshes that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..parameters.nested_units import ODD
from ..support.by_module import by_kind
from ..support.errors import assert_in_order
from ..support.narrowed import PRECISIONS
from ..support.pool import GlooPool
from ..support.programs import Program, Round, Step, compare
from ..support.rows import rows
from . import jobs

CLIPPED = (Step(clips=((0.1, 2.0),)), Step((Round(sync=False), Round())))


@pytest.mark.law("group ranks")
@pytest.mark.parametrize(
    ("stage", "ranks", "more"),
    rows(
        [(3, [[0, 2], [1, 3]], {}), (2, [1, 3], {"precision": PRECISIONS["bf16"]})],
        [
            (0, [[0, 2], [1, 3]], {}),
            (1, [[0], [3]], {}),
            (1, [[0, 1], [2, 3]], {"scaled": True}),
            (3, [[0, 2, 3]], {"precision": PRECISIONS["bf16"]}),
            (3, [0, 1, 2, 3], {"optimizer": "shampoo"}),
            (3, [[0, 2], [1, 3]], {"precision": by_kind, "units": ODD["kept inside units"]}),
        ],
    ),
    ids=lambda value: str(value).replace(" ", "") if isinstance(value, (int, list)) else "-".join(value),
)
def test_a_mesh_of_any_ranks_has_the_bits_of_the_plain_loop(
    gloo: GlooPool, stage: int, ranks: Any, more: dict[str, Any]
) -> None:
    """Ranks are numbered row by row, whatever their numbers in the job; processes outside of it do nothing else."""
    members = torch.tensor(ranks).flatten().tolist()
    program = Program(len(members), stage, steps=CLIPPED, **more)
    results = gloo.run(jobs.on_mesh, program, ranks, ranks=range(4))
    assert [rank for rank, result in enumerate(results) if result is not None] == sorted(members)
    compare(program, [results[rank] for rank in members])


def test_describe_names_the_mesh_and_a_part_of_a_larger_one_is_enough(gloo: GlooPool) -> None:
    for rank, (both, replicated, sharded, alone) in enumerate(gloo.run(jobs.described, ranks=range(4))):
        assert "rank" in both[0]
        assert "mesh (dp_replicate 2, dp_shard 2), sharding factor 2" in both[0]
        assert both[1:] == (rank, 2)
        assert "sharding factor" not in replicated[0], "nothing is sharded at stage 0"
        assert sharded[0].startswith(f"stage 2, rank {rank % 2} of 2, mesh (dp_shard 2), collective")
        assert alone[0].startswith("stage 1, rank 0 of 1, mesh (pp 1), collective")


def test_what_only_processes_of_a_mesh_can_give_is_refused_by_name(gloo: GlooPool) -> None:
    """The dial `mesh` has what one process can give."""
    for of_a_tensor, differ in gloo.run(jobs.errors_of_meshes, ranks=range(4)):
        parts = "clip_grad_norm_(over=...) knows to be a part of a model"
        assert_in_order(f"TypeError … 'weight' is a DTensor, a tensor subclass … its to_local() … {parts}", of_a_tensor)
        meshes = "rank 0 [[0, 2], [1, 3]], rank 1 [[0, 1], [2, 3]]"
        assert_in_order(f"ValueError … the ranks have different meshes: {meshes}", differ)
