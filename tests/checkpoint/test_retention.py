"""The newest checkpoints are kept, and a save below them sets aside what is above; anything foreign stays."""

from __future__ import annotations

import errno
import shutil
import warnings
from pathlib import Path

import pytest

import zero
from zero import CheckpointError, CheckpointManager, ZeroOptimizer
from zero.checkpoint import files
from zero.checkpoint.folder.directory import complete_steps
from zero.checkpoint.read.reader import Checkpoint
from zero.commands.checkpoint.command import verify

from ..support.limits import PATIENT
from ..support.warned import own
from .saves import break_one, entries, names, saved, tree


def names_aside(folder: Path) -> list[str]:
    """Return the names of what was set aside, without the nonce."""
    return [name.rpartition("-")[0] for name in entries(folder) if name.startswith("abandoned-")]


@pytest.mark.assumes("no warning")
def test_a_save_below_the_newest_step_is_the_newest_and_what_was_above_is_set_aside_by_name(
    tmp_path: Path, optimizer: ZeroOptimizer
) -> None:
    saved(tmp_path, optimizer, 2, 4, 6, 8)
    content = zero.open_checkpoint(tmp_path / "step-00000008").content
    with CheckpointManager(tmp_path, optimizer, max_to_keep=2) as checkpoints:
        checkpoints.restore(2)
        with pytest.warns(RuntimeWarning, match="step-00000003 is the newest checkpoint now") as warned:
            checkpoints.save(3, blocking=True)
        (text,) = {str(found.message) for found in own(warned)}
        aside = sorted(path for path in tmp_path.iterdir() if path.name.startswith("abandoned-"))
        assert all(path.name in text for path in aside)
        assert (checkpoints.all_steps(), checkpoints.latest_step()) == ([2, 3], 3)
        with pytest.raises(
            CheckpointError, match=r"was set aside as .*abandoned-step-00000004-[0-9a-f]{16}.*zero\.load"
        ):
            checkpoints.restore(4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in (5, 6, 7):  # steps of the branch that was left are free
                checkpoints.save(step, blocking=True)
        restored = checkpoints.restore()
        assert restored is not None
        assert restored.step == 7
    assert names_aside(tmp_path) == [f"abandoned-step-0000000{step}" for step in (4, 6, 8)], "retention counts none"
    assert zero.load(aside[-1], optimizer).content == content
    assert verify(aside[-1]) == 0
    aside[-1].rename(tmp_path / "step-00000008")
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        assert checkpoints.all_steps() == [6, 7, 8]


@pytest.mark.parametrize("step", [4, 5, 6])
def test_the_first_save_after_a_rollback_sets_aside_all_that_was_saved_after_the_restored_step(
    step: int, tmp_path: Path, optimizer: ZeroOptimizer
) -> None:
    """Also its own step, or one below it: nothing of the branch that was given up stays among those of the other."""
    saved(tmp_path, optimizer, 2, 4, 6)
    (tmp_path / "step-00000006" / "checkpoint.json").write_text("{")
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
        assert names_aside(tmp_path) == ["abandoned-step-00000004", "abandoned-step-00000006"]
        checkpoints.restore(step)
        checkpoints.save(8, overwrite=True, blocking=True)
        restored = checkpoints.restore()
        assert restored is not None
        assert restored.step == 8
    assert names_aside(tmp_path) == ["abandoned-step-00000004", "abandoned-step-00000006"], "8 was to be replaced"


def test_a_rollback_lasts_until_a_save_is_complete(
    tmp_path: Path, optimizer: ZeroOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that fails, whichever rename does, leaves all; the next one sets the same steps aside."""
    saved(tmp_path, optimizer, 2, 4, 6)
    rename = files.rename
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        checkpoints.restore(2)
        for failing in range(3):  # 4, 6, and the new one
            left = [failing]

            def fails(source: Path, target: Path, left: list[int] = left) -> None:
                if source.parent == tmp_path and left:
                    left[0] -= 1
                    if left[0] < 0:
                        del left[0]
                        raise OSError(errno.EIO, "it fails")
                rename(source, target)

            with monkeypatch.context() as patch:
                patch.setattr(files, "rename", fails)
                with pytest.raises(RuntimeError, match="it fails"):
                    checkpoints.save(4, blocking=True)
            assert checkpoints.all_steps() == [2, 4, 6]
        checkpoints.save(8, blocking=True)
        assert checkpoints.all_steps() == [2, 8]
        link = tmp_path / "step-00000010"
        link.symlink_to(tmp_path / "step-00000008")
        with pytest.raises(FileExistsError, match="step-00000010 exists"):
            checkpoints.save(10)
    assert names_aside(tmp_path) == ["abandoned-step-00000004", "abandoned-step-00000006"]


def test_a_save_that_fails_sets_nothing_aside(
    tmp_path: Path, optimizer: ZeroOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rename fails, and also if the first one fails that should undo the others."""
    saved(tmp_path, optimizer, 2, 4, 6, 8)
    rename = files.rename
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        for failing in range(5):  # 4, 6, 8, then 2, which is replaced, and the new one
            left = [failing, 0] if failing % 2 else [failing]

            def fails(source: Path, target: Path, left: list[int] = left) -> None:
                if source.parent == tmp_path and left:
                    left[0] -= 1
                    if left[0] < 0:
                        del left[0]
                        raise OSError(errno.EIO, "it fails")
                rename(source, target)

            with monkeypatch.context() as patch:
                patch.setattr(files, "rename", fails)
                with pytest.raises(RuntimeError, match="it fails"):
                    checkpoints.save(2, overwrite=True, blocking=True)
            assert not left, "there was nothing to undo"
            assert checkpoints.all_steps() == [2, 4, 6, 8]
    assert entries(tmp_path) == names(2, 4, 6, 8)


def test_a_step_whose_name_a_failed_save_cannot_give_back_still_counts(
    tmp_path: Path, optimizer: ZeroOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, optimizer, 2, 4)
    rename = files.rename

    def sets_aside_alone(source: Path, target: Path) -> None:
        if source.parent == tmp_path and not target.name.startswith("abandoned-"):
            raise OSError(errno.EIO, "it fails")
        rename(source, target)

    monkeypatch.setattr(files, "rename", sets_aside_alone)
    with (
        CheckpointManager(tmp_path, optimizer) as checkpoints,
        pytest.raises(RuntimeError, match="it fails"),
    ):
        checkpoints.save(3, blocking=True)
    assert names_aside(tmp_path) == ["abandoned-step-00000004"]
    assert complete_steps(tmp_path) == [2, 4]


# -- retention ---------------------------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_those_of_a_period_beside_them(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    with CheckpointManager(tmp_path, optimizer, max_to_keep=2, keep_period=4) as checkpoints:
        for step in range(1, 11):
            saving = checkpoints.save(step)
            saving.result(PATIENT)
            counted = [each for each in range(1, step + 1) if each % 4][-2 if step % 4 else -1 :]
            kept = sorted({*counted, *range(4, step + 1, 4)})
            assert checkpoints.all_steps() == kept
    assert entries(tmp_path) == names(4, 8, 9, 10)


def test_a_broken_checkpoint_is_neither_counted_nor_removed(
    tmp_path: Path, optimizer: ZeroOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, optimizer, 1, 2, 3, 4)
    break_one(tmp_path, 3)
    (tmp_path / "step-00000004" / "checkpoint.json").write_text("{")
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
    mine = tmp_path / "step-00000001" / "averages" / "ema" / "ema-00001-of-00001.safetensors"  # of no manifest
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    (tmp_path / "step-00000002" / "ranks" / "rank-00007.safetensors").symlink_to("/etc/hostname")
    before = tree(tmp_path)
    checkpoints = CheckpointManager(tmp_path, optimizer, max_to_keep=1)
    with pytest.warns(RuntimeWarning, match=r"step-00000001 is left"):
        checkpoints.save(3, blocking=True)
    with pytest.warns(RuntimeWarning, match=r"step-00000001 is left, because it has averages/ema/ema") as warned:
        checkpoints.save(4, blocking=True)
    checkpoints.close()
    assert {found.filename for found in own(warned)} == {__file__}
    assert set(before) <= set(tree(tmp_path))
    assert complete_steps(tmp_path) == [1, 2, 4]


@pytest.mark.assumes("no warning")
def test_what_the_user_has_removed_is_neither_missed_nor_tried_again(
    tmp_path: Path, optimizer: ZeroOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint, and what a removal that failed has left."""
    remove = files.remove

    def fails_in_trash(path: Path) -> None:
        if ".trash-" in str(path):
            raise OSError(errno.EIO, "it fails")
        remove(path)

    with CheckpointManager(tmp_path, optimizer, max_to_keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, blocking=True)
        with monkeypatch.context() as patch:
            patch.setattr(files, "remove", fails_in_trash)
            with pytest.warns(RuntimeWarning, match="could not be removed yet"):
                checkpoints.save(3, blocking=True)
        (trash,) = tmp_path.glob(".trash-*")
        shutil.rmtree(trash)
        shutil.rmtree(tmp_path / "step-00000003")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoints.save(4, blocking=True)
    assert entries(tmp_path) == names(2, 4)
