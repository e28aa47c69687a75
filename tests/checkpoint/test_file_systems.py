"""Where a file system lacks a call, a save warns once and writes the same bytes, or is one error on every rank."""

from __future__ import annotations

import errno
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager
from zero.checkpoint import files
from zero.checkpoint.folder.directory import complete_steps
from zero.checkpoint.write.chunk_writer import PartWriter

from ..support.limits import PATIENT
from .disk import Disk
from .file_systems import FILE_SYSTEMS
from .saves import Training, entries

WORLD = 2
GOES_ON = [name for name, system in FILE_SYSTEMS.items() if system.error is None]
IS_REFUSED = [name for name in FILE_SYSTEMS if name not in GOES_ON]


class Heard:
    """The warnings of this library."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        for module in ("manager", "single"):
            patch.setattr(f"zero.checkpoint.{module}.warn_caller", self.texts.append)


def saves(folder: Path, transport: Transport) -> list[str]:
    """Save into a folder of steps, and once beside it. Returns the contents, and the SHA-256 of the parameters."""
    training = Training(transport, 2)
    training.step(0)
    found = []
    with CheckpointManager(folder / "run", training.optimizer, max_to_keep=2) as checkpoints:
        for step in (1, 2, 3):
            saving = checkpoints.save(step, {"step": step}, blocking=step == 2)
            found.append(saving.result(PATIENT))
    found.append(zero.save(folder / "above" / "saved", training.optimizer).result())
    return [*found, training.optimizer.check_replicas()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    first, second = on_threads(WORLD, partial(saves, tmp_path_factory.mktemp("reference")))
    assert first == second
    return first


@pytest.mark.parametrize("name", GOES_ON)
def test_what_can_be_left_out_or_done_otherwise_is_with_one_warning_and_the_same_bytes(
    name: str, reference: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, heard = FILE_SYSTEMS[name], Heard(monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        system.use(patch)
        found = on_threads(WORLD, partial(saves, tmp_path), timeout=PATIENT)
    assert found == [reference] * WORLD
    causes = [] if system.warning is None else system.warning.split("|")
    for folder in (tmp_path / "run", tmp_path / "above"):
        texts = [text for text in heard.texts if text.startswith(f"{folder} is on a file system")]
        expected = [cause for cause in causes if folder.name == "run" or "locked" not in cause]
        assert len(texts) == len(expected), texts
        for cause in expected:
            assert len([text for text in texts if cause in text]) == 1, f"{cause}: {texts}"
    assert len(heard.texts) == 2 * len(causes) - ("can be locked" in str(causes))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "step-00000002", "step-00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["above", "run"]
    for step, path in ((2, tmp_path / "run" / "step-00000002"), (4, tmp_path / "above" / "saved")):
        zero.open_checkpoint(path).verify()
        training = Training(None, 0)
        assert zero.load(path, training.optimizer, rng=False).content == reference[step - 1]
        assert training.optimizer.check_replicas() == reference[-1]


@pytest.mark.parametrize("name", IS_REFUSED)
def test_what_would_lose_data_is_one_error_on_every_rank_and_training_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, _ = FILE_SYSTEMS[name], Heard(monkeypatch)
    assert system.error is not None
    folder = tmp_path / "run"
    folder.mkdir()  # where no folder can be made there is one

    def program(transport: Transport) -> tuple[str, str, str]:
        training = Training(transport, 2)
        training.step(0)
        errors = []
        for save in (lambda: managed(training, folder), lambda: zero.save(folder / "saved", training.optimizer)):
            with pytest.raises((RuntimeError, ValueError), match=system.error) as caught:
                save()
            errors.append(str(caught.value))
            training.step(1)
        return errors[0], errors[1], training.optimizer.check_replicas()

    with pytest.MonkeyPatch.context() as patch:
        system.use(patch)
        first, second = on_threads(WORLD, program, timeout=PATIENT)  # for which a rank would wait that is not told
    assert first[2] == second[2]
    for mine, theirs in zip(first, second, strict=True):
        assert re.sub("rank 0: ", "", mine) == re.sub("rank 0: ", "", theirs)
    assert complete_steps(folder) == []


def managed(training: Training, folder: Path) -> None:
    with CheckpointManager(folder, training.optimizer) as checkpoints:
        checkpoints.save(1, blocking=True)


# -- files that are written from their beginning to their end ----------------------------------------------------------


def test_what_a_rank_has_written_is_compared_when_the_files_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FILE_SYSTEMS["no writes in place"].use(monkeypatch)
    Heard(monkeypatch)
    finish = PartWriter.finish

    def loses(this: PartWriter) -> None:
        finish(this)
        os.ftruncate(this._file, this.nbytes - 1)

    monkeypatch.setattr(PartWriter, "finish", loses)

    def program(transport: Transport) -> None:
        with pytest.raises(RuntimeError, match=r"parts/rank-0000\d does not have what its rank has written"):
            zero.save(tmp_path / "saved", Training(transport, 1).optimizer)

    on_threads(WORLD, program, timeout=PATIENT)
    assert entries(tmp_path) == []


@pytest.mark.assumes("pwrite", "no warning")
def test_one_rank_that_cannot_write_in_place_is_enough_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts may have mounted a file system differently."""
    disk, heard = Disk(monkeypatch, tmp_path), Heard(monkeypatch)
    write_at = files.write_at

    def of_rank_1(number: int, data: Any, offset: int) -> None:
        if disk.rank() == 1 and offset != os.fstat(number).st_size:
            raise OSError(errno.EOPNOTSUPP, "not here")
        write_at(number, data, offset)

    monkeypatch.setattr(files, "write_at", of_rank_1)

    def program(transport: Transport) -> str:
        disk.this_thread_is(transport.rank)
        return zero.save(tmp_path / "saved", Training(transport, 1).optimizer).result()

    assert len(set(on_threads(WORLD, program, timeout=PATIENT))) == 1
    assert len(heard.texts) == 1
    zero.open_checkpoint(tmp_path / "saved").verify()
