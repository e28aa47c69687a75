"""`python -m benchmarks.gpu`: one GPT on one GPU, under this library, the plain loop, DDP and FSDP2, at world size 1.

Knows: the command's flags, and the order of runs. Does not know: how anything is measured.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch

try:
    import matplotlib  # noqa: F401
    import typer
    from rich.console import Console
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from zero.commands.train.model import Shape

from . import gpu_tables, tables
from .gpu_device import GIB, checked_device, in_words
from .gpu_job import DTYPES, SHAPES, TINY, GpuJob, OnDevice, largest, needed_bytes, read_on_device
from .processes import RankError, train_on_device
from .report import Report
from .systems import ON_A_DEVICE


@dataclass(frozen=True)
class Size:
    """How much to run: rounds, warm steps, timed steps; sequences in a step and their tokens; bytes of a copy."""

    rounds: int
    warm: int
    steps: int
    batch: int
    sequence: int
    copied: int


WHOLE = Size(5, 5, 20, 4, 512, 1 << 30)
QUICK = Size(1, 1, 2, 2, 16, 1 << 20)


def measure(
    systems: list[str], dtypes: list[str], device: str, shape: Shape, size: Size, console: Console
) -> list[OnDevice]:
    """Run every system in rounds. Each round begins with another system; each run has a fresh process."""
    found = []
    with console.status("starting") as status:
        for dtype in dtypes:
            for number in range(size.rounds):
                for i in range(len(systems)):
                    system = systems[(number + i) % len(systems)]
                    status.update(f"{dtype}, round {number + 1} of {size.rounds}: {system}")
                    job = GpuJob(
                        system, dtype, device, shape, size.batch, size.sequence, size.warm, size.steps, size.copied
                    )
                    found.append(train_on_device(job))
    return found


def _shape(device: str, size: Size, quick: bool) -> Shape:
    """Return the largest model that the device holds."""
    if quick:
        return TINY
    if not device.startswith("cuda"):
        raise typer.BadParameter("without --quick the models are for a GPU: --device cpu is to see that it works")
    free, _ = torch.cuda.mem_get_info(device)
    found = largest(free, tokens := size.batch * size.sequence)
    if found is None:
        least = needed_bytes(SHAPES[-1], tokens) / 0.9
        raise typer.BadParameter(
            f"{device} has {free / GIB:.1f} GiB free, and the smallest model takes about {least / GIB:.1f}: free some, "
            "or --quick to see that it works"
        )
    return found


def _checked(names: list[str] | None, known: dict[str, object], what: str) -> list[str]:
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is no {what}: there are {', '.join(known)}")
    return names or list(known)


def main(
    system: Annotated[list[str] | None, typer.Option(help="One of the systems; may be repeated.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16 or fp32; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ...; cpu only with --quick.")] = "cuda",
    rounds: Annotated[int | None, typer.Option(min=1, help="Of all systems; 5, or 1 with --quick.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, one round: to see that it works.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for gpu.json and gpu.png.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """A training step on one GPU: time, host time, peak memory, and the optimizer's share of memory bandwidth."""
    console = tables.console(stderr=markdown)
    if show_only is not None:
        report = Report.read(show_only)
    else:
        device = str(where := checked_device(device))
        size = QUICK if quick else WHOLE
        size = replace(size, rounds=size.rounds if rounds is None else rounds)
        systems, dtypes = _checked(system, dict(ON_A_DEVICE), "system"), _checked(dtype, dict(DTYPES), "dtype")
        try:
            runs = measure(systems, dtypes, device, _shape(device, size, quick), size, console)
        except RankError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        report = Report.of_this_machine("benchmarks.gpu", [asdict(run) for run in runs], in_words(where))
        report.write(out / "gpu.json")
    results = gpu_tables.DeviceResults([read_on_device(part) for part in report.parts])
    out.mkdir(parents=True, exist_ok=True)
    gpu_tables.draw(out / "gpu.png", results, report.line().replace("`", ""))
    found = [*gpu_tables.by_dtype(results), gpu_tables.targets(results)]
    tables.show(report.line(), found, markdown, console)
    console.print(f"written to {out}", markup=False)


if __name__ == "__main__":
    typer.run(main)
