"""Processes that save, restore at other stages, leave or die while a save is under way keep every promise."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero
from collectives import CollectiveError
from zero import CheckpointManager, ZeroOptimizer, load, open_checkpoint, save
from zero.checkpoint import files
from zero.checkpoint.folder.directory import complete_steps
from zero.checkpoint.write.snapshot import Snapshot

from ...checkpoint.runs import SMALL, Topology, content, run, take_steps
from ...checkpoint.saves import Training, entries
from ...support.limits import PATIENT, at_once
from ...support.models import build
from ...support.pool import GlooPool, ProgramError
from ...support.small import blocks


def trained(group: dist.ProcessGroup, rank: int, stage: int, path: str, steps: int, first: int) -> str:
    model = build(0)
    optimizer = ZeroOptimizer(model, stage=stage, process_group=group, bucket_cap_mb=SMALL, lr=1e-2, divisor=12)
    if first:
        assert load(f"{path}/{first}", optimizer).step == first
    take_steps(model, optimizer, first, steps)
    save(f"{path}/{first + steps}", optimizer, step=first + steps)
    digest = optimizer.check_replicas()
    optimizer.close()
    return digest


def test_processes_save_and_load_at_other_stages_and_numbers(gloo: GlooPool, tmp_path: Path) -> None:
    run(tmp_path / "alone", Topology(), 2)
    gloo.run(trained, 3, str(tmp_path), 2, 0, ranks=(0, 1, 2))
    found = open_checkpoint(tmp_path / "2")
    found.verify()
    assert found.content == content(tmp_path / "alone", 2)
    digests = gloo.run(trained, 2, str(tmp_path), 1, 2, ranks=(0, 1))
    shutil.copytree(tmp_path / "alone", tmp_path / "further")
    assert set(digests) == {run(tmp_path / "further", Topology(), 1)}
    assert open_checkpoint(tmp_path / "3").content == content(tmp_path / "further", 3)


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
