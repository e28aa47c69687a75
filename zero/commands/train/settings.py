"""The flags of `zero train`.

Knows: the name, type, default and help text of every flag, as fields of a frozen dataclass; which values are valid by
themselves. Does not know: the parser, or what a flag does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ...config import ShardingOptions
from ...core.buckets import DEFAULT_CAP_MB
from ..flags import require

DEFAULT_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ShardingOptions):
    """The settings of `zero train`: the options of the optimizer, and its own. A field is a flag; the text in its type
    is the flag's help."""

    NO_FLAGS: ClassVar = ("units", "partition")  # which follow from the model and the optimizer
    GROUPS: ClassVar = {
        "Model": ("preset",),
        "Training": (
            *("ranks", "device", "steps", "micro_batches", "batch", "sequence", "optimizer", "fused", "clip", "lr"),
            *("weight_decay", "seed", "threads", "data"),
        ),
        "Sharding": tuple(field.name for field in fields(ShardingOptions)),
        "Checkpoints": ("checkpoint", "checkpoint_every", "resume"),
        "Output": ("out",),
    }
    EXAMPLES: ClassVar = (
        "zero train --ranks 4 --stage 3",
        "zero train --optimizer muon --precision bf16 --clip 1",
        "# can be killed at any time; the same command continues from the newest checkpoint",
        "zero train --checkpoint checkpoints --checkpoint-every 100 --resume auto",
        "# under a launcher, which sets the number of ranks",
        "torchrun --nproc-per-node 2 -m zero.train --stage 3",
    )

    ranks: Annotated[int | None, "number of processes; default: 2, or under torchrun as many as it started"] = None
    device: Annotated[
        Literal["cpu", "cuda"] | None, "cpu, or cuda (one GPU per rank); default: cuda if the host has enough GPUs"
    ] = None
    steps: Annotated[int, "optimizer steps"] = 600
    micro_batches: Annotated[int, "micro-batches per step, over all ranks; the summed gradient is divided by it"] = 4
    batch: Annotated[int, "sequences in a micro-batch"] = 2
    sequence: Annotated[int, "bytes in a sequence"] = 128
    preset: Annotated[Literal["tiny", "small", "medium"], "size of the model"] = "small"
    optimizer: Annotated[
        str, "torch.optim class in lower case, as adamw or sgd; muon: Muon for the blocks' matrices, AdamW for the rest"
    ] = "adamw"
    fused: Annotated[bool, "use the optimizer's fused kernel"] = False
    clip: Annotated[float | None, "largest global gradient norm; default: no clipping"] = None
    lr: Annotated[float, "learning rate"] = 1e-3
    weight_decay: Annotated[float | None, "weight decay; default: the optimizer's own"] = None
    seed: Annotated[int, "seed of the weights and of the choice of data"] = 0
    threads: Annotated[int, "compute threads per rank (the number changes bits)"] = 1
    data: Annotated[Path | None, "text file or folder; default: the source of Python's standard library"] = None
    checkpoint: Annotated[Path | None, "folder for checkpoints; one is saved after the last step"] = None
    checkpoint_every: Annotated[
        int | None, "with --checkpoint: also save after every so many steps; default: after the last one only"
    ] = None
    resume: Annotated[
        Literal["none", "auto"], "none: start anew; auto: continue from the newest whole one in --checkpoint, if any"
    ] = "none"
    out: Annotated[Path, "folder for run.json, loss.png and memory.png"] = Path("zero-train")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_cap_mb is None and self.device == "cpu":  # run.json has the number
            object.__setattr__(self, "bucket_cap_mb", float(DEFAULT_CAP_MB))
        for name in ("ranks", "steps", "micro_batches", "batch", "sequence", "threads", "checkpoint_every"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1")
        for flag, given in (("--checkpoint-every", self.checkpoint_every), ("--resume auto", self.resume == "auto")):
            if given and self.checkpoint is None:
                raise ValueError(f"{flag} needs --checkpoint DIR")
        require(0 <= self.seed < 2**32, "seed", self.seed, "from 0 to 2**32 - 1")
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            require(value is None or 0 <= value < math.inf, name, value, "finite and not negative")
        require(self.clip is None or self.clip > 0, "clip", self.clip, "above 0")
