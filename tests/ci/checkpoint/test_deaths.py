"""A rank that dies or leaves at any call leaves what the next run needs, and what one rank has is complete for all."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from collectives import CollectiveError, Transport, on_threads
from zero import CheckpointManager, ZeroOptimizer
from zero.checkpoint import files
from zero.checkpoint.folder.directory import complete_steps, steps_in
from zero.checkpoint.write.capture import Snapshot
from zero.checkpoint.write.save_folder import SaveFolder
from zero.checkpoint.write.save_thread import Saving

from ...checkpoint.disk import DiedError, Disk
from ...checkpoint.saved import Training, entries, names, step_folder
from ...support.limits import PATIENT, at_once
from ...support.pool import GlooPool, ProgramError
from ...support.small import blocks

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


def ends(group: Any, rank: int, folder: str, how: str) -> None:
    model = blocks()
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=2, process_group=group)
    ends_here = rank == (0 if how == "dies after the rename" else 1)
    sync_folder = files.sync_folder

    def step() -> None:
        model(torch.full((2, 4), rank + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def dies(path: Path) -> bool:
        if (Path(folder) / "step-00000002").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return sync_folder(path)

    step()
    with pytest.MonkeyPatch.context() as patch, CheckpointManager(folder, optimizer) as checkpoints:
        patch.setattr("zero.checkpoint.manager._GRACE", PATIENT if how == "leaves" else 0.1)
        checkpoints.save(1, blocking=True)
        optimizer.exchange(b"")
        if ends_here and how == "dies after the rename":
            patch.setattr(files, "sync_folder", dies)
        elif ends_here and how == "dies":
            patch.setattr(Snapshot, "take", lambda *_: threading.Event().wait())
        saving = checkpoints.save(2)
        if how == "dies after the rename":
            content = saving.result(PATIENT)
            (Path(folder) / "seen").write_text(content)
        elif not ends_here:
            with at_once(), pytest.raises(CollectiveError):
                step()
            (Path(folder) / "seen").write_text("a CollectiveError")
        elif how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("of the test")


@pytest.mark.parametrize("how", ["leaves", "dies", "dies after the rename"])
def test_a_process_that_leaves_or_dies_while_a_save_is_under_way(gloo: GlooPool, how: str, tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, ProgramError), match=r"of the test|the process of rank \d died"):
        gloo.run(ends, str(tmp_path), how)
    gloo.stop()
    steps = complete_steps(tmp_path)
    assert steps == ([1] if how == "dies" else [1, 2])
    for number in steps:
        zero.open_checkpoint(step_folder(tmp_path, number)).verify()
    seen = zero.open_checkpoint(step_folder(tmp_path, 2)).content if "rename" in how else "a CollectiveError"
    assert (tmp_path / "seen").read_text() == seen
    with CheckpointManager(tmp_path, Training().optimizer) as checkpoints:
        assert checkpoints.latest_step() == max(steps)
    assert not [name for name in entries(tmp_path) if name.startswith(".tmp")]
