"""The tables of a run, and the targets that were met and missed.

Knows: the rows of the sections. Does not know: how they were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from ..report import Report
from ..tables import Table
from .clock import NO_GPU
from .job import SECTIONS, Row, file_of, outcome_of
from .one_rank import AGAIN

PLAIN, DDP, FSDP2 = "plain", "DDP", "FSDP2"
KERNELS, BUSY = 3600, 0.205  # of a step as one of 8 ranks; see `targets`


class Found:
    """The reports of a run, by section."""

    def __init__(self, folder: Path) -> None:
        paths = {name: file_of(str(folder), name) for name in SECTIONS}
        self.reports = {name: Report.read(path) for name, path in paths.items() if path.exists()}

    def rows(self, section: str, key: str) -> list[Row]:
        """Return the rows of a section that have a field."""
        return [part for part in self.reports[section].parts if key in part] if section in self.reports else []

    def has_gpu(self, section: str) -> bool:
        """Return whether a section ran on a GPU."""
        return section in self.reports and self.reports[section].machine.get("device") != NO_GPU

    def outcomes(self) -> Table:
        """Make a table of what became of each section."""
        rows = [
            [name, SECTIONS[name].title, f"{outcome_of(report)['seconds']:.0f}", str(outcome_of(report)["outcome"])]
            for name, report in self.reports.items()
        ]
        return Table("Sections", ["section", "what", "s", "outcome"], rows)


def text_of(found: Found) -> str:
    """Return the page of a run, in Markdown."""
    heads = list(dict.fromkeys(report.line() for report in found.reports.values()))
    return "\n".join([*(f"{head}\n" for head in heads), *(table.markdown() for table in tables(found))])


def tables(found: Found) -> Iterator[Table]:
    """Yield all tables."""
    yield found.outcomes()
    if aims := list(targets(found)):
        cells = [[what, aim, seen, "yes" if met else "no"] for what, aim, seen, met in aims]
        yield Table("Targets", ["measure", "target", "measured", "met"], cells)
    if rows := found.rows("a", "what"):
        yield _updates(rows)
    if rows := found.rows("a", "compared"):
        yield _compared(rows, found.rows("a", "compiled")[0]["compiled"])
    for tokens in dict.fromkeys(row["tokens"] for row in found.rows("b", "turn")):
        yield _steps([row for row in found.rows("b", "turn") if row["tokens"] == tokens], tokens)
    if rows := found.rows("b", "no_room"):
        sizes = {f"{what} GB": _gigabytes(what) for what in ("needed", "free")}
        yield _table("b: systems for which there was no room", rows, {"system": lambda row: row["no_room"], **sizes})
    for ranks in dict.fromkeys(row["ranks"] for row in found.rows("c", "us_a_parameter")):
        yield _hosts([row for row in found.rows("c", "us_a_parameter") if row["ranks"] == ranks], ranks)
    if rows := found.rows("c", "on_device"):
        yield _on_device(rows)
    for system in dict.fromkeys(row["of"] for row in found.rows("c", "kernel")):
        yield _kernels([row for row in found.rows("c", "kernel") if row["of"] == system], system)
    if rows := found.rows("d", "test"):
        cells = [[row["test"], "yes" if row["passed"] else "no", row["took"], row["problem"] or "–"] for row in rows]
        yield Table("d: bits of the plain loop over NCCL", ["test", "passed", "s", "problem"], cells)
    if rows := found.rows("e", "allocator"):
        yield _memory(rows)


def _table(title: str, rows: Sequence[Row], columns: dict[str, Callable[[Row], str]]) -> Table:
    return Table(title, list(columns), [[text(row) for text in columns.values()] for row in rows])


def _updates(rows: Sequence[Row]) -> Table:
    copy = next(row["bytes_a_second"] for row in rows if row["what"] == "copy")
    columns = {
        "": lambda row: row["what"],
        "MiB": lambda row: f"{row['mib']:g}",
        "tensors a call": lambda row: str(row["in_a_call"]),
        "GB/s": lambda row: f"{row['bytes_a_second'] / 1e9:,.0f}",
        "÷ copy": lambda row: f"{row['bytes_a_second'] / copy:.2f}",
        "host µs a call": lambda row: f"{row['host_us']:.0f}",
    }
    return _table("a: fused AdamW in bf16", rows, columns)


def _compared(rows: Sequence[Row], seconds: float) -> Table:
    columns = {
        "": lambda row: row["compared"],
        "same bits": lambda row: "yes" if row["equal"] else "no",
        "ms": _milliseconds("seconds"),
        "GB/s": lambda row: f"{row['bytes_a_second'] / 1e9:,.0f}",
        "operators' ms": _milliseconds("operators"),
        "host µs a call": lambda row: f"{row['host_us']:.0f}",
    }
    return _table(f"a: kernels, compiled and checked in {seconds:.1f} s, beside torch's operators", rows, columns)


def _steps(rows: Sequence[Row], tokens: int) -> Table:
    times = medians(rows)
    cells = []
    for system in dict.fromkeys(row["system"] for row in rows):
        of = [row for row in rows if row["system"] == system]
        turns = [row["in_a_row"] for row in of]
        cells.append(
            [
                system,
                _ms(times[system]),
                f"{_ms(min(turns))}–{_ms(max(turns))}",
                f"{times[system] / times[PLAIN]:.2f}" if PLAIN in times else "–",
                f"{times[system] / times[DDP]:.2f}" if DDP in times else "–",
                _ms(median(row["processor"] for row in of)),
                str(of[0]["buckets"] or "–"),
                " ".join(f"{row['loss']:.6f}" for row in of),
            ]
        )
    columns = ["system", "ms", "turns", "÷ plain", "÷ DDP", "processor ms", "buckets", "loss at the end of each turn"]
    return Table(f"b: a step at world size 1, {tokens:,} tokens, medians of turns", columns, cells)


def medians(rows: Sequence[Row]) -> dict[str, float]:
    """Return the median seconds of a step, by system."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["system"], []).append(row["in_a_row"])
    return {system: median(values) for system, values in found.items()}


def _hosts(rows: Sequence[Row], ranks: int) -> Table:
    columns = {
        "system": lambda row: row["system"],
        **{phase: _milliseconds(phase) for phase in ("forward", "backward", "clip", "step")},
        "sum": _milliseconds("total"),
        "÷ FSDP2": lambda row: f"{row['of_fsdp2']:.2f}",
        "µs a parameter": lambda row: f"{row['us_a_parameter']:.1f}",
        "buckets": lambda row: str(row["buckets"] or "–"),
        "headers sent": lambda row: str(row["headers"] or "–"),
    }
    return _table(f"c: the host's ms in a step of rank {ranks - 1} of {ranks}, 32 narrow blocks", rows, columns)


def _on_device(rows: Sequence[Row]) -> Table:
    columns = {
        "system": lambda row: row["on_device"],
        "ms in a row": _milliseconds("in_a_row"),
        "kernels": lambda row: f"{row['kernels']:,}",
        "busy ms": _milliseconds("busy"),
        "idle share": lambda row: f"{max(0.0, 1 - row['busy'] / row['in_a_row']):.2f}",
        "looks": lambda row: str(row["looks"]),
        **{f"{name} GB": _gigabytes(name) for name in ("peak", "kept")},
    }
    ranks, tokens = rows[0]["ranks"], rows[0]["tokens"]
    return _table(f"c: a step of rank {ranks - 1} of {ranks} on the device, {tokens:,} tokens", rows, columns)


def _kernels(rows: Sequence[Row], system: str) -> Table:
    columns = {
        "kernel": lambda row: row["kernel"],
        "times": lambda row: f"{row['times']:,}",
        "ms": _milliseconds("seconds"),
    }
    return _table(f"c: what takes the device's time under {system}", rows, columns)


def _memory(rows: Sequence[Row]) -> Table:
    columns = {
        "system": lambda row: row["system"],
        "allocator": lambda row: row["allocator"],
        **{f"{name} GB": _gigabytes(name) for name in ("peak", "kept", "reserved")},
        "retries": lambda row: str(row["retries"]),
    }
    return _table("e: memory at world size 1", rows, columns)


def _milliseconds(name: str) -> Callable[[Row], str]:
    return lambda row: _ms(row[name])


def _gigabytes(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name] / 1e9:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


# -- targets ----------------------------------------------------------------------------------------------------------


def targets(found: Found) -> Iterator[tuple[str, str, str, bool]]:
    """Yield what was measured, what was aimed at, what was seen, and whether the target is met."""
    if compared := found.rows("a", "compared"):
        equal = sum(row["equal"] for row in compared)
        yield "a: kernels with the bits of operators", str(len(compared)), str(equal), equal == len(compared)
    steps = found.rows("b", "turn") if found.has_gpu("b") else []
    for tokens in dict.fromkeys(row["tokens"] for row in steps):
        times = medians([row for row in steps if row["tokens"] == tokens])
        yield from _of_one_rank(times, tokens)
    losses = {system: [r["loss"] for r in steps if r["system"] == system] for system in (PLAIN, AGAIN)}
    if losses[PLAIN]:
        equal = losses[PLAIN] == losses[AGAIN]
        yield "b: the losses of two plain loops", "equal", "equal" if equal else "different", equal
    devices = {row["on_device"]: row for row in found.rows("c", "on_device") if found.has_gpu("c")}
    if (ours := devices.get("zero 3")) and (peer := devices.get(FSDP2)):
        yield "c: kernels", f"≤ {KERNELS:,}", f"{ours['kernels']:,}", ours["kernels"] <= KERNELS
        yield "c: device ms", f"≤ {BUSY * 1e3:.0f}", _ms(ours["busy"]), ours["busy"] <= BUSY
        for what, name, most in (("time in a row", "in_a_row", 1.0), ("peak", "peak", 1.02)):
            ratio = ours[name] / peer[name]
            yield f"c: {what}, zero 3 ÷ FSDP2", f"≤ {most:g}", f"{ratio:.2f}", ratio <= most
    for row in found.rows("c", "us_a_parameter"):
        if row["system"] == "zero 3":
            yield f"c: host, {row['ranks']} ranks, ÷ FSDP2", "≤ 1", f"{row['of_fsdp2']:.2f}", row["of_fsdp2"] <= 1
    if tests := found.rows("d", "test"):
        passed = sum(row["passed"] for row in tests)
        yield "d: tests that pass", str(len(tests)), str(passed), passed == len(tests)
    memory = found.rows("e", "allocator") if found.has_gpu("e") else []
    peaks = {row["system"]: row["peak"] for row in memory if row["allocator"] == "default"}
    for system in peaks:
        if system.startswith("zero") and PLAIN in peaks:
            ratio = peaks[system] / peaks[PLAIN]
            yield f"e: peak, {system} ÷ plain", "≤ 1.02", f"{ratio:.2f}", ratio <= 1.02


def _of_one_rank(times: dict[str, float], tokens: int) -> Iterator[tuple[str, str, str, bool]]:
    what = f"b, {tokens:,} tokens"
    if AGAIN in times and PLAIN in times:
        ratio = times[AGAIN] / times[PLAIN]
        yield f"{what}: plain again ÷ plain", "0.98 to 1.02", f"{ratio:.3f}", 0.98 <= ratio <= 1.02
    for stage in (0, 1, 2):
        if (ours := times.get(f"zero {stage}")) and DDP in times and PLAIN in times:
            yield f"{what}: zero {stage} ÷ DDP", "≤ 1", f"{ours / times[DDP]:.2f}", ours <= times[DDP]
            if tokens > 2048:
                ratio = ours / times[PLAIN]
                yield f"{what}: zero {stage} ÷ plain", "≤ 1.05", f"{ratio:.2f}", ratio <= 1.05
    if (ours := times.get("zero 3")) and FSDP2 in times:
        yield f"{what}: zero 3 ÷ FSDP2", "≤ 1", f"{ours / times[FSDP2]:.2f}", ours <= times[FSDP2]
