"""The flags of `zero plan`, fields of a frozen dataclass.

Knows: names, types, defaults and help texts; which values are valid. Does not know: the parser, or what a flag does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

from ...core.stage import check_prefetch_depth
from ...planning.setting import OPTIMIZERS, Training
from ..flags import require


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Training):
    """The settings of `zero plan`: how a model is trained, and the rest. A field is a flag; the text in its type is the
    flag's help."""

    GROUPS: ClassVar = {
        "Model": ("config", "parameters", "module"),
        "Cluster": ("cluster", "nic", "fabric", "hardware"),
        "Training": tuple(item.name for item in fields(Training)),
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
    tokens: Annotated[float | None, "tokens of the whole training: prints its days"] = None
    price: Annotated[float | None, "$ per GPU-hour: prints $ per billion tokens"] = None
    all: Annotated[bool, "print every setting, including those that do not fit or that another one beats"] = False
    trace: Annotated[bool, "write trace.json: the recommended setting's step, for chrome://tracing or Perfetto"] = False
    out: Annotated[Path, "output folder"] = Path("zero-plan")

    def __post_init__(self) -> None:
        for name in ("micro", "sequence", "global_batch", "tokens", "price"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, name, value, "a number above 0")
        require(self.optimizer in OPTIMIZERS, "optimizer", self.optimizer, f"one of {', '.join(OPTIMIZERS)}")
        check_prefetch_depth(self.prefetch_depth)
        patterns = self.fp32_modules
        if patterns is not None and self.precision == "fp32":
            raise ValueError("--fp32-modules: with --precision fp32 every module computes in fp32, so leave it out")
        # an empty pattern would match the outermost module, and so all of them
        named = patterns is None or all(patterns.split(","))
        require(named, "fp32_modules", patterns, "patterns with commas between them, none of them empty")
