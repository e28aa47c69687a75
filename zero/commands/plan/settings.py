"""The flags of `zero plan`, fields of a frozen dataclass.

Knows: names, types, defaults and help texts; which values are valid. Does not know: the parser, or what a flag does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ...precision import PrecisionName
from ..flags import require


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The settings of `zero plan`. A field is a flag; the text in its type is the flag's help."""

    GROUPS: ClassVar = {
        "Model": ("config", "parameters", "module"),
        "Cluster": ("cluster", "nic", "fabric", "hardware"),
        "Training": (
            *("micro", "sequence", "global_batch", "recompute", "precision", "fp32_modules", "optimizer"),
            "prefetch_depth",
        ),
        "Cost": ("tokens", "price"),
        "Output": ("all", "trace", "out"),
    }
    EXAMPLES: ClassVar = (
        "zero plan --config Llama-3.1-8B --cluster h100:8 --global-batch 64 --sequence 8192 --recompute full",
        "# your own model, built by a function; days of the whole training, dollars per billion tokens",
        "zero plan --module my_model:build --cluster a100-80:8x4 --tokens 1e12 --price 2",
    )

    config: Annotated[Path | None, "the model: a Hugging Face config.json, or its folder"] = None
    parameters: Annotated[
        Path | None, "the model: a safetensors file or index, or text lines 'name shape dtype'; omits activations"
    ] = None
    module: Annotated[
        str | None,
        "the model: PKG:CALLABLE, called on the meta device; returns a module, or a module and a function that returns "
        "its loss",
    ] = None
    cluster: Annotated[str, "GPU:GPUS_PER_HOSTxHOSTS, as in h100:8x4; h100 alone: one usual host"] = "h100:8"
    nic: Annotated[float | None, "Gb/s that a host can send; default: the usual network of such a host"] = None
    fabric: Annotated[str, "good, typical or poor: the network's latency per rank of a ring"] = "typical"
    hardware: Annotated[Path | None, "file of measured hardware, in addition to the built-in list"] = None
    micro: Annotated[int, "sequences per micro-batch"] = 1
    sequence: Annotated[int, "tokens per sequence"] = 2048
    global_batch: Annotated[int | None, "sequences per step, over all ranks; default: one micro-batch per rank"] = None
    recompute: Annotated[
        Literal["none", "selective", "full"], "blocks that the backward recomputes: none, every second one, all"
    ] = "none"
    precision: Annotated[PrecisionName, "dtype of the model's compute; bf16 and fp16 add fp32 masters"] = "bf16"
    fp32_modules: Annotated[
        str | None, "modules that compute in fp32 in a 16-bit model: patterns of their names, as in '*norm*,lm_head'"
    ] = None
    optimizer: Annotated[
        str,
        "adamw, adam, momentum, sgd, adagrad; muon: Muon for the units' matrices, AdamW for the rest; adamw8bit, "
        "adamw4bit, adamwfp8: torchao's",
    ] = "adamw"
    prefetch_depth: Annotated[int, "at stage 3: units that are gathered ahead of their use; 0: none"] = 1
    tokens: Annotated[float | None, "tokens of the whole training: prints its days"] = None
    price: Annotated[float | None, "$ per GPU-hour: prints $ per billion tokens"] = None
    all: Annotated[bool, "print every setting, including those that do not fit or that another one beats"] = False
    trace: Annotated[bool, "write trace.json: the recommended setting's step, for chrome://tracing or Perfetto"] = False
    out: Annotated[Path, "output folder"] = Path("zero-plan")

    def __post_init__(self) -> None:
        for name in ("micro", "sequence", "global_batch", "tokens", "price"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, name, value, "a number above 0")
