"""`python -m benchmarks.plan`: `zero plan` scored on published runs, beside null models (`scores`).

    --fit                                fit the constants again, and print them
    --leave-one-out                      plan each series with constants that are fitted to all others
    --rows IN.csv --out OUT.csv          plan each row of a file instead, with the columns of ``points.csv``

Knows: the order of the work, the columns that are written. Does not know: what a row means, equations.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zero.planning.seconds.compute import CONSTANTS

from .fit import fit, leave_one_out
from .own import own_runs
from .rows import RowCounter, RowPlan, plan_rows
from .scores import (
    NULLS,
    confusion,
    errors,
    inside_band,
    is_timed,
    ordered,
    points,
    seeds,
    states_fit,
    summary,
)
from .setting import Columns

COLUMNS = ("id", "tokens_s_gpu", "step_s", "mem_gib", "fits", "margin_gib", "band_low", "band_high", "error")
DIGITS = 6
WRONG_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Score the plan, or plan the rows of a file. Return the exit code. ``arguments``: by default of this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fit", action="store_true", help="fit the constants again, and print them")
    parser.add_argument("--leave-one-out", action="store_true", help="fit without each series, and plan it")
    parser.add_argument("--rows", type=Path, help="a CSV file of runs with the columns of points.csv")
    parser.add_argument("--out", type=Path, help="with --rows: the CSV file to write")
    args = parser.parse_args(arguments)
    if (args.rows is None) is not (args.out is None):
        parser.error("--rows and --out need each other")
    if args.rows is None:
        score(fits=args.fit, leaves_out=args.leave_one_out)
        return 0
    try:
        count = plan_table(args.rows, args.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
    print(f"wrote {count} rows to {args.out}")
    return 0


# -- the rows of a file -----------------------------------------------------------------------------------------------


def plan_table(rows: Path, out: Path) -> int:
    """Write the plan of each row. Return how many there are.

    Args:
        rows: CSV with the columns of ``points.csv``; what was measured may be missing.
        out: the CSV file to write, which is replaced; its columns are `COLUMNS`.

    Raises:
        ValueError: a file that cannot be read or written; or, after all rows are written, one that cannot be planned.
    """
    if out.suffix.lower() != ".csv":
        raise ValueError(f"--out {out}: with --rows it must be the CSV file to write, as in --out planned.csv")
    read = _read(rows)
    if out.exists() and out.samefile(rows):
        raise ValueError(f"--out {out}: is the file of --rows: name another one")
    plans = plan_rows(read)
    try:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows([_written(plan, column) for column in COLUMNS] for plan in plans)
    except OSError as error:
        raise ValueError(
            f"--out {out}: cannot write there ({error.strerror}): name a file that can be written"
        ) from None
    wrong = [plan for plan in plans if plan.error]
    if wrong:
        raise ValueError(
            f"{len(wrong)} of {len(plans)} rows cannot be planned, and {out} says why; the first is {wrong[0].id!r}: "
            f"{wrong[0].error}"
        )
    return len(plans)


def _read(rows: Path) -> list[dict[str, str]]:
    try:
        with rows.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns, read = reader.fieldnames or (), list(reader)
    except OSError as error:
        raise ValueError(f"--rows {rows}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"--rows {rows}: is no CSV file: {error}") from None
    if "id" not in columns:
        raise ValueError(f"--rows {rows}: has no column 'id': its first line must name the columns")
    return read


def _written(plan: RowPlan, column: str) -> str:
    value = getattr(plan, column)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.{DIGITS}g}" if isinstance(value, float) and math.isfinite(value) else str(value)


# -- the score --------------------------------------------------------------------------------------------------------


def score(*, fits: bool, leaves_out: bool) -> None:
    """Print errors of the plan and of null models. ``fits``, ``leaves_out``: and those of constants fitted anew."""
    rows = points("fit")
    plans = plan_rows(rows)
    timed = [(row, plan) for row, plan in zip(rows, plans, strict=True) if is_timed(row)]
    runs, found = [row for row, _ in timed], [plan for _, plan in timed]
    print_times("plan", runs, [plan.tokens_s_gpu for plan in found])
    for name, null in NULLS.items():
        alone = null(runs)
        print_times(name, runs, alone)
        if None in alone:
            same = [None if each is None else plan.tokens_s_gpu for each, plan in zip(alone, found, strict=True)]
            print_times("  plan", runs, same)
    right, total = ordered(runs, [plan.tokens_s_gpu for plan in found])
    print(f"pairs in the right order: {right} of {total}")
    print(f"inside the band: {inside_band(runs, found):.1%}")
    print("fits, plan:", confusion(rows, [plan.fits for plan in plans]))
    print("fits, M0:  ", confusion(rows, [states_fit(row) for row in rows]))
    print("\nthe FSDP paper, not fitted")
    for claim, planned, agrees in seeds():
        print(f"  {claim:50} {planned:16} {'agrees' if agrees else 'DISAGREES'}")
    print("\none H200, its own loops")
    for run in own_runs():
        seconds = f"measured {run.measured * 1e3:6.1f} ms   planned {run.planned * 1e3:6.1f} ms   {run.error:+6.1%}"
        print(f"  {run.name:36} {run.tokens:5,} tokens   {seconds}")
    if fits or leaves_out:
        counter = RowCounter()
        counted = [counter.count(row) for row in runs]
        measured = np.array([float(row["step_s"]) for row in runs])
        constants = CONSTANTS
        if fits:
            constants, _ = fit(counted, measured, constants)
        if leaves_out:
            series = [row["series"] for row in runs]
            left_out = leave_one_out(counted, measured, series, constants)
            print_times(
                "left out", runs, [row.setting.tokens / each for row, each in zip(counted, left_out, strict=True)]
            )


def print_times(name: str, rows: Sequence[Columns], speeds: Sequence[float | None]) -> None:
    found = errors(rows, speeds)
    mean, median, high = summary(found)
    print(f"{name:9} {len(found):4} runs   mean {mean:6.1%}   median {median:6.1%}   90th percentile {high:6.1%}")


if __name__ == "__main__":
    sys.exit(main())
