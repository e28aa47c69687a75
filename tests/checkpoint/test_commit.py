"""Whenever the machine crashes, the checkpoints found are those before a save or those after it, and whole.

`disk.Disk` keeps what a crash would leave after each call, in each of its worlds.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager
from zero.checkpoint import files
from zero.checkpoint.folder.directory import LockedDirectory, complete_steps, steps_in

from ..support.limits import PATIENT
from ..support.rows import without
from .disk import WORLDS, Call, Disk, materialize
from .saves import Training, entries

Steps = dict[int, int]  # the number of the save that has written each step


@dataclass(frozen=True)
class Scenario:
    """Saves in a row. A step that exists is replaced; a negative one is restored, and crashes count from there on.

    ``least``: so many of them differ. ``overwrite``: False if a step that exists is set aside.
    """

    steps: Sequence[int]
    least: int
    world_size: int = 1
    max_to_keep: int | None = None
    assets: bool = False
    overwrite: bool = True


SCENARIOS = {
    "two-saves": Scenario((1, 2), 15, world_size=2),
    "replaced": Scenario((1, 1), 15),
    "removed": Scenario((1, 2), 20, max_to_keep=1, assets=True),
    "went-back": Scenario((2, 4, -2, 3), 15, max_to_keep=4),
    "went-back-and-came-again": Scenario((2, 4, 6, -2, 4), 15, overwrite=False),
}


@dataclass(frozen=True)
class Crash:
    """What a crash has left. ``allowed``: which steps may be there. ``aside``: saves that must be there.

    ``is_cleaned``: whether the next run removes all else; it warns of a folder in which nothing shows what it is.
    """

    tree: dict[str, bytes | None]
    allowed: Sequence[Steps]
    aside: Sequence[int]
    where: str
    is_cleaned: bool


class Witness:
    """Keeps what each crash would leave, and what must be found there."""

    def __init__(self, disk: Disk, scenario: Scenario) -> None:
        self._disk, self._lock = disk, threading.RLock()
        self.counts = min(scenario.steps) > 0
        self.crashes: dict[int, Crash] = {}
        self.contents: list[str] = []  # of each save
        self.steps: Steps = {}
        self._allowed: list[Steps] = [{}]
        self._aside: list[int] = []
        disk.after = self._crash

    def begins(self, step: int, scenario: Scenario) -> None:
        """Note that a save begins: from now on the steps may be those after it."""
        number = len(self.contents)
        with self._lock:
            committed = {**{each: by for each, by in self.steps.items() if each < step}, step: number}
            kept = sorted(committed)[-(scenario.max_to_keep or len(committed)) :]
            after = {each: committed[each] for each in kept}
            replaced = [step] if scenario.overwrite else []
            self._aside += [by for each, by in self.steps.items() if each >= step and each not in replaced]
            self._allowed, self.steps = [self.steps, committed, after], after

    def returned(self, content: str) -> None:
        """Note that the result of the save was returned: from now on it must survive."""
        with self._lock:
            if len(self._allowed) == 3:
                self.contents.append(content)
                self._allowed = self._allowed[1:]

    def _crash(self, call: Call) -> None:
        for world in WORLDS if self.counts else ():
            tree = self._disk.tree(world)
            known = [
                (path, data)
                for path, data in sorted(tree.items())
                if "/.tmp-" not in path or "/notes/" in path or path.endswith("/checkpoint.json") or data is None
            ]
            with self._lock:
                key = hash((tuple(known), str(self._allowed), world == "last"))
                where = f"a crash that keeps {world}, after {call}"
                self.crashes[key] = Crash(
                    tree, tuple(self._allowed), tuple(self._aside), where, self._is_clean(tree, world)
                )

    @staticmethod
    def _is_clean(tree: dict[str, bytes | None], world: str) -> bool:
        begun = any("/.trash-" in path or ("/.tmp-" in path and path.endswith(".safetensors")) for path in tree)
        return begun and world != "last"

    def check(self, crash: Crash, run: Path) -> None:
        """Check what a reader finds in the folder of the run."""
        found = {}
        for step in complete_steps(run):
            checkpoint = zero.open_checkpoint(steps_in(run)[step])
            checkpoint.verify()
            assert checkpoint.step == step
            found[step] = checkpoint.content
        allowed = [{step: self.contents[by] for step, by in steps.items()} for steps in crash.allowed]
        assert found in allowed, f"{crash.where}: {list(found)} instead of {[list(steps) for steps in allowed]}"
        there = [zero.open_checkpoint(path) for path in run.glob("abandoned-*")] if crash.aside else []
        for checkpoint in there:
            checkpoint.verify()
        lost = {self.contents[by] for by in crash.aside} - {*found.values(), *(each.content for each in there)}
        assert not lost, crash.where


def train(scenario: Scenario, disk: Disk, root: Path, witness: Witness, transport: Transport) -> None:
    disk.this_thread_is(transport.rank)
    training = Training(transport, 1)
    assets = root / "assets" if scenario.assets else None
    with CheckpointManager(
        root / "run", training.optimizer, max_to_keep=scenario.max_to_keep, assets=assets
    ) as checkpoints:
        for number, step in enumerate(scenario.steps):
            if step < 0:
                checkpoints.restore(-step)
                witness.counts = True
                continue
            training.step(number)
            training.optimizer.exchange(b"")
            if transport.rank == 0:
                witness.begins(step, scenario)
            training.optimizer.exchange(b"")
            saving = checkpoints.save(step, overwrite=scenario.overwrite)
            witness.returned(saving.result(PATIENT))


@pytest.mark.first(1)
@pytest.mark.assumes("flock", "fsync")
@pytest.mark.filterwarnings("ignore:.*is the newest checkpoint now")
@pytest.mark.parametrize("name", without(SCENARIOS, "replaced", "went-back"))
def test_after_any_crash_the_steps_are_those_before_or_after_the_save(name: str, tmp_path: Path) -> None:
    """And the next run removes whatever else the crash has left."""
    scenario, root = SCENARIOS[name], tmp_path / "disk"
    (root / "assets").mkdir(parents=True)
    (root / "assets" / "config.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, root)
        witness = Witness(disk, scenario)
        on_threads(scenario.world_size, lambda transport: train(scenario, disk, root, witness, transport))
    assert len(witness.crashes) > scenario.least, len(witness.crashes)
    for number, crash in enumerate(witness.crashes.values()):
        left = tmp_path / str(number)
        left.mkdir()
        materialize(crash.tree, left)
        if not (left / "run").exists():
            continue
        witness.check(crash, left / "run")
        if not crash.is_cleaned:
            continue
        lock = LockedDirectory(left / "run", "0" * 16)
        assert lock.clean() == [], crash.where
        lock.close()
        assert not [entry for entry in entries(left / "run") if entry.startswith((".tmp-", ".trash-"))], crash.where
        witness.check(crash, left / "run")


@pytest.mark.assumes("fsync", "pwrite")
def test_every_rank_syncs_the_rename_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, tmp_path)

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        with CheckpointManager(tmp_path / "new" / "run", Training(transport, 1).optimizer) as checkpoints:
            checkpoints.save(1)
            checkpoints.wait_until_finished()

    on_threads(2, program)
    calls = [call for call in disk.calls if call.in_thread]
    commit = next(n for n, call in enumerate(calls) if call.name == "rename" and call.path.name.startswith(".tmp-"))
    run = calls[commit].path.parent
    for rank in (0, 1):
        assert any((call.rank, call.path, call.name) == (rank, run, "sync") for call in calls[commit:]), rank
    assert dict(disk.tree("nothing")).keys() >= {"new/run", "new/run/step-00000001"}
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_mode & 0o111]


def test_files_are_synced_also_when_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(most: int) -> None:
        raise RuntimeError("can't start new thread")

    disk = Disk(monkeypatch, tmp_path)
    monkeypatch.setattr(files, "ThreadPoolExecutor", none)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        files.create(path, 3)
    files.sync_files(paths)
    assert [call.path for call in disk.calls if call.name == "sync"] == paths


def test_a_reader_that_finds_only_the_trash_of_a_swap_uses_it(tmp_path: Path) -> None:
    training = Training(None, 0)
    with CheckpointManager(tmp_path, training.optimizer) as checkpoints:
        saving = checkpoints.save(4, {"a": 1}, blocking=True)
    trash = tmp_path / f".trash-step-00000004-{'0' * 16}"
    saving.path.rename(trash)
    assert list(steps_in(tmp_path)) == [4]
    with CheckpointManager(tmp_path, training.optimizer) as checkpoints:
        assert checkpoints.latest_step() == 4
        restored = checkpoints.restore()
        assert restored is not None
        assert (restored.step, restored.state, restored.content) == (4, {"a": 1}, saving.result())
    assert entries(tmp_path) == [".lock", "step-00000004"], "the next run brings it back"


@pytest.mark.assumes("fsync")
def test_a_step_set_aside_is_back_on_disk_before_its_save_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aside, save = f"abandoned-step-00000003-{'0' * 16}", f".tmp-step-00000002-{'0' * 16}"
    for name in (aside, save):
        (tmp_path / name).mkdir()
    disk = Disk(monkeypatch, tmp_path)

    def check(call: Call) -> None:
        for world in WORLDS:
            assert disk.tree(world).keys() & {"step-00000003", save}, f"a crash that keeps {world}, after {call}"

    disk.after = check
    lock = LockedDirectory(tmp_path, "1" * 16)
    assert lock.clean() == []
    lock.close()
    assert entries(tmp_path) == [".lock", "step-00000003"]


# -- a commit whose calls fail although they are done, or are done although they fail ---------------------------------


def test_a_rename_that_is_done_although_the_call_has_failed_is_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS may send a rename twice, and reports that the second one found nothing. So for the notes of ranks."""
    rename: Callable[..., Any] = files.rename

    def twice(source: Path, target: Path) -> None:
        rename(source, target)
        rename(source, target)

    def program(transport: Transport) -> None:
        with CheckpointManager(tmp_path, Training(transport, 1).optimizer) as checkpoints:
            checkpoints.save(1, blocking=True)

    monkeypatch.setattr(files, "rename", twice)
    on_threads(2, program, timeout=PATIENT)
    assert entries(tmp_path) == [".lock", "step-00000001"]


def test_a_note_whose_folder_is_removed_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename: Callable[..., Any] = files.rename

    def too_late(source: Path, target: Path) -> None:
        shutil.rmtree(source.parent)
        rename(source, target)

    (tmp_path / "notes").mkdir()
    monkeypatch.setattr(files, "rename", too_late)
    with pytest.raises(FileNotFoundError):
        files.put_note(tmp_path / "notes" / "ready", b"")


def test_a_last_sync_that_fails_keeps_older_checkpoints_and_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path)
    with CheckpointManager(tmp_path / "run", Training(None, 1).optimizer, max_to_keep=1) as checkpoints:
        checkpoints.save(1, blocking=True)
        disk.fail_when(lambda call: call.name == "sync" and call.path == tmp_path / "run", 5, skip=1)
        with pytest.warns(RuntimeWarning, match=r"step-00000002 is complete, but may be lost if the machine crashes"):
            checkpoints.save(2, blocking=True)
        assert checkpoints.all_steps() == [1, 2]
        disk.heal()
        checkpoints.restore(1)
        disk.fail_when(lambda call: call.name == "sync" and call.path == tmp_path / "run", 5, skip=2)
        with pytest.warns(RuntimeWarning, match="what was there of steps above 1 is set aside"):
            checkpoints.save(2, blocking=True)
        disk.heal()
        assert checkpoints.all_steps() == [1, 2]
        checkpoints.save(3, blocking=True)
    assert [name for name in entries(tmp_path / "run") if "abandoned" not in name] == [".lock", "step-00000003"]
