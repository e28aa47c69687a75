"""Where a file system lacks a call, a save warns once and writes the same bytes, or is one error on every rank."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager
from zero.checkpoint import files
from zero.checkpoint.folder.directory import complete_steps
from zero.checkpoint.write.save_folder import PartWriter

from ..support.limits import PATIENT
from ..support.rows import only
from .disk import Disk
from .file_systems import FILE_SYSTEMS, not_at_the_end
from .saved import Training, entries, names, saved

WORLD = 2
GOES_ON = [name for name, system in FILE_SYSTEMS.items() if system.error is None]
IS_REFUSED = [name for name in FILE_SYSTEMS if name not in GOES_ON]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    for module in ("manager", "single", "folder.directory"):
        monkeypatch.setattr(f"zero.checkpoint.{module}.warn_caller", texts.append)
    return texts


def saves(folder: Path, transport: Transport) -> list[str]:
    training = Training(transport, 2)
    training.step(0)
    found = []
    with CheckpointManager(folder / "run", training.optimizer, max_to_keep=2) as checkpoints:
        for step in (1, 2, 3):
            found.append(checkpoints.save(step, {"step": step}, blocking=step == 2).result(PATIENT))
    found.append(zero.save(folder / "above" / "saved", training.optimizer).result())
    return [*found, training.optimizer.check_replicas()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    first, second = on_threads(WORLD, partial(saves, tmp_path_factory.mktemp("reference")))
    assert first == second
    return first


@pytest.mark.parametrize("name", only(GOES_ON, "no posix_fallocate", "an object store"))
def test_what_can_be_left_out_or_done_otherwise_is_with_one_warning_and_the_same_bytes(
    name: str, reference: list[str], heard: list[str], tmp_path: Path
) -> None:
    system = FILE_SYSTEMS[name]
    with pytest.MonkeyPatch.context() as patch:
        system.use(patch)
        assert on_threads(WORLD, partial(saves, tmp_path), timeout=PATIENT) == [reference] * WORLD
    causes = [] if system.warning is None else system.warning.split("|")
    expected = [(folder, cause) for cause in causes for folder in ("run", "above")]
    expected = [(folder, cause) for folder, cause in expected if folder == "run" or "locked" not in cause]
    assert len(heard) == len(expected), heard
    for folder, cause in expected:
        told = [text for text in heard if text.startswith(f"{tmp_path / folder} is on a file system") and cause in text]
        assert len(told) == 1, (folder, cause, heard)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names(2, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["above", "run"]
    for step, path in ((2, tmp_path / "run" / "step-00000002"), (4, tmp_path / "above" / "saved")):
        training = Training()
        assert zero.load(path, training.optimizer, rng=False).content == reference[step - 1]
        assert training.optimizer.check_replicas() == reference[-1]


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("name", only(IS_REFUSED, "no fsync of files", "no rename", "no removal of folders"))
def test_what_would_lose_data_is_one_error_on_every_rank_and_training_goes_on(name: str, tmp_path: Path) -> None:
    system, folder = FILE_SYSTEMS[name], tmp_path / "run"
    assert system.error is not None
    folder.mkdir()  # where no folder can be made there is one

    def program(transport: Transport) -> list[str]:
        training = Training(transport, 2)
        training.step(0)
        found = []
        for save in (
            partial(saved, folder, training.optimizer, 1),
            partial(zero.save, folder / "a", training.optimizer),
        ):
            with pytest.raises((RuntimeError, ValueError), match=system.error) as caught:
                save()
            found.append(str(caught.value).replace("rank 0: ", ""))
            training.step(1)
        return [*found, training.optimizer.check_replicas()]

    with pytest.MonkeyPatch.context() as patch:
        system.use(patch)
        first, second = on_threads(WORLD, program, timeout=PATIENT)  # for which a rank would wait that is not told
    assert first == second
    assert complete_steps(folder) == []


@pytest.mark.usefixtures("heard")
def test_what_a_rank_has_written_is_compared_when_the_files_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FILE_SYSTEMS["no writes in place"].use(monkeypatch)
    finish = PartWriter.finish

    def loses(this: PartWriter) -> None:
        finish(this)
        os.ftruncate(this._file, this.nbytes - 16)  # of random numbers

    monkeypatch.setattr(PartWriter, "finish", loses)

    def program(transport: Transport) -> None:
        with pytest.raises(RuntimeError, match=r"parts/rank-0000\d does not have what its rank has written"):
            zero.save(tmp_path / "saved", Training(transport, 1).optimizer)

    on_threads(WORLD, program, timeout=PATIENT)
    assert entries(tmp_path) == []


@pytest.mark.assumes("pwrite", "no warning")
def test_one_rank_that_cannot_write_in_place_is_enough_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts may have mounted a file system differently. Rank 0 warns."""
    disk, write_at, warned = Disk(monkeypatch, tmp_path), files.write_at, list[int]()

    def of_rank_1(number: int, data: Any, offset: int) -> None:
        if disk.rank() == 1 and not_at_the_end(number, data, offset):
            raise OSError(errno.EOPNOTSUPP, "not here")
        write_at(number, data, offset)

    monkeypatch.setattr(files, "write_at", of_rank_1)
    monkeypatch.setattr("zero.checkpoint.folder.directory.warn_caller", lambda _: warned.append(disk.rank()))

    def program(transport: Transport) -> str:
        disk.this_thread_is(transport.rank)
        return zero.save(tmp_path / "saved", Training(transport, 1).optimizer).result()

    assert len(set(on_threads(WORLD, program, timeout=PATIENT))) == 1
    assert warned == [0]
    zero.open_checkpoint(tmp_path / "saved").verify()
