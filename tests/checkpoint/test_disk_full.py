"""A disk that fails at some call stops no training, costs no older checkpoint, and is reported to all ranks."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path

import pytest

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager

from ..support.limits import PATIENT
from ..support.warned import own
from .disk import Disk
from .failing_disk import calls_of_a_save, failures, run
from .saves import Training, entries


def test_a_disk_that_fails_at_some_call_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole").mkdir()
    calls = calls_of_a_save(tmp_path / "whole")
    failed, _ = run(tmp_path / "run", failures(calls, 0)[::9], monkeypatch)
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
