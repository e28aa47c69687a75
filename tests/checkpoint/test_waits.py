"""A rank waits for a save of others as long as they write, and not at all once it knows how the save has ended."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from collectives import CollectiveError, Transport, on_threads
from zero import CheckpointManager
from zero.checkpoint.folder.directory import complete_steps
from zero.checkpoint.write import save_folder
from zero.checkpoint.write.save_folder import GivenUpError, SaveError, SaveFolder
from zero.checkpoint.write.save_thread import Saving

from ..support.limits import PATIENT
from ..support.parts import parts_of
from ..support.rows import rows
from .saves import Taker, Training, entries


@pytest.mark.parametrize("call", rows(["restore"], ["save"]))
def test_a_restore_waits_for_the_save_under_way(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does a save."""
    taker, wait = Taker(monkeypatch), Saving.wait

    def released(this: Saving) -> None:
        taker.release(0)
        wait(this)

    training = Training(None, 1)
    training.step(0)
    with CheckpointManager(tmp_path, training.optimizer) as checkpoints:
        checkpoints.save(1, blocking=True)
        training.step(1)
        monkeypatch.setattr(Saving, "wait", released)
        taker.begin(0, 0)
        first = checkpoints.save(2)
        if call == "save":
            checkpoints.save(3)
            assert first.done()
        else:
            restored = checkpoints.restore()
            assert restored is not None
            assert restored.step == 2


class Clock:
    """The time for `save_folder`: it passes while a rank waits, and ``script`` is called then."""

    def __init__(self, script: Callable[[float], None]) -> None:
        self.now, self._script = 0.0, script

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._script(self.now)


def waiting(folder: Path, script: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> tuple[SaveFolder, Clock]:
    clock = Clock(script)
    monkeypatch.setattr(save_folder, "time", clock)
    made = SaveFolder(folder / "step-00000001", "0" * 16, 0, 2, timeout=10.0)
    made.make()
    made.make_files({"model/a": 10})
    made.report_done({})
    return SaveFolder(folder / "step-00000001", "0" * 16, 1, 2, timeout=10.0), clock


@pytest.mark.assumes("pwrite")
def test_a_rank_waits_as_long_as_the_others_write_and_not_longer_than_the_group_s_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / f".tmp-step-00000001-{'0' * 16}" / "model" / "a"

    def writes_for_a_minute(now: float) -> None:
        if now < 60:
            os.utime(written, ns=(0, 4 * 10**18 + int(now * 1e9)))

    folder, clock = waiting(tmp_path, writes_for_a_minute, monkeypatch)
    with pytest.raises(SaveError, match=r"rank 1 cannot see whether .*step-00000001 is complete.*in time \(10 s\)"):
        folder.wait_until_committed()
    assert 68 < clock.now < 72
    with pytest.raises(SaveError, match=r"rank 1 did not write its part of .* in time"):
        SaveFolder(tmp_path / "step-00000001", "0" * 16, 0, 2, timeout=10.0).collect()


@pytest.mark.assumes("pwrite")
def test_a_rank_that_knows_how_a_save_has_ended_waits_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank tells it of a failure, or it finds nothing of the save."""
    told, clock = waiting(tmp_path, lambda now: told.abandon("rank 0 is gone", 5) if now > 1 else None, monkeypatch)
    with pytest.raises(SaveError, match="rank 0 is gone"):
        told.wait_until_committed()
    assert 6 < clock.now < 6.1
    told.remove_rest()
    folder, clock = waiting(tmp_path, lambda now: None, monkeypatch)
    folder.remove_rest()
    for call in (folder.wait_until_ready, folder.wait_until_committed):
        with pytest.raises(SaveError, match="rank 0 has given up saving"):
            call()
    assert clock.now == 0


def test_a_rank_that_has_given_up_raises_the_reason_that_another_reports(tmp_path: Path) -> None:
    folder = SaveFolder(tmp_path / "step-00000001", "0" * 16, 1, 2, timeout=10.0)
    saving = Saving(1, folder, GivenUpError("rank 0 has given up"), None, lambda *_: None)
    saving.start(asynchronous=False)
    assert len(saving.hear([{saving.report: "rank 2 could not save: no room"}, {}])) == 1
    with pytest.raises(SaveError, match="rank 2 could not save: no room"):
        saving.result()


# -- the end of a run --------------------------------------------------------------------------------------------------


def test_an_error_in_the_block_completes_the_save_under_way_if_all_ranks_leave(tmp_path: Path) -> None:
    def program(transport: Transport) -> None:
        training = Training(transport, 1)
        training.step(0)
        checkpoints = CheckpointManager(tmp_path, training.optimizer)
        checkpoints.save(1)
        checkpoints.__exit__(ZeroDivisionError, ZeroDivisionError(), None)

    on_threads(2, program)
    lock, announcement, step = entries(tmp_path)  # no rank knows that the others have seen it: the next run removes it
    assert (lock, announcement[:7], step) == (".lock", ".saved-", "step-00000001")


def test_close_waits_for_no_rank_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero.checkpoint.manager._GRACE", 0.0)
    taker, closed = Taker(monkeypatch), threading.Event()

    def program(transport: Transport) -> None:
        training, rank = Training(transport, 1), transport.rank
        training.step(0)
        checkpoints = CheckpointManager(tmp_path, training.optimizer)
        taker.begin(rank, 0 if rank else math.inf)
        checkpoints.save(1)
        if rank:
            parts_of(training.optimizer).transport.abort("of the test")
            assert closed.wait(PATIENT)
            taker.release(rank)
        else:
            with pytest.raises(CollectiveError):
                training.optimizer.exchange(b"")
        with pytest.raises(RuntimeError, match=r"rank \d has lost the other ranks"):
            checkpoints.close()
        closed.set()

    on_threads(2, program, timeout=PATIENT)
    assert complete_steps(tmp_path) == []
