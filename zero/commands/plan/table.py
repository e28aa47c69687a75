"""`zero plan --rows FILE --out FILE`: a plan of each row of a table of runs.

Knows: the columns that are written. Does not know: what a row means (`zero.planning.rows`).
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

from ...planning.hardware import Hardware
from ...planning.rows import RowPlan, plan_rows

__all__ = ["COLUMNS", "plan_table"]

COLUMNS = ("id", "tokens_s_gpu", "step_s", "mem_gib", "fits", "margin_gib", "band_low", "band_high", "error")
DIGITS = 6


def plan_table(rows: Path, out: Path, hardware: Hardware) -> int:
    """Write the plan of each row. Return how many there are.

    Args:
        rows: CSV with the columns of ``benchmarks/data/points.csv``; what was measured may be missing.
        out: the CSV file to write, which is replaced; its columns are `COLUMNS`.
        hardware: presets, or a measured file.

    Raises:
        ValueError: a file that cannot be read or written; or, after all rows are written, one that cannot be planned.
    """
    read = _read(rows)
    if out.exists() and out.samefile(rows):
        raise ValueError(f"--out {out}: is the file of --rows: name another one")
    plans = plan_rows(read, hardware)
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
