"""What a benchmark leaves behind: a JSON of every number, with the machine, the date and the versions.

Knows: the file. Does not know: what the numbers mean.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Report:
    """``parts``: plain values, whatever the benchmark's own."""

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    parts: list[dict[str, Any]]

    @classmethod
    def of_this_machine(cls, command: str, parts: Sequence[dict[str, Any]], device: str = "") -> Report:
        """``device``: an accelerator that was measured, in words."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        line = f"python -m {command} {shlex.join(sys.argv[1:])}".strip()
        return cls(line, now, machine() | ({"device": device} if device else {}), versions(), list(parts))

    @classmethod
    def read(cls, path: Path) -> Report:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.__dict__, indent=1) + "\n")

    def line(self) -> str:
        """Where and when, for the head of a table."""
        m = self.machine
        load = " ".join(f"{value:.1f}" for value in m["load_before"])
        device = f"{m['device']}, " if "device" in m else ""
        return (
            f"{self.date[:10]}, `{self.command}`: {device}{m['cores']} cores of {m['cpu']}, {m['memory_gb']:.0f} GB, "
            f"load {load}, torch {self.versions['torch']}, Python {self.versions['python']}, Linux {m['kernel']}"
        )


_LOAD = os.getloadavg()  # before the benchmark adds its own


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9,
        "kernel": platform.release(),
        "load_before": list(_LOAD),
    }


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version()}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
