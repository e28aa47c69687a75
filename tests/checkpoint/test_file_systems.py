"""File systems that lack something: what can be left out or done otherwise is, with one warning; the rest is one error
on every rank, with the reason. What is saved there has the bytes of any other checkpoint."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager
from zero.checkpoint import files
from zero.checkpoint.folder.directory import complete_steps
from zero.checkpoint.folder.lock import LEASE, FolderLock, Holder
from zero.checkpoint.folder.visibility import check_visible
from zero.checkpoint.write.chunk_writer import PartWriter

from .disk import Disk
from .file_systems import FILE_SYSTEMS, VARIABLE, Module, failing
from .saves import PATIENCE, Training, entries

WORLD = 2
CASES = {
    f"{name}: {errno.errorcode.get(number, number)}": (name, number)
    for name, system in FILE_SYSTEMS.items()
    for number in system.numbers
}
GOES_ON = [case for case, (name, _) in CASES.items() if FILE_SYSTEMS[name].error is None]
IS_REFUSED = [case for case in CASES if case not in GOES_ON]
FIRST = {name: next(case for case in CASES if CASES[case][0] == name) for name in FILE_SYSTEMS}


class Heard:
    """The warnings of this library."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        for module in ("manager", "single"):
            patch.setattr(f"zero.checkpoint.{module}.warn_caller", self.texts.append)


def saves(folder: Path, transport: Transport) -> list[str]:
    """Save into a folder of steps, and once beside it. Returns the contents, and the SHA-256 of the parameters."""
    training = Training(transport, 2)
    training.step(0)
    found = []
    with CheckpointManager(folder / "run", training.optimizer, max_to_keep=2) as checkpoints:
        for step in (1, 2, 3):
            saving = checkpoints.save(step, {"step": step}, blocking=step == 2)
            found.append(saving.result(PATIENCE))
    found.append(zero.save(folder / "above" / "saved", training.optimizer).result())
    return [*found, training.optimizer.check_replicas()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    first, second = on_threads(WORLD, partial(saves, tmp_path_factory.mktemp("reference")))
    assert first == second
    return first


@pytest.mark.parametrize("case", GOES_ON)
@pytest.mark.by_default(*(case for case in FIRST.values() if case in GOES_ON))
def test_what_can_be_left_out_or_done_otherwise_is_with_one_warning_and_the_same_bytes(
    case: str, reference: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, number = CASES[case]
    system, heard = FILE_SYSTEMS[name], Heard(monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        system.use(patch, number)
        found = on_threads(WORLD, partial(saves, tmp_path), timeout=PATIENCE)
    assert found == [reference] * WORLD
    causes = [] if system.warning is None else system.warning.split("|")
    for folder in (tmp_path / "run", tmp_path / "above"):
        texts = [text for text in heard.texts if text.startswith(f"{folder} is on a file system")]
        expected = [cause for cause in causes if folder.name == "run" or "locked" not in cause]
        assert len(texts) == len(expected), texts
        for cause in expected:
            assert len([text for text in texts if cause in text]) == 1, f"{cause}: {texts}"
    assert len(heard.texts) == 2 * len(causes) - ("can be locked" in str(causes))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "step-00000002", "step-00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["above", "run"]
    for step, path in ((2, tmp_path / "run" / "step-00000002"), (4, tmp_path / "above" / "saved")):
        zero.open_checkpoint(path).verify()
        training = Training(None, 0)
        assert zero.load(path, training.optimizer, rng=False).content == reference[step - 1]
        assert training.optimizer.check_replicas() == reference[-1]


@pytest.mark.parametrize("case", IS_REFUSED)
@pytest.mark.by_default(*(case for case in FIRST.values() if case in IS_REFUSED))
def test_what_would_lose_data_is_one_error_on_every_rank_and_training_goes_on(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, number = CASES[case]
    system, _ = FILE_SYSTEMS[name], Heard(monkeypatch)
    assert system.error is not None
    folder = tmp_path / "run"
    folder.mkdir()  # where no folder can be made there is one

    def program(transport: Transport) -> tuple[str, str, str]:
        training = Training(transport, 2)
        training.step(0)
        errors = []
        for save in (lambda: managed(training, folder), lambda: zero.save(folder / "saved", training.optimizer)):
            with pytest.raises((RuntimeError, ValueError), match=system.error) as caught:
                save()
            errors.append(str(caught.value))
            training.step(1)
        return errors[0], errors[1], training.optimizer.check_replicas()

    with pytest.MonkeyPatch.context() as patch:
        system.use(patch, number)
        first, second = on_threads(WORLD, program, timeout=PATIENCE)  # for which a rank would wait that is not told
    assert first[2] == second[2]
    for mine, theirs in zip(first, second, strict=True):
        assert re.sub("rank 0: ", "", mine) == re.sub("rank 0: ", "", theirs)
    assert complete_steps(folder) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_folder_whose_files_cannot_be_synced_is_refused_at_once(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FILE_SYSTEMS["no fsync of files"].use(monkeypatch)

    def program(transport: Transport) -> None:
        with pytest.raises(ValueError, match=r"cannot use this folder: .*a crash could leave a checkpoint without"):
            CheckpointManager(tmp_path, Training(transport, 0).optimizer)

    on_threads(world_size, program)


def managed(training: Training, folder: Path) -> None:
    with CheckpointManager(folder, training.optimizer) as checkpoints:
        checkpoints.save(1, blocking=True)


@pytest.mark.assumes("posix_fallocate", "pwrite")
def test_a_full_disk_of_unknown_size_is_still_said_to_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, tmp_path)
    disk.fail_when(lambda call: call.name == "reserve" and "probe" not in call.path.name, errno.ENOSPC)
    broken = {"statvfs": failing(errno.ENOSYS, lambda _: True, os.statvfs)}
    monkeypatch.setattr("zero.checkpoint.write.save_folder.os", Module(os, broken))
    with pytest.raises(RuntimeError, match=r"the disk is full .*: the checkpoint needs [\d,]+ bytes$"):
        zero.save(tmp_path / "saved", Training(None, 0).optimizer)


# -- a file in the place of a lock -------------------------------------------------------------------------------------


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    FILE_SYSTEMS["no flock"].use(monkeypatch)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.filterwarnings("ignore:.*where no file can be locked")
def test_a_second_run_is_refused_without_locks_too_and_told_what_to_remove(tmp_path: Path) -> None:
    optimizer = Training(None, 0).optimizer
    lease = tmp_path / LEASE
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"still trains into .* if it has, remove {re.escape(str(lease))}$"):
                CheckpointManager(tmp_path, Training(None, 0).optimizer)
        checkpoints.save(1, blocking=True)
        assert json.loads(lease.read_text())["pid"] == os.getpid()
    assert not lease.exists()
    dropped = CheckpointManager(tmp_path, Training(None, 0).optimizer)
    del dropped
    gc.collect()
    assert not lease.exists()


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("waited", [True, False])
def test_a_lease_of_a_process_that_has_ended_is_taken_over(waited: bool, tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        held = FolderLock(tmp_path, "0" * 16)
        os.kill(os.getpid(), 0 if held.remark is None else signal.SIGKILL)
        os._exit(1)
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    if waited:
        os.waitpid(child, 0)
    assert json.loads((tmp_path / LEASE).read_text())["pid"] == child
    lock = FolderLock(tmp_path, "1" * 16)
    assert json.loads((tmp_path / LEASE).read_text())["nonce"] == "1" * 16
    lock.check()
    lock.close()
    assert os.listdir(tmp_path) == [".lock"]
    if not waited:
        os.waitpid(child, 0)


@pytest.mark.parametrize("changes", [{"host": "another"}, {"system": "another boot"}, {"started": 0}, None])
@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.by_default
def test_a_lease_of_which_nothing_shows_that_its_process_has_ended_is_an_error_that_names_it(
    locks: bool, changes: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a run that finds locks: the file system may be mounted otherwise on another host."""
    if not locks:
        FILE_SYSTEMS["no flock"].use(monkeypatch)
    mine = {**json.loads(Holder.me("0" * 16).pack()), "pid": 2**22 + 1}
    text = "" if changes is None else json.dumps({**mine, **changes})
    (tmp_path / LEASE).write_text(text)
    with pytest.raises(ValueError, match=rf"nothing shows whether it has ended: if it has, remove {tmp_path}/.lease"):
        FolderLock(tmp_path, "1" * 16)
    assert (tmp_path / LEASE).read_text() == text


@pytest.mark.usefixtures("no_locks")
@pytest.mark.filterwarnings("ignore:.*where no file can be locked")
@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_run_whose_lease_was_replaced_neither_commits_nor_removes(how: str, tmp_path: Path) -> None:
    old = CheckpointManager(tmp_path, Training(None, 0).optimizer, max_to_keep=1)
    old.save(1, blocking=True)
    (tmp_path / LEASE).unlink()
    new = CheckpointManager(tmp_path, Training(None, 0).optimizer) if how == "replaced" else None
    before = entries(tmp_path)
    with pytest.raises(RuntimeError, match=r"\.lease (belongs to another run|is gone)"):
        old.save(2)
    old.close()
    assert entries(tmp_path) == before
    if new is not None:
        assert (tmp_path / LEASE).exists()
        new.close()


@pytest.mark.usefixtures("no_locks")
def test_a_forked_process_does_not_end_the_lease_of_its_parent(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "0" * 16)
    child = os.fork()
    if not child:
        lock.close()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    lock.check()
    lock.close()
    assert os.listdir(tmp_path) == [".lock"]


# -- files that are written from their beginning to their end ----------------------------------------------------------


def test_what_a_rank_has_written_is_compared_when_the_files_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FILE_SYSTEMS["no writes in place"].use(monkeypatch)
    Heard(monkeypatch)
    finish = PartWriter.finish

    def loses(this: PartWriter) -> None:
        finish(this)
        os.ftruncate(this._file, this.nbytes - 1)

    monkeypatch.setattr(PartWriter, "finish", loses)

    def program(transport: Transport) -> None:
        with pytest.raises(RuntimeError, match=r"parts/rank-0000\d does not have what its rank has written"):
            zero.save(tmp_path / "saved", Training(transport, 1).optimizer)

    on_threads(WORLD, program, timeout=PATIENCE)
    assert entries(tmp_path) == []


@pytest.mark.assumes("pwrite")
def test_whether_a_file_can_be_written_at_any_place_is_tried_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = Training(None, 0).optimizer
    assert not check_visible(optimizer, tmp_path, None)
    with pytest.raises(ValueError, match="missing cannot be written on host"):
        check_visible(optimizer, tmp_path / "missing", None)
    FILE_SYSTEMS["no writes in place"].use(monkeypatch)
    assert check_visible(optimizer, tmp_path, None)
    assert os.listdir(tmp_path) == []


@pytest.mark.assumes("pwrite", "no warning")
def test_one_rank_that_cannot_write_in_place_is_enough_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts may have mounted a file system differently."""
    disk, heard = Disk(monkeypatch, tmp_path), Heard(monkeypatch)
    write_at = files.write_at

    def of_rank_1(number: int, data: Any, offset: int) -> None:
        if disk.rank() == 1 and offset != os.fstat(number).st_size:
            raise OSError(errno.EOPNOTSUPP, "not here")
        write_at(number, data, offset)

    monkeypatch.setattr(files, "write_at", of_rank_1)

    def program(transport: Transport) -> str:
        disk.this_thread_is(transport.rank)
        return zero.save(tmp_path / "saved", Training(transport, 1).optimizer).result()

    assert len(set(on_threads(WORLD, program, timeout=PATIENCE))) == 1
    assert len(heard.texts) == 1
    zero.open_checkpoint(tmp_path / "saved").verify()


# -- the tests of this folder ------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "name", [name for name, system in FILE_SYSTEMS.items() if system.error is None and system.lacks]
)
def test_the_tests_of_this_folder_hold_there(name: str) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.file_systems", name]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, VARIABLE: name})
    assert done.returncode == 0, done.stdout
