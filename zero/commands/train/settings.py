"""The flags of `zero train`.

Knows: the name, type, default and help text of every flag, as fields of a frozen dataclass; which values are valid by
themselves, and how JSON has them. Does not know: the parser, or what a flag does.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ...config import ShardingOptions
from ...precision import PRECISIONS
from ..flags import require

DEFAULT_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ShardingOptions):
    """The settings of `zero train`: the options of the optimizer, and those of `zero.examples.train`. A field is a
    flag; the text in its type is the flag's help."""

    GROUPS: ClassVar = {
        "Training": (
            *("ranks", "device", "steps", "micro_batches", "batch", "width", "layers", "lr", "clip", "threads"),
            *("data", "checkpoint", "save_every", "out"),
        ),
        # units and partition follow from the model and the optimizer
        "Sharding": tuple(item.name for item in fields(ShardingOptions) if item.name not in ("units", "partition")),
    }
    EXAMPLES: ClassVar = (
        "zero train --ranks 4 --stage 3",
        "# can be killed at any time; the same command continues from the newest checkpoint",
        "zero train --checkpoint checkpoints --save-every 100",
        "# under a launcher, which sets the number of ranks",
        "torchrun --nproc-per-node 2 -m zero.train --stage 3",
    )

    ranks: Annotated[int | None, "number of processes; default: 2, or under torchrun as many as it started"] = None
    device: Annotated[
        Literal["cpu", "cuda"] | None, "cpu, or cuda (one GPU per rank); default: cuda if the host has enough GPUs"
    ] = None
    steps: Annotated[int, "optimizer steps"] = 300
    micro_batches: Annotated[int, "micro-batches per step, over all ranks; the summed gradient is divided by it"] = 4
    batch: Annotated[int, "samples of 64 bytes in a micro-batch"] = 4
    width: Annotated[int, "features of the model, a multiple of 4"] = 128
    layers: Annotated[int, "blocks of the model"] = 6
    lr: Annotated[float, "largest learning rate, which the schedule reaches and leaves"] = 3e-3
    clip: Annotated[float, "largest global gradient norm; inf: no clipping"] = 1.0
    threads: Annotated[int, "compute threads per rank (the number changes bits)"] = 1
    data: Annotated[Path | None, "text file; default: torch/nn/functional.py"] = None
    checkpoint: Annotated[
        Path | None, "folder for checkpoints; training goes on from the newest one there, and SIGTERM saves one"
    ] = None
    save_every: Annotated[int, "steps between two checkpoints; one is saved after the last step, too"] = 50
    out: Annotated[Path, "folder for run.json, loss.png and memory.png"] = Path("zero-train")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ranks", "steps", "micro_batches", "batch", "layers", "threads", "save_every"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1")
        require(self.width >= 4 and self.width % 4 == 0, "width", self.width, "a multiple of 4")
        require(0 <= self.lr < math.inf, "lr", self.lr, "finite and not negative")
        require(self.clip > 0, "clip", self.clip, "above 0")

    def written(self) -> dict[str, Any]:
        """Return the settings as run.json has them. "cpu" is the host's memory, a folder of this name has its path."""
        offload = {} if self.offload is None else asdict(self.offload)
        if self.offload is not None and not self.offload.on_host:
            offload["states"] = os.path.abspath(self.offload.states)
        precision = next(name for name, rule in PRECISIONS.items() if rule == self.mixed_precision)
        rounding = self.rounding and self.rounding.seed
        return {**vars(self), "offload": offload or None, "mixed_precision": precision, "rounding": rounding}
