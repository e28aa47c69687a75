"""The exit code of every command after wrong input, and rarely used options of `zero train`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from zero import ZeroOptimizer, save
from zero.commands import cli, plots
from zero.commands.train import command as train
from zero.commands.train import data


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of a launcher."""
    for name in ("WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_the_zero_command_reads_its_flags_with_typer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(train, "run", lambda config: given.append(config) or 7)
    for flags, code in ((["--stage", "1", "--lr=0.5", "--fused"], 7), (["--steps", "0"], 2)):
        monkeypatch.setattr(sys, "argv", ["zero", "train", *flags])
        assert cli.main() == code
    assert [(config.stage, config.lr, config.fused) for config in given] == [(1, 0.5, True)]
    assert capsys.readouterr().err == "error: --steps is 0: it must be at least 1\n"


WRONG = {
    "zero train": ["train", "--stage=7"],
    "zero train, a flag without the one that it needs": ["train", "--checkpoint-every=2"],
    "zero train, a file that is missing": ["train", "--data={}/no"],
    "zero train, a folder that cannot be written": ["train", "--ranks=2", "--steps=1", "--checkpoint=/proc/no"],
    "zero plan": ["plan", "--preset=tiny", "--cluster=h10:8", "--out={}"],
    "zero verify": ["verify", "no_such_module:arguments"],
    "zero verify, arguments": ["verify", "tests.commands.verified:unknown_arguments"],
    "zero checkpoint list": ["checkpoint", "list", "{}/no"],
    "zero checkpoint verify": ["checkpoint", "verify", "{}/file"],
    "zero checkpoint verify, no checkpoint": ["checkpoint", "verify", "{}"],
    "zero checkpoint export": ["checkpoint", "export", "{}/runs", "--to=torch", "{}/out"],
    "zero checkpoint export, below a file": ["checkpoint", "export", "{}/runs/step-00000003", "--to=hf", "{}/file/out"],
    "zero checkpoint export, there already": ["checkpoint", "export", "{}/runs/step-00000003", "--to=hf", "{}/file"],
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.by_default
def test_wrong_input_is_one_line_and_exit_code_2_in_every_command(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "launch_ranks", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no archive")
    (tmp_path / "runs").mkdir()
    save(tmp_path / "runs" / "step-00000003", ZeroOptimizer(nn.Linear(3, 3)), step=3)
    assert cli.main([argument.replace("{}", str(tmp_path)) for argument in WRONG[what]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    if what == "zero checkpoint export":
        assert error.endswith(f"; it is a folder of checkpoints, and the newest is {tmp_path}/runs/step-00000003\n")


def test_an_interrupt_is_one_word_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "launch_ranks", interrupted)
    assert cli.main([f"--out={tmp_path}", "--ranks=2"], "train") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_error_is_told_where_its_traceback_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        (tmp_path / train.TRACEBACK).mkdir()
        raise RuntimeError("the loss\nis gone")

    monkeypatch.setattr(train, "launch_ranks", fail)
    assert cli.main([f"--out={tmp_path}", "--ranks=2"], "train") == 1
    assert capsys.readouterr().err == "error: the loss is gone\n"


def test_where_there_is_no_library_source_the_error_says_what_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_stdlib", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match="name a file or a folder of text with --data"):
        data.load_corpus(None, 16)


def test_a_long_run_is_drawn_with_a_running_mean(tmp_path: Path) -> None:
    assert plots._windows([0.0, 3.0, 6.0, 9.0], 3) == [[0.0, 3.0], [0.0, 3.0, 6.0], [3.0, 6.0, 9.0], [6.0, 9.0]]
    plots.draw_loss(tmp_path / "loss.png", "a long run", [float(step) for step in range(60)], 8.0)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
