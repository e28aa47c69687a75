"""Rows of published runs: errors of tokens a second below those of null models, what fits, and rows that are wrong."""

from __future__ import annotations

import csv
import functools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.plan import fit as plan_fit
from benchmarks.plan import scores as score
from benchmarks.plan.__main__ import COLUMNS, main
from benchmarks.plan.rows import RowCounter, RowPlan, plan_row, plan_rows
from benchmarks.plan.setting import PRECISIONS
from zero.planning.seconds.compute import CONSTANTS, FIT, values

ROW = {"id": "a row", "framework": "torch FSDP1", "layers": "2", "hidden": "256", "heads": "4", "vocab": "1000"}
ROW |= {"seq": "128", "micro_batch": "2", "gpus": "16", "gpu": "a100-80", "precision": "bf16", "sharding": "zero3"}
MEASURED = ("tokens_s_gpu", "step_s", "tflops_gpu", "mfu_pct", "mem_gib", "mem_kind", "outcome")
WRONG_ROWS = (
    ({"layers": ""}, r"^layers is missing: "),
    ({"seq": "many"}, r"^seq: 'many' must be a number above 0$"),
    ({"hidden": "1e300"}, r"^hidden: '1e300' is not between 0\.001 and 10\^9: check the row$"),
    ({"layers": "20000"}, r"^layers: '20000' is more than 10,000: check the row$"),
    ({"seq": "1e8", "micro_batch": "4e6", "ffn": "4e6"}, r"^its sizes cannot be counted: check hidden, "),
    ({"nic_gbit_host": "1e-320"}, r"^nic_gbit_host: '1e-320' is not between "),
    ({"sharding": "single"}, r"^sharding: 'single' is one GPU, and the row has 16: "),
    ({"layers": "2.5"}, r"^layers: '2\.5' is no whole number"),
    ({"gpu": "h10"}, r"^gpu: 'h10' is unknown: did you mean 'h100'\?"),
    ({"ac": "some"}, r"^ac: 'some' is unknown: "),
    ({"gpus": "12"}, r"^gpus: 12 do not fill hosts of 8: "),
    ({"shard_factor": "3"}, r"^shard_factor: 3 does not divide 16 GPUs: choose a divisor$"),
    ({"reshard": "perhaps"}, r"^reshard: 'perhaps' must be true or false$"),
    ({"heads": "3"}, r"3 heads do not divide hidden 256"),
    ({"gpu": "rtx4090"}, r"no network is usual"),
)
WRONG_TABLES = (
    (None, "out.csv", "cannot be read (No such file or directory)"),
    (b"name\nx\n", "out.csv", "has no column 'id'"),
    (b"\xff\xfe\x00", "out.csv", "is no CSV file"),
    (b"id\nx\n", "folder", "with --rows it must be the CSV file to write"),
    (b"id\nx\n", "no/folder/out.csv", "cannot write there (No such file or directory)"),
    (b"id\nx\n", "rows.csv", "is the file of --rows: name another one"),
)


@functools.cache
def planned() -> tuple[list[dict[str, str]], list[RowPlan]]:
    rows = score.points("fit")
    return rows, plan_rows(rows)


def timed() -> tuple[list[dict[str, str]], list[RowPlan]]:
    pairs = [(row, plan) for row, plan in zip(*planned(), strict=True) if score.is_timed(row)]
    return [row for row, _ in pairs], [plan for _, plan in pairs]


def are_near(rows: list[dict[str, str]], speeds: Sequence[float | None], **bounds: float) -> None:
    """Compare the errors of tokens a second with a bound of their mean, their median and their 90th percentile."""
    found = dict(zip(("mean", "median", "high"), score.summary(score.errors(rows, speeds)), strict=True))
    assert {name: found[name] for name in bounds if found[name] > bounds[name]} == {}


def one(**changed: str) -> RowPlan:
    return plan_row({**ROW, **changed}, RowCounter(), values())


def test_speeds_are_near_the_measured_ones_and_nearer_than_those_of_every_null_model() -> None:
    rows, plans = timed()
    speeds = [plan.tokens_s_gpu for plan in plans]
    are_near(rows, speeds, mean=0.05, median=0.025, high=0.15)
    for null in score.NULLS.values():
        alone = null(rows)  # None where it is told the speed
        asked = [(row, speed) for row, speed, other in zip(rows, speeds, alone, strict=True) if other is not None]
        found = score.summary(score.errors([row for row, _ in asked], [speed for _, speed in asked]))
        assert found[0] < score.summary(score.errors(rows, alone))[0]
    right, total = score.ordered(rows, speeds)
    assert right >= 0.9 * total > 0
    assert 0.7 <= score.inside_band(rows, plans) <= 0.95


def test_what_fits_is_right_and_every_row_has_numbers() -> None:
    """98 % of the runs that say, and more than by model states alone."""
    rows, plans = planned()
    for row, plan in zip(rows, plans, strict=True):
        assert not plan.error, (row["id"], plan.error)
        assert (plan.band_low or 0) < (plan.tokens_s_gpu or 0) < (plan.band_high or 0), row["id"]
        assert plan.step_s
        assert plan.mem_gib
        assert plan.fits is (plan.margin_gib is not None and plan.margin_gib >= 0)
    found = score.confusion(rows, [plan.fits for plan in plans])
    states = score.confusion(rows, [score.states_fit(row) for row in rows])
    right = found["right fits"] + found["right no"]
    assert right >= 0.98 * sum(found.values())
    assert right > states["right fits"] + states["right no"]


def test_what_is_measured_and_the_order_of_rows_and_columns_change_nothing() -> None:
    rows, plans = planned()
    few = random.Random(0).sample(range(len(rows)), 12)
    changed = [{key: "" if key in MEASURED else rows[at][key] for key in reversed(rows[at])} for at in few]
    assert plan_rows(changed) == [plans[at] for at in few]


def test_series_that_are_left_out_of_the_fit_are_near_and_a_fit_from_others_comes_back() -> None:
    """The constants whose source is "fit" are those of a fit: from others it comes as near to the runs, not nearer."""
    rows, _ = timed()
    counter = RowCounter()
    counted, measured = [counter.count(row) for row in rows], np.array([float(row["step_s"]) for row in rows])
    left_out = plan_fit.leave_one_out(counted, measured, [row["series"] for row in rows], values())
    speeds = [row.setting.tokens / seconds for row, seconds in zip(counted, left_out, strict=True)]
    are_near(rows, speeds, mean=0.07, median=0.04, high=0.15)
    ours = plan_fit.loss(measured, plan_fit.seconds_of(counted, values()))
    disturbed = values(**{name: 0.9 * values()[name] for name in ("matmul.ampere", "matmul.hopper", "overlap")})
    assert plan_fit.loss(measured, plan_fit.seconds_of(counted, disturbed)) > 1.5 * ours
    found, least = plan_fit.fit(counted, measured, disturbed)
    assert 0.97 * ours <= least <= 1.1 * ours
    for name in ("matmul.ampere", "matmul.hopper"):
        assert found[name] == pytest.approx(values()[name], rel=0.03)
    assert {name for name, constant in CONSTANTS.items() if constant.source == FIT} == set(plan_fit.FITTED)


def test_what_the_paper_on_fsdp_claims_is_planned() -> None:
    """Nothing is fitted to it. Two claims are missed by a hair, and zero/planning/README.md says so."""
    found = score.seeds()
    assert len(found) == 7
    missed = [claim for claim, _, agrees in found if not agrees]
    assert missed == ["175B: 186 TFLOP/s a GPU", "11.3B: 512 GPUs at 0.93 of 8, each"]


def test_each_word_of_a_row_is_planned() -> None:
    assert one(framework="some fsdp2") == one(framework="some FSDP2") != one(framework="torch FSDP1")
    assert (one(), one(gated="1")) == (one(tied="1"), one(gated="1", tied="0"))
    assert [one(precision=name, gpu="h100").error for name in PRECISIONS] == [""] * len(PRECISIONS)
    for sharding in ("single", "ddp", "zero1", "zero2", "zero3", "hsdp"):
        gpus = "1" if sharding == "single" else "8"
        few, many = (one(sharding=sharding, micro_batch=micro, gpus=gpus).mem_gib or 0.0 for micro in ("2", "64"))
        assert 0 < few < many, sharding
    plans = [one(ac=ac, micro_batch="64") for ac in ("full", "selective op", "none")]
    memory, seconds = [plan.mem_gib or 0.0 for plan in plans], [plan.step_s or 0.0 for plan in plans]
    assert (memory, seconds) == (sorted(memory), sorted(seconds, reverse=True))
    assert (memory[0] < memory[-1], seconds[0] > seconds[-1]) == (True, True)


def test_a_row_that_cannot_be_planned_says_why() -> None:
    for changed, message in WRONG_ROWS:
        plan = one(**changed)
        assert plan == RowPlan("a row", error=plan.error)
        with pytest.raises(ValueError, match=message):
            raise ValueError(plan.error)


def test_a_table_is_planned_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROW)
        writer.writeheader()
        writer.writerows([ROW, {**ROW, "gpu": "h10"}])
    assert main(["--rows", str(table), "--out", str(out)]) == 2
    with out.open(newline="") as file:
        right, wrong = csv.DictReader(file)
    assert tuple(right) == COLUMNS
    assert float(right["band_low"]) <= float(right["tokens_s_gpu"]) <= float(right["band_high"])
    assert (right["id"], right["fits"], right["error"]) == ("a row", "yes", "")
    assert wrong["error"] == "gpu: 'h10' is unknown: did you mean 'h100'?"
    assert not any(value for name, value in wrong.items() if name not in ("id", "error"))
    assert capsys.readouterr().err.startswith("error: 1 of 2 rows cannot be planned, and ")


def test_a_table_that_cannot_be_read_or_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, out, message in WRONG_TABLES:
        table = tmp_path / "rows.csv"
        table.unlink(missing_ok=True)
        if content is not None:
            table.write_bytes(content)
        assert main(["--rows", str(table), "--out", str(tmp_path / out)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert content is None or table.read_bytes() == content
    with pytest.raises(SystemExit, match="2"):
        main(["--rows", "rows.csv"])
    assert "--rows and --out need each other" in capsys.readouterr().err
