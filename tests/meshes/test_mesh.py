"""`mesh=`: the plain loop's bits on meshes of one and two dimensions, and errors of meshes that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..parameters.nested_units import ODD
from ..support.by_module import by_kind
from ..support.narrowed import PRECISIONS
from ..support.pool import GlooPool
from ..support.programs import Program, Round, Step, compare
from ..support.rows import rows
from . import jobs

CLIPPED = (Step(clips=((0.1, 2.0),)), Step((Round(sync=False), Round())))


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


WORDS = {
    "no mesh": ("TypeError", "must be a torch.distributed.device_mesh.DeviceMesh, not [[0, 1], [2, 3]]"),
    "three dimensions": (
        "ValueError",
        'mesh has 3 dimensions (pp, dp, tp): pass the dimension that shards, as in mesh["dp"]',
    ),
    "a group, too": (
        "ValueError",
        "mesh= with process_group=: both say which ranks share a copy: pass mesh= alone, or",
    ),
    "a factor, too": ("ValueError", "mesh= with sharding_factor=: both say which ranks share a copy"),
    "descending": ("ValueError", "the ranks of the mesh descend along dim1, [[0, 1], [3, 2]]", "ascend along each"),
    "a DTensor": (
        "TypeError",
        "'weight' is a DTensor, a tensor subclass",
        "put its to_local() as an nn.Parameter, which clip_grad_norm_(over=...) knows to be a part of a model",
    ),
    "differ": ("ValueError", "the ranks have different meshes: rank 0 [[0, 2], [1, 3]], rank 1 [[0, 1], [2, 3]]"),
    "not a rank": ("ValueError", "this process is not a rank of the mesh: build the optimizer on the mesh's ranks"),
    "another device": (
        "ValueError",
        "the mesh is for cpu, but parameters are on meta",
        "or move the model to cpu first",
    ),
}


def test_a_mesh_that_cannot_be_used_is_refused_by_name(gloo: GlooPool) -> None:
    results = gloo.run(jobs.errors_of_meshes, ranks=range(4))
    assert {name for found in results for name in found} == set(WORDS)
    for found in results:
        for name, error in found.items():
            assert all(word in error for word in WORDS[name]), error
            assert "\n" not in error
