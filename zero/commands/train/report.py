"""The report of `zero train`: the summary in the terminal and the files run.json, loss.png, memory.png and steps.png.

Knows: the record of a run, and how to write and print it. Does not know: how the numbers were measured.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..console import INSTALL_HINT, Console, megabytes
from .plots import can_draw, draw_loss, draw_memory, draw_steps
from .saves import SaveRecord
from .settings import TrainConfig

__all__ = ["KINDS", "RankFacts", "RunRecord", "write_report"]

KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "gathered_peak": "gathered (peak; bound)",
    "scratch_peak": "scratch (peak; bound)",
}


@dataclass(frozen=True)
class RankFacts:
    """The measurements of one rank in its own process during the last step; sizes in bytes.

    `measured` and `formula` have the keys of KINDS. `other` are live storages of no kind (data, activations), `live`
    is every live storage, `pss` the proportional set size (None if the system has none). Gradients, parameters, `other`
    and `live` are measured between the last backward and the update, optimizer states after it.
    """

    rank: int
    measured: dict[str, int]
    formula: dict[str, int]
    other: int
    live: int
    pss: int | None
    payload_sent: int
    control_sent: int

    def to_bytes(self) -> bytes:
        """Encode for an exchange between ranks."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RankFacts:
        """Decode the bytes of `to_bytes`."""
        return cls(**json.loads(data))


@dataclass(frozen=True)
class RunRecord:
    """A finished run. `losses`: for each step the mean over all its micro-batches, in nats per byte; `step_ms`: for
    each step that was taken since the run was resumed; `unsaved`: why its end has no checkpoint, if it should."""

    config: TrainConfig
    collective: str
    corpus: dict[str, str | int]
    parameters: int
    losses: list[float]
    validation_bits_per_byte: float
    params_sha256: str
    step_ms: list[float]
    checkpoints: list[SaveRecord]
    unsaved: str | None
    ranks: list[RankFacts]
    formula_traffic: int
    sample: str

    @property
    def resumed(self) -> int:
        """The number of steps that a checkpoint had, after which this run went on."""
        return len(self.losses) - len(self.step_ms)

    @property
    def traffic(self) -> int:
        """Payload bytes that all ranks sent in the last step."""
        return sum(facts.payload_sent for facts in self.ranks)

    @property
    def control_traffic(self) -> int:
        """Bytes of control messages that all ranks sent in the last step."""
        return sum(facts.control_sent for facts in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Return the content of run.json. Values "per rank" are those of rank 0; `ranks` has those of all ranks."""
        first = self.ranks[0]
        return {
            "world_size": len(self.ranks),
            "stage": self.config.stage,
            "steps": self.config.steps,
            "micro_batches": self.config.micro_batches,
            "parameters": self.parameters,
            "losses": self.losses,
            "validation_bits_per_byte": self.validation_bits_per_byte,
            "params_sha256": self.params_sha256,
            "step_ms_median": float(np.median(self.step_ms)) if self.step_ms else None,
            "checkpoints": [asdict(save) for save in self.checkpoints],
            "bytes_per_rank": first.measured,
            "formula_bytes_per_rank": first.formula,
            "traffic_bytes_per_step": self.traffic,
            "formula_traffic_bytes_per_step": self.formula_traffic,
            "control_bytes_per_step": self.control_traffic,
            "collective": self.collective,
            "ranks": [asdict(facts) for facts in self.ranks],
            "corpus": self.corpus,
            "config": self.config.to_json(),
            "sample": self.sample,
            "versions": _versions(),
        }


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("zero-optimizer")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {
        "zero-optimizer": own,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def write_report(record: RunRecord, console: Console) -> None:
    """Write the files to the folder of the run, and print the summary."""
    out = record.config.out
    (out / "run.json").write_text(json.dumps(record.to_json(), indent=2) + "\n")
    drawn = _draw(record, out)
    _show_table(record, console)
    _show_result(record, console)
    console.line(f"written to {out}: {', '.join(['run.json', *drawn])}")
    if not drawn:
        console.line(f"matplotlib is not installed: no loss.png, no memory.png. To have them: {INSTALL_HINT}")


def _draw(record: RunRecord, out: Path) -> list[str]:
    if not can_draw():
        return []
    config, first = record.config, record.ranks[0]
    run = f"stage {config.stage}, {_count(len(record.ranks), 'rank')}, {record.parameters:,} parameters"
    draw_loss(out / "loss.png", f"Loss: {run}", record.losses, record.validation_bits_per_byte)
    measured, formula = ({kind: sizes[kind] for kind in _kinds(first)} for sizes in (first.measured, first.formula))
    draw_memory(out / "memory.png", f"Memory of rank 0: {run}", measured, formula)
    if config.checkpoint is None or not record.step_ms:
        return ["loss.png", "memory.png"]
    saves = {save.step: save.blocked_ms for save in record.checkpoints}
    draw_steps(out / "steps.png", f"Time of a step: {run}", record.resumed, record.step_ms, saves)
    return ["loss.png", "memory.png", "steps.png"]


def _kinds(facts: RankFacts) -> list[str]:
    """Return the kinds of bytes in this run: if every rank holds all parameters, none are gathered."""
    return [kind for kind in KINDS if kind != "gathered_peak" or facts.measured[kind] or facts.formula[kind]]


def _show_table(record: RunRecord, console: Console) -> None:
    first = record.ranks[0]
    rows = [(KINDS[kind], first.measured[kind], first.formula[kind]) for kind in _kinds(first)]
    rows.append(("sent per step by all ranks", record.traffic, record.formula_traffic))
    cells = [(name, f"{measured:,}", f"{formula:,}") for name, measured, formula in rows]
    title = f"measured beside formula: stage {record.config.stage}, rank 0 of {len(record.ranks)}, {record.collective}"
    console.table(title, ["bytes", "measured", "formula"], cells)
    pss = "unknown on this system" if first.pss is None else megabytes(first.pss)
    console.line(
        f"rank 0 in all: {megabytes(first.live)} in live tensors ({megabytes(first.other)} of them data and "
        f"activations); the process: {pss} (proportional set size)"
    )
    console.line(f"control messages: {record.control_traffic:,} bytes per step by all ranks")


def _show_result(record: RunRecord, console: Console) -> None:
    first, last = record.losses[0] / math.log(2), record.losses[-1] / math.log(2)
    console.line(f"median step: {np.median(record.step_ms):.1f} ms" if record.step_ms else "no step was left to take")
    _show_checkpoints(record, console)
    console.line(f"training loss: {first:.3f} -> {last:.3f} bits per byte")
    console.line(f"validation: {record.validation_bits_per_byte:.3f} bits per byte")
    console.line(f"parameters: {record.parameters:,}, SHA-256 {record.params_sha256}")
    console.line("a sample of what it writes:")
    console.line("".join(f"    {line}\n" for line in record.sample.splitlines()).rstrip())


def _show_checkpoints(record: RunRecord, console: Console) -> None:
    """Print one line about checkpoints, if the run has used any."""
    parts = [f"resumed after step {record.resumed}"] if record.resumed else []
    saves = record.checkpoints
    if saves:
        waited = sum(save.blocked_ms for save in saves) / len(saves)
        size = megabytes(max(save.bytes for save in saves))
        parts.append(
            f"{len(saves)} of {size} saved to {record.config.checkpoint}, for each rank 0 waited {waited:.1f} ms"
        )
    if parts:
        console.line(f"checkpoints: {', '.join(parts)}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
