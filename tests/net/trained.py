"""Runs of `zero train` in real processes, as a user starts them, and the contents of run.json.

Knows: the command line. Does not know: how the command works.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from .compare import ERROR

LIMIT = 600.0  # seconds for a run, which takes about ten on an idle core
COMMON = ("--width=64", "--layers=2", "--steps=2", "--micro-batches=6", "--data=tests/README.md", "--out=out")
RUNS = (  # starting processes takes most of the time: one rank unless several matter, and then fp32, where sums differ
    "zero train --ranks=1 --stage=0 --precision=bf16 --clip=0.5",
    "zero train --ranks=1 --stage=1",
    "zero train --ranks=1 --stage=2 --precision=fp16",
    "zero train --ranks=1 --stage=2 --clip=inf",
    "zero train --ranks=1 --stage=3 --precision=bf16",
    "zero train --ranks=1 --stage=3 --offload=disk",
    "zero train --ranks=1 --stage=3 --clip=0.5 --bucket-cap-mb=0.01",
    "zero train --ranks=2 --stage=0 --collective=pairwise",
    "zero train --ranks=2 --stage=1 --sharding-factor=1",
    "zero train --ranks=2 --stage=3 --clip=0.5 --bucket-cap-mb=0.01",
    "zero train --ranks=3 --stage=2 --bucket-cap-mb=0.1",
    "torchrun --nproc-per-node=2 -m zero.train --stage=3 --bucket-cap-mb=0.01",
)
OF_THE_MOMENT = ("versions", "pss")
TORCHRUN = "-m torch.distributed.run --standalone"
DISK, OUT = Path("disk"), Path("out")


def record(run: str) -> dict[str, Any]:
    """Run a command in the working directory.

    Return the contents of run.json without values that differ between all runs.
    """
    DISK.mkdir(exist_ok=True)
    (OUT / "run.json").unlink(missing_ok=True)
    try:
        command = run.replace("zero train", "-m zero.commands.cli train").replace("torchrun", TORCHRUN).split()
        done = subprocess.run([sys.executable, *command, *COMMON], capture_output=True, text=True, timeout=LIMIT)
        if done.returncode != 0:
            lines = " / ".join((done.stdout + done.stderr).strip().splitlines()[-5:])
            raise RuntimeError(f"it ended with code {done.returncode}: {lines}")
        found: dict[str, Any] = _lasting(json.loads((OUT / "run.json").read_text()))
        return found
    except Exception as error:
        return {ERROR: f"{type(error).__name__}: {error}"}


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(inside) for key, inside in value.items() if key not in OF_THE_MOMENT}
    return [_lasting(inside) for inside in value] if isinstance(value, list) else value
