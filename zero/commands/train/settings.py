"""The flags of `zero train`.

Knows: the name, type, default and help text of every flag, as fields of one frozen dataclass for each command; which
values are valid by themselves. Does not know: the parser, or what a flag does. The ranks of `zero train` get the fields
as JSON.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

__all__ = ["Flag", "TrainConfig", "flags_of", "option_of"]


_ELASTIC = "MIN:MAX, two numbers of ranks with 1 <= MIN <= MAX"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of `zero train`. A field is a flag; the text in its type is the flag's help."""

    stage: Annotated[int, "what is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too"] = 2
    sharding_factor: Annotated[
        int | None, "ranks that share one copy of what is sharded, a divisor of their number; all when omitted"
    ] = None
    reshard_after_forward: Annotated[
        str, "at stage 3: true, false (keep parameters for the backward), or how many ranks share what is kept"
    ] = "true"
    offload: Annotated[Path | None, "folder on a disk, in which a rank keeps its optimizer states"] = None
    offload_parameters: Annotated[bool, "with --offload at stage 3: keep slices of the parameters there, too"] = False
    ranks: Annotated[int | None, "processes; 2 when omitted (under torchrun: as many as it started)"] = None
    elastic: Annotated[
        str | None,
        "MIN:MAX: start MAX ranks, and go on from --checkpoint while MIN of them are left; resumes by itself",
    ] = None
    steps: Annotated[int, "optimizer steps"] = 600
    micro_batches: Annotated[int, "micro-batches of a step, over all ranks; its gradient is divided by this"] = 4
    batch: Annotated[int, "sequences in a micro-batch"] = 2
    sequence: Annotated[int, "bytes in a sequence"] = 128
    preset: Annotated[Literal["tiny", "small", "medium"], "size of the model"] = "small"
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"], "what the model computes in; 16 bits have fp32 masters, fp16 a scaled loss"
    ] = "fp32"
    optimizer: Annotated[
        str, "a class of torch.optim in lower case: adamw, sgd; muon: Muon for the blocks' matrices, AdamW for the rest"
    ] = "adamw"
    fused: Annotated[bool, "use the optimizer's fused kernel"] = False
    clip: Annotated[float | None, "bound of the global gradient norm; no clipping when omitted"] = None
    lr: Annotated[float, "learning rate"] = 1e-3
    weight_decay: Annotated[float | None, "weight decay; the optimizer's own default when omitted"] = None
    seed: Annotated[int, "seed of the weights, of the choice of data and of the sample"] = 0
    threads: Annotated[int, "threads that a rank computes with (their number changes bits)"] = 1
    bucket_cap_mb: Annotated[
        str, "size of a bucket in MiB; auto: 25, or a unit if that is larger and 64 ranks or more share a copy"
    ] = "25"
    collective: Annotated[str, "algorithm that moves the buckets"] = "auto"
    data: Annotated[Path | None, "file or folder of text; the source of Python's standard library when omitted"] = None
    checkpoint: Annotated[Path | None, "folder of checkpoints; one is saved after the last step"] = None
    checkpoint_every: Annotated[
        int | None, "with --checkpoint: save one after every so many steps, too; after the last alone when omitted"
    ] = None
    keep: Annotated[int | None, "with --checkpoint: how many of the newest are kept; all when omitted"] = None
    resume: Annotated[
        str, "none: start anew; auto: go on from the newest whole one in --checkpoint, if any; or a checkpoint's path"
    ] = "none"
    no_async: Annotated[bool, "with --checkpoint: wait for the disk at each save, instead of writing in a thread"] = (
        False
    )
    out: Annotated[Path, "folder for run.json, loss.png, memory.png, and with --checkpoint steps.png"] = Path(
        "zero-train"
    )

    def __post_init__(self) -> None:
        for name in ("steps", "micro_batches", "batch", "sequence", "threads", "checkpoint_every", "keep"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "at least 1")
        of_checkpoints = {option_of(name): getattr(self, name) for name in ("checkpoint_every", "keep", "no_async")}
        of_checkpoints |= {"--resume auto": self.resume == "auto", "--elastic": self.elastic}
        for flag, given in of_checkpoints.items():
            _need(flag, "--checkpoint DIR", self.checkpoint is not None or not given)
        _need("--offload-parameters", "--offload DIR", self.offload is not None or not self.offload_parameters)
        known = self.reshard_after_forward in ("true", "false") or self.reshard_after_forward.isdecimal()
        _require(known, "reshard_after_forward", self.reshard_after_forward, "true, false or a number of ranks")
        _require(self.ranks is None or self.ranks >= 1, "ranks", self.ranks, "at least 1")
        _require(self.elastic is None or self.elastic_ranks is not None, "elastic", self.elastic, _ELASTIC)
        _require(self.elastic is None or self.ranks is None, "ranks", self.ranks, "omitted with --elastic")
        known = self.elastic is None or self.resume in ("none", "auto")
        _require(known, "resume", self.resume, "omitted with --elastic, which goes on from --checkpoint")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "from 0 to 2**32 - 1")
        _require(0 <= self.lr < math.inf, "lr", self.lr, "finite and not negative")
        sized = self.bucket_cap_mb == "auto" or 0 < _number(self.bucket_cap_mb) < math.inf
        _require(sized, "bucket_cap_mb", self.bucket_cap_mb, "auto, or MiB above 0 and finite")
        _require(self.clip is None or self.clip > 0, "clip", self.clip, "above 0")
        _require_choices(self, "preset", "precision")

    @property
    def reshard(self) -> bool | int:
        """The argument ``reshard_after_forward`` of `ZeroOptimizer`."""
        text = self.reshard_after_forward
        return text == "true" if text in ("true", "false") else int(text)

    @property
    def elastic_ranks(self) -> range | None:
        """The numbers of ranks that ``--elastic`` allows; None if it is omitted, or is not MIN:MAX."""
        least, _, most = (self.elastic or "").partition(":")
        if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
            return None
        return range(int(least), int(most) + 1)

    @property
    def bucket_cap(self) -> float | Literal["auto"]:
        """The argument ``bucket_cap_mb`` of `ZeroOptimizer`."""
        return "auto" if self.bucket_cap_mb == "auto" else _number(self.bucket_cap_mb)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as values of JSON's types."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainConfig:
        """Build the configuration from the values of `to_json`."""
        paths = {
            name: Path(values[name]) for name in ("offload", "data", "checkpoint", "out") if values[name] is not None
        }
        return cls(**{**values, **paths})


def _number(text: str) -> float:
    """Return the number that a text is; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{option_of(name)} is {value}: it must be {expected}")


def _need(flag: str, other: str, there: bool) -> None:
    if not there:
        raise ValueError(f"{flag} needs {other}")


def _require_choices(config: TrainConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        choices = next(get_args(flag.type) for flag in flags_of(type(config)) if flag.name == name)
        _require(value in choices, name, value, f"one of {', '.join(choices)}")


def option_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Flag:
    """One field of a configuration, as a command line needs it."""

    name: str
    type: Any
    default: Any
    help: str

    @property
    def options(self) -> tuple[str, ...]:
        """The flags, if typer should not make them of the name: one that says no has no opposite."""
        return (option_of(self.name),) if self.name.startswith("no_") else ()


def flags_of(config: type[Any]) -> list[Flag]:
    """The flags of a command, in the order of the fields of its configuration."""
    hints = get_type_hints(config, include_extras=True)
    parts = {item.name: get_args(hints[item.name]) for item in fields(config)}
    return [Flag(item.name, parts[item.name][0], item.default, parts[item.name][1]) for item in fields(config)]
