"""A disk that is full for one process is an error by name on all, and training goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from zero import CheckpointManager
from zero.checkpoint import files

from ...checkpoint.saves import Training, entries
from ...support.pool import GlooPool
from ...support.warned import own


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
