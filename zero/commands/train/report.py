"""The report of `zero train`: the summary in the terminal and the files run.json, loss.png and memory.png.

Knows: the content of run.json, and how to write, draw and print it. Does not know: how the numbers were measured.
"""

from __future__ import annotations

import json
import platform
import shlex
from dataclasses import replace
from typing import Any

import torch

from ... import __version__
from ...core.stage import Placement
from ...planning.stages import PLAIN
from ..console import INSTALL_HINT, Console
from ..flags import option_of, to_flags
from ..plots import can_draw, draw_loss, draw_memory
from ..runner import choose_device, counted
from .settings import DEFAULT_RANKS, TrainConfig

KINDS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}
PEAKS = {"gathered_peak": "gathered parameters", "scratch_peak": "buffers for messages"}


def write_report(record: dict[str, Any], config: TrainConfig, console: Console) -> None:
    """Write the files to the folder of the run, and print the summary. ``record``: the content of run.json. Values
    "per rank" are those of rank 0; ``ranks`` has those of all ranks."""
    out = config.out
    versions = {"zero-optimizer": __version__, "torch": torch.__version__, "python": platform.python_version()}
    (out / "run.json").write_text(json.dumps({**record, "versions": versions}, indent=2, default=str) + "\n")
    if can_draw():
        run = f"{config.preset}, {record['parameters']:,} parameters, {config.optimizer}"
        draw_loss(out / "loss.png", f"Loss: {run}", record["losses"], record["validation_loss"])
        own, bars = f"stage {config.stage}", dict(record["formula_bytes_by_stage"])
        bars[own] = {kind: record["bytes_per_rank"][kind] for kind in KINDS}
        named = {name: {KINDS[kind]: size for kind, size in held.items()} for name, held in bars.items()}
        draw_memory(
            out / "memory.png", f"What each of {counted(record['world_size'], 'rank')} holds: {run}", named, own
        )
        written = "run.json, loss.png, memory.png"
    else:
        written = f"run.json. matplotlib is not installed: no loss.png, no memory.png. To have them: {INSTALL_HINT}"
    _show(record, console)
    console.line(f"written to {out}: {written}")
    same = "" if record["collective"] in ("native", "ring") else " (the same SHA-256)"  # they add in other orders
    ours = f"{next_command(config, record['world_size'])}{same}"
    console.line(f"try next: {ours}; for your own model: zero verify --help")


def _show(record: dict[str, Any], console: Console) -> None:
    sizes = record["bytes_per_rank"], record["formula_bytes_per_rank"], record["formula_bytes_by_stage"][PLAIN]
    rows = [(name, *(held[kind] for held in sizes)) for kind, name in KINDS.items()]
    rows.append(("together", *(sum(held[kind] for kind in KINDS) for held in sizes)))
    title = f"what rank 0 of {record['world_size']} holds at stage {record['stage']}, next to the plain loop"
    header = ["bytes", "measured", "formula", PLAIN]
    console.table(title, header, [(name, *(f"{size:,}" for size in row)) for name, *row in rows])
    for kind, name in PEAKS.items():
        if sizes[0][kind]:  # where ranks share memory, nothing is gathered
            console.line(f"{name}: {sizes[0][kind]:,} bytes at the peak (formula: at most {sizes[1][kind]:,})")
    sent, formula = record["traffic_bytes_per_step"], record["formula_traffic_bytes_per_step"]
    control = f"{record['control_bytes_per_step']:,} bytes of control messages"
    console.line(f"sent per step by all ranks: {sent:,} bytes (formula: {formula:,}) and {control}")
    median = record["step_ms_median"]
    console.line("no step was left to take" if median is None else f"median step: {median:.1f} ms")
    begin, end = record["losses"][0], record["losses"][-1]
    console.line(f"training loss: {begin:.3f} -> {end:.3f} {record['loss_unit']}")
    console.line(f"validation loss: {record['validation_loss']:.3f} {record['loss_unit']}")
    console.line(f"parameters: {record['parameters']:,}, SHA-256 {record['params_sha256']}")


def next_command(config: TrainConfig, ranks: int) -> str:
    """Return a command that has the same result at stage 3, or there on other ranks than these."""
    other = config.row.parameters is Placement.SHARD or ranks == 1
    count = ranks if not other else 4 if ranks == 2 else 2
    asked = None if count == ranks == DEFAULT_RANKS else count  # a launcher's number has no flag
    anew = replace(config, stage=3, ranks=asked, checkpoint=None, checkpoint_every=None, resume="none")
    if other:
        anew = replace(anew, sharding_factor=None, reshard_after_forward=True)
    device: Any = choose_device(None, count, torch.cuda.device_count())[0]
    usual, words = to_flags(TrainConfig(device=device)), ["zero", "train"]
    for name, value in to_flags(anew).items():
        if value != usual[name]:
            words += [option_of(name)] if value is True else [option_of(name), str(value)]
    return shlex.join(words)
