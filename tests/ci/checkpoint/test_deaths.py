"""A rank that dies or leaves at any call leaves what the next run needs, and what one rank has is complete for all."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import zero
from collectives import CollectiveError, Transport, on_threads
from zero import CheckpointManager
from zero.checkpoint.folder.directory import complete_steps, steps_in
from zero.checkpoint.write.save_folder import SaveFolder
from zero.checkpoint.write.save_thread import Saving

from ...checkpoint.disk import DiedError, Disk
from ...checkpoint.saved import Training, entries, names
from ...support.limits import PATIENT

DISTANCE = 7  # a death at every seventh call of a save


def contents(root: Path) -> dict[int, str]:
    return {step: zero.open_checkpoint(steps_in(root)[step]).content for step in complete_steps(root)}


def died_at(disk: Disk, root: Path, rank: int, skip: int) -> bool:
    """Train and save twice while a rank dies after so many calls of the second save. Returns whether it did."""
    savings: list[Saving] = []

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 1)
        training.step(0)
        checkpoints = CheckpointManager(root, training.optimizer)
        checkpoints.save(1, blocking=True)
        training.step(1)
        training.on_rank_0(partial(disk.kill, rank, skip))
        savings.append(checkpoints.save(2))
        if transport.rank == rank:
            savings[-1].wait()
        training.optimizer.exchange(b"")
        if rank in disk.dead:
            raise DiedError
        savings[-1].wait()

    with suppress(DiedError, CollectiveError):
        on_threads(2, program, timeout=PATIENT)
    died = rank in disk.dead
    for saving in savings:
        saving.abandon("the test has killed a rank", 0)
    disk.revive(PATIENT)
    disk.release_locks(0)
    return died


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_at_any_call_leaves_what_the_next_run_needs(rank: int, tmp_path: Path) -> None:
    left: list[dict[int, str]] = []
    died = True
    while died:
        skip = len(left) * DISTANCE
        root = tmp_path / f"{skip}"
        with pytest.MonkeyPatch.context() as patch:
            died = died_at(Disk(patch, tmp_path), root, rank, skip)
        left.append(contents(root))
        with CheckpointManager(root, Training().optimizer) as checkpoints:
            assert checkpoints.latest_step() == max(left[-1])
            checkpoints.restore(rng=False)
            checkpoints.save(3, blocking=True)
        assert entries(root) == names(*left[-1], 3)
    undisturbed = left[-1]  # where no rank died
    assert list(undisturbed) == [1, 2]
    assert len(left) > 5
    assert list(left[0]) == [1]
    for found in left:
        assert found == {step: undisturbed[step] for step in found}


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
    assert entries(tmp_path / "run") == names(*([1] if row == "saved over" else [])), "and nothing else is left"
