"""The report of `zero train`: the summary in the terminal and the files run.json, loss.png and memory.png.

Knows: the content of run.json, and how to write, draw and print it. Does not know: how the numbers were measured.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ..console import INSTALL_HINT, Console
from ..plots import can_draw, draw_loss, draw_memory

KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "gathered_peak": "gathered (peak; bound)",
    "scratch_peak": "scratch (peak; bound)",
}


def write_report(record: dict[str, Any], out: Path, console: Console) -> None:
    """Write the files to the folder of the run, and print the summary. ``record``: the content of run.json. Values
    "per rank" are those of rank 0; ``ranks`` has those of all ranks."""
    versions = {"zero-optimizer": __version__, "torch": torch.__version__, "python": platform.python_version()}
    (out / "run.json").write_text(json.dumps({**record, "versions": versions}, indent=2, default=str) + "\n")
    kinds = [kind for kind in KINDS if kind != "gathered_peak" or any(_bytes_of(record, kind))]
    if can_draw():
        ranks = record["world_size"]
        run = f"stage {record['stage']}, {ranks} rank{'s' if ranks > 1 else ''}, {record['parameters']:,} parameters"
        draw_loss(out / "loss.png", f"Loss: {run}", record["losses"], record["validation_bits_per_byte"])
        draw_memory(out / "memory.png", f"Memory of rank 0: {run}", {kind: _bytes_of(record, kind) for kind in kinds})
        written = "run.json, loss.png, memory.png"
    else:
        written = f"run.json. matplotlib is not installed: no loss.png, no memory.png. To have them: {INSTALL_HINT}"
    _show(record, kinds, console)
    console.line(f"written to {out}: {written}")


def _bytes_of(record: dict[str, Any], kind: str) -> tuple[int, int]:
    """Return the bytes of a kind on rank 0: measured, and by formula."""
    return record["bytes_per_rank"][kind], record["formula_bytes_per_rank"][kind]


def _show(record: dict[str, Any], kinds: Sequence[str], console: Console) -> None:
    rows = [(KINDS[kind], *_bytes_of(record, kind)) for kind in kinds]
    sent = record["traffic_bytes_per_step"], record["formula_traffic_bytes_per_step"]
    rows.append(("sent per step by all ranks", *sent))
    cells = [(name, f"{measured:,}", f"{formula:,}") for name, measured, formula in rows]
    about = f"stage {record['stage']}, rank 0 of {record['world_size']}, {record['collective']}"
    console.table(f"measured beside formula: {about}", ["bytes", "measured", "formula"], cells)
    console.line(f"control messages: {record['control_bytes_per_step']:,} bytes per step by all ranks")
    median = record["step_ms_median"]
    console.line("no step was left to take" if median is None else f"median step: {median:.1f} ms")
    begin, end = (record["losses"][place] / math.log(2) for place in (0, -1))
    console.line(f"training loss: {begin:.3f} -> {end:.3f} bits per byte")
    console.line(f"validation: {record['validation_bits_per_byte']:.3f} bits per byte")
    console.line(f"parameters: {record['parameters']:,}, SHA-256 {record['params_sha256']}")
