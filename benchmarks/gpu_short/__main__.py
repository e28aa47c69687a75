"""`python -m benchmarks.gpu_short --out DIR`: see the package.

It starts a worker, which runs one section after the other and writes the results of each to DIR. A section that takes
longer than its limit is cut off with its worker, and another worker runs the rest. After each section DIR/gpu-short.md
has the tables of what is there.

Knows: the command's flags, limits, the worker's process. Does not know: what a section measures.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from .. import tables as shown
from .clock import checked_device
from .job import ROOT, SECTIONS, WHOLE, ShortJob, cut_off, file_of, outcome_of
from .page import Found, tables, text_of

STARTING = 60.0  # seconds in which a worker imports torch and begins a section
TIMES_ON_THE_CPU = 20.0  # a limit there, times that of a GPU: the sections of the CPU harness are longer, and no cost


def run(job: ShortJob, worker: list[str], limits: dict[str, float]) -> None:
    """Run the sections of a job. ``worker``: its command, to which the job and this process are added; ``limits``: the
    seconds of each section."""
    left = job.sections
    for section in left:  # what an earlier run has left there is not this one's
        file_of(job.folder, section).unlink(missing_ok=True)
    while left:
        left = _run_some(replace(job, sections=left), worker, limits)


def _run_some(job: ShortJob, worker: list[str], limits: dict[str, float]) -> str:
    """Run sections in one worker, until it is done or one is cut off. Return those that were not begun."""
    with (Path(job.folder) / "gpu-short.log").open("a") as errors:
        process = subprocess.Popen(
            [*worker, job.to_json(), str(os.getpid())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    lines = _lines(process)
    left, current, begin, limit, problem = job.sections, "", time.monotonic(), STARTING, ""
    try:
        while line := lines.get(timeout=limit):
            event, _, section = line.strip().partition(" ")
            if event not in ("begin", "end") or section not in limits:
                continue  # a line of a library
            begin = time.monotonic()
            current, limit = (section, limits[section]) if event == "begin" else ("", STARTING)
            if event == "begin":
                left = left.replace(section, "", 1)
            else:
                _write_page(job)
        problem = f"its process ended with {process.wait()}"
    except Empty:
        problem = f"cut off after {limit:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if current:
        cut_off(job, current, problem, time.monotonic() - begin)
        _write_page(job)
    elif left:  # it never began the next one
        cut_off(job, left[0], problem, time.monotonic() - begin)
        left = left[1:]
    return left


def _lines(process: subprocess.Popen[str]) -> SimpleQueue[str]:
    """Return the queue of a process's lines; the last one is empty."""
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put("")

    Thread(target=read, daemon=True).start()
    return lines


def _write_page(job: ShortJob) -> None:
    (Path(job.folder) / "gpu-short.md").write_text(text_of(Found(Path(job.folder))))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--world takes numbers with commas between them, not {text!r}") from None
    if not all(number >= 1 for number in found):
        raise typer.BadParameter(f"--world takes numbers from 1 on, not {text!r}")
    return found


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results of each section, tables and a log.")],
    sections: Annotated[str, typer.Option(help="Which, as in bc; '': none, show what the folder has.")] = "".join(
        SECTIONS
    ),
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ... or cpu.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, few steps: to see that it works.")] = False,
    world: Annotated[str, typer.Option(help="c: of how many ranks this one is the last, with commas.")] = "8",
    pairs: Annotated[int, typer.Option(min=1, help="c: steps of each system, in turn.")] = 10,
) -> None:
    """All that a few minutes on one GPU can show, in sections that are written as they end."""
    unknown = [name for name in sections if name not in SECTIONS]
    if unknown or len(set(sections)) < len(sections):
        raise typer.BadParameter(f"--sections takes letters of {''.join(SECTIONS)!r}, not {sections!r}")
    folder = out.resolve()
    if sections:
        flags = f"--sections {sections} --device {device}{' --quick' if quick else ''} --world {world} --pairs {pairs}"
        job = ShortJob(
            str(folder),
            sections,
            checked_device(device),
            quick,
            _numbers(world),
            3 if quick else pairs,
            f"python -m benchmarks.gpu_short {flags} --out DIR",
        )
        folder.mkdir(parents=True, exist_ok=True)
        factor = TIMES_ON_THE_CPU if device == "cpu" else 1.0
        limits = {name: section.limit * factor for name, section in SECTIONS.items()}
        run(job, [sys.executable, "-m", "benchmarks.gpu_short.worker"], limits)
    found = Found(folder)
    if not found.reports:
        raise typer.BadParameter(f"{out} has no results")
    console = shown.console(stderr=False)
    for line in dict.fromkeys(report.line() for report in found.reports.values()):
        console.print(line, markup=False)
    console.print(*(table.rich() for table in tables(found)), sep="\n")
    if any(outcome_of(found.reports[name])["outcome"] != WHOLE for name in sections):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
