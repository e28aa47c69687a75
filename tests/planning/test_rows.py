"""Rows of published runs: their errors beside null models, whether they fit, order, bands, and rows that are wrong."""

from __future__ import annotations

import csv
import functools
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.plan import fit as plan_fit
from benchmarks.plan import scores as score
from benchmarks.plan.__main__ import COLUMNS, main
from benchmarks.plan.rows import CountedRow, RowCounter, RowPlan, plan_row, plan_rows
from benchmarks.plan.setting import PRECISIONS
from zero.planning.seconds.compute import CONSTANTS, FIT, values

from .configs import ROW

Rows = list[dict[str, str]]


@functools.cache
def planned() -> tuple[Rows, list[RowPlan]]:
    rows = score.points("fit")
    return rows, plan_rows(rows)


def timed() -> tuple[Rows, list[RowPlan]]:
    pairs = [(row, plan) for row, plan in zip(*planned(), strict=True) if score.is_timed(row)]
    return [row for row, _ in pairs], [plan for _, plan in pairs]


def counted_runs() -> tuple[Rows, list[CountedRow], plan_fit.Values]:
    """Return the timed rows, counted, and their measured seconds."""
    rows, _ = timed()
    counter = RowCounter()
    return rows, [counter.count(row) for row in rows], np.array([float(row["step_s"]) for row in rows])


def one(**changed: str) -> RowPlan:
    return plan_row({**ROW, **changed}, RowCounter(), values())


def test_every_row_has_numbers() -> None:
    for row, plan in zip(*planned(), strict=True):
        assert not plan.error, (row["id"], plan.error)
        assert plan.step_s
        assert plan.tokens_s_gpu
        assert plan.mem_gib
        assert plan.band_low
        assert plan.band_high
        assert plan.band_low < plan.tokens_s_gpu < plan.band_high
        assert plan.fits is (plan.margin_gib is not None and plan.margin_gib >= 0)


def test_speeds_are_near_the_measured_ones_and_nearer_than_those_of_every_null_model() -> None:
    rows, plans = timed()
    speeds = [plan.tokens_s_gpu for plan in plans]
    mean, median, high = score.summary(score.errors(rows, speeds))
    assert mean <= 0.05
    assert median <= 0.025
    assert high <= 0.15
    for null in score.NULLS.values():
        alone = null(rows)  # None where it is told the speed
        asked = [(row, speed) for row, speed, other in zip(rows, speeds, alone, strict=True) if other is not None]
        found = score.summary(score.errors([row for row, _ in asked], [speed for _, speed in asked]))
        assert found[0] < score.summary(score.errors(rows, alone))[0]


@pytest.mark.full
def test_series_that_are_left_out_of_the_fit_are_near_the_measured_ones() -> None:
    rows, counted, measured = counted_runs()
    series = [row["series"] for row in rows]
    left_out = plan_fit.leave_one_out(counted, measured, series, values())
    speeds = [row.setting.tokens / seconds for row, seconds in zip(counted, left_out, strict=True)]
    mean, median, high = score.summary(score.errors(rows, speeds))
    assert mean <= 0.07
    assert median <= 0.04
    assert high <= 0.15


@pytest.mark.full
def test_a_fit_from_disturbed_constants_comes_back() -> None:
    """The constants whose source is "fit" are those of a fit: from others it comes as near to the runs, not nearer."""
    _, counted, measured = counted_runs()
    ours = plan_fit.loss(measured, plan_fit.seconds_of(counted, values()))
    disturbed = values(**{name: 0.9 * values()[name] for name in ("matmul.ampere", "matmul.hopper", "overlap")})
    assert plan_fit.loss(measured, plan_fit.seconds_of(counted, disturbed)) > 1.5 * ours
    found, least = plan_fit.fit(counted, measured, disturbed)
    assert 0.97 * ours <= least <= 1.1 * ours
    for name in ("matmul.ampere", "matmul.hopper"):
        assert found[name] == pytest.approx(values()[name], rel=0.03)


def test_at_most_twenty_constants_are_fitted_and_each_is_inside_its_range() -> None:
    fitted = {name for name, constant in CONSTANTS.items() if constant.source == FIT}
    assert fitted == set(plan_fit.FITTED)
    assert len(fitted) <= 20
    for name in fitted:
        assert CONSTANTS[name].low <= CONSTANTS[name].value <= CONSTANTS[name].high, name


def test_what_fits_is_right() -> None:
    """98 % of the runs that say, and more than by model states alone."""
    rows, plans = planned()
    found = score.confusion(rows, [plan.fits for plan in plans])
    states = score.confusion(rows, [score.states_fit(row) for row in rows])
    right = found["right fits"] + found["right no"]
    assert right >= 0.98 * sum(found.values())
    assert right > states["right fits"] + states["right no"]


def test_nine_of_ten_pairs_are_in_order() -> None:
    rows, plans = timed()
    right, total = score.ordered(rows, [plan.tokens_s_gpu for plan in plans])
    assert right >= 0.9 * total > 0


def test_the_band_holds_most_runs_but_not_all() -> None:
    assert 0.7 <= score.inside_band(*timed()) <= 0.95


def test_what_is_measured_and_the_order_of_rows_and_columns_change_nothing() -> None:
    measured = ("tokens_s_gpu", "step_s", "tflops_gpu", "mfu_pct", "mem_gib", "mem_kind", "outcome")
    rows, plans = planned()
    few = random.Random(0).sample(range(len(rows)), 12)
    changed = [{key: "" if key in measured else rows[at][key] for key in reversed(rows[at])} for at in few]
    assert plan_rows(changed) == [plans[at] for at in few]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": ""}, r"^layers is missing: "),
        ({"seq": "many"}, r"^seq: 'many' must be a number above 0$"),
        ({"hidden": "1e300"}, r"^hidden: '1e300' is not between 0\.001 and 10\^9: check the row$"),
        ({"layers": "20000"}, r"^layers: '20000' is more than 10,000: check the row$"),
        ({"seq": "1e8", "micro_batch": "4e6", "ffn": "4e6"}, r"^its sizes cannot be counted: check hidden, "),
        ({"nic_gbit_host": "1e-320"}, r"^nic_gbit_host: '1e-320' is not between "),
        ({"sharding": "single"}, r"^sharding: 'single' is one GPU, and the row has 16: "),
        ({"layers": "2.5"}, r"^layers: '2\.5' is no whole number"),
        ({"gpu": "h10"}, r"^gpu: 'h10' is unknown: did you mean 'h100'\?"),
        ({"precision": "bf61"}, r"^precision: 'bf61' is unknown: did you mean 'bf16'\?"),
        ({"sharding": "zero4"}, r"^sharding: 'zero4' is unknown: did you mean 'zero3'\?"),
        ({"ac": "some"}, r"^ac: 'some' is unknown: "),
        ({"gpus": "12"}, r"^gpus: 12 do not fill hosts of 8: "),
        ({"shard_factor": "3"}, r"^shard_factor: 3 does not divide 16 GPUs: choose a divisor$"),
        ({"reshard": "perhaps"}, r"^reshard: 'perhaps' must be true or false$"),
        ({"heads": "3"}, r"3 heads do not divide hidden 256"),
        ({"gpu": "rtx4090"}, r"no network is usual"),
    ],
)
def test_a_row_that_cannot_be_planned_says_why(changed: dict[str, str], message: str) -> None:
    plan = one(**changed)
    assert plan == RowPlan("a row", error=plan.error)
    with pytest.raises(ValueError, match=message):
        raise ValueError(plan.error)


def test_what_the_paper_on_fsdp_claims_is_planned() -> None:
    """Nothing is fitted to it. Two claims are missed by a hair, and zero/planning/README.md says so."""
    found = score.seeds()
    assert len(found) == 7
    missed = [claim for claim, _, agrees in found if not agrees]
    assert missed == ["175B: 186 TFLOP/s a GPU", "11.3B: 512 GPUs at 0.93 of 8, each"]


def test_a_framework_is_known_in_any_case() -> None:
    assert one(framework="some fsdp2") == one(framework="some FSDP2") != one(framework="torch FSDP1")


def test_without_a_word_plain_models_are_tied_and_gated_ones_are_not() -> None:
    assert one() == one(tied="1")
    assert one(gated="1") == one(gated="1", tied="0")


def test_a_wrong_row_leaves_others_planned() -> None:
    wrong, right = plan_rows([{**ROW, "layers": ""}, ROW])
    assert wrong.error
    assert right == one()


@pytest.mark.parametrize("sharding", ["single", "ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_memory_grows_with_the_batch(sharding: str) -> None:
    gpus = "1" if sharding == "single" else "8"
    few, many = (one(sharding=sharding, micro_batch=micro, gpus=gpus).mem_gib for micro in ("2", "64"))
    assert few
    assert many
    assert few < many


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_is_planned(precision: str) -> None:
    gpu = "h100" if "fp8" in precision else "a100-80"
    assert not one(precision=precision, gpu=gpu).error


def test_what_is_recomputed_takes_time_and_saves_memory() -> None:
    plans = [one(ac=ac, micro_batch="64") for ac in ("none", "selective op", "full")]
    seconds, memory = [plan.step_s or 0.0 for plan in plans], [plan.mem_gib or 0.0 for plan in plans]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]
    assert memory == sorted(memory, reverse=True)
    assert memory[-1] < memory[0]


# -- the command ------------------------------------------------------------------------------------------------------


def test_rows_need_a_file_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--rows", "rows.csv"])
    assert "--rows and --out need each other" in capsys.readouterr().err


def written(path: Path, *given: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for row in given for name in row}))
        writer.writeheader()
        writer.writerows(given)
    return path


def test_the_table_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = written(tmp_path / "rows.csv", ROW)
    before = table.read_bytes()
    assert main(["--rows", str(table), "--out", str(table)]) == 2
    assert "is the file of --rows: name another one" in capsys.readouterr().err
    assert table.read_bytes() == before


def test_each_row_of_a_table_is_planned(tmp_path: Path) -> None:
    table, out = written(tmp_path / "rows.csv", ROW, {**ROW, "id": "another", "micro_batch": "4"}), tmp_path / "out.csv"
    assert main(["--rows", str(table), "--out", str(out)]) == 0
    with out.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["id"] for row in found] == ["a row", "another"]
    for row in found:
        assert tuple(row) == COLUMNS
        assert float(row["band_low"]) <= float(row["tokens_s_gpu"]) <= float(row["band_high"])
        assert float(row["step_s"]) > 0
        assert float(row["mem_gib"]) > 0
        assert (row["fits"], row["error"]) == ("yes", "")
        assert float(row["margin_gib"]) > 0


def test_a_wrong_row_has_an_error_and_the_others_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = written(tmp_path / "rows.csv", {**ROW, "gpu": "h10"}, ROW), tmp_path / "out.csv"
    assert main(["--rows", str(table), "--out", str(out)]) == 2
    with out.open(newline="") as file:
        wrong, right = csv.DictReader(file)
    assert wrong["error"] == "gpu: 'h10' is unknown: did you mean 'h100'?"
    assert not any(value for name, value in wrong.items() if name not in ("id", "error"))
    assert right["tokens_s_gpu"]
    error = capsys.readouterr().err
    assert error.startswith("error: 1 of 2 rows cannot be planned, and ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "out", "message"),
    [
        (None, "out.csv", "cannot be read (No such file or directory)"),
        (b"name\nx\n", "out.csv", "has no column 'id'"),
        (b"", "out.csv", "has no column 'id'"),
        (b"\xff\xfe\x00", "out.csv", "is no CSV file"),
        (b"id\nx\n", "folder", "with --rows it must be the CSV file to write"),
        (b"id\nx\n", "no/folder/out.csv", "cannot write there (No such file or directory)"),
    ],
)
def test_a_table_that_cannot_be_read_or_written_is_one_line(
    content: bytes | None, out: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "rows.csv"
    if content is not None:
        table.write_bytes(content)
    assert main(["--rows", str(table), "--out", str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
