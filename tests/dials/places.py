"""Where states and parameters lie between steps."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from zero import Offload

from .record import Dial, Differs, Refused

DIALS = (
    Dial(
        name="offload",
        values={"none": {}, "disk": {"offload": True}},
        refused=[
            Refused({"offload": "cpu"}, "not 'cpu': give zero.Offload(\"cpu\") or zero.Offload(folder)"),
            Refused({"offload": Offload("/missing")}, "offload: no file can be made in /missing"),
            Refused({"offload": Offload(__file__)}, f"offload: no file can be made in {__file__}"),
            Refused({"offload": CPUOffloadPolicy()}, 'give zero.Offload("cpu", parameters="cpu", step="cpu")'),
            Refused(
                {"offload": Offload("cpu", parameters="cpu"), "stage": 2},
                'Offload(parameters="cpu") with stage 2 … leave parameters= out',
            ),
        ],
        differs=[
            Differs(
                {"offload": Offload("cpu", parameters="cpu"), "stage": 3},
                {"offload": Offload("cpu", parameters="cpu", step="cpu"), "stage": 3},
                "offload=states and parameters in the host's memory … stepped there",
            )
        ],
    ),
    Dial(
        name="ignored",
        values={"none": {}},
        refused=[
            Refused({"ignored": "weight"}, "ignored[0] is a str, neither a parameter nor a module"),
            Refused({"ignored": ""}, "ignored[0] is a str, neither a parameter nor a module"),
            Refused({"ignored": len}, "ignored[0] is a builtin_function_or_method, neither"),
            Refused({"ignored": nn.Linear(2, 2)}, "ignored[0] is no part of the optimizer's module"),
        ],
    ),
)
