"""`python -m benchmarks.calls`: the calls of a system's own Python functions in one training step, by event.

A comprehension is a call in Python 3.11, and so is each time that a generator goes on. Both are in the sums, and listed
apart. CPU ms: processor time of the thread that trains, in steps of the same run that are not counted.

Knows: the command's flags, the tables. Does not know: how calls are counted.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import tables
from .call_counter import ORDER
from .calls_rank import Called, CallsJob
from .models import trainable
from .processes import RankError, calling_ranks
from .report import Report
from .steps import checked
from .systems import DDP, FSDP2

MODEL = "gpt-24x256"
WARM, STEPS = 3, 9
COUNTED = ("zero 0", "zero 1", "zero 2", "zero 3", FSDP2, DDP)  # the others clip in ways of their own


def by_event(found: Sequence[Called], model: str) -> tables.Table:
    """Make a table with a row for each system."""
    rows = []
    for called in found:
        events: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        for event, kind, _, count in called.calls:
            events[event] += count
            kinds[kind] += count
        total = sum(events.values())
        rows.append(
            [
                called.system,
                f"{total:,}",
                f"{total / called.parameters:.1f}",
                *(f"{events[event]:,}" for event in ORDER),
                f"{kinds['comprehension']:,}",
                f"{kinds['generator']:,}",
                str(called.buckets or "–"),
                tables.milliseconds(called.cpu),
            ]
        )
    columns = ["system", "calls", "÷ parameters", *ORDER, "comprehensions", "generators", "buckets", "CPU ms"]
    heading = f"{model}, {found[0].parameters} parameters: Python calls in a step, by the event that causes them"
    return tables.Table(heading, columns, rows)


def by_function(called: Called, most: int) -> tables.Table:
    """Make a table of the functions that are called most under one system."""
    rows = [[name, event, kind, f"{count:,}"] for event, kind, name, count in called.calls[:most]]
    return tables.Table(f"{called.system}: functions called most", ["function", "event", "kind", "calls"], rows)


def _shown(found: Sequence[Called], model: str, functions: int) -> Iterator[tables.Table]:
    yield by_event(found, model)
    if functions:
        yield from (by_function(called, functions) for called in found)


def main(
    model: Annotated[str, typer.Option(help="One of benchmarks.models.")] = MODEL,
    system: Annotated[list[str] | None, typer.Option(help="One of the systems; may be repeated.")] = None,
    ranks: Annotated[int, typer.Option(help="How many processes.")] = 2,
    precision: Annotated[str, typer.Option(help="What all compute in: fp32 or bf16.")] = "fp32",
    clip: Annotated[bool, typer.Option(help="Whether every step clips by the norm.")] = True,
    functions: Annotated[int, typer.Option(help="List this many functions of each system.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for calls.json.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
) -> None:
    """Python calls in a step of functions that are defined in this library, or in FSDP2 and DDP, by event."""
    if platform.python_version_tuple()[:2] != ("3", "11"):
        print("error: calls are counted on CPython 3.11: later ones inline comprehensions", file=sys.stderr)
        raise typer.Exit(1)
    console = tables.console(stderr=markdown)
    systems = checked(system, COUNTED, "system here")
    checked([precision], ("fp32", "bf16"), "precision")
    try:
        trainable(model)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    job = CallsJob(systems, model, WARM, STEPS, clip, precision == "bf16")
    try:
        with console.status("training"):
            found = calling_ranks(job, ranks)
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    parts = [
        {"system": called.system, "event": event, "kind": kind, "function": name, "calls": count}
        for called in found
        for event, kind, name, count in called.calls
    ]
    report = Report.of_this_machine("benchmarks.calls", parts)
    report.write(out / "calls.json")
    tables.show(report.line(), _shown(found, model, functions), markdown, console)


if __name__ == "__main__":
    typer.run(main)
