"""The script that goes on with other ranks prints the SHA-256 of one undisturbed run, under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from zero.examples.resume_on_other_ranks import train

from ...support.limits import PATIENT
from ...support.loops import ROOT

pytestmark = pytest.mark.timeout(300)  # a launcher and its ranks are started twice


def run(folder: Path, ranks: int, *flags: str) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, "-m", "zero.examples.resume_on_other_ranks", str(folder), *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENT)
    assert ended.returncode == 0, ended.stderr
    assert "Warning" not in ended.stderr
    return ended.stdout


def sha256_of(said: str) -> str:
    (found,) = re.findall(r"^trained: SHA-256 of the parameters ([0-9a-f]{64})$", said, re.MULTILINE)
    return str(found)


def test_two_ranks_and_then_three_have_the_bits_of_one_undisturbed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(str(tmp_path / "whole"), 2, None)  # one rank: this process
    whole = capsys.readouterr().out
    stopped = run(tmp_path / "stopped", 2, "--stop-after=10")
    resumed = run(tmp_path / "stopped", 3, "--stage=3")
    assert whole.startswith("begins after step 0 of 24, ranks: 1, stage: 2\n")
    assert stopped.startswith("begins after step 0 of 24, ranks: 2, stage: 2\nstopped after step 10")
    assert resumed.startswith("begins after step 10 of 24, ranks: 3, stage: 3\n")
    assert sha256_of(resumed) == sha256_of(whole)


def test_a_step_that_is_taken_already_is_no_place_to_stop(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^--stop-after 0: \S+ has step 0 of 24, so give one after it$"):
        train(str(tmp_path), 2, 0)
    train(str(tmp_path), 2, 10)
    for step in (3, 10, 25):
        with pytest.raises(SystemExit, match=rf"^--stop-after {step}: \S+ has step 10 of 24, so give one after it$"):
            train(str(tmp_path), 2, step)
