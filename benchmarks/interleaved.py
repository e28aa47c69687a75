"""`python -m benchmarks.interleaved`: a step of one system beside a step of another, in turn, in the same processes.

A machine's noise lasts longer than a step, so it strikes both alike, and small differences show. Memory is not
measured: the systems share the processes.

Knows: the command's flags, the table. Does not know: how a step is run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import tables
from .interleaved_rank import InterleavedJob
from .job import quartiles
from .models import trainable
from .processes import RankError, interleaved_ranks
from .report import Report
from .steps import checked
from .systems import DDP, SYSTEMS

WARM, STEPS, ROUNDS = 3, 20, 9
Round = dict[str, list[float]]  # the slowest rank's seconds of each step, by system


def compared(rounds: Sequence[Round], model: str, ranks: int) -> tables.Table:
    """Make a table with a row for each system. A ratio is of two steps that followed each other: its median over the
    steps of a round, and then the median and the quartiles over the rounds."""
    rows = []
    first = next(iter(rounds[0]))
    for system in rounds[0]:
        pairs = [zip(found[system], found[first], strict=True) for found in rounds]
        ratios = [median(mine / theirs for mine, theirs in pair) for pair in pairs]
        low, high = quartiles(ratios)
        seconds = median(median(found[system]) for found in rounds)
        rows.append([system, tables.milliseconds(seconds), f"{median(ratios):.3f}", f"{low:.3f}–{high:.3f}"])
    heading = f"{model}, {ranks} ranks, rounds: {len(rounds)} of {len(rounds[0][first])} steps, interleaved"
    return tables.Table(heading, ["system", "ms", f"÷ {first}", "quartiles"], rows)


def main(
    model: Annotated[str, typer.Option(help="One of benchmarks.models.")] = "deep",
    system: Annotated[list[str] | None, typer.Option(help="A system; the first one is what others are ÷.")] = None,
    ranks: Annotated[int, typer.Option(help="How many processes.")] = 2,
    rounds: Annotated[int, typer.Option(help="How many times fresh processes are started.")] = ROUNDS,
    precision: Annotated[str, typer.Option(help="What all compute in: fp32 or bf16.")] = "fp32",
    out: Annotated[Path, typer.Option(help="Folder for interleaved.json.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
) -> None:
    """A training step under several systems, in turn, in the same processes: their ratios."""
    console = tables.console(stderr=markdown)
    here = [name for name, found in SYSTEMS.items() if found.is_here and not found.alone]
    systems = checked(system or ["zero 2", "zero 3", DDP], here, "system here")
    checked([precision], ("fp32", "bf16"), "precision")
    try:
        trainable(model)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    job = InterleavedJob(systems, model, WARM, STEPS, precision == "bf16")
    found: list[Round] = []
    try:
        with console.status("training") as status:
            for number in range(rounds):
                status.update(f"round {number + 1} of {rounds}")
                of_ranks = interleaved_ranks(job, ranks)
                steps = {name: zip(*(rank[name] for rank in of_ranks), strict=True) for name in systems}
                found.append({name: [max(step) for step in steps[name]] for name in systems})
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    parts = [{"round": number, "system": name, "seconds": of[name]} for number, of in enumerate(found) for name in of]
    report = Report.of_this_machine("benchmarks.interleaved", parts)
    report.write(out / "interleaved.json")
    tables.show(report.line(), [compared(found, model, ranks)], markdown, console)


if __name__ == "__main__":
    typer.run(main)
