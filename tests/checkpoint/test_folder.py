"""The newest checkpoints are kept; only what is known to be ours is removed, set aside or replaced."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import zero
from zero import CheckpointError, CheckpointManager, ZeroOptimizer
from zero.checkpoint.folder.directory import complete_steps, steps_in
from zero.checkpoint.read.reader import Checkpoint
from zero.commands.checkpoint.command import verify

from ..support.errors import error_of
from ..support.limits import PATIENT
from ..support.warned import own
from .saved import aside, break_one, entries, names, saved, step_folder, tree

NONCE = "0123456789abcdef"


@pytest.mark.assumes("no warning")
def test_a_save_below_the_newest_step_is_the_newest_and_what_was_above_is_set_aside_by_name(
    tmp_path: Path, optimizer: ZeroOptimizer
) -> None:
    saved(tmp_path, optimizer, 2, 4, 6, 8)
    content = zero.open_checkpoint(step_folder(tmp_path, 8)).content
    with CheckpointManager(tmp_path, optimizer, max_to_keep=2) as checkpoints:
        checkpoints.restore(2)
        with pytest.warns(RuntimeWarning, match="step-00000003 is the newest checkpoint now") as warned:
            checkpoints.save(3, blocking=True)
        (text,) = {str(found.message) for found in own(warned)}
        kept = sorted(tmp_path.glob("abandoned-*"))
        assert all(path.name in text for path in kept)
        assert (checkpoints.all_steps(), checkpoints.latest_step()) == ([2, 3], 3)
        words = r"was set aside as .*abandoned-step-00000004-[0-9a-f]{16}.*zero\.load"
        with pytest.raises(CheckpointError, match=words):
            checkpoints.restore(4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in (5, 6, 7):  # steps of the branch that was left are free
                checkpoints.save(step, blocking=True)
        restored = checkpoints.restore()
        assert restored is not None
        assert restored.step == 7
    assert aside(tmp_path) == [f"abandoned-step-0000000{step}" for step in (4, 6, 8)], "retention counts none"
    assert zero.load(kept[-1], optimizer).content == content
    assert verify(kept[-1]) == 0
    kept[-1].rename(step_folder(tmp_path, 8))
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        assert checkpoints.all_steps() == [6, 7, 8]


@pytest.mark.parametrize("step", [4, 5, 6])
def test_the_first_save_after_a_rollback_sets_aside_all_that_was_saved_after_the_restored_step(
    step: int, tmp_path: Path, optimizer: ZeroOptimizer
) -> None:
    """Also its own step, or one below it: nothing of the branch that was given up stays among those of the other."""
    saved(tmp_path, optimizer, 2, 4, 6)
    (step_folder(tmp_path, 6) / "checkpoint.json").write_text("{")
    with CheckpointManager(tmp_path, optimizer, max_to_keep=2) as checkpoints:
        checkpoints.restore(2)
        with pytest.raises(FileExistsError, match="step-00000002 exists"):
            checkpoints.save(2)
        with pytest.warns(RuntimeWarning, match="what was there of steps above 2 is set aside") as warned:
            checkpoints.save(step, blocking=True)
        assert len(own(warned)) == 1
        checkpoints.save(8, blocking=True)
        assert checkpoints.all_steps() == [step, 8], "this is no rollback, and retention counts both"
        with pytest.raises(FileExistsError, match="step-00000008 exists"):
            checkpoints.save(8)
        checkpoints.restore(step)
        checkpoints.save(8, overwrite=True, blocking=True)
        assert checkpoints.latest_step() == 8
        step_folder(tmp_path, 10).symlink_to(step_folder(tmp_path, 8))
        with pytest.raises(FileExistsError, match="step-00000010 exists"):
            checkpoints.save(10)
    assert aside(tmp_path) == ["abandoned-step-00000004", "abandoned-step-00000006"], "8 was to be replaced"


def test_the_newest_are_kept_and_those_of_a_period_beside_them(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    with CheckpointManager(tmp_path, optimizer, max_to_keep=2, keep_period=4) as checkpoints:
        for step in range(1, 11):
            checkpoints.save(step).result(PATIENT)
            counted = [each for each in range(1, step + 1) if each % 4][-2 if step % 4 else -1 :]
            assert checkpoints.all_steps() == sorted({*counted, *range(4, step + 1, 4)})
    assert entries(tmp_path) == names(4, 8, 9, 10)


def test_a_broken_checkpoint_is_neither_counted_nor_removed(
    tmp_path: Path, optimizer: ZeroOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, optimizer, 1, 2, 3, 4)
    break_one(tmp_path, 3)
    (step_folder(tmp_path, 4) / "checkpoint.json").write_text("{")
    read: list[str] = []
    verify = Checkpoint.verify

    def noted(this: Checkpoint) -> None:
        read.append(this.path.name)
        verify(this)

    monkeypatch.setattr(Checkpoint, "verify", noted)
    with CheckpointManager(tmp_path, optimizer, max_to_keep=2) as checkpoints:
        checkpoints.save(5, blocking=True)
        assert entries(tmp_path) == names(1, 2, 3, 4, 5), "which of them is whole is not known"
        checkpoints.save(6, blocking=True)
    assert entries(tmp_path) == names(3, 4, 5, 6)
    assert read == ["step-00000003"], "what this run has written is whole"


def test_a_checkpoint_with_anything_foreign_is_left_and_named(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    saved(tmp_path, optimizer, 1, 2)
    mine = step_folder(tmp_path, 1) / "averages" / "ema" / "ema-00001-of-00001.safetensors"  # of no manifest
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    (step_folder(tmp_path, 2) / "ranks" / "rank-00007.safetensors").symlink_to("/etc/hostname")
    before = tree(tmp_path)
    checkpoints = CheckpointManager(tmp_path, optimizer, max_to_keep=1)
    with pytest.warns(RuntimeWarning, match=r"step-00000001 is left"):
        checkpoints.save(3, blocking=True)
    checkpoints.save(4)
    with pytest.warns(RuntimeWarning, match=r"step-00000001 is left, because it has averages/ema/ema") as warned:
        checkpoints.close()
    assert {found.filename for found in own(warned)} == {__file__}
    assert set(before) <= set(tree(tmp_path))
    assert complete_steps(tmp_path) == [1, 2, 4]


def left_under_way(folder: Path) -> Path:
    for name in ("notes", "model", "averages/ema", "ranks"):
        (folder / name).mkdir(parents=True)
    for name in ("notes/ready", "notes/.rank-00000.done.part", "state.safetensors"):
        (folder / name).touch()
    (folder / "notes" / "nonce").write_text(folder.name[-16:])
    (folder / "notes" / "rank-00001.done").write_text("{}")
    (folder / "model" / "model-00001-of-00001.safetensors").write_bytes(bytes(100))
    return folder


@pytest.mark.assumes("no warning")
def test_what_a_dead_run_of_ours_has_left_is_removed(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    saved(tmp_path, optimizer, 1, 2, 3)
    left_under_way(tmp_path / f".tmp-step-00000009-{NONCE}")
    (tmp_path / f".tmp-step-00000010-{NONCE}").mkdir()
    (tmp_path / f".tmp-step-00000011-{NONCE}" / "notes").mkdir(parents=True)
    (tmp_path / f".tmp-step-00000011-{NONCE}" / "notes" / ".nonce.part").write_text(NONCE[:3])
    nonce = zero.open_checkpoint(step_folder(tmp_path, 3)).manifest.written_by["nonce"]
    step_folder(tmp_path, 3).rename(tmp_path / f".tmp-step-00000003-{nonce}")  # all but renamed
    trash = step_folder(tmp_path, 2).rename(tmp_path / f".trash-step-00000002-{NONCE}")
    (trash / "state.safetensors").unlink()  # half removed
    (tmp_path / f".trash-step-00000007-{NONCE}").mkdir()
    (tmp_path / f".probe-{NONCE}").write_bytes(bytes([1, 1, 0, 2, 3]))
    (tmp_path / f".probe-{NONCE}.1").write_bytes(bytes([2, 2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CheckpointManager(tmp_path, optimizer).close()
    assert entries(tmp_path) == names(1)


def test_what_is_not_ours_is_left_and_named(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    """A folder with another nonce, with a file or a link inside, a link, and trash without a nonce."""
    saved(tmp_path, optimizer, 1)
    outside = left_under_way(tmp_path.parent / f"{tmp_path.name} outside" / f"x-{NONCE}").parent
    foreign, with_file, with_link = (left_under_way(tmp_path / f".tmp-step-0000000{n}-{NONCE}") for n in (1, 2, 3))
    (foreign / "notes" / "nonce").write_text("f" * 16)
    (with_file / "model" / "mine.txt").write_text("kept")
    (with_link / "ranks").rmdir()
    (with_link / "ranks").symlink_to(outside)
    link, trash = tmp_path / f".tmp-step-00000004-{NONCE}", tmp_path / f".trash-step-00000005-{NONCE}"
    link.symlink_to(outside / f"x-{NONCE}")
    trash.mkdir()
    (trash / "checkpoint.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f".tmp-other-{NONCE}").mkdir()
    step_folder(tmp_path, 8).symlink_to(step_folder(tmp_path, 1))
    before, before_outside = tree(tmp_path), tree(outside)
    with pytest.warns(RuntimeWarning) as warned:
        checkpoints = CheckpointManager(tmp_path, optimizer, max_to_keep=1)
    texts = " ".join(str(found.message) for found in warned)
    for folder in (foreign, with_file, with_link, link, trash):
        assert f"{folder} is left, because" in texts
    assert {found.filename for found in own(warned)} == {__file__}
    assert checkpoints.all_steps() == [1]
    saving = checkpoints.save(2, blocking=True)
    checkpoints.close()
    assert tree(outside) == before_outside
    new = {"step-00000002", *(f"step-00000002/{path}" for path in tree(saving.path))}
    assert set(tree(tmp_path)) == {path for path in before if not path.startswith("step-00000001")} | new


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    for name in ("step-5", "step-000000007", "step-00000006x", "Step-00000008", "step-00000004"):
        (tmp_path / name).mkdir()
    assert list(steps_in(tmp_path)) == [4]
    (step_folder(tmp_path, 4) / "weights.bin").touch()
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        assert (checkpoints.all_steps(), checkpoints.latest_step()) == ([], None)
        with pytest.raises(CheckpointError, match=r"step-00000004 is not a checkpoint: it has no checkpoint\.json"):
            checkpoints.restore(4)
        with pytest.raises(CheckpointError, match="step-00000009 is not a checkpoint"):
            checkpoints.restore(9)


PUTS: dict[str, Callable[[Path], object]] = {
    "a file inside": lambda target: (target / "thesis.txt").write_text("mine"),
    "a link inside": lambda target: (target / "model" / "config.json").symlink_to("/etc/hostname"),
    "a link": lambda target: target.symlink_to(target.rename(target.parent.parent / "elsewhere")),
    "a file": lambda target: (target.rename(target.parent.parent / "elsewhere"), target.write_text("mine")),
    "no manifest": lambda target: (target / "checkpoint.json").unlink(),
}


@pytest.mark.parametrize("what", PUTS)
def test_only_a_checkpoint_is_replaced(what: str, tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    """Whatever its files are called; and a folder without files."""
    saved(tmp_path / "run", optimizer, 1)
    target = step_folder(tmp_path / "run", 1)
    PUTS[what](target)
    before, words = tree(tmp_path), "step-00000001 is left, because it "
    if what == "no manifest":
        words = "step-00000001 is no checkpoint, since it has no checkpoint.json: save elsewhere"
    else:  # as of a run that has died
        with CheckpointManager(tmp_path / "run", optimizer) as checkpoints:
            assert words in error_of(checkpoints.save, 1, overwrite=True)
    assert words in error_of(zero.save, target, optimizer, overwrite=True)
    assert tree(tmp_path) == before
    (tmp_path / "empty").mkdir()
    zero.save(tmp_path / "empty", optimizer, overwrite=True)
    zero.open_checkpoint(tmp_path / "empty").verify()
