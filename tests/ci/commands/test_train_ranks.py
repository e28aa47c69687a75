"""`zero train` has the bits of the plain loop on any number of ranks."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import conftest as tiny
from zero.checkpoint.folder.directory import steps_in
from zero.commands import cli

pytestmark = [pytest.mark.usefixtures("bare"), pytest.mark.timeout(3 * tiny.LIMIT)]


def check_bytes(record: dict[str, Any]) -> None:
    """Assert that ranks have held what the formulas say."""
    assert len(record["ranks"]) == record["world_size"]
    for facts in record["ranks"]:
        for kind in ("parameters", "gradients", "optimizer"):
            assert facts["measured"][kind] == facts["formula"][kind]
        assert facts["measured"]["scratch_peak"] <= facts["formula"]["scratch_peak"]


def test_every_way_to_start_two_ranks_gives_the_parameters_and_losses_of_one(
    text: Path, tmp_path: Path, one_rank: tiny.RunOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tiny.ROOT))
    outs = [tmp_path / str(stage) for stage in range(3)]
    tiny.trained_by_command(text, outs[0], "--ranks=2", "--stage=0")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")  # prints a line on OMP_NUM_THREADS
    ended = tiny.command(*torchrun, "-m", "zero.train", *tiny.flags(text, outs[1], "--stage=1"))
    assert ended.returncode == 0, ended.stderr
    assert cli.main(tiny.flags(text, outs[2], "--stage=2", "--bucket-cap-mb=0.05"), "train") == 0
    for stage, record in enumerate(map(tiny.run_json, outs)):
        assert (record["world_size"], record["stage"]) == (2, stage)
        assert tiny.equal_part(record) == tiny.equal_part(one_rank.record)
        check_bytes(record)


def test_ranks_that_are_asked_to_end_save_the_same_step(text: Path, tmp_path: Path) -> None:
    saves, begin = (f"--checkpoint={tmp_path / 'saved'}", "--steps=100000"), ("-m", "zero.commands.cli", "train")
    started = subprocess.Popen(
        [sys.executable, *begin, *tiny.flags(text, tmp_path, "--ranks=2", "--stage=3", *saves)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tiny.ROOT,
    )
    assert started.stdout is not None
    for line in started.stdout:
        if line.startswith("step 10/"):
            started.terminate()
        if line.startswith("stopped: "):
            break
    assert started.wait(tiny.LIMIT) == 128 + signal.SIGTERM
    (step,) = re.findall(r"^stopped: rank \d got SIGTERM: all ranks have saved step (\d+) and end$", line)
    assert max(steps_in(tmp_path / "saved")) == int(step)
