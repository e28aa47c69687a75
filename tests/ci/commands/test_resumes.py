"""A run under torchrun that loses, gets and changes ranks ends with the bits of an undisturbed one, which are those of
the plain loop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests import resumes
from tests.support.example import plain_example
from tests.support.plain import assert_same_value, plain_step
from zero.checkpoint.folder.directory import steps_in
from zero.commands.train.command import parameters_sha256

CADENCE = resumes.Cadence()
pytestmark = pytest.mark.timeout(resumes.LIMIT)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> resumes.TrainedRun:
    """Return an undisturbed run on two ranks, which has the plain loop's parameters and the bytes of the formulas."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found = resumes.undisturbed(CADENCE, folder)
    plain = plain_example(Path(nn.functional.__file__), CADENCE.steps, CADENCE.micro_batches, 4)
    assert found.params_sha256 == parameters_sha256(plain)
    ranks = json.loads((folder / "out" / "run.json").read_text())["ranks"]
    assert len(ranks) == 2
    for facts in ranks:
        assert facts["measured"].pop("scratch_peak") <= facts["formula"].pop("scratch_peak")
        assert facts["measured"] == facts["formula"]
    return found


def test_ranks_that_are_asked_to_end_save_the_same_step(tmp_path: Path) -> None:
    flags = ("--ranks=2", *CADENCE.flags(tmp_path, 3), "--steps=100000")
    command = [sys.executable, "-m", "zero.commands.cli", "train", *flags]
    with subprocess.Popen(command, cwd=resumes.ROOT, stdout=subprocess.PIPE, text=True) as job:
        for line in job.stdout or ():
            if line.startswith("step 10/"):
                job.terminate()
            if stopped := resumes.STOPPED.match(line):
                break
        assert job.wait(resumes.LIMIT) == 128 + signal.SIGTERM
    assert max(steps_in(tmp_path / "checkpoints")) == int(stopped[2])


def test_four_three_one_and_five_ranks_end_with_the_bits_of_an_undisturbed_run(
    tmp_path: Path, expected: resumes.TrainedRun
) -> None:
    """An agent gets SIGTERM, which loses no step; an agent is killed, and another one with its worker; four come."""
    with resumes.torchrun_job(tmp_path, resumes.training(tmp_path, 3, CADENCE)) as job:
        job.add(4)
        assert job.until(lambda: job.saved() >= 10), job.log()
        job.staying[0].leave()
        assert job.until(lambda: resumes.BEGUN.search(job.log())), job.log()
        stopped, begun = resumes.STOPPED.search(job.log()), resumes.BEGUN.search(job.log())
        assert stopped is not None, job.log()
        assert begun is not None
        assert ("3", stopped[2]) == (begun[1], begun[2])
        first, second, _ = job.staying
        resumes.send([first.pid, second.pid, *second.workers()], signal.SIGKILL)
        assert job.until(lambda: re.search(r"on 1 cpu rank\(s\): step [1-9]", job.log())), job.log()
        (last,) = job.staying
        resumes.send(last.workers(), signal.SIGSTOP)  # it would finish while four interpreters start
        there = len(job.folders())
        job.add(4)
        assert job.until(lambda: len(job.folders()) >= there + 4), job.log()
        resumes.send(last.workers(), signal.SIGCONT)
        assert job.until(lambda: "on 5 cpu rank(s)" in job.log()), job.log()
        job.wait()
        assert not job.processes()
        assert [agent.returncode for agent in job.agents[3:]] == [0] * 5, job.log()
    resumes.check_outcome(tmp_path, expected, "4 -> 3 -> 1 -> 5 ranks")


PAGE = (resumes.ROOT / "zero" / "ELASTIC.md").read_text()


@dataclass
class PageScript:
    """The script of the page, with more steps, so that there is time for it, in a folder."""

    folder: Path
    every: int
    stop: str = "zero.StopOnSignal(optimizer)"

    def __post_init__(self) -> None:
        code = (
            PAGE.partition("```python\n")[2]
            .partition("```")[0]
            .replace("EVERY = 60, 6, 10", f"EVERY = 200, 6, {self.every}")
        )
        code = f"import signal\n{code}".replace("zero.StopOnSignal(optimizer)", self.stop)
        (self.folder / "script.py").write_text(code)
        self.names: dict[str, Any] = {}
        exec(code.partition("with zero.process_group")[0], self.names)
        assert self.names["STEPS"] == 200

    def saved(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.folder / "saved").glob("step-*"))

    def check(self) -> None:
        """Assert that the last checkpoint has the bits of the plain loop."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        count = self.names["MICRO_BATCHES"]
        for step in range(200):
            batches = [self.names["micro_batch"](step, index) for index in range(count)]
            plain_step(model, optimizer, lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]), batches, count)
            optimizer.zero_grad()
        trained = zero.open_checkpoint(self.folder / "saved" / "step-00000200").model_state_dict()
        assert_same_value(trained, dict(model.state_dict()), "the last checkpoint")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "asked to end"])
def test_the_script_of_the_page_runs_as_it_stands_and_loses_a_worker(number: signal.Signals, tmp_path: Path) -> None:
    killed = number == signal.SIGKILL
    script = PageScript(tmp_path, every=10 if killed else 1000)
    with resumes.torchrun_job(tmp_path, [str(tmp_path / "script.py")], tmp_path) as job:
        job.add(3)
        assert job.until(lambda: list((tmp_path / "saved").glob("step-*" if killed else ".lock"))), job.log()
        time.sleep(1.0)  # any moment of the run will do
        resumes.send(job.staying[1].workers(), number)
        job.wait()
        assert [agent.returncode for agent in job.agents] == [0] * 3, job.log()
    saved = script.saved()
    assert saved[-1] == 200
    assert saved == list(range(10, 201, 10)) if killed else len(saved) == 2, "when all ranks ended, and the last one"
    script.check()


def test_a_job_that_slurm_signals_saves_and_goes_on_with_other_ranks_when_it_is_queued_again(tmp_path: Path) -> None:
    flags = re.findall(r"--s\w+-\w+(?:-\w+)?=\S+", PAGE)
    assert [flag.partition("=")[0] for flag in flags] == ["--signals-to-handle", "--shutdown-timeout"]
    (stop,) = re.findall(r"`(zero\.StopOnSignal\(optimizer, \[.*?\]\))`", PAGE)
    script = PageScript(tmp_path, 1000, stop)

    def queued(ranks: int) -> subprocess.Popen[str]:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *flags, "script.py"]
        environment = {**os.environ, "PYTHONPATH": str(resumes.ROOT)}
        return subprocess.Popen(
            [sys.executable, *command], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
        )

    with queued(2) as job:
        end = time.monotonic() + resumes.LIMIT
        while not (tmp_path / "saved" / ".lock").exists() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.5)  # any moment of the run will do
        job.send_signal(signal.SIGUSR1)
        _, said = job.communicate(timeout=resumes.LIMIT)
    assert job.returncode != 0, said
    (stopped,) = script.saved()
    assert 0 < stopped < 200, said
    with queued(3) as job:
        _, said = job.communicate(timeout=resumes.LIMIT)
    assert job.returncode == 0, said
    assert script.saved() == [stopped, 200]
    script.check()
