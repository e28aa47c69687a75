"""No room, no harm: a disk that fails at any call stops no training, costs no older checkpoint, and is reported to all.

Every rank hears of it in the next step, with the rank and the cause. Nothing of a failed save stays.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager
from zero.checkpoint import files
from zero.checkpoint.folder.directory import complete_steps

from ..support.parts import parts_of
from ..support.pool import GlooPool
from ..support.warned import own
from .disk import ERRORS, Call, Disk
from .saves import PATIENCE, Training, entries

WORLD = 2


@dataclass(frozen=True)
class Failure:
    """Calls of a rank during a save that fail: one after ``skip`` others, or from then on all."""

    rank: int
    skip: int
    number: int
    for_good: bool = False

    def fits(self, call: Call) -> bool:
        return call.rank == self.rank


def run(root: Path, failures: Sequence[Failure | None], monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], Disk]:
    """Save once with each failure, and once without in between. Returns which saves have failed, and the disk."""
    disk = Disk(monkeypatch, root.parent)
    warned: dict[int, list[str]] = {rank: [] for rank in range(WORLD)}
    monkeypatch.setattr("zero.checkpoint.manager.warn_caller", lambda text: warned[disk.rank()].append(text))

    def program(transport: Transport) -> list[bool]:
        rank = transport.rank
        disk.this_thread_is(rank)
        plain, training = Training(transport, 1), Training(transport, 1)
        checkpoints = CheckpointManager(root, training.optimizer, max_to_keep=2)

        def step(number: int) -> None:
            for each in (plain, training):
                each.step(number)

        failed = []
        step(0)
        for number, failure in enumerate(failures):
            good, bad = 2 * number + 1, 2 * number + 2
            saving = checkpoints.save(good, blocking=True)
            if rank == 0:
                assert not [name for name in entries(root) if name.startswith(".tmp")]
                assert complete_steps(root)[-1] == good
            training.optimizer.exchange(b"")
            if rank == 0:
                disk.calls.clear()
                if failure is not None:
                    disk.fail_when(
                        failure.fits, failure.number, skip=failure.skip, most=None if failure.for_good else 1
                    )
            training.optimizer.exchange(b"")
            saving = checkpoints.save(bad)
            if failure is None or rank == failure.rank:
                saving.wait()
            training.optimizer.exchange(b"")
            step(number)
            saving.wait()
            told = training.optimizer.exchange(b"" if saving.error is None else str(saving.error).encode())
            failed.append(saving.error is not None)
            texts = [text for text in warned[rank] if "the save of step" in text]
            if failed[-1]:
                assert failure is not None
                assert all(told), f"{failure}: {told}"
                cause = f"rank {failure.rank} could not "
                assert len(texts) == 1, f"{failure}: {texts}"
                assert texts[0].startswith(f"the save of step {bad} has failed, and training goes on: {cause}"), texts
                for text in (texts[0], str(saving.error)):
                    assert cause in text
                    assert os.strerror(failure.number) in text, f"{failure}: {text}"
            else:
                assert not any(told), f"{failure}: {told}"
                assert texts == []
            training.optimizer.exchange(b"")
            warned[rank].clear()
            if rank == 0:
                disk.heal()
                zero.open_checkpoint(root / f"step-{good:08d}").verify()
                if not failed[-1]:
                    zero.open_checkpoint(root / f"step-{bad:08d}").verify()
            training.optimizer.exchange(b"")
        checkpoints.save(10**6, blocking=True)
        checkpoints.close()
        assert training.optimizer.check_replicas() == plain.optimizer.check_replicas()
        return failed

    (found, _) = on_threads(WORLD, program, timeout=PATIENCE)
    left = entries(root)
    assert left[0] == ".lock"
    assert [name for name in left[1:] if not name.startswith("step-")] == []
    return found, disk


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[int, int]:
    """Return how many calls a save takes, by rank; those that wait for another rank are not counted."""
    with pytest.MonkeyPatch.context() as patch:
        failed, disk = run(tmp_path_factory.mktemp("whole") / "run", [None, None, None], patch)
    assert failed == [False] * 3
    counts = {rank: len({(call.name, call.path) for call in disk.of(rank)}) for rank in range(WORLD)}
    assert min(counts.values()) > 10
    return counts


def failures(calls: dict[int, int], turn: int) -> list[Failure]:
    """Return a failure of each call: for turn 0 the first call fails once, the second one for good, and so on; for
    turn 1 the other way round."""
    found = []
    for rank, count in calls.items():
        for skip in range(count + 5):
            for_good = (skip + turn) % 2
            found.append(Failure(rank, skip, ERRORS[(skip + for_good) % len(ERRORS)], for_good=bool(for_good)))
    return found


def test_a_disk_that_fails_at_some_call_does_no_harm(
    calls: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, _ = run(tmp_path / "run", failures(calls, 0)[::9], monkeypatch)
    assert sum(failed) > len(failed) / 2


@pytest.mark.full
@pytest.mark.timeout(400)  # two saves for each call of one
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_disk_that_fails_at_any_call_does_no_harm(
    turn: int, calls: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, _ = run(tmp_path / "run", failures(calls, turn), monkeypatch)
    assert sum(failed) > len(failed) / 2


@pytest.mark.assumes("posix_fallocate", "pwrite")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_found_before_a_byte_is_written_and_says_how_much_is_missing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path)
    training = Training(None, 1)
    training.step(0)
    checkpoints = CheckpointManager(tmp_path / "run", training.optimizer)
    disk.fail_when(lambda call: call.name == "reserve", number)
    disk.calls.clear()
    with pytest.raises(RuntimeError, match=r"the disk is full .*needs [\d,]{6,} bytes, and [\d,]+ are free"):
        checkpoints.save(1, blocking=True)
    assert not [call for call in disk.calls if call.name == "write_at" and call.path.suffix == ".safetensors"]
    assert checkpoints.all_steps() == []
    checkpoints.close()
    assert entries(tmp_path / "run") == [".lock"]


def test_each_failure_in_a_row_is_a_warning_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, tmp_path)
    told: dict[int, list[str]] = {0: [], 1: []}
    rank_of = threading.local()
    monkeypatch.setattr("zero.checkpoint.manager.warn_caller", lambda text: told[rank_of.rank].append(text))

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        rank_of.rank = transport.rank
        training = Training(transport, 2)
        training.step(0)
        with CheckpointManager(tmp_path / "run", training.optimizer) as checkpoints:
            training.optimizer.exchange(b"")
            if transport.rank == 0:
                disk.fail_when(lambda call: call.name == "sync" and call.rank == 1, errno.EIO)
            training.optimizer.exchange(b"")
            for number in range(4):
                checkpoints.save(number).wait()
                training.step(number)
            training.optimizer.exchange(b"")
            if transport.rank == 0:
                disk.heal()
            training.optimizer.exchange(b"")
            checkpoints.save(4, blocking=True)

    on_threads(2, program)
    for texts in told.values():
        assert [text.partition(" has failed, and training goes on: rank 1 could not save")[0] for text in texts] == [
            f"the save of step {number}" for number in range(4)
        ]
    assert entries(tmp_path / "run") == [".lock", "step-00000004"]


@pytest.mark.assumes("pwrite")
def test_a_blocking_save_that_fails_on_one_rank_ends_at_once_on_all_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path)
    disk.fail_when(
        lambda call: call.rank == 1 and call.name == "write_at" and call.path.suffix == ".safetensors", errno.EIO
    )

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 1)
        training.step(0)
        checkpoints = CheckpointManager(tmp_path / "run", training.optimizer)
        with pytest.raises(RuntimeError, match=r"rank 1 could not save .*Input/output error"):
            checkpoints.save(1, blocking=True)
        checkpoints.close()

    on_threads(2, program, timeout=PATIENCE)  # for which a rank would wait that is not told
    assert entries(tmp_path / "run") == [".lock"]


def test_a_failure_in_a_folder_whose_name_is_no_text_is_known_to_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / os.fsdecode(b"caf\xe9")
    disk = Disk(monkeypatch, tmp_path)

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 1)
        training.step(0)
        checkpoints = CheckpointManager(run, training.optimizer)
        checkpoints.save(1, blocking=True)
        disk.fail_when(lambda call: call.rank == 1 and call.name == "sync", errno.EIO)
        checkpoints.save(2)
        with pytest.raises(RuntimeError, match=r"rank 1 could not save .*/caf\\udce9/step-00000002: OSError"):
            checkpoints.close()

    on_threads(2, program, timeout=PATIENCE)  # for which a rank would wait that is not told
    assert entries(run) == [".lock", "step-00000001"]


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


@pytest.mark.assumes("no warning")
def test_a_warning_that_is_an_error_on_one_rank_ends_the_next_save_on_all(tmp_path: Path) -> None:
    def program(transport: Transport) -> None:
        training = Training(transport, 1)
        checkpoints = CheckpointManager(tmp_path, training.optimizer, max_to_keep=1)
        checkpoints.save(1, blocking=True)
        if transport.rank == 0:
            (tmp_path / "step-00000001" / "foreign").touch()
        saving = checkpoints.save(2)  # rank 0 alone has something to warn of
        saving.result(PATIENCE)
        with pytest.raises((RuntimeError, RuntimeWarning), match="step-00000001 is left, because it has foreign"):
            checkpoints.save(3)
        training.step(1)
        checkpoints.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_threads(2, program)
    assert entries(tmp_path) == [".lock", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("name", ["rename", "remove"])
def test_an_older_checkpoint_that_cannot_be_removed_is_no_failure_of_the_save(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path)
    training = Training(None, 0)
    training.step(0)
    with CheckpointManager(tmp_path / "run", training.optimizer, max_to_keep=1) as checkpoints:
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
    training = Training(None, 0)
    training.step(0)
    with CheckpointManager(tmp_path / "run", training.optimizer) as checkpoints:
        saving = checkpoints.save(1, {"n": 1}, blocking=True)
        disk.fail_when(lambda call: call.name == "rename" and call.path.name.startswith(".tmp-"), errno.EIO)
        with pytest.raises(RuntimeError, match="Input/output error"):
            checkpoints.save(1, {"n": 2}, overwrite=True, blocking=True)
    assert entries(tmp_path / "run") == [".lock", "step-00000001"]
    assert zero.open_checkpoint(saving.path).state == {"n": 1}


def test_a_failure_is_heard_although_another_manager_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, tmp_path)
    training = Training(None, 0)
    training.step(0)
    first = CheckpointManager(tmp_path / "first", training.optimizer)
    second = CheckpointManager(tmp_path / "second", training.optimizer)
    disk.fail_when(lambda call: call.in_thread and call.path.is_relative_to(tmp_path / "first"), errno.EIO)
    saving = first.save(1)
    saving.wait()
    second.save(1, blocking=True)
    with pytest.warns(RuntimeWarning, match=r"the save of step 1 has failed.* in .*first are as they were"):
        training.step(1)
    second.close()
    with pytest.raises(RuntimeError, match="Input/output error"):
        first.close()


def test_a_failure_of_which_all_ranks_have_heard_is_told_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path)
    training = Training(None, 0)
    manager = CheckpointManager(tmp_path / "run", training.optimizer)
    disk.fail_when(lambda call: call.name == "sync" and "probe" not in call.path.name, errno.EIO)
    for number in range(3):
        with pytest.raises(RuntimeError, match="Input/output error"):
            zero.save(tmp_path / f"{number}", training.optimizer)
    saving = manager.save(1)
    saving.wait()
    with pytest.raises(RuntimeError, match="Input/output error"):
        manager.close()
    training.step(0)
    assert parts_of(training.optimizer).reducer.agreement.reports == [{}]


def full_on_one_rank(group: Any, rank: int, folder: str) -> tuple[str, str, str]:
    """Save while the disk of rank 1 is full. Returns the warning, the error of `close`, and the bits."""
    training = Training(group, 2)
    training.step(0)
    checkpoints = CheckpointManager(folder, training.optimizer)
    checkpoints.save(1, blocking=True)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(files, "write_at", refuse)
        saving = checkpoints.save(2)
        if rank == 1:
            saving.wait()  # not even a note can be left: the others learn it in the next step
    training.optimizer.exchange(b"")
    with pytest.warns(RuntimeWarning) as warned:
        training.step(1)
    with pytest.raises(RuntimeError) as caught:
        checkpoints.close()
    return str(own(warned)[0].message), str(caught.value), training.optimizer.check_replicas()


def refuse(number: int, data: bytes, offset: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_it_is_on_real_processes(gloo: GlooPool, tmp_path: Path) -> None:
    found = gloo.run(full_on_one_rank, str(tmp_path), ranks=(0, 1, 2))
    for warned, error, _ in found:
        assert "the save of step 2 has failed, and training goes on: rank 1 could not save" in warned
        assert "No space left on device" in warned
        assert "No space left on device" in error
    assert len({bits for _, _, bits in found}) == 1
    assert entries(tmp_path) == [".lock", "step-00000001"]
