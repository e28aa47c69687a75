"""`zero train` with checkpoints: a resumed run is the undisturbed one, and what may not be resumed is one error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zero import ZeroOptimizer, open_checkpoint, save
from zero.checkpoint.folder.directory import LockedDirectory
from zero.checkpoint.write.save_folder import SaveFolder
from zero.commands import cli
from zero.commands.train import command as train
from zero.commands.train.data import Batch, Corpus

from .conftest import LIMIT, RunOutput, command, flags, run_json

pytestmark = pytest.mark.usefixtures("no_launcher")

STEPS = 6
EQUAL = ("params_sha256", "losses", "validation_bits_per_byte")
Train = Callable[..., dict[str, Any]]


@pytest.fixture
def trained(text: Path, tmp_path: Path, bare: None) -> Train:
    """Return a function that trains on one rank in this process, and returns the record of the run."""

    def run(*more: str, steps: int = STEPS) -> dict[str, Any]:
        out = tmp_path / "out"
        assert cli.main(flags(text, out, "--ranks=1", f"--steps={steps}", *more), "train") == 0
        return run_json(out)

    return run


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, which has nothing else."""
    names = sorted(path.name for path in folder.iterdir())
    assert names[0] == ".lock"
    return [int(name.removeprefix("step-")) for name in names[1:]]


def break_one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("first", "then", "both"),
    [
        ((), ("--stage=3", "--bucket-cap-mb=0.05"), ()),
        ((), ("--stage=0", "--collective=ring"), ("--clip=0.5", "--optimizer=sgd", "--lr=0.01")),
        (("--stage=3",), ("--stage=1",), ("--precision=bf16", "--fused")),
        (("--stage=0",), ("--stage=2",), ("--precision=fp16", "--clip=0.5")),
    ],
)
@pytest.mark.by_default("first3-then3-both3")
def test_a_resumed_run_is_the_undisturbed_one(
    trained: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: tuple[str, ...],
    then: tuple[str, ...],
    both: tuple[str, ...],
) -> None:
    undisturbed = trained(f"--checkpoint={tmp_path / 'undisturbed'}", *both)
    taken: list[tuple[int, int]] = []
    micro_batch = Corpus.micro_batch

    def noted(this: Corpus, seed: int, step: int, index: int, batch: int, sequence: int) -> Batch:
        taken.append((step, index))
        return micro_batch(this, seed, step, index, batch, sequence)

    monkeypatch.setattr(Corpus, "micro_batch", noted)
    folder = f"--checkpoint={tmp_path / 'checkpoints'}"
    before = trained(folder, "--checkpoint-every=2", *first, *both, steps=3)
    after = trained(folder, "--resume=auto", *then, *both)
    assert saved_steps(tmp_path / "checkpoints") == [2, 3, STEPS]
    assert {key: after[key] for key in EQUAL} == {key: undisturbed[key] for key in EQUAL}
    assert before["losses"] == undisturbed["losses"][:3]
    assert taken == [(step, index) for step in range(STEPS) for index in range(undisturbed["micro_batches"])]
    ends = [open_checkpoint(tmp_path / name / "step-00000006") for name in ("checkpoints", "undisturbed")]
    assert ends[0].content == ends[1].content
    assert ends[0].state["scaler"].get("_growth_tracker", STEPS) == STEPS


@pytest.mark.full
@pytest.mark.long
@pytest.mark.usefixtures("bare")
@pytest.mark.timeout(4 * LIMIT)
def test_a_run_goes_on_at_other_numbers_of_ranks_under_any_launcher(text: Path, tmp_path: Path) -> None:
    def arguments(name: str, *more: str) -> list[str]:
        return [*flags(text, tmp_path / name, "--micro-batches=6"), *more]

    assert cli.main(arguments("undisturbed", "--ranks=1", "--steps=9"), "train") == 0
    undisturbed, folder = run_json(tmp_path / "undisturbed"), f"--checkpoint={tmp_path / 'checkpoints'}"
    two = command("-m", "zero.commands.cli", "train", *arguments("two", "--ranks=2", "--stage=1", folder))
    assert (two.returncode, two.stderr) == (0, "")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m", "zero.train")
    three = command(*torchrun, *arguments("three", "--steps=6", "--stage=3", "--resume=auto", folder))
    assert three.returncode == 0, three.stderr
    assert "goes on from step 3 on 3 ranks" in three.stdout
    again = command(*torchrun, *arguments("again", "--steps=6", folder))
    assert again.returncode != 0
    assert "go on from it with --resume auto" in again.stderr
    assert cli.main(arguments("one", "--ranks=1", "--steps=9", "--resume=auto", folder), "train") == 0
    assert {key: run_json(tmp_path / "one")[key] for key in EQUAL} == {key: undisturbed[key] for key in EQUAL}


@pytest.mark.full
def test_a_run_that_saves_is_the_run_that_does_not(trained: Train, one_rank: RunOutput) -> None:
    plain = trained(steps=3)
    assert {key: one_rank.record[key] for key in EQUAL} == {key: plain[key] for key in EQUAL}
    assert saved_steps(one_rank.checkpoints) == [2, 3]


@pytest.mark.full
def test_when_no_step_is_left_the_report_is_written_again(
    trained: Train, one_rank: RunOutput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(one_rank.checkpoints, tmp_path / "checkpoints")
    again = trained(f"--checkpoint={tmp_path / 'checkpoints'}", "--resume=auto", steps=3)
    assert {key: again[key] for key in EQUAL} == {key: one_rank.record[key] for key in EQUAL}
    assert again["step_ms_median"] is None
    assert again["bytes_per_rank"]["parameters"] == one_rank.record["bytes_per_rank"]["parameters"]
    shown = capsys.readouterr().out
    assert "goes on from step 3 on 1 rank\n" in shown
    assert "no step was left to take\n" in shown


def test_a_broken_checkpoint_is_reported_and_replaced(trained: Train, one_rank: RunOutput, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(one_rank.checkpoints, folder)
    contents = [open_checkpoint(path).content for path in sorted(folder.glob("step-*"))]
    break_one_byte(folder / "step-00000003" / "optimizer" / "optimizer-00001-of-00001.safetensors")
    with pytest.warns(
        RuntimeWarning, match=r"optimizer-00001-of-00001.safetensors is broken at block 0.*step-00000002 is"
    ):
        again = trained(f"--checkpoint={folder}", "--resume=auto", steps=3)
    assert {key: again[key] for key in EQUAL} == {key: one_rank.record[key] for key in EQUAL}
    for path, content in zip(sorted(folder.glob("step-*")), contents, strict=True):
        open_checkpoint(path).verify()
        assert open_checkpoint(path).content == content


def test_a_checkpoint_of_a_newer_release_is_an_error_and_stays(
    text: Path, one_rank: RunOutput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(one_rank.checkpoints, folder)
    path = folder / "step-00000003" / "checkpoint.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    newer = path.read_text()
    more = ("--ranks=1", f"--checkpoint={folder}", "--resume=auto")
    assert cli.main(flags(text, tmp_path / "out", *more), "train") == 1
    assert f"error: {path}: it has version 2 of the format" in capsys.readouterr().err
    assert path.read_text() == newer


@pytest.mark.full
@pytest.mark.parametrize("failing", [2, 3])
def test_a_save_that_fails_ends_no_training_and_the_last_one_is_an_error(
    failing: int,
    trained: Train,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, calls = tmp_path / "checkpoints", iter(range(1, 10))

    def make_files(self: SaveFolder, sizes: dict[str, int]) -> None:
        if next(calls) == failing:
            raise OSError(28, "No space left on device")
        make(self, sizes)

    make = SaveFolder.make_files
    monkeypatch.setattr(SaveFolder, "make_files", make_files)
    more = (f"--checkpoint={folder}", "--checkpoint-every=1")
    if failing == 2:
        with pytest.warns(RuntimeWarning, match="the save of step 2 has failed, and training goes on: .*No space left"):
            trained(*more, steps=3)
    else:
        assert cli.main(flags(text, tmp_path / "out", "--ranks=1", "--steps=3", *more), "train") == 1
        assert f"error: rank 0 could not save {folder}/step-00000003: " in capsys.readouterr().err
    assert saved_steps(folder) == sorted({1, 2, 3} - {failing})


# ------------------------------------------------------------------------------------------------ what may not go on


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
@pytest.mark.by_default
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


def test_a_folder_with_checkpoints_is_not_written_to_by_another_run(
    text: Path, one_rank: RunOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "launch_ranks", lambda *_: pytest.fail("ranks were started"))
    saved = one_rank.checkpoints
    assert cli.main(flags(text, tmp_path / "out", f"--checkpoint={saved}", "--steps=6"), "train") == 2
    said = f"--checkpoint {saved} has checkpoints, the newest of step 3: go on from it with --resume auto, or name"
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_a_checkpoint_of_another_program_is_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step-00000001"
    save(path, ZeroOptimizer(torch.nn.Linear(2, 2), torch.optim.SGD, lr=0.1), step=1)
    more = (f"--checkpoint={tmp_path}", "--resume=auto")
    assert cli.main(flags(text, tmp_path / "out", *more), "train") == 2
    assert capsys.readouterr().err == f"error: {path} was not saved by zero train: its state has no 'run'\n"


@pytest.mark.full
def test_a_run_that_saves_to_the_same_folder_is_named(
    trained: Train, one_rank: RunOutput, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(one_rank.checkpoints, folder)
    holder = LockedDirectory(folder, "0" * 16)
    more = ("--ranks=1", "--steps=4", f"--checkpoint={folder}", "--resume=auto")
    assert cli.main(flags(text, tmp_path / "out", *more), "train") == 1
    assert f"still trains into {folder}: stop it, or use another folder" in capsys.readouterr().err
    holder.close()
    trained(f"--checkpoint={folder}", "--resume=auto", steps=4)
    assert saved_steps(folder) == [2, 3, 4]
