"""A `zero train` that is resumed is the undisturbed one, and a folder that may not be gone on from is one error."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from zero import ZeroOptimizer, open_checkpoint, save
from zero.checkpoint.folder.directory import LockedDirectory
from zero.checkpoint.write.save_folder import SaveFolder
from zero.commands import cli
from zero.commands.train.data import Batch, Corpus

from ..support.rows import rows
from .conftest import MICRO_BATCHES, RunOutput, Train, equal_part, flags, saved_steps

STEPS = 6
Flags = tuple[str, ...]


@pytest.fixture
def copied(one_rank: RunOutput, tmp_path: Path) -> Path:
    """Return a copy of the checkpoints of `one_rank`."""
    return shutil.copytree(one_rank.checkpoints, tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("first", "then", "both"),
    rows(
        [
            ((), ("--stage=3", "--bucket-cap-mb=0.05"), ("--optimizer=sgd", "--lr=0.01")),
        ],
        [
            (("--stage=3",), ("--stage=1", "--collective=ring"), ("--precision=bf16", "--fused")),
            (("--stage=0",), ("--stage=2",), ("--precision=fp16", "--clip=0.5")),
        ],
    ),
)
def test_a_resumed_run_is_the_undisturbed_one(
    trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Flags, then: Flags, both: Flags
) -> None:
    undisturbed = trained(f"--checkpoint={tmp_path / 'undisturbed'}", *both, steps=STEPS)
    taken: list[tuple[int, int]] = []
    micro_batch = Corpus.micro_batch

    def noted(this: Corpus, seed: int, step: int, index: int, batch: int, sequence: int) -> Batch:
        taken.append((step, index))
        return micro_batch(this, seed, step, index, batch, sequence)

    monkeypatch.setattr(Corpus, "micro_batch", noted)
    folder = f"--checkpoint={tmp_path / 'checkpoints'}"
    before = trained(folder, "--checkpoint-every=2", *first, *both, steps=3)
    after = trained(folder, "--resume=auto", *then, *both, steps=STEPS)
    assert saved_steps(tmp_path / "checkpoints") == [2, 3, STEPS]
    assert equal_part(after) == equal_part(undisturbed)
    assert before["losses"] == undisturbed["losses"][:3]
    assert taken == [(step, index) for step in range(STEPS) for index in range(MICRO_BATCHES)]
    ends = [open_checkpoint(tmp_path / name / "step-00000006") for name in ("checkpoints", "undisturbed")]
    assert ends[0].content == ends[1].content
    assert ends[0].state["scaler"].get("_growth_tracker", STEPS) == STEPS


def test_a_signal_to_the_only_rank_saves_the_step_and_the_same_command_goes_on(
    trained: Train,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    micro_batch = Corpus.micro_batch

    def ended(this: Corpus, seed: int, step: int, *place: int) -> Batch:
        if (step, place[0]) == (1, 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return micro_batch(this, seed, step, *place)

    more = ("--checkpoint-every=100", "--resume=auto")
    saves = (f"--checkpoint={tmp_path / 'checkpoints'}", *more)
    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "micro_batch", ended)
        assert cli.main(flags(text, tmp_path / "out", "--ranks=1", *saves), "train") == 128 + signal.SIGTERM
    assert "stopped: rank 0 got SIGTERM: all ranks have saved step 2 and end" in capsys.readouterr().err
    after = trained(*saves)
    assert "goes on from step 2 on 1 rank" in capsys.readouterr().out
    assert equal_part(after) == equal_part(trained(f"--checkpoint={tmp_path / 'undisturbed'}", *more))


def test_when_no_step_is_left_the_report_is_written_again(
    trained: Train, one_rank: RunOutput, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = trained(f"--checkpoint={copied}", "--resume=auto")
    assert equal_part(again) == equal_part(one_rank.record)
    assert again["step_ms_median"] is None
    assert again["bytes_per_rank"]["parameters"] == one_rank.record["bytes_per_rank"]["parameters"]
    shown = capsys.readouterr().out
    assert "goes on from step 3 on 1 rank\n" in shown
    assert "no step was left to take\n" in shown


def test_a_broken_checkpoint_is_reported_and_replaced(trained: Train, one_rank: RunOutput, copied: Path) -> None:
    contents = [open_checkpoint(path).content for path in sorted(copied.glob("step-*"))]
    broken = copied / "step-00000003" / "optimizer" / "optimizer-00001-of-00001.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1] + bytes([broken.read_bytes()[-1] ^ 1]))
    with pytest.warns(
        RuntimeWarning, match=r"optimizer-00001-of-00001.safetensors is broken at block 0.*step-00000002 is"
    ):
        again = trained(f"--checkpoint={copied}", "--resume=auto")
    assert equal_part(again) == equal_part(one_rank.record)
    for path, content in zip(sorted(copied.glob("step-*")), contents, strict=True):
        open_checkpoint(path).verify()
        assert open_checkpoint(path).content == content


def test_a_last_save_that_fails_is_an_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_files(self: SaveFolder, sizes: dict[str, int]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SaveFolder, "make_files", make_files)
    folder = tmp_path / "checkpoints"
    assert cli.main(flags(text, tmp_path / "out", "--ranks=1", f"--checkpoint={folder}"), "train") == 1
    assert f"error: rank 0 could not save {folder}/step-00000003: " in capsys.readouterr().err
    assert saved_steps(folder) == []


def test_a_folder_that_may_not_be_gone_on_from_is_named_and_stays(
    text: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(code: int, folder: Path, *more: str) -> str:
        before = {path: path.read_bytes() for path in folder.glob("step-*/*.json")}
        out = tmp_path / "out"
        assert cli.main(flags(text, out, "--ranks=1", "--steps=4", f"--checkpoint={folder}", *more), "train") == code
        assert {path: path.read_bytes() for path in folder.glob("step-*/*.json")} == before
        return capsys.readouterr().err

    said = f"error: --checkpoint {copied} has checkpoints, the newest of step 3: go on from it with --resume auto, or"
    assert error(2, copied).startswith(said)
    other = tmp_path / "other" / "step-00000001"
    other.parent.mkdir()
    save(other, ZeroOptimizer(torch.nn.Linear(2, 2), torch.optim.SGD, lr=0.1), step=1)
    said = f"error: {other} was not saved by zero train: its state has no 'run'\n"
    assert error(2, other.parent, "--resume=auto") == said
    holder = LockedDirectory(copied, "0" * 16)
    assert f"still trains into {copied}: stop it, or use another folder" in error(1, copied, "--resume=auto")
    holder.close()
    newer = copied / "step-00000003" / "checkpoint.json"
    newer.write_text(newer.read_text().replace('"version": 1', '"version": 2'))
    assert f"error: {newer}: it has version 2 of the format" in error(1, copied, "--resume=auto")


DECIDING = {
    "--seed=1": "--seed is 1, but the run that saved {} had 0: a run that goes on needs the same",
    "--preset=small": "--preset is small, but the run that saved {} had tiny: ",
    "--batch=3": "--batch is 3, but the run that saved {} had 2: ",
    "--sequence=25": "--sequence is 25, but the run that saved {} had 24: ",
    "--micro-batches=8": "--micro-batches is 8, but the run that saved {} had 4: ",
    "--optimizer=adam": "--optimizer is adam, but the run that saved {} had adamw: ",
    "--lr=0.5": "--lr is 0.5, but the run that saved {} had 0.001: ",
    "--weight-decay=0.5": "--weight-decay is 0.5, but the run that saved {} had None: ",
    "--fused": "--fused is True, but the run that saved {} had False: ",
    "--precision=bf16": "--precision is bf16, but the run that saved {} had fp32: ",
    "--clip=0.25": "--clip is 0.25, but the run that saved {} had None: ",
    "--threads=2": "--threads is 2, but the run that saved {} had 1: ",
    "--data=OTHER": "--data is text of SHA-256 ",
    "--steps=2": "--steps is 2, but {} was saved after step 3: it must be at least that",
}


@pytest.mark.parametrize("flag", DECIDING)
def test_a_flag_that_would_change_the_bits_is_named_with_both_values(
    flag: str, text: Path, one_rank: RunOutput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, path = tmp_path / "other", one_rank.checkpoints / "step-00000003"
    other.write_text(text.read_text() + "and no bottle more\n")
    more = ["--steps=6", f"--checkpoint={one_rank.checkpoints}", "--resume=auto", flag.replace("OTHER", str(other))]
    assert cli.main(flags(text, tmp_path / "out", *more), "train") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {DECIDING[flag].format(path)}")
    assert error.count("\n") == 1
