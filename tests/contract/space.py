"""The settings of training programs, and rows that hold each pair of their values.

Knows: which settings go together. Does not know: how a program is run.
"""

from __future__ import annotations

import tempfile

import torch

from zero import Offload, StochasticRounding

from ..support.by_module import BY_MODULE
from ..support.narrowed import PRECISIONS
from ..support.pairs import Row
from ..support.programs import BY_PARAMETER, Program, Round, Step

OFF, ON = Round(sync=False), Round()
INFINITY = float("inf")
CLIPPED = Step(clips=((0.1, 2.0),))
HABITS: dict[str, tuple[Step, ...]] = {
    "clips": (CLIPPED, Step(lr=3e-3), Step()),
    "norms": (Step(clips=((0.3, 1.0), (0.2, 3.0))), Step(clips=((0.3, INFINITY), (INFINITY, 2.0))), Step()),
    "no sync": (Step((OFF, OFF, ON)), Step((OFF, OFF)), Step((ON, OFF)), Step((ON, OFF, ON, OFF), CLIPPED.clips)),
    "fewer": (
        Step((ON, Round(ranks=1))),
        Step((Round(ranks=2), Round(ranks=1))),
        Step((Round(ranks=2), Round(ranks=1, sync=False))),
        Step((Round(ranks=1),) * 2),
        Step(),
    ),
    "freezes": (
        Step(),
        Step(toggle=("frozen", "first.weight")),
        Step(toggle=("last.bias", "frozen")),
        Step(toggle=("first.weight", "last.bias"), clips=CLIPPED.clips),
    ),
    "divisors": (Step(divisor=7.5), Step(divisor=3.0, clips=CLIPPED.clips), Step()),
    "scales": (Step(), Step((ON, OFF), CLIPPED.clips, overflow=(1, 0)), Step(unscale=False), Step()),
    **{
        clear: (Step(clear=clear), Step(clear=clear, step=False), Step(clear=clear, clips=CLIPPED.clips), Step())
        for clear in ("zero_grad", "zeros", "module", "module zeros", "none")
    },
}
DTYPES = {"": torch.float32, "fp64": torch.float64, "in bf16": torch.bfloat16, "in fp16": torch.float16}
ROUNDED = {"rounded": (torch.bfloat16, None), "rounded, sums in fp32": (torch.float32, PRECISIONS["bf16"])}


def allowed(row: Row) -> bool:
    """Return whether the settings of a row go together."""
    clean = row["optimizer"] in ("adamw", "sgd momentum")
    return all(
        (
            row["habit"] != "fewer" or (row["stage"] < 3 and row["ranks"] > 1),
            row["factor"] is None or (row["stage"] > 0 and row["ranks"] % row["factor"] == 0 and row["ranks"] > 1),
            row["reshard"] or row["stage"] == 3,
            row["ranks"] != 4 or row["factor"] == 2,
            row["numbers"] not in DTYPES or not row["numbers"] or clean,
            row["numbers"] not in ROUNDED or row["habit"] != "scales",
            row["numbers"] != "in fp16" or row["habit"] == "clips",
            row["habit"] != "scales" or row["numbers"] not in DTYPES or not row["numbers"],
            # of other classes numbers become infinite in fp16
            row["numbers"] not in ("fp16", "ends in fp16") or row["optimizer"] in ("adamw", "adamw fused"),
            row["optimizer"] not in BY_PARAMETER or row["whole"],
            row["habit"] != "module zeros" or not row["lends"],  # zeros that no step used do not move
            row["optimizer"] != "sgd fused" or row["habit"] == "clips",  # torch's fails where a first use comes later
        )
    )


def named(row: Row) -> str:
    """Return a row as the name of a case, without what is usual."""
    usual: Row = {"numbers": "", "factor": None, "collective": "auto", "reshard": True}
    usual |= dict.fromkeys(("offload", "whole", "lends"), False)
    more = [f"{key} {value}" for key, value in row.items() if key in usual and value != usual[key]]
    return "-".join([*(str(row[key]) for key in ("stage", "ranks", "cap", "optimizer", "habit")), *more])


def program_of(row: Row) -> Program:
    numbers = row["numbers"]
    dtype, precision = ROUNDED.get(
        numbers, (DTYPES.get(numbers, torch.float32), {**PRECISIONS, **BY_MODULE}.get(numbers))
    )
    return Program(
        row["ranks"],
        row["stage"],
        row["optimizer"],
        row["cap"],
        "auto" if row["collective"] == "one host" else row["collective"],
        "parameter" if row["whole"] else "element",
        row["factor"],
        row["reshard"],
        Offload(tempfile.gettempdir()) if row["offload"] else None,
        dtype,
        precision=precision,
        rounding=StochasticRounding(1) if numbers in ROUNDED else None,
        scaled=row["habit"] == "scales",
        lends=row["lends"],
        steps=HABITS[row["habit"]],
    )
