"""The number of ranks, and how they share a copy and move it."""

from __future__ import annotations

from .record import Dial, Differs, Refused

FACTOR = "must divide the number of ranks, 1, so be one of [1]"
APART = "different models or optimizers"

DIALS = (
    Dial(
        name="stage",
        first=4,
        values={f"{stage}": {"stage": stage} for stage in (2, 0, 1, 3)},
        refused=[Refused({"stage": stage}, "stage must be one of [0, 1, 2, 3]") for stage in (4, -1, "2", True, None)],
        differs=[Differs({"stage": 1}, {"stage": 2}, APART)],
    ),
    Dial(
        name="ranks",
        values={f"{ranks}": {"world_size": ranks} for ranks in (3, 1, 2, 4, 6, 8)},
    ),
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
        refused=[Refused({"collective": "tree"}, "collective")],
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
            )
        ],
    ),
)
