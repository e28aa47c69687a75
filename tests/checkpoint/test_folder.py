"""The newest checkpoints are kept; only what is known to be ours is removed, and by one run alone."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zero
from collectives import Transport, on_threads
from zero import CheckpointError, CheckpointManager, ZeroOptimizer
from zero.checkpoint.folder.directory import LEASE, LOCK, Holder, LockedDirectory, complete_steps, steps_in
from zero.checkpoint.read.reader import Checkpoint
from zero.commands.checkpoint.command import verify

from ..support.errors import error_of
from ..support.limits import PATIENT
from ..support.parts import parts_of
from ..support.warned import own
from .disk import FILE_SYSTEMS
from .saved import Training, aside, break_one, entries, names, saved, step_folder, tree

NONCE = "0123456789abcdef"


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


HERE = rf"pid {os.getpid()} on host {re.escape(socket.gethostname())} \(this process: .*still trains into "
LOCKED = (LOCK, LEASE)  # the file of a lock, and what takes its place where there are none


def manager(folder: Path, **arguments: Any) -> CheckpointManager:
    return CheckpointManager(folder, Training().optimizer, **arguments)


@pytest.mark.filterwarnings("ignore:.*where no file can be locked")
@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_a_second_run_is_refused_and_names_the_first_on_every_rank(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what to remove, where no file can be locked."""
    if not locks:
        FILE_SYSTEMS["no flock"].use(monkeypatch)
    words = HERE if locks else rf"still trains into .* if it has, remove {re.escape(str(tmp_path / LEASE))}$"

    def program(transport: Transport) -> str:
        training = Training(transport, 1)
        with pytest.raises(ValueError, match=rf"rank 0: .*{words}") as caught:
            CheckpointManager(tmp_path, training.optimizer)
        assert not parts_of(training.optimizer).update.watchers
        return str(caught.value)

    def dropped() -> None:
        manager(tmp_path)  # that nobody closes: it is closed when nobody has it any more
        gc.collect()

    with manager(tmp_path) as checkpoints:
        assert len(set(on_threads(2, program))) == 1
        checkpoints.save(1, blocking=True)
        assert locks or json.loads((tmp_path / LEASE).read_text())["pid"] == os.getpid()
    dropped()
    assert locks or not (tmp_path / LEASE).exists()
    manager(tmp_path).close()


def test_a_forked_process_does_not_hold_the_lock_after_its_parent(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    (reading, writing), (is_there, was_there) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.write(was_there, b"x")
        os.read(reading, 1)  # until the test closes its end
        os._exit(0)
    os.read(is_there, 1)
    try:
        checkpoints.close()
        manager(tmp_path).close()
    finally:
        for number in (reading, writing, is_there, was_there):
            os.close(number)
        os.waitpid(child, 0)


def test_a_lease_of_a_process_that_has_ended_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FILE_SYSTEMS["no flock"].use(monkeypatch)
    child = os.fork()
    if not child:
        held = LockedDirectory(tmp_path, "0" * 16)
        os.kill(os.getpid(), 0 if held.remark is None else signal.SIGKILL)
        os._exit(1)
    assert os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT) is not None  # it has ended, and is not waited for
    assert json.loads((tmp_path / LEASE).read_text())["pid"] == child
    lock = LockedDirectory(tmp_path, "1" * 16)
    assert json.loads((tmp_path / LEASE).read_text())["nonce"] == "1" * 16
    lock.check()
    lock.close()
    assert os.listdir(tmp_path) == [LOCK]
    os.waitpid(child, 0)


def test_a_lease_of_which_nothing_shows_that_its_process_has_ended_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Also for a run that finds locks: the file system may be mounted otherwise on another host."""
    mine = {**json.loads(Holder.me("0" * 16).pack()), "pid": 2**22 + 1}
    others = ({"host": "another"}, {"system": "another boot"}, {"started": 0})
    for text in ("", *(json.dumps({**mine, **changes}) for changes in others)):
        (tmp_path / LEASE).write_text(text)
        with pytest.raises(ValueError, match=rf"nothing shows whether it has ended: if it has, remove {tmp_path}/.lea"):
            LockedDirectory(tmp_path, "1" * 16)
        assert (tmp_path / LEASE).read_text() == text


@pytest.mark.filterwarnings("ignore:.*where no file can be locked")
@pytest.mark.parametrize("row", [".lock replaced", ".lock removed", ".lease replaced", ".lease removed"])
def test_a_run_whose_lock_was_replaced_neither_commits_nor_removes(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, how = row.split()
    if name == LEASE:
        FILE_SYSTEMS["no flock"].use(monkeypatch)

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name not in LOCKED}

    old = manager(tmp_path, max_to_keep=1)
    old.save(1, blocking=True)
    (tmp_path / name).unlink()
    new = manager(tmp_path) if how == "replaced" else None
    before = times()
    with pytest.raises(RuntimeError, match=rf"\{name} (belongs to another run|is gone)"):
        old.save(3)
    old.close()
    assert times() == before
    if new is not None:
        assert (tmp_path / name).exists()
        new.close()


def test_a_folder_that_is_removed_under_the_run_fails_saves_until_the_user_makes_it_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    reason = r"rank 0 could not save .*/run/step-0000000\d: .*/run was removed.*: make it again, and saves go on"

    def program(transport: Transport) -> str:
        training = Training(transport, 1)
        checkpoints = CheckpointManager(run, training.optimizer)
        checkpoints.save(1, blocking=True)
        training.on_rank_0(lambda: shutil.rmtree(run))
        saving = checkpoints.save(2)
        saving.wait()
        training.step(1)
        with pytest.raises(RuntimeError, match=reason):
            saving.result()
        assert (checkpoints.all_steps(), checkpoints.restore(), run.exists()) == ([], None, False)
        training.on_rank_0(run.mkdir)
        checkpoints.save(3, blocking=True)
        if transport.rank == 0:
            with pytest.raises(ValueError, match=HERE):
                LockedDirectory(run, "0" * 16)
        training.optimizer.exchange(b"")
        checkpoints.close()
        return training.optimizer.check_replicas()

    with pytest.warns(RuntimeWarning, match=f"has failed, and training goes on: {reason}; the next save tries again"):
        assert len(set(on_threads(2, program, timeout=PATIENT))) == 1
    assert entries(run) == names(3)
