"""Runs tests on mutants: one process collects the tests, and each mutant runs some of them in a fork of it.

A fork changes live functions, runs its tests one after another until one fails, and ends. The first time that a test
kills a mutant it also runs in a fork that changes nothing, where it must pass. A hang counts if a test's own limit ends
it; `FORK_LIMIT` ends a fork that no test ends, which is no kill.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import Phase, settings

from . import live
from .judge import catches

TEST_LIMIT = 60  # seconds for one test; on an idle machine each takes a few
FORK_LIMIT = 300  # seconds for the tests of one mutant, should no limit of a test end one


@dataclass(frozen=True)
class Trial:
    """A mutant and tests for it."""

    name: str
    change: tuple[str, Any] | None  # the arguments of `live.apply`; None for a trial of the tests themselves
    tests: tuple[str, ...]  # node ids below ``tests/``; one without a case means each case


@dataclass(frozen=True)
class Verdict:
    """The outcome of a trial."""

    trial: Trial
    outcome: str  # "failed", "passed", "stale"; "late" if the fork had to be ended, "died" if it ended otherwise
    test: str = ""  # that failed
    crash: bool = False  # it did not catch anything (`judge`)
    error: str = ""
    seconds: float = 0.0
    entered: bool = False  # wrong code ran

    @property
    def caught(self) -> bool:
        return bool(self.test) and self.entered and not self.crash


def run(
    trials: Sequence[Trial],
    files: Sequence[str],
    each: Callable[[Verdict], None],
    *,
    jobs: int = 2,
    limit: float = FORK_LIMIT,
) -> int:
    """Run the trials, call ``each`` with every verdict, and return pytest's exit status."""
    forks = _Forks(trials, each, jobs, limit)
    options = ["-q", "-s", "-n=0", "-m=", "-pno:cacheprovider", "--disable-warnings", f"--timeout={TEST_LIMIT}"]
    return int(pytest.main([*options, *files], plugins=[forks]))


@dataclass
class _Fork:
    trial: Trial
    process: int
    folder: Path
    begin: float
    told: bytes = b""


class _Forks:
    """A pytest plugin that runs trials in the place of the tests."""

    def __init__(self, trials: Sequence[Trial], each: Callable[[Verdict], None], jobs: int, limit: float) -> None:
        self._waiting, self._each, self._jobs, self._limit = deque(trials), each, jobs, limit
        self._sound: dict[str, bool] = {}  # whether a test passes without a mutant
        self._held: dict[str, list[Verdict]] = {}  # verdicts that wait for that
        self._items: dict[str, pytest.Item] = {}
        self._pipe = -1  # in a fork: where it tells how its tests end

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        settings.register_profile(
            "zoo",
            settings.get_profile("default"),
            phases=(Phase.explicit, Phase.generate),  # no shrinking: any failing example catches the mutant
            report_multiple_bugs=False,
            database=None,
        )
        settings.load_profile("zoo")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        import torch._dynamo  # noqa: F401  # which the first optimizer of each fork would import

        self._items = {item.nodeid.removeprefix("tests/"): item for item in session.items}
        running: dict[int, _Fork] = {}
        while self._waiting or running:
            while self._waiting and len(running) < self._jobs:
                pipe, fork = self._start(self._waiting.popleft())
                running[pipe] = fork
            begins = min(fork.begin for fork in running.values())
            ready = select.select(list(running), [], [], max(0.0, begins + self._limit - time.monotonic()))[0]
            for pipe, fork in list(running.items()):
                data = os.read(pipe, 1 << 16) if pipe in ready else b""
                fork.told += data
                late = time.monotonic() > fork.begin + self._limit
                if (pipe in ready and not data) or late:
                    os.close(pipe)
                    del running[pipe]
                    self._ended(self._verdict(fork, late))
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
        report = yield
        if report.failed:
            error = None if call.excinfo is None else call.excinfo.value
            self._tell(
                outcome="failed",
                test=item.nodeid.removeprefix("tests/"),
                crash=error is None or call.when != "call" or not catches(error),
                error=f"{type(error).__name__}: {error}"[:1500],
            )
        return report

    def _start(self, trial: Trial) -> tuple[int, _Fork]:
        ours, theirs = os.pipe()
        folder = Path(tempfile.mkdtemp(prefix="zoo-"))
        (folder / "entered").write_bytes(b"\0")
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            self._pipe = theirs
            self._run(trial, folder)
        os.close(theirs)
        return ours, _Fork(trial, process, folder, time.monotonic())

    def _run(self, trial: Trial, folder: Path) -> NoReturn:
        try:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(nothing, number)
            before = os.environ.get("PYTHONPATH")
            paths = [str(Path(__file__).with_name("spawned")), str(live.ROOT), *([before] if before else [])]
            os.environ.update({live.NOTED: str(folder / "entered"), "TMPDIR": str(folder)})
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            tempfile.tempdir = None
            if trial.change is not None:
                live.apply(*trial.change)
            items = list(self._chosen(trial))
            other = next((item for item in self._items.values() if item.path != items[-1].path), None)
            items[0].config._tmp_path_factory._basetemp = folder / "pytest"  # type: ignore[attr-defined]
            (folder / "pytest").mkdir()
            for item, following in zip(items, [*items[1:], other], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._tell(outcome="passed")
        except live.StaleError as error:
            self._tell(outcome="stale", error=str(error))
        except BaseException as error:
            self._tell(outcome="died", error=f"the fork failed: {error!r}"[:1500])
        finally:
            os._exit(0)

    def _chosen(self, trial: Trial) -> Iterator[pytest.Item]:
        for test in trial.tests:
            cases = [item for name, item in self._items.items() if name == test or name.partition("[")[0] == test]
            if not cases:
                raise live.StaleError(f"there is no {test}")
            yield from cases

    def _tell(self, **facts: Any) -> None:
        os.write(self._pipe, json.dumps(facts).encode() + b"\n")
        os._exit(0)

    def _verdict(self, fork: _Fork, late: bool) -> Verdict:
        with suppress(ProcessLookupError):
            os.killpg(fork.process, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(fork.process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(fork.process, 0)[1])
        entered = (fork.folder / "entered").read_bytes() == b"\1"
        shutil.rmtree(fork.folder, ignore_errors=True)
        facts = {"outcome": "late", "error": "no limit of a test ended it"}
        if not late:
            facts = {"outcome": "died", "error": f"its process ended with status {status}"}
        told, complete, _ = fork.told.partition(b"\n")  # a test may fork, and both processes may fail
        if complete:
            facts = json.loads(told)
        return Verdict(fork.trial, **facts, seconds=time.monotonic() - fork.begin, entered=entered)

    def _ended(self, verdict: Verdict) -> None:
        trial, test = verdict.trial, verdict.test
        if trial.change is None:
            (checked,) = trial.tests
            self._sound[checked] = verdict.outcome == "passed"
            for held in self._held.pop(checked):
                self._ended(held)
        elif not test or self._sound.get(test):
            self._each(verdict)
        elif test in self._held:
            self._held[test].append(verdict)
        elif test not in self._sound:
            self._held[test] = [verdict]
            self._waiting.appendleft(Trial(test, None, (test,)))
        elif rest := tuple(each for each in trial.tests if each not in (test, test.partition("[")[0])):
            self._waiting.appendleft(replace(trial, tests=rest))
        else:
            self._each(replace(verdict, outcome="passed", test="", error=f"{test} fails without a mutant, too"))
