"""At stage 3: which modules are gathered as a whole, when, and for how long."""

from __future__ import annotations

from torch import nn

from ..support.machine.ranks import UNIT_ARGUMENTS
from .numbers import fails
from .record import Dial, Differs, Refused

KEPT = "divides the 1 ranks that share a copy, so one of"


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


DIALS = (
    Dial(
        name="units",
        values={"usual": {}, **{name: {"units": name} for name in UNIT_ARGUMENTS}},
        needs=lambda row: row["stage"] == "3",
        refused=[
            Refused(
                {"stage": 3, "units": "blocks"}, "units must be a function of a module that returns a bool", layers
            ),
            Refused({"stage": 3, "units": nn.Linear}, "Linear'>: for a class, lambda module: isinstance", layers),
            Refused({"stage": 3, "units": fails}, "units: the function failed for '0' (KeyError: 'x'", layers),
            *(
                Refused(
                    {"stage": stage, "units": fails}, f"units= with stage {stage}: no … leave it out, since it is for"
                )
                for stage in (0, 2)
            ),
            *(Refused({"stage": 3, "prefetch_depth": depth}, "at least 0, not ") for depth in (-1, 1.0, True, None)),
            Refused({"stage": 2, "prefetch_depth": 0}, "is for stage 3"),
        ],
        differs=[Differs({"stage": 3, "prefetch_depth": 0}, {"stage": 3, "prefetch_depth": 2}, "prefetch_depth")],
    ),
    Dial(
        name="reshard",
        values={"true": {}, "false": {"reshard": False}, "2": {"reshard": 2}},
        needs=lambda row: (
            row["stage"] == "3"
            and (row["reshard"] == "false" or (row["ranks"] == "4" and row["sharding_factor"] == "all"))
        ),
        refused=[
            *(Refused({"stage": 3, "reshard_after_forward": given}, KEPT) for given in (0, 3, "2", None)),
            *(Refused({"stage": stage, "reshard_after_forward": False}, "is for stage 3") for stage in (0, 2)),
        ],
    ),
)
