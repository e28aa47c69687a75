"""`python -m benchmarks.offload`: a step with states on disk and an empty page cache, beside the disk's own time.

    disk     read a file of as many bytes from its beginning to its end, a bucket at a time, after its pages were
             dropped from the page cache; then write it, and wait. The floor is the sum of both: the same bytes are
             read and written, and their arithmetic runs meanwhile
    offload  `optimizer.step()`, and wait until its writes are on the disk
    memory   the same step with states in memory: the time of the arithmetic

Each round has one of each; one rank, whose states are 8Ψ bytes.

Knows: clocks, the disk. Does not know: how a step keeps its states there.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

import torch

from zero import Offload, ZeroOptimizer

from . import tables
from .models import Layers
from .report import Report

MODEL = Layers(16, 1, 2048)
CAP_MB = 25.0
WARM, ROUNDS = 2, 7
TARGET = 1.3


class Disk:
    """A file without a name in ``folder``, of ``nbytes``, which is read and written ``chunk`` bytes at a time."""

    def __init__(self, folder: Path, nbytes: int, chunk: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it stays open
        self._buffer = memoryview(bytearray(chunk))
        self._places = [(begin, self._buffer[: min(chunk, nbytes - begin)]) for begin in range(0, nbytes, chunk)]
        os.posix_fallocate(self._file.fileno(), 0, nbytes)
        self.write()

    def read(self) -> float:
        """Read the file from the disk; return the seconds."""
        forget(self._file.fileno())
        begin = time.perf_counter()
        for place, part in self._places:
            os.preadv(self._file.fileno(), [part], place)
        return time.perf_counter() - begin

    def write(self) -> float:
        """Write the file to the disk; return the seconds."""
        begin = time.perf_counter()
        for place, part in self._places:
            os.pwrite(self._file.fileno(), part, place)
        os.fdatasync(self._file.fileno())
        return time.perf_counter() - begin


def forget(file: int) -> None:
    """Drop a file's pages from the page cache: written pages that no process has mapped."""
    os.fdatasync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


class Training:
    """A training of `MODEL`, with states on disk or in memory."""

    def __init__(self, offload: Offload | None) -> None:
        self._model = MODEL.build()
        self.optimizer = ZeroOptimizer(
            self._model, torch.optim.AdamW, lr=1e-3, fused=True, stage=2, bucket_cap_mb=CAP_MB, offload=offload
        )
        self._generator = torch.Generator().manual_seed(0)

    def step(self, file: int | None) -> tuple[float, float]:
        """Run a step. Return the seconds until it is done, and until its writes are on the disk, in ``file``."""
        inputs, targets = MODEL.batch(self._generator)
        MODEL.loss(self._model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if file is not None:
            forget(file)
        begin = time.perf_counter()
        self.optimizer.step()
        done = time.perf_counter() - begin
        if file is not None:
            os.fdatasync(file)
        written = time.perf_counter() - begin
        self.optimizer.zero_grad()
        return done, written


def measure(folder: Path) -> dict[str, list[float]]:
    """Return the seconds of each round, by what was timed."""
    plain, spooled = Training(None), Training(Offload(folder))
    nbytes = 8 * MODEL.numel
    disk = Disk(folder, nbytes, int(CAP_MB * (1 << 20)))
    offload_backend = spooled.optimizer._engine.parts.offload_backend
    file: int = offload_backend._file.fileno()  # type: ignore[union-attr]
    found: dict[str, list[float]] = {name: [] for name in ("read", "write", "memory", "offload", "written")}
    for number in range(WARM + ROUNDS):
        seconds = [disk.read(), disk.write(), plain.step(None)[0], *spooled.step(file)]
        if number >= WARM:
            for name, value in zip(found, seconds, strict=True):
                found[name].append(value)
    return found


def table(found: dict[str, list[float]]) -> tables.Table:
    """Make a table of the medians, and the ratio to the floor."""
    nbytes = 8 * MODEL.numel
    of = {name: median(values) for name, values in found.items()}
    floor = of["read"] + of["write"]
    rows = [
        ["disk: read", f"{1000 * of['read']:.0f}", f"{nbytes / of['read'] / 1e6:.0f} MB/s"],
        ["disk: written", f"{1000 * of['write']:.0f}", f"{nbytes / of['write'] / 1e6:.0f} MB/s"],
        ["step, states in memory", f"{1000 * of['memory']:.0f}", ""],
        [
            "step, states on disk, none cached",
            f"{1000 * of['offload']:.0f}",
            f"÷ read {of['offload'] / of['read']:.2f}",
        ],
        ["the same, until all is written", f"{1000 * of['written']:.0f}", f"÷ floor {of['written'] / floor:.2f}"],
    ]
    met = "met" if of["written"] <= TARGET * floor else "not met"
    title = (
        f"{nbytes / 1e6:.0f} MB of states, one rank, medians of {len(found['read'])} rounds; ÷ floor ≤ {TARGET}: {met}"
    )
    return tables.Table(title, ["", "ms", ""], rows)


def main(
    folder: Annotated[Path, typer.Option(help="Folder on the disk that is measured.")] = Path(),
    out: Annotated[Path, typer.Option(help="Folder for offload.json.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """A step with states on disk and an empty page cache, beside the disk's own time for as many bytes."""
    console = tables.console(stderr=markdown)
    torch.set_num_threads(1)
    if show_only is None:
        with console.status("measuring"):
            report = Report.of_this_machine("benchmarks.offload", [measure(folder)])
        report.write(out / "offload.json")
    else:
        report = Report.read(show_only)
    tables.show(report.line(), [table(report.parts[0])], markdown, console)


if __name__ == "__main__":
    typer.run(main)
