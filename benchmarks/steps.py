"""`python -m benchmarks.steps`: one GPT trained by every system, side by side: memory against time.

With `--in-turn` systems take their steps in turn instead, a step of each: the noise of a machine lasts longer than a
step, so it strikes all alike, and small differences show. A system may be that of another working tree of this
repository (`"zero 2@../other"`). Memory is not measured then.

Knows: the command's flags, and the order of runs. Does not know: how anything is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

try:
    import matplotlib  # noqa: F401
    import typer
    from rich.console import Console
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from . import step_tables, tables
from .dials import DIALS
from .models import MODELS, trainable
from .processes import RankError, Ranks, run_ranks, started
from .report import Report
from .step_rank import StepJob, Trained
from .step_tables import Run, Summary, Turn
from .systems import SYSTEMS

FULL, QUICK = (5, 3, 12), (2, 1, 3)  # rounds, steps that warm up, timed steps
IN_TURN, QUICK_IN_TURN = (9, 3, 20), (1, 1, 3)


def measure(
    models: list[str], systems: list[str], ranks: int, numbers: tuple[int, int, int], how: dict[str, Any], out: Console
) -> Iterator[Run]:
    """Run every system on every model in rounds. ``how``: "narrow", "muon" and "micro_batches" of a `StepJob`.

    Each round begins with another system; each run has fresh processes.
    """
    rounds, warm, steps = numbers
    with out.status("starting") as status:
        for model in models:
            for number in range(rounds):
                for i in range(len(systems)):
                    system = systems[(number + i) % len(systems)]
                    status.update(f"{model}, round {number + 1} of {rounds}: {system}")
                    job = StepJob(system, model, warm, steps, **how)
                    lines = run_ranks("step_rank", job.to_json(), ranks)
                    yield Run.of(system, model, number, [Trained(**json.loads(printed[-1])) for printed in lines])


def take_turns(
    model: str, systems: list[str], ranks: int, numbers: tuple[int, int, int], how: dict[str, Any], out: Console
) -> Iterator[Turn]:
    """Yield the turns of every round. All systems of a round live in processes of their own, and step in turn."""
    rounds, warm, steps = numbers
    with out.status("starting") as status:
        for number in range(rounds):
            status.update(f"{model}, round {number + 1} of {rounds}")
            with ExitStack() as stack:
                running: dict[str, Ranks] = {}
                for name in systems:
                    system, _, tree = name.partition("@")
                    job = StepJob(system, model, warm, steps, in_turn=True, **how).to_json()
                    where = Path(tree).resolve() if tree else None
                    name = f"{system}@{where.name}" if where else system  # results name no folder of the machine
                    running[name] = stack.enter_context(started("step_rank", job, [()] * ranks, tree=where))
                names = list(running)
                found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
                for step in range(warm + steps):
                    first = step % len(names)  # no system is always behind the same other one
                    for name in (*names[first:], *names[:first]):
                        found[name].append(_step(running[name]))
                for name, taken in found.items():
                    yield Turn(number, model, name, [seconds for seconds, _ in taken[warm:]], taken[-1][1])


def _step(ranks: Ranks) -> tuple[float, float]:
    """Let all ranks take a step. Return the seconds of the slowest one, and the loss of rank 0."""
    for process in ranks.processes:
        assert process.stdin is not None
        print("step", file=process.stdin, flush=True)
    lines = [process.stdout.readline() for process in ranks.processes if process.stdout is not None]
    if not all(lines):
        ranks.check()
        raise RankError("a rank ended before its last step")
    results = [json.loads(line) for line in lines]
    return max(seconds for seconds, _ in results), results[0][1]


def checked(names: Sequence[str] | None, known: Collection[str], what: str) -> list[str]:
    """Return the names, or all known ones by default. An unknown name is an error that lists the known ones."""
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is no {what}: there are {', '.join(known)}")
    return list(names or known)


def main(
    model: Annotated[list[str] | None, typer.Option(help="One of the models; may be repeated.")] = None,
    system: Annotated[list[str] | None, typer.Option(help="One of the systems; may be repeated.")] = None,
    in_turn: Annotated[
        list[str] | None, typer.Option(help="SYSTEM or SYSTEM@TREE, repeated: a step of each in turn, ÷ the first.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="How many processes.")] = 2,
    rounds: Annotated[int | None, typer.Option(help="How many times each is run.")] = None,
    precision: Annotated[str, typer.Option(help="What all compute in: fp32 or bf16.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help="adamw; muon: Muon for matrices of blocks, AdamW for the rest.")] = (
        "adamw"
    ),
    micro_batches: Annotated[int, typer.Option(help="How many backwards a step, each of them reduced.")] = 1,
    dials: Annotated[
        bool, typer.Option("--dials", help="Options that FSDP2 and this library both have, instead of systems.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and steps: to see that it works.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for steps.json and .png (steps-bf16, steps-muon).")] = Path(
        "zero-bench"
    ),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables as Markdown.")] = False,
    show_only: Annotated[Path | None, typer.Option("--show", help="Measure nothing: show this JSON.")] = None,
) -> None:
    """A training step under every system that is installed, beside DDP and beside the floor below all of them."""
    console, parts = tables.console(stderr=markdown), list[Any]()
    checked([precision], ("fp32", "bf16"), "precision")
    checked([optimizer], ("adamw", "muon"), "optimizer")
    how = {"narrow": precision == "bf16", "muon": optimizer == "muon", "micro_batches": micro_batches}
    stem = "-".join(["steps", *(name for name in (precision, optimizer) if name not in ("fp32", "adamw"))])
    stem += "-in-turn" if in_turn else "-dials" if dials else ""
    here = DIALS if dials else {name: found for name, found in SYSTEMS.items() if found.is_here and not found.alone}
    here = {n: f for n, f in here.items() if (f.in_bf16 or not how["narrow"]) and (f.with_muon or not how["muon"])}
    usual = (QUICK_IN_TURN if quick else IN_TURN) if in_turn else QUICK if quick else FULL
    numbers, failed = (rounds or usual[0], *usual[1:]), False
    if show_only is None:
        try:
            if in_turn:
                checked([name.partition("@")[0] for name in in_turn], here, "system here")
                chosen = (model or ["deep"])[-1]
                trainable(chosen)
                for turn in take_turns(chosen, in_turn, ranks, numbers, how, console):
                    parts.append(asdict(turn))
            else:
                models, systems = checked(model, MODELS, "model"), checked(system, here, "system here")
                for run in measure(models, systems, ranks, numbers, how, console):
                    parts.append(run)
        except RankError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True  # what ran before is still shown
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if not parts:
            raise typer.Exit(1)
        summed = parts if in_turn else [asdict(summary) for summary in step_tables.summaries(parts)]
        Report.of_this_machine("benchmarks.steps", summed).write(out / f"{stem}.json")
    report = Report.read(show_only or out / f"{stem}.json")
    if "turn" in report.parts[0]:
        found = [step_tables.in_turn([Turn(**part) for part in report.parts])]
    else:
        results = [Summary(**part) for part in report.parts]
        if dials:
            found = list(step_tables.by_option(results))
        else:
            step_tables.draw(out / f"{stem}.png", results, report.line().replace("`", ""))
            found = list(step_tables.by_system(results))
    tables.show(report.line(), found, markdown, console)
    console.print(f"written to {out}", markup=False)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
