"""A `zero train` that gets a signal saves and goes on as if undisturbed; a folder that cannot be used is one error."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from zero.checkpoint.folder.directory import LockedDirectory, steps_in
from zero.checkpoint.write.save_folder import SaveFolder
from zero.examples.train import ByteModel

from .conftest import MICRO_BATCHES, STEPS, Train


def test_a_signal_to_the_only_rank_saves_the_step_and_the_same_command_goes_on(
    trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, calls = ByteModel.forward, itertools.count(1)

    def ended(this: ByteModel, tokens: torch.Tensor) -> torch.Tensor:
        if next(calls) == MICRO_BATCHES + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(this, tokens)

    saves = (f"--checkpoint={tmp_path / 'checkpoints'}", "--save-every=100")
    with monkeypatch.context() as patch:
        patch.setattr(ByteModel, "forward", ended)
        trained(*saves, code=128 + signal.SIGTERM)
    assert "stopped: rank 0 got SIGTERM: all ranks have saved step 2 and end\n" in capsys.readouterr().out
    after = trained(*saves)
    assert "stage 2 on 1 cpu rank(s): step 2 of 3 is taken\n" in capsys.readouterr().out
    assert after["params_sha256"] == trained()["params_sha256"]


def test_a_last_save_that_fails_and_a_folder_of_another_run_are_errors(
    trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SaveFolder, "make_files", Mock(side_effect=OSError(28, "No space left on device")))
    folder = tmp_path / "checkpoints"
    trained(f"--checkpoint={folder}", code=1)
    assert f"error: rank 0 could not save {folder}/step-{STEPS:08d}: " in capsys.readouterr().err
    assert not steps_in(folder)
    holder = LockedDirectory(folder, "0" * 16)
    trained(f"--checkpoint={folder}", code=1)
    assert f"still trains into {folder}: stop it, or use another folder" in capsys.readouterr().err
    holder.close()
