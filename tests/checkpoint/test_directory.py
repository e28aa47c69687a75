"""Of a run's folder only what is known to be ours is removed or replaced; all else is left and named."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import zero
from collectives import Transport, on_threads
from zero import CheckpointError, CheckpointManager, ZeroOptimizer
from zero.checkpoint.folder.directory import steps_in

from ..support.limits import PATIENT
from ..support.warned import own
from .saves import Training, break_one, entries, names, saved, tree

NONCE = "0123456789abcdef"


def left_under_way(folder: Path) -> Path:
    """Make what a run leaves that dies while it saves."""
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
    nonce = zero.open_checkpoint(tmp_path / "step-00000003").manifest.written_by["nonce"]
    (tmp_path / "step-00000003").rename(tmp_path / f".tmp-step-00000003-{nonce}")  # all but renamed
    trash = (tmp_path / "step-00000002").rename(tmp_path / f".trash-step-00000002-{NONCE}")
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
    (tmp_path / "step-00000008").symlink_to(tmp_path / "step-00000001")
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


def test_a_step_whose_name_is_written_otherwise_is_none(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    saved(tmp_path, optimizer, 5)
    for name in ("step-5", "step-000000007", "step-00000006x", "Step-00000008"):
        (tmp_path / name).mkdir()
    assert list(steps_in(tmp_path)) == [5]


# -- a step that exists ------------------------------------------------------------------------------------------------


def test_a_step_that_exists_is_refused_on_every_rank_and_replaced_if_asked(tmp_path: Path) -> None:
    def program(transport: Transport) -> None:
        training = Training(transport, 1)
        training.step(0)
        with CheckpointManager(tmp_path, training.optimizer) as checkpoints:
            checkpoints.save(1, {"n": 1}, blocking=True)
            with pytest.raises((FileExistsError, RuntimeError), match="step-00000001 exists: overwrite=True replaces"):
                checkpoints.save(1, {"n": 2})
            training.step(1)
            checkpoints.save(1, {"n": 3}, blocking=True, overwrite=True)
            training.step(2)
            saving = checkpoints.save(1, {"n": 4}, overwrite=True)
            saving.result(PATIENT)

    on_threads(2, program)
    assert entries(tmp_path) == names(1)
    assert zero.open_checkpoint(tmp_path / "step-00000001").state == {"n": 4}


@pytest.mark.parametrize("what", ["a file inside", "a link inside", "a link", "a file"])
def test_only_a_checkpoint_is_replaced(what: str, tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    saved(tmp_path / "run", optimizer, 1)
    target = tmp_path / "run" / "step-00000001"
    if what == "a file inside":
        (target / "thesis.txt").write_text("mine")
    elif what == "a link inside":
        (target / "model" / "config.json").symlink_to("/etc/hostname")
    else:
        target.rename(tmp_path / "elsewhere")
        target.symlink_to(tmp_path / "elsewhere") if what == "a link" else target.write_text("mine")
    before = tree(tmp_path)
    with (
        CheckpointManager(tmp_path / "run", optimizer) as checkpoints,
        pytest.raises(FileExistsError, match="step-00000001 is left, because it "),
    ):
        checkpoints.save(1, overwrite=True)
    with pytest.raises(FileExistsError, match="is left, because it "):
        zero.save(target, optimizer, overwrite=True)
    assert tree(tmp_path) == before


def test_a_folder_without_a_manifest_is_not_replaced_whatever_its_files_are_called(
    tmp_path: Path, optimizer: ZeroOptimizer
) -> None:
    weights = tmp_path / "mine" / "model" / "model-00001-of-00001.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"of another library")
    with pytest.raises(
        FileExistsError, match=r"mine is no checkpoint, since it has no checkpoint\.json: save elsewhere"
    ):
        zero.save(tmp_path / "mine", optimizer, overwrite=True)
    assert (entries(tmp_path), weights.read_bytes()) == (["mine"], b"of another library")
    weights.unlink()
    weights.parent.rmdir()
    zero.save(tmp_path / "mine", optimizer, overwrite=True)  # an empty folder
    zero.open_checkpoint(tmp_path / "mine").verify()


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / "weights.bin").touch()
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        assert (checkpoints.all_steps(), checkpoints.latest_step()) == ([], None)
        with pytest.raises(CheckpointError, match=r"step-00000004 is not a checkpoint: it has no checkpoint\.json"):
            checkpoints.restore(4)
        with pytest.raises(CheckpointError, match="step-00000009 is not a checkpoint"):
            checkpoints.restore(9)


def test_a_newest_checkpoint_that_is_broken_is_replaced_when_training_comes_to_its_step_again(
    tmp_path: Path, optimizer: ZeroOptimizer
) -> None:
    saved(tmp_path, optimizer, 1, 2)
    break_one(tmp_path, 2)
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        with pytest.warns(RuntimeWarning, match="step-00000001 is tried instead"):
            checkpoints.restore()
        with pytest.raises(FileExistsError, match="step-00000001 exists"):
            checkpoints.save(1)
        checkpoints.save(2, blocking=True)
        with pytest.raises(FileExistsError, match="step-00000002 exists"):
            checkpoints.save(2)
    zero.open_checkpoint(tmp_path / "step-00000002").verify()
    assert entries(tmp_path) == names(1, 2)
