"""Runs of `zero train` in real processes, as a user starts them, and the contents of run.json.

Knows: the command line. Does not know: how the command works.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from .compare import ERROR

LIMIT = 600.0  # seconds for a run, which takes about ten on an idle core
COMMON = ("--preset=tiny", "--steps=2", "--micro-batches=6", "--sequence=32", "--data=tests/README.md", "--out=out")
RUNS = (  # starting processes takes most of the time: one rank unless several matter, and then fp32, where sums differ
    "zero train --ranks=1 --stage=0 --precision=bf16 --clip=0.5",
    "zero train --ranks=1 --stage=1 --fused",
    "zero train --ranks=1 --stage=2 --precision=fp16",
    "zero train --ranks=1 --stage=2 --optimizer=sgd --clip=0.5",
    "zero train --ranks=1 --stage=3 --precision=bf16",
    "zero train --ranks=1 --stage=3 --offload=disk",
    "zero train --ranks=1 --stage=3 --clip=0.5 --bucket-cap-mb=0.01",
    "zero train --ranks=2 --stage=0 --collective=pairwise",
    "zero train --ranks=2 --stage=1 --sharding-factor=1",
    "zero train --ranks=2 --stage=3 --clip=0.5 --bucket-cap-mb=0.01",
    "zero train --ranks=3 --stage=2 --bucket-cap-mb=0.1",
    "torchrun --nproc-per-node=2 -m zero.train --stage=3 --bucket-cap-mb=0.01",
)
OF_THE_MOMENT = ("step_ms_median", "versions", "pss")
DISK, OUT = Path("disk"), Path("out")


def record(run: str) -> dict[str, Any]:
    """Run a command in the working directory.

    Return the contents of run.json without values that differ between all runs.
    """
    DISK.mkdir(exist_ok=True)
    (OUT / "run.json").unlink(missing_ok=True)
    try:
        _end_of([*_arguments(run), *COMMON])
        found: dict[str, Any] = _lasting(json.loads((OUT / "run.json").read_text()))
        return found
    except Exception as error:
        return {ERROR: f"{type(error).__name__}: {error}"}


def _arguments(run: str) -> list[str]:
    name, *arguments = run.split()
    if name == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    found = re.search(rf'^{name} = "([\w.]+):(\w+)"$', Path("pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"pyproject.toml names no script {name!r}")
    module, function = found.groups()
    return [sys.executable, "-c", f"import sys; from {module} import {function}; sys.exit({function}())", *arguments]


def _end_of(command: list[str]) -> None:
    """Wait for a command. After the time limit, send SIGTERM, so that the command ends its ranks, and then kill it."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        text, _ = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"it ended with code {process.returncode}: {' / '.join(text.strip().splitlines()[-5:])}")


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(inside) for key, inside in value.items() if key not in OF_THE_MOMENT}
    return [_lasting(inside) for inside in value] if isinstance(value, list) else value
