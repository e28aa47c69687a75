"""What a run is asked for, the sections with their limits, and how their results are written.

Knows: plain values and files. Does not know: what a section measures.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..report import Report

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent.parent
WHOLE, UNDER_WAY = "whole", "under way"


@dataclass(frozen=True)
class Section:
    """A section of a run. ``limit``: seconds on a GPU; it is cut off then."""

    name: str
    limit: float
    title: str


SECTIONS = {
    section.name: section
    for section in (
        Section("a", 40, "kernels beside operators; fused AdamW by the size of a bucket, and by the tensors of a call"),
        Section("b", 150, "a step at world size 1"),
        Section("c", 140, "a step as the last of several ranks"),
        Section("d", 110, "bits over NCCL among ranks that share the GPU"),
        Section("e", 40, "the peak of memory"),
    )
}


@dataclass(frozen=True)
class ShortJob:
    """A run: ``sections`` in their order, the last one of ``worlds`` ranks, ``pairs`` steps of two systems in turn.

    ``quick``: tiny models, few steps. ``command`` and ``device_name`` are for the report.
    """

    folder: str
    sections: str
    device: str
    quick: bool = False
    worlds: Sequence[int] = (8,)
    pairs: int = 10
    command: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ShortJob:
        return cls(**json.loads(text))


Measure = Callable[[ShortJob], Iterator[Row]]


class Results:
    """The file of one section, which is written anew with each row: what was measured so far can be read at any time.

    Its last row says what became of the section, and after how many seconds.
    """

    def __init__(self, job: ShortJob, name: str, device_name: str) -> None:
        self._path, self._job, self._device = file_of(job.folder, name), job, device_name
        self._rows: list[Row] = []
        self._begin = time.monotonic()
        self._write(UNDER_WAY)

    def add(self, row: Row) -> None:
        """Add a row."""
        self._rows.append(row)
        self._write(UNDER_WAY)

    def end(self, problem: str = "") -> None:
        """Note that the section is over. ``problem``: why it is not whole."""
        self._write(problem or WHOLE)

    def _write(self, outcome: str) -> None:
        parts = [*self._rows, _outcome(outcome, time.monotonic() - self._begin)]
        report = replace(Report.of_this_machine("", parts, self._device), command=self._job.command)
        scratch = self._path.with_suffix(".part")
        report.write(scratch)
        os.replace(scratch, self._path)


def _outcome(outcome: str, seconds: float) -> Row:
    return {"outcome": outcome, "seconds": seconds}


def file_of(folder: str, name: str) -> Path:
    """Return the file of a section's results."""
    return Path(folder) / f"gpu-short-{name}.json"


def run(job: ShortJob, measures: Mapping[str, Measure], device_name: str) -> None:
    """Run the sections of a job, and print a line when one begins and when it is over. If one raises, the next one is
    run."""
    for section in job.sections:
        print(f"begin {section}", flush=True)
        results = Results(job, section, device_name)
        try:
            for row in measures[section](job):
                results.add(row)
            results.end()
        except Exception as error:
            traceback.print_exc()
            results.end(" ".join(f"{type(error).__name__}: {error}".split())[:500])
        print(f"end {section}", flush=True)


def cut_off(job: ShortJob, name: str, why: str, seconds: float) -> None:
    """Note in a section's file that its worker is gone. Rows that are there stay."""
    path = file_of(job.folder, name)
    report = Report.read(path) if path.exists() else replace(Report.of_this_machine("", []), command=job.command)
    rows = [part for part in report.parts if "outcome" not in part]
    replace(report, parts=[*rows, _outcome(why, seconds)]).write(path)


def outcome_of(report: Report) -> Row:
    """Return the row that says what became of a section."""
    return next(part for part in report.parts if "outcome" in part)
