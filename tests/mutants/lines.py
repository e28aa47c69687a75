"""A pytest plugin (``-p tests.mutants.lines``) that notes which lines of the library each test runs, and its seconds.

Knows: coverage, and files of one folder, one for each process of pytest. Does not know: mutants.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage, CoverageData

from ..zoo.live import ROOT

FOLDER = Path(os.environ.get("TESTS_MUTANTS_LINES", ROOT / ".mutants"))  # git ignores it
FILES = "TESTS_MUTANTS_FILES"  # whose lines are noted; a test runs the others as fast as without the plugin


class Lines:
    """The lines of the tests of one process."""

    def __init__(self, name: str) -> None:
        FOLDER.mkdir(exist_ok=True, parents=True)
        self._file = FOLDER / f"lines-{name}"
        include = [str(ROOT / pattern) for pattern in os.environ.get(FILES, "zero/* collectives/*").split()]
        self._coverage = Coverage(str(self._file), config_file=False, include=include, concurrency="thread")
        self._coverage.start()
        self._seconds: dict[str, float] = {}
        self._left_out: set[str] = set()  # tests that failed or were skipped

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._coverage.switch_context(item.nodeid.removeprefix("tests/"))
        begin = time.monotonic()
        result = yield
        self._seconds[item.nodeid.removeprefix("tests/")] = time.monotonic() - begin
        self._coverage.switch_context("")
        return result

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._left_out.add(report.nodeid.removeprefix("tests/"))

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        passed = {test: seconds for test, seconds in self._seconds.items() if test not in self._left_out}
        self._file.with_suffix(".json").write_text(json.dumps(passed))


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None or not config.getoption("numprocesses", 0):
        config.pluginmanager.register(Lines("main" if worker is None else worker["workerid"]))


def reaching() -> dict[str, dict[int, list[str]]]:
    """Return the tests that reach each line of each file: first those that are fast and reach few lines."""
    seconds: dict[str, float] = {}
    found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    count: Counter[str] = Counter()
    for noted in FOLDER.glob("lines-*.json"):
        seconds |= json.loads(noted.read_text())
        data = CoverageData(str(noted.with_suffix("")))
        data.read()
        for file in data.measured_files():
            for line, tests in data.contexts_by_lineno(file).items():
                found[Path(file).relative_to(ROOT).as_posix()][line] += tests
                count.update(tests)
    cost = {test: seconds[test] * count[test] for test in seconds}
    return {
        file: {line: sorted({*tests} & cost.keys(), key=lambda test: cost[test]) for line, tests in lines.items()}
        for file, lines in found.items()
    }
