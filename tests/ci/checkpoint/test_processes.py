"""A process that leaves, dies or cannot write while a save is under way leaves what the next run needs."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from collectives import CollectiveError
from zero import CheckpointManager, ZeroOptimizer
from zero.checkpoint import files
from zero.checkpoint.folder.directory import complete_steps
from zero.checkpoint.write.capture import Snapshot

from ...checkpoint.saves import Training, entries
from ...support.limits import PATIENT, at_once
from ...support.pool import GlooPool, ProgramError
from ...support.small import blocks
from ...support.warned import own


def ends(group: Any, rank: int, folder: str, how: str) -> None:
    """Leave the block, or die, on one rank while a save is under way. The other one writes what it has seen."""
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
def test_a_rank_that_leaves_or_dies_while_a_save_is_under_way(gloo: GlooPool, how: str, tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, ProgramError), match=r"of the test|the process of rank \d died"):
        gloo.run(ends, str(tmp_path), how)
    gloo.stop()
    steps = complete_steps(tmp_path)
    assert steps == ([1] if how == "dies" else [1, 2])
    for number in steps:
        zero.open_checkpoint(tmp_path / f"step-{number:08d}").verify()
    seen = zero.open_checkpoint(tmp_path / "step-00000002").content if "rename" in how else "a CollectiveError"
    assert (tmp_path / "seen").read_text() == seen
    with CheckpointManager(tmp_path, Training(None, 0).optimizer) as checkpoints:
        assert checkpoints.latest_step() == max(steps)
    assert not [name for name in entries(tmp_path) if name.startswith(".tmp")]


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


def test_a_disk_that_is_full_for_one_process_is_reported_on_all(gloo: GlooPool, tmp_path: Path) -> None:
    found = gloo.run(full_on_one_rank, str(tmp_path), ranks=(0, 1, 2))
    for warned, error, _ in found:
        assert "the save of step 2 has failed, and training goes on: rank 1 could not save" in warned
        assert "No space left on device" in warned
        assert "No space left on device" in error
    assert len({bits for _, _, bits in found}) == 1
    assert entries(tmp_path) == [".lock", "step-00000001"]
