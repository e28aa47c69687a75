"""A checkpoint is read, and trained on, in a process that has neither of our packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from zero import open_checkpoint

from ...checkpoint.runs import Topology, run, step_folder

ROOT = Path(__file__).resolve().parents[3]


def test_plain_torch_trains_on_with_our_bits(tmp_path: Path) -> None:
    run(tmp_path / "run", Topology(3, 3, 0.0005), 2)
    expected = run(tmp_path / "whole", Topology(2, 2, 0.0005), 5)
    command = [sys.executable, "-m", "tests.ci.checkpoint.without_us", str(step_folder(tmp_path / "run", 2)), "3", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected
    assert open_checkpoint(step_folder(tmp_path / "whole", 5)).step == 5
