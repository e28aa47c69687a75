"""A `zero train` that is resumed is the undisturbed one, and a folder that may not be gone on from is one error."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from zero import ZeroOptimizer, open_checkpoint, save
from zero.checkpoint.folder.directory import LockedDirectory
from zero.checkpoint.write.save_folder import SaveFolder
from zero.commands import cli
from zero.examples.train import ByteModel

from ..support.rows import rows
from .conftest import MICRO_BATCHES, RunOutput, Train, flags, saved_steps

STEPS = 6
Flags = tuple[str, ...]


@pytest.fixture
def copied(one_rank: RunOutput, tmp_path: Path) -> Path:
    return shutil.copytree(one_rank.checkpoints, tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("first", "then", "both"),
    rows(
        [((), ("--stage=3", "--bucket-cap-mb=0.05"), ("--lr=0.01",))],
        [(("--stage=3",), ("--stage=1", "--collective=ring"), ("--precision=fp16", "--clip=0.5"))],
    ),
)
def test_a_resumed_run_is_the_undisturbed_one(
    trained: Train, tmp_path: Path, first: Flags, then: Flags, both: Flags
) -> None:
    undisturbed = trained(f"--checkpoint={tmp_path / 'undisturbed'}", *both, steps=STEPS)
    folder = tmp_path / "checkpoints"
    trained(f"--checkpoint={folder}", "--save-every=2", *first, *both, steps=STEPS)
    for step in (4, STEPS):
        shutil.rmtree(folder / f"step-{step:08d}")
    after = trained(f"--checkpoint={folder}", *then, *both, steps=STEPS)
    assert saved_steps(folder) == [2, STEPS]
    assert after["params_sha256"] == undisturbed["params_sha256"]
    assert after["validation_loss"] == undisturbed["validation_loss"]
    assert after["losses"] == {"6": undisturbed["losses"]["6"]}
    ends = [open_checkpoint(tmp_path / name / "step-00000006") for name in ("checkpoints", "undisturbed")]
    assert ends[0].content == ends[1].content


def test_a_signal_to_the_only_rank_saves_the_step_and_the_same_command_goes_on(
    trained: Train, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, calls = ByteModel.forward, itertools.count(1)

    def ended(this: ByteModel, tokens: torch.Tensor) -> torch.Tensor:
        if next(calls) == MICRO_BATCHES + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(this, tokens)

    saves = (f"--checkpoint={tmp_path / 'checkpoints'}", "--save-every=100")
    with monkeypatch.context() as patch:
        patch.setattr(ByteModel, "forward", ended)
        assert cli.main(flags(text, tmp_path / "out", "--ranks=1", *saves), "train") == 128 + signal.SIGTERM
    assert "stopped: rank 0 got SIGTERM: all ranks have saved step 2 and end\n" in capsys.readouterr().out
    after = trained(*saves)
    assert "stage 2 on 1 cpu rank(s): step 2 of 3 is taken\n" in capsys.readouterr().out
    assert after["params_sha256"] == trained()["params_sha256"]


def test_a_last_save_that_fails_is_an_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SaveFolder, "make_files", Mock(side_effect=OSError(28, "No space left on device")))
    folder = tmp_path / "checkpoints"
    assert cli.main(flags(text, tmp_path / "out", "--ranks=1", f"--checkpoint={folder}"), "train") == 1
    assert f"error: rank 0 could not save {folder}/step-00000003: " in capsys.readouterr().err
    assert saved_steps(folder) == []


def test_a_folder_that_may_not_be_gone_on_from_is_named_and_stays(
    text: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(folder: Path, *more: str) -> str:
        before = {path: path.read_bytes() for path in folder.glob("step-*/*.json")}
        assert cli.main(flags(text, tmp_path / "out", "--ranks=1", f"--checkpoint={folder}", *more), "train") == 1
        assert {path: path.read_bytes() for path in folder.glob("step-*/*.json")} == before
        return capsys.readouterr().err

    said = f"error: {copied} has a run of 3 steps, not 4: give the --steps, --epochs and --micro-batches with which it"
    assert error(copied, "--steps=4").startswith(said)
    assert "batch_size=2, and this sampler has batch_size=3" in error(copied, "--batch=3")
    assert "error: " in error(copied, "--width=64")
    other = tmp_path / "other" / "step-00000001"
    other.parent.mkdir()
    save(other, ZeroOptimizer(torch.nn.Linear(2, 2), torch.optim.SGD, lr=0.1), step=1)
    assert error(other.parent).startswith("error: ")
    holder = LockedDirectory(copied, "0" * 16)
    assert f"still trains into {copied}: stop it, or use another folder" in error(copied)
    holder.close()
    newer = copied / "step-00000003" / "checkpoint.json"
    newer.write_text(newer.read_text().replace('"version": 1', '"version": 2'))
    assert f"error: {newer}: it has version 2 of the format" in error(copied)
