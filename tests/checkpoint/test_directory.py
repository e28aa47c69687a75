"""The folder of a run: who may write there, what may be removed, and which checkpoints are kept."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import signal
import socket
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zero
from collectives import Transport, on_threads
from zero import CheckpointError, CheckpointManager, ZeroOptimizer
from zero.checkpoint import files
from zero.checkpoint.folder.directory import LockedDirectory, complete_steps, steps_in
from zero.checkpoint.folder.lock import LOCK
from zero.checkpoint.read.reader import Checkpoint
from zero.checkpoint.write.save_folder import SaveFolder
from zero.commands.checkpoint.command import verify

from ..support.parts import parts_of
from ..support.warned import own
from .file_systems import Module
from .saves import PATIENCE, Training, entries


@pytest.fixture(scope="module")
def optimizer() -> ZeroOptimizer:
    training = Training(None, 0)
    training.step(0)
    return training.optimizer


def saved(folder: Path, optimizer: ZeroOptimizer, *steps: int) -> None:
    """Write checkpoints of these steps."""
    with CheckpointManager(folder, optimizer) as checkpoints:
        for step in steps:
            checkpoints.save(step, blocking=True)


def break_one(folder: Path, step: int) -> Path:
    """Change one byte of a checkpoint."""
    path = folder / f"step-{step:08d}" / "model" / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def names(*steps: int) -> list[str]:
    return [".lock", *(f"step-{step:08d}" for step in steps)]


# -- the lock ----------------------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_and_names_the_first_on_every_rank(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    def program(transport: Transport) -> str:
        training = Training(transport, 1)
        with pytest.raises(ValueError, match="still trains into") as caught:
            CheckpointManager(tmp_path, training.optimizer)
        assert not parts_of(training.optimizer).update.watchers
        return str(caught.value)

    with CheckpointManager(tmp_path, optimizer):
        first, second = on_threads(2, program)
    assert first == second
    assert f"rank 0: pid {os.getpid()} on host {socket.gethostname()} (this process:" in first
    assert f"still trains into {tmp_path}" in first
    CheckpointManager(tmp_path, optimizer).close()


def test_a_forked_process_does_not_hold_the_lock_after_its_parent(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    checkpoints = CheckpointManager(tmp_path, optimizer)
    reading, writing = os.pipe()
    is_there, was_there = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.write(was_there, b"x")
        os.read(reading, 1)  # until the test closes its end
        os._exit(0)
    os.close(reading)
    os.read(is_there, 1)
    try:
        checkpoints.close()
        CheckpointManager(tmp_path, optimizer).close()
    finally:
        for number in (writing, is_there, was_there):
            os.close(number)
        os.waitpid(child, 0)


def test_a_manager_that_was_dropped_holds_no_lock(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    training = Training(None, 0)
    manager = CheckpointManager(tmp_path, training.optimizer)
    with pytest.raises(ValueError, match=r"this process: a CheckpointManager that was not closed\) still trains"):
        CheckpointManager(tmp_path, optimizer)
    del manager, training
    gc.collect()
    CheckpointManager(tmp_path, optimizer).close()


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_a_process_that_lives_keeps_the_lock_and_is_named_and_one_that_is_killed_loses_it(
    is_stopped: bool, tmp_path: Path
) -> None:
    told, tell = os.pipe()
    first = os.fork()
    if not first:
        held = LockedDirectory(tmp_path, "0" * 16)
        os.write(tell, b"x")
        time.sleep(60)
        held.close()
        os._exit(0)
    try:
        assert os.read(told, 1) == b"x"
        if is_stopped:
            os.kill(first, signal.SIGSTOP)
            os.waitpid(first, os.WUNTRACED)
        words = rf"pid {first} on host {re.escape(socket.gethostname())} still trains into .*: stop it, or use another"
        with pytest.raises(ValueError, match=words):
            LockedDirectory(tmp_path, "1" * 16)
        assert os.waitpid(first, os.WNOHANG)[0] == 0
    finally:
        os.kill(first, signal.SIGKILL)
        os.close(told)
        os.close(tell)
    LockedDirectory(tmp_path, "1" * 16).close()
    os.waitpid(first, 0)


@pytest.mark.assumes("flock")
@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_run_whose_lock_was_replaced_neither_commits_nor_removes(
    how: str, tmp_path: Path, optimizer: ZeroOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = CheckpointManager(tmp_path, optimizer, max_to_keep=1)
    old.save(1, blocking=True)
    saving = old.save(2)
    saving.wait()
    (tmp_path / ".lock").unlink()
    new = CheckpointManager(tmp_path, optimizer) if how == "replaced" else None
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"}
    with pytest.raises(RuntimeError, match=r"\.lock (belongs to another run|is gone)"):
        old.save(3)
    old.close()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"} == before
    if new is not None:
        new.close()


@pytest.mark.assumes("flock")
def test_a_lock_that_is_lost_while_a_save_is_under_way_fences_its_commit(
    tmp_path: Path, optimizer: ZeroOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = CheckpointManager(tmp_path, optimizer, max_to_keep=1)
    old.save(1, blocking=True)
    collect = SaveFolder.collect

    def loses_the_lock(this: SaveFolder) -> object:
        (tmp_path / ".lock").unlink()
        (tmp_path / ".lock").touch()
        return collect(this)

    monkeypatch.setattr(SaveFolder, "collect", loses_the_lock)
    with pytest.raises(RuntimeError, match=r"rank 0 could not save .*\.lock belongs to another run"):
        old.save(2, blocking=True)
    old.close()
    assert entries(tmp_path) == names(1)


@pytest.mark.assumes("flock")
def test_a_lock_that_is_lost_after_a_commit_fences_the_removal_of_older_checkpoints(
    tmp_path: Path, optimizer: ZeroOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = CheckpointManager(tmp_path, optimizer, max_to_keep=1)
    old.save(1, blocking=True)
    commit = SaveFolder.commit

    def loses_the_lock(this: SaveFolder, *arguments: Any) -> None:
        commit(this, *arguments)
        (tmp_path / ".lock").unlink()
        (tmp_path / ".lock").touch()

    monkeypatch.setattr(SaveFolder, "commit", loses_the_lock)
    with pytest.warns(RuntimeWarning, match=r"could not be removed: .*\.lock belongs to another run"):
        old.save(2, blocking=True)
    old.close()
    assert entries(tmp_path) == names(1, 2)


# -- a folder that is removed ------------------------------------------------------------------------------------------


def test_a_folder_that_is_removed_under_the_run_fails_saves_until_the_user_makes_it_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    reason = r"rank 0 could not save .*/run/step-0000000\d: .*/run was removed.*: make it again, and saves go on"

    def program(transport: Transport) -> str:
        training = Training(transport, 1)
        training.step(0)
        checkpoints = CheckpointManager(run, training.optimizer)

        def on_rank_0(act: Callable[[], object]) -> None:
            training.optimizer.exchange(b"")
            if transport.rank == 0:
                act()
            training.optimizer.exchange(b"")

        checkpoints.save(1, blocking=True)
        on_rank_0(lambda: shutil.rmtree(run))
        for _ in range(2):
            saving = checkpoints.save(2)
            saving.wait()
            training.step(1)
            with pytest.raises(RuntimeError, match=reason):
                saving.result()
        assert (checkpoints.all_steps(), checkpoints.restore(), run.exists()) == ([], None, False)
        on_rank_0(run.mkdir)
        checkpoints.save(3, blocking=True)
        if transport.rank == 0:
            with pytest.raises(
                ValueError, match=r"this process: a CheckpointManager that was not closed\) still trains"
            ):
                LockedDirectory(run, "0" * 16)
        training.optimizer.exchange(b"")
        checkpoints.close()
        return training.optimizer.check_replicas()

    with pytest.warns(RuntimeWarning, match=f"has failed, and training goes on: {reason}; the next save tries again"):
        assert len(set(on_threads(2, program, timeout=PATIENCE))) == 1
    assert entries(run) == names(3)


def test_a_folder_that_is_removed_while_a_save_is_under_way_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, run = SaveFolder.collect, tmp_path / "run"

    def removed(this: SaveFolder) -> object:
        found = collect(this)
        shutil.rmtree(run)
        return found

    def program(transport: Transport) -> None:
        training = Training(transport, 1)
        checkpoints = CheckpointManager(run, training.optimizer)
        saving = checkpoints.save(1)
        saving.wait()
        with pytest.raises(RuntimeError, match=r"rank 0 could not save .*/run was removed \(.*: make it again"):
            checkpoints.close()

    monkeypatch.setattr(SaveFolder, "collect", removed)
    on_threads(2, program, timeout=PATIENCE)
    assert entries(tmp_path) == []


def test_a_folder_that_another_run_has_made_again_is_left_to_it(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    run = tmp_path / "run"
    old = CheckpointManager(run, optimizer)
    shutil.rmtree(run)
    with CheckpointManager(run, Training(None, 0).optimizer) as new:
        with pytest.raises(ValueError, match="still trains into"):
            old.save(1)
        new.save(2, blocking=True)
        old.close()
    assert entries(run) == names(2)


@pytest.mark.assumes("flock")
def test_a_disk_that_fails_when_the_lock_is_looked_at_fails_the_save_and_not_the_training(
    tmp_path: Path, optimizer: ZeroOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr("zero.checkpoint.folder.lock.os", Module(os, {"stat": fails_on_lock}))
            saving = checkpoints.save(1)
            with pytest.raises(RuntimeError, match=r"rank 0 could not save .*Input/output error"):
                saving.result(PATIENCE)
        checkpoints.save(2, blocking=True)
    assert entries(tmp_path) == names(2)


def fails_on_lock(path: Path, **options: Any) -> os.stat_result:
    if path.name == LOCK:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return os.stat(path, **options)


# -- what earlier runs have left ---------------------------------------------------------------------------------------


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


NONCE = "0123456789abcdef"


def left_under_way(folder: Path) -> None:
    """Make what a run leaves that dies while it saves."""
    (folder / "notes").mkdir(parents=True)
    (folder / "notes" / "nonce").write_text(folder.name[-16:])
    (folder / "notes" / "ready").touch()
    (folder / "notes" / "rank-00001.done").write_text("{}")
    (folder / "notes" / ".rank-00000.done.part").touch()
    (folder / "model").mkdir()
    (folder / "model" / "model-00001-of-00001.safetensors").write_bytes(bytes(100))
    (folder / "averages" / "ema").mkdir(parents=True)
    (folder / "ranks").mkdir()
    (folder / "state.safetensors").touch()


@pytest.mark.assumes("no warning")
def test_what_a_dead_run_of_ours_has_left_is_removed(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    saved(tmp_path, optimizer, 1, 2, 3)
    left_under_way(tmp_path / f".tmp-step-00000009-{NONCE}")
    (tmp_path / f".tmp-step-00000010-{NONCE}").mkdir()
    (tmp_path / f".tmp-step-00000011-{NONCE}" / "notes").mkdir(parents=True)
    (tmp_path / f".tmp-step-00000011-{NONCE}" / "notes" / ".nonce.part").write_text(NONCE[:3])
    nonce = zero.open_checkpoint(tmp_path / "step-00000003").manifest.written_by["nonce"]
    (tmp_path / "step-00000003").rename(tmp_path / f".tmp-step-00000003-{nonce}")  # all but renamed
    (tmp_path / "step-00000002").rename(tmp_path / f".trash-step-00000002-{NONCE}")
    (tmp_path / f".trash-step-00000002-{NONCE}" / "state.safetensors").unlink()  # half removed
    (tmp_path / f".trash-step-00000007-{NONCE}").mkdir()
    (tmp_path / f".probe-{NONCE}").write_bytes(bytes([1, 1, 0, 2, 3]))
    (tmp_path / f".probe-{NONCE}.1").write_bytes(bytes([2, 2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CheckpointManager(tmp_path, optimizer).close()
    assert entries(tmp_path) == names(1)


def test_what_is_not_ours_is_left_and_named(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    saved(tmp_path, optimizer, 1)
    outside = tmp_path.parent / f"{tmp_path.name} outside"
    left_under_way(outside / f"x-{NONCE}")
    foreign = tmp_path / f".tmp-step-00000001-{NONCE}"  # has another nonce
    left_under_way(foreign)
    (foreign / "notes" / "nonce").write_text("f" * 16)
    with_file = tmp_path / f".tmp-step-00000002-{NONCE}"
    left_under_way(with_file)
    (with_file / "model" / "mine.txt").write_text("kept")
    with_link = tmp_path / f".tmp-step-00000003-{NONCE}"
    left_under_way(with_link)
    (with_link / "ranks").rmdir()
    (with_link / "ranks").symlink_to(outside)
    link = tmp_path / f".tmp-step-00000004-{NONCE}"
    link.symlink_to(outside / f"x-{NONCE}")
    trash = tmp_path / f".trash-step-00000005-{NONCE}"
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
    assert (tree(tmp_path / "step-00000002"), tree(outside)) == (tree(saving.path), before_outside)
    gone = {path for path in before if path.startswith("step-00000001")}
    new = {f"step-00000002/{path}" for path in tree(saving.path)} | {"step-00000002"}
    assert set(tree(tmp_path)) == set(before) - gone | new


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
            saving.result(PATIENCE)

    on_threads(2, program)
    assert entries(tmp_path) == names(1)
    found = zero.open_checkpoint(tmp_path / "step-00000001")
    found.verify()
    assert found.state == {"n": 4}


@pytest.mark.parametrize("what", ["a file inside", "a link inside", "a link", "a file"])
def test_only_a_checkpoint_is_replaced(what: str, tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    saved(tmp_path / "run", optimizer, 1)
    target = tmp_path / "run" / "step-00000001"
    match what:
        case "a file inside":
            (target / "thesis.txt").write_text("mine")
        case "a link inside":
            (target / "model" / "config.json").symlink_to("/etc/hostname")
        case _:
            target.rename(tmp_path / "elsewhere")
            target.symlink_to(tmp_path / "elsewhere") if what == "a link" else target.write_text("mine")
    before = tree(tmp_path)
    checkpoints = CheckpointManager(tmp_path / "run", optimizer)
    with pytest.raises(FileExistsError, match="step-00000001 is left, because it "):
        checkpoints.save(1, overwrite=True)
    checkpoints.close()
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


# -- a run that goes back ----------------------------------------------------------------------------------------------


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


def test_a_step_that_was_set_aside_is_named_to_who_asks_for_it(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    saved(tmp_path, optimizer, 2, 4)
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        with pytest.warns(RuntimeWarning, match="newest checkpoint now"):
            checkpoints.save(3, blocking=True)
        with pytest.raises(
            CheckpointError, match=r"was set aside as .*abandoned-step-00000004-[0-9a-f]{16}.*zero\.load"
        ):
            checkpoints.restore(4)


def test_only_checkpoints_are_set_aside(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    saved(tmp_path, optimizer, 1, 4, 5, 6)
    break_one(tmp_path, 4)
    (tmp_path / "step-00000005" / "state.safetensors").unlink()
    (tmp_path / "step-00000006" / "thesis.txt").write_text("mine")
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-00000007" / "mine").touch()
    (tmp_path / "step-00000008").symlink_to(tmp_path / "step-00000001")
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        with pytest.warns(RuntimeWarning, match="newest checkpoint now"):
            checkpoints.save(2, blocking=True)
        assert checkpoints.latest_step() == 2
    assert names_aside(tmp_path) == [f"abandoned-step-0000000{step}" for step in (4, 5, 6)]
    assert {"step-00000007", "step-00000008"} <= set(entries(tmp_path))
    assert len(list(tmp_path.glob("abandoned-step-00000006-*/thesis.txt"))) == 1


def test_a_step_that_is_replaced_below_the_newest_is_the_newest(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    saved(tmp_path, optimizer, 2, 4, 6)
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        with pytest.raises(FileExistsError, match="step-00000004 exists"):
            checkpoints.save(4)
        assert checkpoints.all_steps() == [2, 4, 6]
        with pytest.warns(RuntimeWarning, match="abandoned-step-00000006-"):
            checkpoints.save(4, {"n": 1}, blocking=True, overwrite=True)
        assert checkpoints.all_steps() == [2, 4]
    assert names_aside(tmp_path) == ["abandoned-step-00000006"]
    assert zero.open_checkpoint(tmp_path / "step-00000004").state == {"n": 1}


@pytest.mark.parametrize("again", [False, True])
def test_a_save_that_fails_sets_nothing_aside(
    again: bool, tmp_path: Path, optimizer: ZeroOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rename fails, and ``again``: if the first one fails, too, that should undo the others."""
    saved(tmp_path, optimizer, 2, 4, 6, 8)
    rename = files.rename
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        for failing in range(5):  # 4, 6, 8, then 2, which is replaced, and the new one
            left = [failing, 0] if again else [failing]

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
            assert not left or failing == 0, "there was nothing to undo"
            assert checkpoints.all_steps() == [2, 4, 6, 8]
    assert entries(tmp_path) == names(2, 4, 6, 8)


# -- retention ---------------------------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_those_of_a_period_beside_them(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    with CheckpointManager(tmp_path, optimizer, max_to_keep=2, keep_period=4) as checkpoints:
        for step in range(1, 11):
            saving = checkpoints.save(step)
            saving.result(PATIENCE)
            kept = [s for s in range(1, step + 1) if s % 4 == 0 or s in [t for t in range(1, step + 1) if t % 4][-2:]]
            kept = sorted({*kept, step} - ({[t for t in range(1, step) if t % 4][-2]} if step % 4 == 0 else set()))
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


def test_what_is_left_of_other_saves_is_not_counted_as_kept(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    saved(tmp_path, optimizer, 1, 2)
    foreign = tmp_path / f".tmp-step-00000009-{NONCE}"
    left_under_way(foreign)
    (foreign / "notes" / "nonce").write_text("f" * 16)
    with pytest.warns(RuntimeWarning, match="is left, because"):
        checkpoints = CheckpointManager(tmp_path, optimizer, max_to_keep=2)
    checkpoints.save(3, blocking=True)
    checkpoints.close()
    assert entries(tmp_path) == [".lock", foreign.name, "step-00000002", "step-00000003"]


@pytest.mark.assumes("no warning")
def test_a_checkpoint_that_the_user_has_removed_is_not_missed(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    with (
        CheckpointManager(tmp_path, optimizer, max_to_keep=2) as checkpoints,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        for step in (1, 2, 3):
            checkpoints.save(step, blocking=True)
        shutil.rmtree(tmp_path / "step-00000003")
        checkpoints.save(4, blocking=True)
    assert [str(found.message) for found in own(warned)] == []
    assert entries(tmp_path) == names(2, 4)


def test_a_checkpoint_with_anything_foreign_is_left_and_named(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    saved(tmp_path, optimizer, 1, 2)
    (tmp_path / "step-00000001" / "model" / "config.json").write_text("{}")
    (tmp_path / "step-00000002" / "ranks" / "rank-00007.safetensors").symlink_to("/etc/hostname")
    before = tree(tmp_path)
    checkpoints = CheckpointManager(tmp_path, optimizer, max_to_keep=1)
    with pytest.warns(RuntimeWarning, match=r"step-00000001 is left"):
        checkpoints.save(3, blocking=True)
    with pytest.warns(RuntimeWarning, match=r"step-00000001 is left, because it has model/config\.json") as warned:
        checkpoints.save(4, blocking=True)
    checkpoints.close()
    assert {found.filename for found in own(warned)} == {__file__}
    assert set(before) <= set(tree(tmp_path))
    assert complete_steps(tmp_path) == [1, 2, 4]


@pytest.mark.parametrize(
    "path", ["model/model-00002-of-00002.safetensors", "averages/ema/ema-00001-of-00001.safetensors"]
)
@pytest.mark.by_default
def test_a_file_that_has_a_name_of_ours_but_is_not_in_the_manifest_is_foreign(
    path: str, tmp_path: Path, optimizer: ZeroOptimizer
) -> None:
    with CheckpointManager(tmp_path, optimizer, max_to_keep=1) as checkpoints:
        checkpoints.save(1, blocking=True)
        mine = tmp_path / "step-00000001" / path
        mine.parent.mkdir(parents=True, exist_ok=True)
        mine.write_text("mine")
        with pytest.warns(RuntimeWarning, match=f"step-00000001 is left, because it has {path}"):
            checkpoints.save(2, blocking=True)
    assert mine.read_text() == "mine"


def test_a_removal_that_failed_and_that_the_user_has_completed_is_not_tried_again(
    tmp_path: Path, optimizer: ZeroOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path, optimizer, max_to_keep=1) as checkpoints:
        checkpoints.save(1, blocking=True)
        with monkeypatch.context() as patch:
            patch.setattr(files, "remove", partial(fails_in_trash, files.remove))
            with pytest.warns(RuntimeWarning, match="could not be removed yet"):
                checkpoints.save(2, blocking=True)
        (trash,) = tmp_path.glob(".trash-*")
        shutil.rmtree(trash)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoints.save(3, blocking=True)
    assert entries(tmp_path) == names(3)


def fails_in_trash(remove: Callable[[Path], None], path: Path) -> None:
    if ".trash-" in str(path):
        raise OSError(errno.EIO, "it fails")
    remove(path)


def test_files_that_a_save_was_told_to_copy_are_its_own(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text("{}")
    run = tmp_path / "run"
    with CheckpointManager(run, optimizer, max_to_keep=1, assets=tmp_path / "assets") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, blocking=True)
    assert entries(run) == names(2)
    assert (run / "step-00000002" / "model" / "config.json").read_text() == "{}"


def test_the_checkpoint_that_was_resumed_from_stays_until_the_next_commit(
    tmp_path: Path, optimizer: ZeroOptimizer
) -> None:
    saved(tmp_path, optimizer, 1, 2, 3)
    with CheckpointManager(tmp_path, optimizer, max_to_keep=1) as checkpoints:
        checkpoints.restore(1)
        assert checkpoints.all_steps() == [1, 2, 3]
        with pytest.raises(TypeError):
            checkpoints.save(4, {"f": print})
        assert checkpoints.all_steps() == [1, 2, 3]
        checkpoints.save(4, blocking=True)
        assert checkpoints.all_steps() == [4]


@pytest.mark.assumes("flock")
def test_the_lock_says_who_holds_it(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    with CheckpointManager(tmp_path / "a" / "b", optimizer):
        found = json.loads((tmp_path / "a" / "b" / ".lock").read_text())
    assert (found["pid"], found["host"]) == (os.getpid(), socket.gethostname())
    assert re.fullmatch(r"[0-9a-f]{16}", found["nonce"])
