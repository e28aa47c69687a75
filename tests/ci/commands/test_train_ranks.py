"""`zero train` has the bits of the plain loop on any number of ranks."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.conftest import (
    LIMIT,
    ROOT,
    RunOutput,
    Train,
    command,
    equal_part,
    flags,
    plain_sha256,
    run_json,
    trained_by_command,
)
from zero.checkpoint.folder.directory import steps_in
from zero.commands import cli

pytestmark = [pytest.mark.usefixtures("bare"), pytest.mark.timeout(3 * LIMIT)]


def check_bytes(record: dict[str, Any]) -> None:
    """Assert that ranks have held what the formulas say."""
    assert len(record["ranks"]) == record["world_size"]
    for facts in record["ranks"]:
        for kind in ("parameters", "gradients", "optimizer"):
            assert facts["measured"][kind] == facts["formula"][kind]
        assert facts["measured"]["scratch_peak"] <= facts["formula"]["scratch_peak"]


def test_every_way_to_start_two_ranks_gives_the_parameters_and_losses_of_one(
    text: Path, tmp_path: Path, one_rank: RunOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`zero train`, torchrun, and the function that `python -m zero.train` calls."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    outs = [tmp_path / str(stage) for stage in range(3)]
    trained_by_command(text, outs[0], "--ranks=2", "--stage=0")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")  # prints a line on OMP_NUM_THREADS
    ended = command(*torchrun, "-m", "zero.train", *flags(text, outs[1], "--stage=1"))
    assert ended.returncode == 0, ended.stderr
    assert cli.main(flags(text, outs[2], "--stage=2", "--bucket-cap-mb=0.05"), "train") == 0
    for stage, record in enumerate(map(run_json, outs)):
        assert (record["world_size"], record["stage"]) == (2, stage)
        assert equal_part(record) == equal_part(one_rank.record)
        check_bytes(record)


@pytest.mark.parametrize(
    ("ranks", "more", "plain"),
    [
        (5, ("--stage=2", "--precision=fp16", "--clip=0.5"), {"precision": torch.float16, "clip": 0.5}),
        (3, ("--stage=3", "--reshard-after-forward=false", "--precision=bf16"), {"precision": torch.bfloat16}),
        (2, ("--stage=3", "--collective=pairwise"), {}),
    ],
    ids=lambda value: "".join(value) if isinstance(value, tuple) else str(value),
)
def test_ranks_have_the_hash_of_the_plain_loop_and_the_losses_of_one_rank(
    text: Path, tmp_path: Path, trained: Train, ranks: int, more: tuple[str, ...], plain: dict[str, Any]
) -> None:
    """Four micro-batches on two ranks, on three, and on five, where one has none at all."""
    record = trained_by_command(text, tmp_path / "ranks", f"--ranks={ranks}", "--bucket-cap-mb=0.05", *more)
    assert record["params_sha256"] == plain_sha256(text, **plain)
    check_bytes(record)
    alone = [flag for flag in more if flag.startswith(("--precision", "--clip"))]
    assert record["losses"] == trained(*alone)["losses"]


def test_ranks_that_are_asked_to_end_save_the_same_step(text: Path, tmp_path: Path) -> None:
    """The parent of the ranks gets SIGTERM, and passes it on."""
    saves, begin = (f"--checkpoint={tmp_path / 'saved'}", "--steps=100000"), ("-m", "zero.commands.cli", "train")
    started = subprocess.Popen(
        [sys.executable, *begin, *flags(text, tmp_path, "--ranks=2", "--stage=3", *saves)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert started.stdout is not None
    for line in started.stdout:
        if line.startswith("step 10/"):
            started.terminate()
        if line.startswith("stopped: "):
            break
    assert started.wait(LIMIT) == 128 + signal.SIGTERM
    (step,) = re.findall(r"^stopped: rank \d got SIGTERM: all ranks have saved step (\d+) and end$", line)
    assert max(steps_in(tmp_path / "saved")) == int(step)
