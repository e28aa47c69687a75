"""`python -m benchmarks.gpu_first --out FOLDER`: all that is worth a first look on a GPU, in order of its value.

    tests      the plain loop's bits on the GPU
    bits       gpu_bits: what the promise needs of the GPU
    steps      gpu: a step of ours beside the plain loop, DDP and FSDP2
    host       gpu_host: the host's work as one of eight ranks, kernels, idle time
    headers    gpu_host --headers
    sanitizer  tests of streams under torch's CUDA sanitizer

Each is a process with a time limit and a log in FOLDER. After a failure the next one is run. FOLDER/report.md and
report.json are written after each, so that they are there even if the run is cut off.

Knows: the commands and their limits. Does not know: how a command is run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch

try:
    import typer
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import tables
from .commands import FOLDER, Command, Ran, left_out, run
from .gpu_device import checked_device, in_words_apart
from .report import Report
from .steps import checked

PYTEST = (
    "pytest",
    "tests/contract/test_cuda.py",
    "tests/gpu",
    "-o",
    "addopts=",
    "-q",
    "-p",
    "no:cacheprovider",
    "--timeout=300",
)  # with or without pytest-xdist
ON_GPU = "cuda:0"  # in the names of the tests that need one
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
LEAST = 20.0  # seconds: with less left, no further command is begun


def commands(device: str, quick: bool) -> list[Command]:
    """Return the commands, those that show most first."""
    how = ["--device", device, *(["--quick"] if quick else []), "--markdown", "--out", FOLDER]
    chosen = ["-m", "not full and not slow"] if quick else ["-k", ON_GPU]
    few, one = (["--tokens", "16"], ["--dtype", "bf16"]) if quick else ([], [])
    sanitized = ["-k", f"{ON_GPU} and (ahead or parts_of_a_step)"]
    return [
        Command("tests", [*PYTEST, *chosen], 420, DETERMINISTIC),
        Command("bits", ["benchmarks.gpu_bits", *how], 300),
        Command("steps", ["benchmarks.gpu", *one, *how], 540),
        Command("host", ["benchmarks.gpu_host", *few, *how], 540),
        Command("headers", ["benchmarks.gpu_host", "--headers", "2,4" if quick else "2,4,8", *how], 120),
        Command("sanitizer", [*PYTEST, *sanitized], 480, {**DETERMINISTIC, "TORCH_CUDA_SANITIZER": "1"}, True),
    ]


def results(ran: Sequence[Ran]) -> tables.Table:
    """Make a table with a row for each command."""
    rows = [[each.name, each.outcome, f"{each.seconds:.0f}", each.log or "–", _last_line(each)] for each in ran]
    return tables.Table("What became of each command", ["name", "exit code", "s", "log", "last line"], rows)


def _last_line(ran: Ran) -> str:
    return next((line.strip("= ")[:80] for line in reversed(ran.last.splitlines()) if line.strip("= ")), "–")


def page(report: Report, ran: Sequence[Ran]) -> str:
    """Return the page of a run: the machine, a table, and the end of each log."""
    parts = [f"# First run on a device\n\n{report.line()}\n", results(ran).markdown()]
    parts += [f"## {each.name}\n\n`{each.command}`\n\n```\n{each.last}\n```\n" for each in ran]
    return "\n".join(parts)


def main(
    out: Annotated[Path, typer.Option(help="Folder for logs, results and the report.")],
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ...; cpu only with --quick.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, few cases: to see that it works.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="One of the commands by name; may be repeated.")] = None,
    minutes: Annotated[float, typer.Option(help="For all commands together; what does not fit is not run.")] = 40.0,
) -> None:
    """Tests and benchmarks on a GPU, one after another, and one report of all of them.

    It ends with code 1 if a command did not end with 0.
    """
    where = checked_device(device)
    if where.type == "cpu" and not quick:
        raise typer.BadParameter("without --quick the commands are for a GPU: --device cpu is to see that it works")
    listed = commands(device, quick)
    names = checked(only, [command.name for command in listed], "command")
    folder = out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    console = tables.console(stderr=False)
    told = in_words_apart(where)
    until = time.monotonic() + 60 * minutes
    ran: list[Ran] = []
    for command in listed:
        if command.name not in names:
            continue
        left = until - time.monotonic()
        if command.needs_cuda and not torch.cuda.is_available():
            ran.append(left_out(command, "there is no CUDA"))
        elif left < LEAST:
            ran.append(left_out(command, "no time is left"))
        else:
            with console.status(command.name):
                ran.append(run(command, folder, min(command.limit, left)))
        report = Report.of_this_machine("benchmarks.gpu_first", [asdict(each) for each in ran], told)
        report.write(folder / "report.json")
        (folder / "report.md").write_text(page(report, ran))
        console.print(f"{command.name}: {ran[-1].outcome} ({ran[-1].seconds:.0f} s)", markup=False)
    tables.show(report.line(), [results(ran)], False, console)
    console.print(f"written to {out}", markup=False)
    if any(each.failed for each in ran):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
