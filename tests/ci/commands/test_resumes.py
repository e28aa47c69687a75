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
STEPS, EVERY = 300, 60  # more than the page's, so that there is time for what happens


def test_the_script_of_the_page_loses_a_worker_and_goes_on_with_other_ranks_when_slurm_has_queued_it_again(
    tmp_path: Path,
) -> None:
    flags = re.findall(r"--s\w+-\w+(?:-\w+)?=\S+", PAGE)
    assert [flag.partition("=")[0] for flag in flags] == ["--signals-to-handle", "--shutdown-timeout"]
    (stop,) = re.findall(r"`(zero\.StopOnSignal\(optimizer, \[.*?\]\))`", PAGE)
    code = PAGE.partition("```python\n")[2].partition("```")[0]
    for page, here in (("EVERY = 60, 6, 10", f"EVERY = {STEPS}, 6, {EVERY}"), ("zero.StopOnSignal(optimizer)", stop)):
        assert page in code
        code = code.replace(page, here)
    (tmp_path / "script.py").write_text(f"import signal\n{code}")

    def queued(ranks: int) -> subprocess.Popen[str]:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1"]
        return subprocess.Popen(
            [sys.executable, *command, *flags, "script.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(resumes.ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(step: int) -> None:
        end = time.monotonic() + resumes.LIMIT
        while step not in steps_in(tmp_path / "saved") and time.monotonic() < end:
            time.sleep(0.01)

    with queued(2) as job:
        wait_for(EVERY)
        worker, _ = resumes.processes(job.pid)
        resumes.send([worker], signal.SIGKILL)
        wait_for(3 * EVERY)  # by other workers
        job.send_signal(signal.SIGUSR1)
        _, said = job.communicate(timeout=resumes.LIMIT)
    assert job.returncode != 0, said
    *_, third, stopped = sorted(steps_in(tmp_path / "saved"))
    assert third == 3 * EVERY < stopped < 4 * EVERY, said
    with queued(3) as job:
        _, said = job.communicate(timeout=resumes.LIMIT)
    assert job.returncode == 0, said
    saved = steps_in(tmp_path / "saved")
    assert sorted(saved) == sorted([*range(EVERY, STEPS + 1, EVERY), stopped])
    trained = zero.open_checkpoint(saved[STEPS]).model_state_dict()

    names: dict[str, Any] = {}
    exec(code.partition("with zero.process_group")[0], names)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer, count = torch.optim.AdamW(model.parameters(), lr=1e-2), names["MICRO_BATCHES"]
    for step in range(STEPS):
        batches = [names["micro_batch"](step, index) for index in range(count)]
        plain_step(model, optimizer, lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]), batches, count)
        optimizer.zero_grad()
    assert_same_value(trained, dict(model.state_dict()), "the last checkpoint")
