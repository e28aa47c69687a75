"""A signal to the only rank of `zero train` saves its step, and the same command goes on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from zero.commands import cli
from zero.commands.train.rank import RankTraining

from ..support.torchrun import Cadence

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.usefixtures("bare")
def test_a_signal_to_the_only_rank_saves_the_step_and_the_same_command_goes_on(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cadence = Cadence(steps=6, micro_batches=2, every=100, more=("--sequence=24", f"--data={text}"))
    backwards = RankTraining._backwards

    def ended(self: RankTraining, step: int) -> list[float]:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return backwards(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(RankTraining, "_backwards", ended)
        assert cli.main(["--ranks=1", *cadence.flags(tmp_path / "a", 2)], "train") == 128 + signal.SIGTERM
    assert "stopped: rank 0 got SIGTERM: all ranks have saved step 4 and end" in capsys.readouterr().err
    assert cli.main(["--ranks=1", *cadence.flags(tmp_path / "a", 2)], "train") == 0
    assert "goes on from step 4 on 1 rank" in capsys.readouterr().out
    assert cli.main(["--ranks=1", *cadence.flags(tmp_path / "b", 2)], "train") == 0
    found, undisturbed_run = (json.loads((tmp_path / name / "out" / "run.json").read_text()) for name in "ab")
    assert found["params_sha256"] == undisturbed_run["params_sha256"]
    assert found["losses"] == undisturbed_run["losses"]
