"""A disk that fails at some call stops no training, costs no older checkpoint, and is reported to all ranks."""

from __future__ import annotations

import errno
import os
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager
from zero.checkpoint.folder.directory import complete_steps
from zero.checkpoint.write.capture import Snapshot

from ..support.errors import warned as told
from ..support.limits import PATIENT
from ..support.warned import own
from .disk import ERRORS, Disk
from .saves import Training, entries

WORLD = 2


@dataclass(frozen=True)
class Failure:
    """Calls of a rank during a save that fail: one after ``skip`` others, or from then on all."""

    rank: int
    skip: int
    number: int
    for_good: bool


def failures(disk: Disk) -> list[Failure]:
    """Return failures of each fifth call of the save that the disk has recorded; in turn one call and all fail."""
    found = []
    for rank in range(WORLD):
        calls = {(call.name, call.path) for call in disk.of(rank)}  # one that waits for another rank is made often
        assert len(calls) > 5
        for skip in range(0, len(calls) + 5, 5):
            for_good = skip % 2 == 1
            found.append(Failure(rank, skip, ERRORS[(skip + for_good) % len(ERRORS)], for_good))
    return found


def check_failed(failure: Failure, error: str, warned: list[str], step: int) -> None:
    cause = f"rank {failure.rank} could not "
    assert len(warned) == 1, f"{failure}: {warned}"
    assert warned[0].startswith(f"the save of step {step} has failed, and training goes on: {cause}"), warned
    for text in (warned[0], error):
        assert cause in text
        assert os.strerror(failure.number) in text, f"{failure}: {text}"


@pytest.mark.first(0)
def test_a_disk_that_fails_at_some_call_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save is whole; each pair of saves after it has one that is whole and one during which calls fail."""
    root, disk = tmp_path / "run", Disk(monkeypatch, tmp_path)
    warned: dict[int, list[str]] = {rank: [] for rank in range(WORLD)}
    monkeypatch.setattr("zero.checkpoint.manager.warn_caller", lambda text: warned[disk.rank()].append(text))
    planned: list[Failure] = []

    def program(transport: Transport) -> list[bool]:
        rank = transport.rank
        disk.this_thread_is(rank)
        training = Training(transport, 1)
        checkpoints = CheckpointManager(root, training.optimizer, max_to_keep=2)

        def on_rank_0(act: Callable[[], object]) -> None:
            training.optimizer.exchange(b"")
            if rank == 0:
                act()
            training.optimizer.exchange(b"")

        def fail(failure: Failure, good: int) -> None:
            assert not [name for name in entries(root) if name.startswith(".tmp")]
            assert complete_steps(root)[-1] == good
            most = None if failure.for_good else 1
            disk.fail_when(lambda call: call.rank == failure.rank, failure.number, skip=failure.skip, most=most)

        training.step(0)
        checkpoints.save(1, blocking=True)
        on_rank_0(disk.calls.clear)
        checkpoints.save(2)
        checkpoints.wait_until_finished()
        on_rank_0(lambda: planned.extend(failures(disk)))
        failed = []
        for number, failure in enumerate(planned, start=1):
            good, bad = 2 * number + 1, 2 * number + 2
            checkpoints.save(good, blocking=True)
            on_rank_0(partial(fail, failure, good))
            saving = checkpoints.save(bad)
            if rank == failure.rank:
                saving.wait()
            training.optimizer.exchange(b"")
            training.step(number)
            saving.wait()
            told = training.optimizer.exchange(b"" if saving.error is None else str(saving.error).encode())
            assert len({bool(text) for text in told}) == 1, f"{failure}: {told}"
            failed.append(saving.error is not None)
            texts = [text for text in warned[rank] if "the save of step" in text]
            if failed[-1]:
                check_failed(failure, str(saving.error), texts, bad)
            else:
                assert texts == []
            warned[rank].clear()
            on_rank_0(disk.heal)
            for step in (good, bad)[: 1 if failed[-1] else 2]:
                zero.open_checkpoint(root / f"step-{step:08d}").verify()
            training.optimizer.exchange(b"")
        checkpoints.save(10**6, blocking=True)
        checkpoints.close()
        plain = Training(transport, 1)
        for number in range(len(planned) + 1):
            plain.step(number)
        assert training.optimizer.check_replicas() == plain.optimizer.check_replicas()
        return failed

    failed, _ = on_threads(WORLD, program, timeout=PATIENT)
    assert sum(failed) > len(failed) / 2
    assert all(name == ".lock" or name.startswith("step-") for name in entries(root))


def manager(folder: Path, **arguments: Any) -> CheckpointManager:
    """Return the manager of a training of one rank."""
    training = Training(None, 0)
    training.step(0)
    return CheckpointManager(folder / "run", training.optimizer, **arguments)


@pytest.mark.assumes("posix_fallocate", "pwrite")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_found_before_a_byte_is_written_and_says_how_much_is_missing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, checkpoints = Disk(monkeypatch, tmp_path), manager(tmp_path)
    disk.fail_when(lambda call: call.name == "reserve", number)
    disk.calls.clear()
    with pytest.raises(RuntimeError, match=r"the disk is full .*needs [\d,]{6,} bytes, and [\d,]+ are free"):
        checkpoints.save(1, blocking=True)
    assert not [call for call in disk.calls if call.name == "write_at" and call.path.suffix == ".safetensors"]
    assert checkpoints.all_steps() == []
    checkpoints.close()
    assert entries(tmp_path / "run") == [".lock"]


@pytest.mark.assumes("pwrite")
def test_a_blocking_save_that_fails_on_one_rank_ends_at_once_on_all_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a folder whose name is no text."""
    disk, folder = Disk(monkeypatch, tmp_path), tmp_path / os.fsdecode(b"caf\xe9")
    disk.fail_when(
        lambda call: call.rank == 1 and call.name == "write_at" and call.path.suffix == ".safetensors", errno.EIO
    )

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 1)
        training.step(0)
        checkpoints = CheckpointManager(folder, training.optimizer)
        with pytest.raises(
            RuntimeError, match=r"rank 1 could not save .*/caf\\udce9/.*: OSError: .*Input/output error"
        ):
            checkpoints.save(1, blocking=True)
        checkpoints.close()

    on_threads(2, program, timeout=PATIENT)  # for which a rank would wait that is not told
    assert entries(folder) == [".lock"]


@pytest.mark.timeout(20)  # a save that never ends would be waited for
def test_a_failure_is_a_warning_at_the_line_of_the_step_and_an_error_of_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path)
    training = Training(None, 0)
    training.step(0)
    checkpoints = CheckpointManager(tmp_path / "run", training.optimizer)
    disk.fail_when(lambda call: call.name == "write_at" and call.in_thread, errno.EIO)
    saving = checkpoints.save(1)
    saving.wait()
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


def test_the_error_of_a_save_holds_nothing_of_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Tensor]] = []

    def fails(*_: object) -> None:
        copied = torch.zeros(4)
        held.append(weakref.ref(copied))
        raise OSError(errno.EIO, "of the test")

    monkeypatch.setattr(Snapshot, "take", fails)
    with manager(tmp_path) as checkpoints:
        saving = checkpoints.save(1)
        with pytest.raises(RuntimeError, match="of the test"):
            saving.result(PATIENT)
        assert [ref() for ref in held] == [None]


@pytest.mark.parametrize("name", ["rename", "remove"])
def test_an_older_checkpoint_that_cannot_be_removed_is_no_failure_of_the_save(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path)
    with manager(tmp_path, max_to_keep=1) as checkpoints:
        checkpoints.save(1, blocking=True)
        disk.fail_when(lambda call: call.name == name and "step-00000001" in str(call.path), errno.EIO)
        with pytest.warns(RuntimeWarning, match=r"could not be removed.*Input/output error"):
            checkpoints.save(2, blocking=True)
        assert checkpoints.latest_step() == 2
        disk.heal()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoints.save(3, blocking=True)
    assert entries(tmp_path / "run") == [".lock", "step-00000003"]


def test_a_checkpoint_whose_replacement_fails_stays_at_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path)
    with manager(tmp_path) as checkpoints:
        saving = checkpoints.save(1, {"n": 1}, blocking=True)
        disk.fail_when(lambda call: call.name == "rename" and call.path.name.startswith(".tmp-"), errno.EIO)
        with pytest.raises(RuntimeError, match="Input/output error"):
            checkpoints.save(1, {"n": 2}, overwrite=True, blocking=True)
    assert entries(tmp_path / "run") == [".lock", "step-00000001"]
    assert zero.open_checkpoint(saving.path).state == {"n": 1}


def test_a_commit_that_fails_on_rank_0_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, tmp_path)
    disk.fail_when(lambda call: call.name == "rename" and call.path.name.startswith(".tmp-"), errno.EIO)

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        with (
            CheckpointManager(tmp_path, Training(transport, 1).optimizer) as checkpoints,
            pytest.raises(RuntimeError, match=r"rank 0 could not save .*Input/output error"),
        ):
            checkpoints.save(1, blocking=True)

    on_threads(2, program, timeout=PATIENT)
    assert entries(tmp_path) == [".lock"]


def test_what_a_commit_that_failed_leaves_is_removed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path)
    disk.fail_when(lambda call: call.name == "rename" and call.path.name.startswith(".tmp-"), errno.EIO)

    def interrupted() -> None:
        with manager(tmp_path) as checkpoints:
            with pytest.raises(RuntimeError, match="Input/output error"):
                checkpoints.save(1, blocking=True)
            raise KeyError("the run ends before another save")

    with pytest.raises(KeyError):
        interrupted()
    disk.heal()
    with told() as messages, manager(tmp_path) as checkpoints:
        checkpoints.save(2, blocking=True)
    assert [message for message in messages if "is left" in message] == []
    assert entries(tmp_path / "run") == [".lock", "step-00000002"]
