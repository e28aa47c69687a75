"""The number of ranks, and how they share a copy and move it."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from collectives import solo

from .record import Dial, Differs, Refused

FACTOR = "must divide the number of ranks, 1, so be one of [1]"
APART = "different models or optimizers"


def mesh_of(ranks: Any, *names: str) -> DeviceMesh:
    """Return a mesh as rank 0 has it, without process groups."""
    return DeviceMesh("cpu", ranks, mesh_dim_names=names or None, _init_backend=False, _rank=0)


def on_mesh(mesh: Any, words: str, **more: Any) -> Refused:
    return Refused({"mesh": mesh, "process_group": None, **more}, words)


SQUARE, TWICE = mesh_of([[0, 1], [2, 3]]), "both say which ranks share a copy: pass mesh= alone, or"
DIALS = (
    Dial(
        name="stage",
        first=4,
        values={f"{stage}": {"stage": stage} for stage in (2, 0, 1, 3)},
        refused=[Refused({"stage": stage}, "stage must be one of [0, 1, 2, 3]") for stage in (4, -1, "2", True, None)],
        differs=[Differs({"stage": 1}, {"stage": 2}, APART)],
    ),
    Dial(name="ranks", values={f"{ranks}": {"world_size": ranks} for ranks in (3, 1, 2, 4, 6, 8)}),
    Dial(
        name="bucket_cap_mb",
        values={f"{cap}": {"bucket_cap_mb": cap} for cap in (0.0005, 1e-6, 25.0, "auto")},
        refused=[
            *(
                Refused({"bucket_cap_mb": cap}, "bucket_cap_mb must be a positive number of MiB")
                for cap in (0, -1, "x")
            ),
            Refused({"bucket_cap_mb": float("nan")}, "bucket_cap_mb must be a positive number of MiB"),
        ],
        differs=[Differs({"bucket_cap_mb": 1}, {"bucket_cap_mb": 2}, APART)],
    ),
    Dial(
        name="collective",
        values={name: {"collective": name} for name in ("auto", "pairwise", "hierarchical", "shared")},
        refused=[Refused({"collective": "tree"}, "collective must be one of auto, pairwise, … not 'tree'")],
        differs=[Differs({"collective": "ring"}, {"collective": "auto"}, APART)],
    ),
    Dial(
        name="sharding_factor",
        values={"all": {}, **{f"{factor}": {"sharding_factor": factor} for factor in (1, 2, 3)}},
        needs=lambda row: row["stage"] != "0" and int(row["ranks"]) % int(row["sharding_factor"]) == 0,
        refused=[
            *(Refused({"sharding_factor": factor}, FACTOR) for factor in (0, 3, -1, 1.0, True, "2")),
            Refused({"stage": 0, "sharding_factor": 1}, "sharding_factor=1 with stage 0 … leave sharding_factor= out"),
        ],
        differs=[
            Differs(
                {"sharding_factor": 1},
                {},
                "rank 0 asked for stage=2, sharding_factor=1, reshard … but rank 1 for stage=2, sharding_factor=None",
            ),
            Differs({"stage": 0}, {"stage": 0, "sharding_factor": 1}, "rank 0 asked for stage=0, … but rank 1"),
        ],
    ),
    Dial(
        name="mesh",
        values={"none": {}},  # ranks that are threads have none: `tests.meshes`
        refused=[
            on_mesh([[0, 1], [2, 3]], "mesh must be a torch.distributed.device_mesh.DeviceMesh, not [[0, 1], [2, 3]]"),
            on_mesh(
                mesh_of([[[0, 1]], [[2, 3]]], "pp", "dp", "tp"),
                'mesh has 3 dimensions (pp, dp, tp): pass the dimension that shards, as in mesh["dp"]',
            ),
            on_mesh(SQUARE, f"mesh= with process_group=: {TWICE}", process_group=solo()),
            on_mesh(SQUARE, f"mesh= with sharding_factor=: {TWICE}", sharding_factor=2),
            on_mesh(
                mesh_of([[0, 1], [3, 2]]),
                "the ranks of the mesh descend along dim1, [[0, 1], [3, 2]] … ascend along each dimension",
            ),
            on_mesh(mesh_of([1, 3]), "this process is not a rank of the mesh: build the optimizer on the mesh's ranks"),
        ],
    ),
)
