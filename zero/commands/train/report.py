"""The report of `zero train`: the summary in the terminal and the files run.json, loss.png and memory.png.

Knows: how to write, draw and print it. Does not know: how the numbers were measured.
"""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Sequence
from typing import Any

import torch

from ... import __version__
from ..console import INSTALL_HINT, can_draw, counted, print_line, print_table
from .pictures import draw_loss, draw_memory
from .settings import TrainConfig

PLAIN = "plain loop"
KINDS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}
PEAKS = {"gathered_peak": "gathered parameters", "scratch_peak": "buffers for messages"}
OTHER = {"--stage", "--ranks", "--sharding-factor", "--reshard-after-forward", "--checkpoint"}  # in the next command


def write_report(record: dict[str, Any], config: TrainConfig) -> None:
    """Write the files to the folder of the run, and print the summary. ``record``: the content of run.json."""
    out, ranks = config.out, record["world_size"]
    versions = {"zero-optimizer": __version__, "torch": torch.__version__, "python": platform.python_version()}
    (out / "run.json").write_text(json.dumps({**record, "versions": versions}, indent=2, default=str) + "\n")
    measured, formula = (record["ranks"][0][name] for name in ("measured", "formula"))
    if can_draw():
        run = f"{record['parameters']:,} parameters, AdamW"
        draw_loss(out / "loss.png", f"Loss: {run}", record["losses"], record["validation_loss"])
        own = f"stage {config.stage}"
        bars = record["formula_bytes_by_stage"] | {own: measured}
        named = {name: {KINDS[kind]: held[kind] for kind in KINDS} for name, held in bars.items()}
        draw_memory(out / "memory.png", f"What each of {counted(ranks, 'rank')} holds: {run}", named, own)
        written = "run.json, loss.png, memory.png"
    else:
        written = f"run.json. matplotlib is not installed: no loss.png, no memory.png. To have them: {INSTALL_HINT}"
    sizes = measured, formula, record["formula_bytes_by_stage"][PLAIN]
    rows = [(name, *(held[kind] for held in sizes)) for kind, name in KINDS.items()]
    rows.append(("together", *(sum(held[kind] for kind in KINDS) for held in sizes)))
    title = f"what rank 0 of {ranks} holds at stage {config.stage}, next to the plain loop"
    table = [(name, *(f"{size:,}" for size in row)) for name, *row in rows]
    print_table(title, ["bytes", "measured", "formula", PLAIN], table)
    for kind, name in PEAKS.items():
        if measured[kind]:  # where ranks share memory, nothing is gathered
            print_line(f"{name}: {measured[kind]:,} bytes at the peak (formula: at most {formula[kind]:,})")
    print_line(f"parameters: {record['parameters']:,}, SHA-256 {record['params_sha256']}")
    print_line(f"written to {out}: {written}")


def next_command(words: Sequence[str], ranks: int) -> str:
    """Return a command that has the same bits at stage 3 on another number of ranks than these. ``words``: flags of
    this one."""
    rest, kept = iter(words), []
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in OTHER:
            kept.append(word)
        elif not equals:
            next(rest, None)
    kept = [word for word in kept if word != "train"]
    return shlex.join(["zero", "train", *kept, "--stage", "3", "--ranks", "4" if ranks == 2 else "2"])
