"""A rank that dies at any call leaves what the next run needs, and what is complete for one rank is so for all."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import zero
from collectives import CollectiveError, Transport, on_threads
from zero import CheckpointManager
from zero.checkpoint.folder.directory import complete_steps, steps_in
from zero.checkpoint.write.save_folder import SaveFolder
from zero.checkpoint.write.save_thread import Saving

from ...checkpoint.disk import DiedError, Disk
from ...checkpoint.saves import Training, entries
from ...support.limits import PATIENT

DISTANCE = 7  # a death at every seventh call of a save


def died_at(disk: Disk, root: Path, rank: int, skip: int | None) -> bool:
    """Train and save twice while a rank dies after so many calls of the second save. Returns whether it did."""
    savings: list[Saving] = []

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 1)
        training.step(0)
        checkpoints = CheckpointManager(root, training.optimizer)
        checkpoints.save(1, blocking=True)
        training.step(1)
        if skip is not None and transport.rank == rank:
            disk.kill(rank, skip)
        training.optimizer.exchange(b"")
        savings.append(checkpoints.save(2))
        if transport.rank == rank:
            savings[-1].wait()
        training.optimizer.exchange(b"")
        if disk.is_dead(rank):
            raise DiedError
        savings[-1].wait()

    with suppress(DiedError, CollectiveError):
        on_threads(2, program, timeout=PATIENT)
    died = disk.is_dead(rank)
    for saving in savings:
        saving.abandon("the test has killed a rank", 0)
    disk.revive(PATIENT)
    disk.release_locks(0)
    return died


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_at_any_call_leaves_what_the_next_run_needs(rank: int, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, tmp_path)
        assert not died_at(disk, tmp_path / "whole", rank, None)
        most = len(disk.of(rank))
    reference = {step: zero.open_checkpoint(tmp_path / "whole" / f"step-0000000{step}").content for step in (1, 2)}
    seen = set()
    for skip in range(0, most, DISTANCE):
        root = tmp_path / f"{skip}"
        with pytest.MonkeyPatch.context() as patch:
            if not died_at(Disk(patch, tmp_path), root, rank, skip):
                break
        steps = complete_steps(root)
        seen.add(max(steps))
        found = {step: zero.open_checkpoint(steps_in(root)[step]).content for step in steps}
        assert found == {step: reference[step] for step in steps}
        with CheckpointManager(root, Training(None, 0).optimizer) as checkpoints:
            assert checkpoints.latest_step() == max(steps)
            checkpoints.restore(rng=False)
            checkpoints.save(3, blocking=True)
        assert entries(root) == [".lock", *(f"step-0000000{step}" for step in (*steps, 3))]
    assert {1} <= seen <= {1, 2}


# -- what is complete for one rank is complete for all -----------------------------------------------------------------


@pytest.mark.parametrize("row", ["moved", "removed", "saved over", "moved, blocking"])
def test_a_checkpoint_may_be_moved_or_removed_as_soon_as_one_rank_has_returned(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, event = SaveFolder.wait_until_committed, threading.Event()

    def waiting(this: SaveFolder) -> str:
        assert this.rank != 1 or event.wait(PATIENT), "never released"
        return wait(this)

    monkeypatch.setattr(SaveFolder, "wait_until_committed", waiting)

    def program(transport: Transport) -> str:
        with CheckpointManager(tmp_path / "run", Training(transport, 1).optimizer) as checkpoints:
            saving = checkpoints.save(1, blocking="blocking" in row)
            if transport.rank != 1:
                saving.result(PATIENT)
            if transport.rank == 0:
                saving.path.rename(tmp_path / "best") if "moved" in row else shutil.rmtree(saving.path)
                if row == "saved over":
                    saving.path.mkdir()
                event.set()
            return saving.result(PATIENT)

    assert len(set(on_threads(3, program, timeout=PATIENT))) == 1
    left = [".lock", "step-00000001"] if row == "saved over" else [".lock"]
    assert entries(tmp_path / "run") == left, "and nothing else is left"
