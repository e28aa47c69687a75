"""Whenever the machine crashes, the checkpoints found are those before a save or those after it, and whole.

`disk.Disk` keeps what a crash would leave after each call, in each of its worlds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager, ZeroOptimizer
from zero.checkpoint import files
from zero.checkpoint.folder.directory import LockedDirectory, complete_steps, steps_in

from ..support.limits import PATIENT
from ..support.rows import without
from .disk import WORLDS, Call, Disk, materialize
from .saved import Training, entries, names, saved, step_folder

Steps = dict[int, int]  # the number of the save that has written each step


@dataclass(frozen=True)
class Scenario:
    """Saves in a row. A step that exists is replaced, or set aside without ``overwrite``; a negative one is restored,
    and crashes count from there on."""

    steps: Sequence[int]
    world_size: int = 1
    max_to_keep: int | None = None
    overwrite: bool = True


SCENARIOS = {
    "two-saves": Scenario((1, 2), world_size=2),
    "replaced": Scenario((1, 1)),
    "removed": Scenario((1, 2), max_to_keep=1),  # with assets
    "went-back": Scenario((2, 4, -2, 3), max_to_keep=4),
    "went-back-and-came-again": Scenario((2, 4, 6, -2, 4), overwrite=False),
}


class Witness:
    """Keeps what each crash would leave, with the steps that may be found there, and the saves that must be."""

    def __init__(self, disk: Disk, scenario: Scenario) -> None:
        self._disk, self._scenario, self._lock = disk, scenario, threading.RLock()
        self.counts = min(scenario.steps) > 0
        self.crashes: dict[int, tuple[str, dict[str, bytes | None], list[Steps], list[int]]] = {}
        self._allowed: list[Steps] = [{}]
        self._aside: list[int] = []
        disk.after = self._crash

    def begins(self, step: int, number: int) -> None:
        with self._lock:
            before = self._allowed[-1]
            committed = {**{each: by for each, by in before.items() if each < step}, step: number}
            kept = sorted(committed)[-(self._scenario.max_to_keep or len(committed)) :]
            replaced = [step] if self._scenario.overwrite else []
            self._aside += [by for each, by in before.items() if each >= step and each not in replaced]
            self._allowed = [before, committed, {each: committed[each] for each in kept}]

    def returned(self) -> None:
        with self._lock:
            self._allowed = self._allowed[-2:]

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
                self.crashes[key] = f"{world}, after {call}", tree, [*self._allowed], [*self._aside]


def check(run: Path, allowed: list[Steps], aside: list[int], where: str) -> None:
    found, saves = {}, set()
    for step in complete_steps(run):
        checkpoint = zero.open_checkpoint(steps_in(run)[step])
        checkpoint.verify()
        assert checkpoint.step == step
        found[step] = checkpoint.state["n"]
    assert found in allowed, f"{where}: {found} instead of {allowed}"
    for path in run.glob("abandoned-*") if aside else ():
        zero.open_checkpoint(path).verify()
        saves.add(zero.open_checkpoint(path).state["n"])
    assert set(aside) <= {*found.values(), *saves}, where


@pytest.mark.first(1)
@pytest.mark.filterwarnings("ignore:.*is the newest checkpoint now")
@pytest.mark.parametrize("name", without(SCENARIOS, "replaced", "went-back"))
def test_after_any_crash_the_steps_are_those_before_or_after_the_save(name: str, tmp_path: Path) -> None:
    """And the next run removes whatever else the crash has left, but for a folder in which nothing shows what it is."""
    scenario, root = SCENARIOS[name], tmp_path / "disk"
    (root / "assets").mkdir(parents=True)
    (root / "assets" / "config.json").write_text("{}")

    def train(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 1)
        more = {"max_to_keep": scenario.max_to_keep, "assets": root / "assets" if name == "removed" else None}
        with CheckpointManager(root / "run", training.optimizer, **more) as checkpoints:
            for number, step in enumerate(scenario.steps):
                if step < 0:
                    checkpoints.restore(-step)
                    witness.counts = True
                    continue
                training.step(number)
                training.on_rank_0(partial(witness.begins, step, number))
                checkpoints.save(step, {"n": number}, overwrite=scenario.overwrite).result(PATIENT)
                witness.returned()

    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, root)
        witness = Witness(disk, scenario)
        on_threads(scenario.world_size, train)
    assert len(witness.crashes) > 15, len(witness.crashes)
    for number, (where, tree, allowed, aside) in enumerate(witness.crashes.values()):
        left = tmp_path / str(number)
        left.mkdir()
        materialize(tree, left)
        if not (left / "run").exists():
            continue
        check(left / "run", allowed, aside, where)
        begun = any("/.trash-" in path or ("/.tmp-" in path and path.endswith(".safetensors")) for path in tree)
        if begun and not where.startswith("last"):
            lock = LockedDirectory(left / "run", "0" * 16)
            assert lock.clean() == [], where
            lock.close()
            assert not [name for name in entries(left / "run") if name.startswith((".tmp-", ".trash-"))], where
            check(left / "run", allowed, aside, where)


def test_every_rank_syncs_the_rename_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are synced also when no thread can be started."""
    disk = Disk(monkeypatch, tmp_path)

    def none(most: int) -> None:
        raise RuntimeError("can't start new thread")

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        saved(tmp_path / "new" / "run", Training(transport, 1).optimizer, 1)

    monkeypatch.setattr(files, "ThreadPoolExecutor", none)
    on_threads(2, program)
    run = tmp_path / "new" / "run"
    commit = next(n for n, call in enumerate(disk.calls) if call.name == "rename" and ".tmp-" in call.path.name)
    for rank in (0, 1):
        assert any((call.rank, call.path, call.name) == (rank, run, "sync") for call in disk.calls[commit:]), rank
    kept = disk.tree("nothing")
    assert all(kept[path.relative_to(tmp_path).as_posix()] == path.read_bytes() for path in run.glob("step-*/*/*"))
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_mode & 0o111]


def test_a_reader_that_finds_only_the_trash_of_a_swap_uses_it(tmp_path: Path, optimizer: ZeroOptimizer) -> None:
    saved(tmp_path, optimizer, 4)
    content = zero.open_checkpoint(step_folder(tmp_path, 4)).content
    step_folder(tmp_path, 4).rename(tmp_path / f".trash-step-00000004-{'0' * 16}")
    assert list(steps_in(tmp_path)) == [4]
    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        assert checkpoints.latest_step() == 4
        restored = checkpoints.restore()
        assert restored is not None
        assert (restored.step, restored.content) == (4, content)
    assert entries(tmp_path) == names(4), "the next run brings it back"
