"""The JSON file of a benchmark: the numbers that its tables and pictures need, with machine, date and versions.

Knows: the file. Does not know: what the numbers mean.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Report:
    """The results of a benchmark.

    ``parts``: plain values of the benchmark. ``command`` names no folder of the machine.
    """

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    parts: list[dict[str, Any]]

    @classmethod
    def of_this_machine(cls, command: str, parts: Sequence[dict[str, Any]], device: str = "") -> Report:
        """Make a report. ``device``: the measured accelerator, in words."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        line = f"python -m {command} {shlex.join(map(_without_folder, sys.argv[1:]))}".strip()
        return cls(line, now, machine() | ({"device": device} if device else {}), versions(), list(parts))

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read a file of `write`."""
        record = json.loads(path.read_text())
        tables = record.pop("tables")
        parts = [dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["rows"]]
        return cls(**record, parts=parts)

    def write(self, path: Path) -> None:
        """Write the JSON file. Consecutive parts with the same fields become a table of columns and rows."""
        head = {name: value for name, value in self.__dict__.items() if name != "parts"}
        lines = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        tables = [_table(columns, parts) for columns, parts in itertools.groupby(self.parts, key=list)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["{", *lines, f'"tables": [{", ".join(tables)}]', "}"]) + "\n")

    def line(self) -> str:
        """Return the machine, the date and the command, for the head of a table."""
        m = self.machine
        load = " ".join(f"{value:.1f}" for value in m["load_before"])
        device = f"{m['device']}, " if "device" in m else ""
        return (
            f"{self.date[:10]}, `{self.command}`: {device}{m['cores']} cores of {m['cpu']}, {m['memory_gb']:.0f} GB, "
            f"load {load}, torch {self.versions['torch']}, Python {self.versions['python']}, Linux {m['kernel']}"
        )


def _table(columns: list[str], parts: Iterable[dict[str, Any]]) -> str:
    rows = ",\n".join(json.dumps(list(part.values())) for part in parts)
    return f'{{"columns": {json.dumps(columns)}, "rows": [\n{rows}\n]}}'


def _without_folder(argument: str) -> str:
    """Return an argument of a command line, with DIR in place of a path that has a slash."""
    return re.sub(r"^(--[\w-]+=|[\w ]+@)?.*/.*$", r"\1DIR", argument)


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
