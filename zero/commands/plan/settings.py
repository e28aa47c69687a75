"""The flags of `zero plan`.

Knows: the name, type, default and help text of every flag, as fields of a frozen dataclass. Does not know: the parser,
which values are valid, or what a flag does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from ...config import PrecisionName

__all__ = ["PlanConfig"]


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The settings of `zero plan`. A field is a flag; the text in its type is the flag's help."""

    GROUPS: ClassVar = {
        "Model": ("config", "parameters", "module", "preset"),
        "Cluster": ("cluster", "nic", "fabric", "hardware"),
        "Training": ("micro", "sequence", "global_batch", "recompute", "precision", "optimizer"),
        "Cost": ("tokens", "price"),
        "Output": ("all", "trace", "out"),
    }
    EXAMPLES: ClassVar = (
        "zero plan --config Llama-3.1-8B --cluster h100:8 --global-batch 64 --sequence 8192 --recompute full",
        "# a model of your own, which a function builds; days and dollars of the whole training",
        "zero plan --module my_model:build --cluster a100:8x4 --tokens 1e12 --price 2",
    )

    config: Annotated[Path | None, "the model: a Hugging Face config.json, or its folder"] = None
    parameters: Annotated[
        Path | None, "the model: a safetensors file or index, or lines 'name shape dtype'; activations are not counted"
    ] = None
    module: Annotated[
        str | None,
        "the model: PKG:CALLABLE, which returns a module, or a module and a function that returns its loss; it is "
        "called on the meta device",
    ] = None
    preset: Annotated[Literal["tiny", "small", "medium"] | None, "the model: that of zero train"] = None
    cluster: Annotated[str, "GPU, GPUs of a host and hosts, as in h100:8x4; one host as it is usual: h100"] = "h100:8"
    nic: Annotated[float | None, "Gb/s that a host sends into the network; what is usual when omitted"] = None
    fabric: Annotated[str, "good, typical or poor: the network's seconds for each rank of a ring"] = "typical"
    hardware: Annotated[Path | None, "file of measured hardware, beside what the library knows"] = None
    micro: Annotated[int, "sequences in a micro-batch of a rank"] = 1
    sequence: Annotated[int, "tokens in a sequence"] = 2048
    global_batch: Annotated[
        int | None, "sequences of a step over all ranks; one micro-batch of each rank when omitted"
    ] = None
    recompute: Annotated[
        Literal["none", "selective", "full"], "blocks that the backward recomputes: none, every second one, all"
    ] = "none"
    precision: Annotated[PrecisionName, "what the model computes in; 16 bits have fp32 masters"] = "bf16"
    optimizer: Annotated[
        str, "adamw, adam, momentum, sgd, adagrad; muon: Muon for matrices of units, AdamW for the rest"
    ] = "adamw"
    tokens: Annotated[float | None, "tokens of the whole training, for days"] = None
    price: Annotated[float | None, "$ for a GPU-hour, for $ of a billion tokens"] = None
    all: Annotated[bool, "print every setting, also those that another one beats and those that do not fit"] = False
    trace: Annotated[bool, "write trace.json: the recommended step for chrome://tracing or Perfetto"] = False
    out: Annotated[Path, "folder for the files that are written"] = Path("zero-plan")

    def to_json(self) -> dict[str, Any]:
        """Return what decides the plan as values of JSON's types: no folders of the machine."""
        values = {name: value.name if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {name: value for name, value in values.items() if name not in ("out", "all", "trace")}
