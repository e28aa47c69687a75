"""What fails or lacks on a disk stops no training, costs no older checkpoint, and is told to all ranks."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager, ZeroOptimizer
from zero.checkpoint import files
from zero.checkpoint.folder.directory import complete_steps
from zero.checkpoint.write.save_folder import PartWriter

from ..support.errors import error_of
from ..support.errors import warned as told
from ..support.limits import PATIENT
from ..support.rows import only
from ..support.warned import own
from .disk import ERRORS, FILE_SYSTEMS, Call, Disk, not_at_the_end
from .saved import Training, aside, entries, names, saved, step_folder

WORLD = 2


@dataclass(frozen=True)
class Fault:
    """Calls that fail while ``step`` is saved, and the words of the error, or of the warning if ``warns``.

    ``left``: the checkpoints behind it; None: the save, which runs in the background, may succeed. ``skip``: so many
    calls that fit do not fail, and at most ``most`` fail.
    """

    fails: Callable[[Call], bool]
    words: str
    left: tuple[int, ...] | None = (1,)
    number: int = errno.EIO
    step: int = 2
    skip: int = 0
    most: int | None = None
    warns: bool = False
    rank: int = 0


def at_call(rank: int, skip: int) -> Fault:
    """Let a call of a rank fail, or all from it on if its number is odd."""
    number = ERRORS[skip % 4]
    words = f"rank {rank} could not .*{os.strerror(number)}"
    most = None if skip % 2 else 1
    return Fault(lambda call: call.rank == rank, words, None, number, skip=skip, most=most, rank=rank)


def of_older(name: str) -> Callable[[Call], bool]:
    return lambda call: call.name == name and "step-00000001" in str(call.path)


def commits(call: Call) -> bool:
    return call.name == "rename" and call.path.name.startswith(".tmp-")


FAILED = r"rank {} could not save .*/caf\\udce9/.*: OSError: .*Input/output error"
KEPT = "could not be removed.*Input/output error"
NO_ROOM = r"rank 0 could not save .*the disk is full .*needs [\d,]{6,} bytes, and [\d,]+ are free"
FAULTS: dict[str, Fault] = {
    "no room": Fault(lambda call: call.name == "reserve", NO_ROOM, number=errno.ENOSPC),
    "no file": Fault(lambda call: call.name == "reserve", FAILED.format(0)),
    "no write of rank 1": Fault(
        lambda call: call.rank == 1 and call.name == "write_at" and call.path.suffix == ".safetensors",
        FAILED.format(1),
    ),
    "no commit": Fault(commits, FAILED.format(0)),
    "no replacement": Fault(commits, FAILED.format(0), step=1),
    "an older one stays": Fault(of_older("rename"), KEPT, (1, 2), warns=True),
    "an older one is left as trash": Fault(of_older("remove"), KEPT, (1, 2), warns=True),
    "no last sync": Fault(
        lambda call: call.name == "sync" and call.path.name.startswith("caf"),
        "step-00000002 is complete, but may be lost if the machine crashes",
        (1, 2),
        skip=1,
        warns=True,
    ),
    "no quota": Fault(lambda call: call.name == "reserve", NO_ROOM, number=errno.EDQUOT),
    **{f"call {skip} of rank 0": at_call(0, skip) for skip in range(0, 170, 13)},
    **{f"call {skip} of rank 1": at_call(1, skip) for skip in range(0, 46, 5)},
}


@pytest.mark.first(4)
@pytest.mark.parametrize("name", FAULTS)
def test_a_save_during_which_calls_fail_is_one_error_or_warning_and_the_next_one_is_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a folder whose name is no text. A full disk is found before a byte of a tensor is written."""
    fault, disk, folder = FAULTS[name], Disk(monkeypatch, tmp_path), tmp_path / os.fsdecode(b"caf\xe9")

    def program(transport: Transport) -> str:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 1)
        training.step(0)
        with CheckpointManager(folder, training.optimizer, max_to_keep=1) as checkpoints:
            checkpoints.save(1, {"n": 1}, blocking=True)
            training.on_rank_0(disk.calls.clear)
            failing = partial(disk.fail_when, fault.fails, fault.number, skip=fault.skip, most=fault.most)
            training.on_rank_0(failing)
            blocking = fault.left is not None and not fault.warns
            save = partial(checkpoints.save, fault.step, {"n": 2}, blocking=blocking, overwrite=True)
            if blocking:
                said = error_of(save)
            else:
                saving = save()
                if fault.warns or transport.rank == fault.rank:
                    saving.wait()
                if not fault.warns:  # of which the next save warns
                    training.optimizer.exchange(b"")
                    training.step(1)  # the other rank hears of it
                    saving.wait()
                said = str(saving.error or "nothing")
            assert (said == "nothing" and not blocking) or re.search(fault.words, said), said
            training.on_rank_0(disk.failing.clear)
            steps = checkpoints.all_steps()
            if fault.left is not None:
                assert steps == list(fault.left)
            else:
                assert (2 if said == "nothing" else 1) in steps
            assert fault.warns or zero.open_checkpoint(step_folder(folder, steps[0])).state == {"n": steps[0]}
            training.optimizer.exchange(b"")
            checkpoints.save(3)
            checkpoints.wait_until_finished()
        return said

    with told() as messages:
        first, second = on_threads(WORLD, program, timeout=PATIENT)  # for which a rank would wait that is not told
    assert disk.failed
    assert (first == "nothing") is (second == "nothing")
    warned = sum("step" in text for text in messages)
    if fault.left is not None:
        assert warned == fault.warns, messages
    else:  # what fails behind the commit is one warning or none
        assert (warned <= 1) if first == "nothing" else (warned == WORLD), messages
    written = [call for call in disk.calls if call.name == "write_at" and call.path.suffix == ".safetensors"]
    assert fault.words != NO_ROOM or all(".tmp-step-00000003" in str(call.path) for call in written)
    assert entries(folder) == names(3)


@pytest.mark.timeout(20)  # a save that never ends would be waited for
def test_a_failure_is_a_warning_at_the_line_of_the_step_and_an_error_of_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, training = Disk(monkeypatch, tmp_path), Training()
    training.step(0)
    checkpoints = CheckpointManager(tmp_path / "run", training.optimizer)
    disk.fail_when(lambda call: call.name == "write_at", errno.EIO)
    checkpoints.save(1).wait()
    training.backward(1)
    with pytest.warns(RuntimeWarning, match="the save of step 1 has failed, and training goes on: rank 0") as warned:
        training.optimizer.step()
    assert [found.filename for found in own(warned)] == [__file__]
    assert str(own(warned)[0].message).endswith("; the next save tries again")
    training.optimizer.zero_grad()
    training.step(2)
    with pytest.raises(RuntimeError, match=r"rank 0 could not save .*Input/output error"):
        checkpoints.close()
    checkpoints.close()
    assert entries(tmp_path / "run") == [".lock"]


def fails_at(monkeypatch: pytest.MonkeyPatch, folder: Path, *left: int) -> list[int]:
    """Let renames in a folder fail: one after so many others, and one after so many again. Return what is to come."""
    rename, turns = files.rename, list(left)

    def fails(source: Path, target: Path) -> None:
        if source.parent == folder and turns:
            turns[0] -= 1
            if turns[0] < 0:
                del turns[0]
                raise OSError(errno.EIO, "it fails")
        rename(source, target)

    monkeypatch.setattr(files, "rename", fails)
    return turns


@pytest.mark.parametrize("goes_back", [True, False], ids=["after a restore", "replaced"])
def test_a_save_that_fails_sets_nothing_aside(goes_back: bool, tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    """Whichever rename fails, and also if the first one fails that should undo the others. A rollback lasts until a
    save is complete: the next one sets the same steps aside."""
    saved(tmp_path, optimizer, 2, 4, 6)
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        if goes_back:
            checkpoints.restore(2)
        for failing in range(3 if goes_back else 4):  # 4, 6, then 2 if it is replaced, and the new one
            with pytest.MonkeyPatch.context() as patch:
                left = fails_at(patch, tmp_path, failing, *([0] if failing % 2 else []))
                with pytest.raises(RuntimeError, match="it fails"):
                    checkpoints.save(4 if goes_back else 2, overwrite=not goes_back, blocking=True)
            assert not left, "there was nothing to undo"
            assert checkpoints.all_steps() == [2, 4, 6]
        if goes_back:
            checkpoints.save(8, blocking=True)
    assert complete_steps(tmp_path) == ([2, 8] if goes_back else [2, 4, 6])
    assert aside(tmp_path) == ["abandoned-step-00000004", "abandoned-step-00000006"] * goes_back
    assert len(entries(tmp_path)) == (5 if goes_back else 4), "and nothing else is left"


def test_a_rename_that_is_done_although_the_call_has_failed_is_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS may send a rename twice, and reports that the second one found nothing. So for the notes of ranks."""
    rename: Callable[..., Any] = files.rename

    def twice(source: Path, target: Path) -> None:
        rename(source, target)
        rename(source, target)

    monkeypatch.setattr(files, "rename", twice)
    on_threads(2, lambda transport: saved(tmp_path, Training(transport, 1).optimizer, 1), timeout=PATIENT)
    assert entries(tmp_path) == names(1)
    with pytest.raises(FileNotFoundError):
        files.put_note(tmp_path / "gone" / "ready", b"")


def test_an_interrupt_of_a_blocking_save_is_no_failed_save(
    tmp_path: Path, optimizer: ZeroOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(number: int) -> None:
        raise KeyboardInterrupt

    with CheckpointManager(tmp_path, optimizer) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(files, "sync", interrupted)
        for save in (partial(checkpoints.save, 1, blocking=True), partial(zero.save, tmp_path / "saved", optimizer)):
            with pytest.raises(KeyboardInterrupt):
                save()
    assert complete_steps(tmp_path) == []


GOES_ON = [name for name, system in FILE_SYSTEMS.items() if system.error is None]
IS_REFUSED = [name for name in FILE_SYSTEMS if name not in GOES_ON]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    for module in ("manager", "single", "folder.directory"):
        monkeypatch.setattr(f"zero.checkpoint.{module}.warn_caller", texts.append)
    return texts


def saves(folder: Path, transport: Transport) -> list[str]:
    training = Training(transport, 2)
    training.step(0)
    found = []
    with CheckpointManager(folder / "run", training.optimizer, max_to_keep=2) as checkpoints:
        for step in (1, 2, 3):
            found.append(checkpoints.save(step, {"step": step}, blocking=step == 2).result(PATIENT))
        assert checkpoints.save(3, {"step": 3}, overwrite=True, blocking=True).result() == found[-1]
    found.append(zero.save(folder / "above" / "saved", training.optimizer).result())
    return [*found, training.optimizer.check_replicas()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    first, second = on_threads(WORLD, partial(saves, tmp_path_factory.mktemp("reference")))
    assert first == second
    return first


@pytest.mark.parametrize("name", only(GOES_ON, "no posix_fallocate", "an object store"))
def test_what_can_be_left_out_or_done_otherwise_is_with_one_warning_and_the_same_bytes(
    name: str, reference: list[str], heard: list[str], tmp_path: Path
) -> None:
    system = FILE_SYSTEMS[name]
    with pytest.MonkeyPatch.context() as patch:
        system.use(patch)
        assert on_threads(WORLD, partial(saves, tmp_path), timeout=PATIENT) == [reference] * WORLD
    causes = [] if system.warning is None else system.warning.split("|")
    expected = [(folder, cause) for cause in causes for folder in ("run", "above")]
    expected = [(folder, cause) for folder, cause in expected if folder == "run" or "locked" not in cause]
    assert len(heard) == len(expected), heard
    for folder, cause in expected:
        told = [text for text in heard if text.startswith(f"{tmp_path / folder} is on a file system") and cause in text]
        assert len(told) == 1, (folder, cause, heard)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names(2, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["above", "run"]
    for step, path in ((2, tmp_path / "run" / "step-00000002"), (4, tmp_path / "above" / "saved")):
        training = Training()
        assert zero.load(path, training.optimizer, rng=False).content == reference[step - 1]
        assert training.optimizer.check_replicas() == reference[-1]


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("name", only(IS_REFUSED, "no fsync of files", "no rename", "no removal of folders"))
def test_what_would_lose_data_is_one_error_on_every_rank_and_training_goes_on(name: str, tmp_path: Path) -> None:
    system, folder = FILE_SYSTEMS[name], tmp_path / "run"
    assert system.error is not None
    folder.mkdir()  # where no folder can be made there is one

    def program(transport: Transport) -> list[str]:
        training = Training(transport, 2)
        training.step(0)
        found = []
        for save in (
            partial(saved, folder, training.optimizer, 1),
            partial(zero.save, folder / "a", training.optimizer),
        ):
            with pytest.raises((RuntimeError, ValueError), match=f"this file system {system.error}") as caught:
                save()
            found.append(str(caught.value).replace("rank 0: ", ""))
            training.step(1)
        return [*found, training.optimizer.check_replicas()]

    with pytest.MonkeyPatch.context() as patch:
        system.use(patch)
        first, second = on_threads(WORLD, program, timeout=PATIENT)  # for which a rank would wait that is not told
    assert first == second
    assert complete_steps(folder) == []


@pytest.mark.usefixtures("heard")
def test_what_a_rank_has_written_is_compared_when_the_files_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FILE_SYSTEMS["no writes in place"].use(monkeypatch)
    finish = PartWriter.finish

    def loses(this: PartWriter) -> None:
        finish(this)
        os.ftruncate(this._file, this.nbytes - 16)  # of random numbers

    monkeypatch.setattr(PartWriter, "finish", loses)

    def program(transport: Transport) -> None:
        with pytest.raises(RuntimeError, match=r"parts/rank-0000\d does not have what its rank has written"):
            zero.save(tmp_path / "saved", Training(transport, 1).optimizer)

    on_threads(WORLD, program, timeout=PATIENT)
    assert entries(tmp_path) == []


def test_one_rank_that_cannot_write_in_place_is_enough_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts may have mounted a file system differently. Rank 0 warns."""
    disk, write_at, warned = Disk(monkeypatch, tmp_path), files.write_at, list[int]()

    def of_rank_1(number: int, data: Any, offset: int) -> None:
        if disk.rank() == 1 and not_at_the_end(number, data, offset):
            raise OSError(errno.EOPNOTSUPP, "not here")
        write_at(number, data, offset)

    monkeypatch.setattr(files, "write_at", of_rank_1)
    monkeypatch.setattr("zero.checkpoint.folder.directory.warn_caller", lambda _: warned.append(disk.rank()))

    def program(transport: Transport) -> str:
        disk.this_thread_is(transport.rank)
        return zero.save(tmp_path / "saved", Training(transport, 1).optimizer).result()

    assert len(set(on_threads(WORLD, program, timeout=PATIENT))) == 1
    assert warned == [0]
    zero.open_checkpoint(tmp_path / "saved").verify()


def test_what_the_kernel_writes_or_reads_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv, found = os.pwrite, os.preadv, [bytearray(7), bytearray(4)]
    monkeypatch.setattr(os, "pwrite", lambda number, data, offset: pwrite(number, data[:3], offset))
    monkeypatch.setattr(os, "preadv", lambda number, data, offset: preadv(number, [data[0][:3]], offset))
    with (tmp_path / "a").open("w+b") as file:
        files.write_at(file.fileno(), b"0123456789", 5)
        assert files.read_pieces(file.fileno(), [memoryview(each) for each in found], 5) == 10
    assert (tmp_path / "a").read_bytes() == bytes(5) + b"0123456789"
    assert found == [b"0123456", b"789\0"]
