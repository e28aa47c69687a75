"""One run alone writes into a folder: another one is refused, and a run that lost its lock changes nothing."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from collectives import Transport, on_threads
from zero import CheckpointManager
from zero.checkpoint.folder.directory import LEASE, LOCK, Holder, LockedDirectory

from ..support.limits import PATIENT
from ..support.parts import parts_of
from .file_systems import FILE_SYSTEMS
from .saved import Training, entries, names

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


@pytest.mark.assumes("flock")
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
