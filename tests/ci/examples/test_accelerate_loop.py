"""The script of accelerate trains one set of weights at any stage and number of ranks, also stopped and resumed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from subprocess import run

import pytest

from ...support.loops import ROOT

LIMIT = 240  # seconds of two ranks on a busy machine

pytestmark = pytest.mark.timeout(3 * LIMIT)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--epochs=0", "--epochs is 0: it must be at least 1"),
        ("--folder=", "--folder '': name a folder"),
        ("--resume=", "--resume '': name a folder that an earlier run has saved by --folder"),
        ("--resume={}/no", "--resume '{}/no': name a folder that an earlier run has saved by --folder"),
        ("--stage=9", "2"),  # after a line of argparse
    ],
)
def test_wrong_input_is_one_line(flag: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    from zero.examples import accelerate_loop

    monkeypatch.setattr(sys, "argv", ["accelerate_loop.py", flag.format(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        accelerate_loop.main()
    assert str(ended.value) == said.format(tmp_path)


def test_the_hash_is_the_same_at_any_stage_and_number_of_ranks_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    hashes = []
    for ranks, arguments in (
        (2, "--stage 3 --epochs 2"),
        (2, "--stage 2 --epochs 1 --folder"),
        (1, "--stage 3 --epochs 2 --resume"),
    ):
        words = [f"{tmp_path}/run"] * arguments.endswith(("--folder", "--resume"))
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *start, "-m", "zero.examples.accelerate_loop", *arguments.split(), *words]
        ended = run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert ended.returncode == 0, ended.stderr
        hashes += re.findall(r"^SHA-256 (\w{64})$", ended.stdout, re.MULTILINE)
    whole, half, resumed = hashes
    assert whole == resumed != half
