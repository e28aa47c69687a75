"""The commit: whenever ranks die or the machine crashes, the newest checkpoint is a whole one, and none is lost.

`disk.Disk` keeps what a crash would leave after each call, in each of its worlds. A reader that finds this must find a
checkpoint that verifies, with the content that was saved, and no older than the last save whose result was returned.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zero
from collectives import CollectiveError, Transport, on_threads
from zero import CheckpointManager
from zero.checkpoint import files
from zero.checkpoint.folder.directory import LockedDirectory, complete_steps, steps_in
from zero.checkpoint.write.save_folder import SaveFolder, UnseenError
from zero.checkpoint.write.save_thread import Saving

from .disk import WORLDS, Call, DiedError, Disk, materialize, reading
from .saves import PATIENCE, Training, entries


class Witness:
    """Keeps what each crash would leave, and what must be found there."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._lock = threading.Lock()
        self.crashes = 0
        self._returned: dict[int, str] = {}  # step -> content of the saves whose results were returned
        self._contents: dict[int, list[str]] = {}  # step -> the contents that it has had, in order
        self._states: dict[int, tuple[dict[str, bytes | None], dict[int, str], str, Call]] = {}
        disk.after = self._crash

    def expect(self, step: int, content: str) -> None:
        with self._lock:
            self._contents.setdefault(step, []).append(content)

    def returned(self, step: int, content: str) -> None:
        """Note that a result was returned: from now on this checkpoint must survive."""
        with self._lock:
            self._returned = {**self._returned, step: content}

    def _crash(self, call: Call) -> None:
        for world in WORLDS:
            self.crashes += 1
            found = self._disk.tree(world).items()  # a reader opens nothing in a folder of a save
            tree = {path: data for path, data in found if "/.tmp-" not in path and not path.startswith("references")}
            key = zlib.crc32(repr((sorted(tree.items()), sorted(self._returned.items()))).encode())
            if key not in self._states:
                self._states[key] = (tree, self._returned, world, call)

    def check(self, folder: Path, inside: str) -> int:
        """Check every crash. Returns their number. ``inside``: the folder of the checkpoints."""
        for number, (tree, returned, world, call) in enumerate(self._states.values()):
            left = folder / str(number)
            left.mkdir(parents=True)
            materialize(tree, left)
            where = f"a crash that keeps {world}, after {call}"
            found = complete_steps(left / inside)
            assert set(returned) <= set(found), f"{where}: {returned} were returned, {found} are left"
            for step in found:
                checkpoint = zero.open_checkpoint(steps_in(left / inside)[step])
                checkpoint.verify()
                assert checkpoint.step == step
                saved = self._contents[step]
                allowed = saved[saved.index(returned[step]) :] if step in returned else saved
                assert checkpoint.content in allowed, f"{where}: step {step} is not what was saved"
        return self.crashes


def run_and_crash(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    saves: Callable[[Training, CheckpointManager, Callable[..., str]], None],
    **arguments: Any,
) -> int:
    """Run ``saves``, and check every crash under way. It calls its third argument to save, with the step."""
    root = tmp_path / "disk"
    (root / "references").mkdir(parents=True)
    disk = Disk(monkeypatch, root)
    witness = Witness(disk)
    disk.after, crash = lambda call: None, disk.after

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 2)

        def save(step: int, *, overwrite: bool = False) -> str:
            path = root / "references" / f"{step}-{overwrite}"
            disk.after = lambda call: None
            content = zero.save(path, training.optimizer, step=step).result()
            training.optimizer.exchange(b"")
            if transport.rank == 0:
                witness.expect(step, content)
                disk.after = crash
            training.optimizer.exchange(b"")
            saving = checkpoints.save(step, overwrite=overwrite)
            training.step(step)
            assert saving.result(PATIENCE) == content
            witness.returned(step, content)
            training.optimizer.exchange(b"")
            return content

        training.step(0)
        with CheckpointManager(root / "run", training.optimizer, **arguments) as checkpoints:
            saves(training, checkpoints, save)

    on_threads(world_size, program)
    return witness.check(tmp_path / "crashes", "run")


@pytest.mark.assumes("fsync")
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.by_default("2")
def test_after_any_crash_the_newest_checkpoint_is_whole_and_none_is_lost(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saves(training: Training, checkpoints: CheckpointManager, save: Callable[..., str]) -> None:
        for step in (1, 2):
            save(step)

    assert run_and_crash(tmp_path, monkeypatch, world_size, saves) > 400


@pytest.mark.assumes("fsync")
def test_after_any_crash_a_checkpoint_that_is_replaced_is_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saves(training: Training, checkpoints: CheckpointManager, save: Callable[..., str]) -> None:
        first = save(1)
        training.step(100)
        assert save(1, overwrite=True) != first

    assert run_and_crash(tmp_path, monkeypatch, 1, saves) > 400


@pytest.mark.assumes("flock", "fsync")
@pytest.mark.filterwarnings("ignore:.*is the newest checkpoint now")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.by_default("1")
def test_after_any_crash_of_a_run_that_went_back_its_step_or_the_old_newest_is_the_newest(
    world_size: int, tmp_path: Path
) -> None:
    """And none that was set aside is lost, neither by the crash nor by the next run."""
    root = tmp_path / "disk"
    root.mkdir()
    states: dict[int, tuple[dict[str, bytes | None], bool, str]] = {}
    contents: dict[int, str] = {}
    returned = threading.Event()

    def crash(disk: Disk, call: Call) -> None:
        for world in WORLDS:
            tree = disk.tree(world)
            small = {path: data for path, data in tree.items() if "/.tmp-" not in path or path.endswith("notes/nonce")}
            states[zlib.crc32(repr((sorted(small.items()), returned.is_set())).encode())] = (
                *(tree, returned.is_set(), f"a crash that keeps {world}, after {call}"),
            )

    def program(disk: Disk, transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 1)
        with CheckpointManager(root / "run", training.optimizer, max_to_keep=4) as checkpoints:
            for step in (2, 4, 6, 8):
                training.step(step)
                saving = checkpoints.save(step, blocking=True)
                contents[step] = saving.result()
            checkpoints.restore(2)
            training.step(3)
            if transport.rank == 0:
                disk.after = partial(crash, disk)
            training.optimizer.exchange(b"")
            saving = checkpoints.save(3)
            contents[3] = saving.result(PATIENCE)
            returned.set()
            training.step(5)
            checkpoints.save(5)
            checkpoints.wait_until_finished()

    with pytest.MonkeyPatch.context() as patch:
        on_threads(world_size, partial(program, Disk(patch, root)))
    assert len(states) > 15
    for number, (tree, is_returned, where) in enumerate(states.values()):
        left = tmp_path / str(number)
        left.mkdir()
        materialize(tree, left)
        for _ in ("as the crash has left it", "after the next run has cleaned"):
            newest = complete_steps(left / "run")[-1]
            assert newest in ({3, 5} if is_returned else {3, 8}), where
            there = [zero.open_checkpoint(path) for path in (left / "run").iterdir() if path.name[0] in "sa"]
            for checkpoint in there:
                checkpoint.verify()
            found = {checkpoint.content for checkpoint in there}
            assert {contents[step] for step in (2, 4, 6, 8, *([3] if is_returned else []))} <= found, where
            lock = LockedDirectory(left / "run", "0" * 16)
            lock.clean()
            lock.close()


@pytest.mark.assumes("fsync")
def test_after_any_crash_in_a_removal_the_kept_checkpoints_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is being removed may be there or not; the newest must be."""
    root = tmp_path / "run"
    states: dict[int, tuple[dict[str, bytes | None], int]] = {}
    disk = Disk(monkeypatch, tmp_path)
    newest = [0]

    def crash(call: Call) -> None:
        if call.name in ("remove", "remove_folder", "rename"):
            for world in WORLDS:
                tree = disk.tree(world)
                states[zlib.crc32(repr(sorted(tree.items())).encode())] = (tree, newest[0])

    disk.after = crash
    training = Training(None, 1)
    with CheckpointManager(root, training.optimizer, max_to_keep=1) as checkpoints:
        for step in (1, 2, 3):
            training.step(step)
            saving = checkpoints.save(step)
            saving.result(PATIENCE)
            newest[0] = step
    assert entries(root) == [".lock", "step-00000003"]
    assert len(states) > 20
    for number, (tree, least) in enumerate(states.values()):
        left = tmp_path / "crashes" / str(number)
        left.mkdir(parents=True)
        materialize(tree, left)
        found = complete_steps(left / "run")
        assert max(found, default=0) >= least
        for step in found:
            zero.open_checkpoint(steps_in(left / "run")[step]).verify()


@pytest.mark.assumes("flock", "fsync")
@pytest.mark.parametrize("assets", [False, True])
def test_after_any_crash_the_next_run_removes_what_a_save_or_a_removal_has_left(assets: bool, tmp_path: Path) -> None:
    states: dict[int, tuple[dict[str, bytes | None], str, Call]] = {}
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text("{}")
    training = Training(None, 1)
    training.step(0)
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, tmp_path)

        def crash(call: Call) -> None:
            for world in WORLDS:
                tree = disk.tree(world)
                small = [
                    (path, data if "/notes/" in path or path.endswith(".json") else b"") for path, data in tree.items()
                ]
                if any("/.trash-" in path or ("/.tmp-" in path and path.endswith(".safetensors")) for path in tree):
                    states[zlib.crc32(repr(small).encode())] = (tree, world, call)

        disk.after = crash
        config = tmp_path / "assets" if assets else None
        with CheckpointManager(tmp_path / "run", training.optimizer, max_to_keep=1, assets=config) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, blocking=True)
    assert len(states) > 30
    for number, (tree, world, call) in enumerate(states.values()):
        left = tmp_path / f"crash-{number}"
        left.mkdir()
        materialize(tree, left)
        lock = LockedDirectory(left / "run", "0" * 16)
        assert lock.clean() == [], f"a crash that keeps {world}, after {call}"
        lock.close()
        assert not [name for name in entries(left / "run") if name.startswith((".tmp-", ".trash-"))]


@pytest.mark.assumes("fsync", "pwrite")
def test_everything_is_synced_before_the_rename_and_the_rename_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path)

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 1)
        training.step(0)
        with CheckpointManager(tmp_path / "new" / "run", training.optimizer) as checkpoints:
            disk.calls.clear()
            training.optimizer.exchange(b"")
            checkpoints.save(1)
            checkpoints.wait_until_finished()

    on_threads(2, program)
    calls = [call for call in disk.calls if call.in_thread]
    commit = next(n for n, call in enumerate(calls) if call.name == "rename" and call.path.name.startswith(".tmp-"))
    temporary = calls[commit].path
    assert calls[commit].rank == 0
    for path in {call.path for call in calls[:commit] if call.name in ("reserve", "write_at")}:
        last = max(n for n, call in enumerate(calls) if call.path == path and call.name in ("reserve", "write_at"))
        if path.parent.name != "notes":
            assert any(call.path == path and call.name == "sync" for call in calls[last:commit]), path
    changed = {call.path.parent for call in calls[:commit] if call.name in ("make_folder", "remove", "remove_folder")}
    for folder in {path for path in changed if path.name != "notes"} - {temporary.parent}:
        last = max(
            n
            for n, call in enumerate(calls[:commit])
            if call.name in ("make_folder", "remove", "remove_folder") and call.path.parent == folder
        )
        assert any(call.path == folder and call.name == "sync" for call in calls[last:commit]), folder
    for rank in (0, 1):
        assert any(
            call.rank == rank and call.path == temporary.parent and call.name == "sync" for call in calls[commit:]
        ), f"rank {rank} returned before the rename was on the disk"
    assert entries(tmp_path / "new" / "run") == [".lock", "step-00000001"]


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


def test_no_file_is_executable(tmp_path: Path) -> None:
    zero.save(tmp_path / "saved", Training(None, 0).optimizer)
    files_of = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
    assert len(files_of) > 5
    assert not [path for path in files_of if path.stat().st_mode & 0o111]


@pytest.mark.assumes("fsync")
def test_a_folder_that_is_made_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, tmp_path)
    files.make_folders(tmp_path / "a" / "b")
    assert dict(disk.tree("nothing")) == {"a": None, "a/b": None}


def died_at(disk: Disk, root: Path, rank: int, skip: int | None) -> bool:
    """Train and save twice while a rank dies after so many calls of the second save. Returns whether it did."""
    savings: dict[int, Saving] = {}
    dead = threading.Event()

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 1)
        training.step(0)
        checkpoints = CheckpointManager(root, training.optimizer)
        checkpoints.save(1, blocking=True)
        training.step(1)
        if skip is not None and transport.rank == rank:
            disk.kill(rank, skip)
        training.optimizer.exchange(b"")
        try:
            saving = checkpoints.save(2)
            savings[transport.rank] = saving
        except BaseException:
            dead.set()
            raise
        if transport.rank == rank:
            saving.wait()
            if disk.is_dead(rank):
                dead.set()
        training.optimizer.exchange(b"")
        if dead.is_set() and transport.rank != rank:
            saving.abandon("the test has killed a rank", 0)
        saving.wait()

    with suppress(DiedError, CollectiveError):
        on_threads(2, program, timeout=PATIENCE)
    return dead.is_set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))])
@pytest.mark.full
def test_a_rank_that_dies_at_any_call_leaves_what_the_next_run_needs(
    rank: int, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, tmp_path)
        assert not died_at(disk, tmp_path / "whole", rank, None)
        first = sum(call.rank == rank for call in disk.calls)
    reference = {step: zero.open_checkpoint(tmp_path / "whole" / f"step-0000000{step}").content for step in (1, 2)}
    seen = set()
    for skip in range(part, first, 6):
        root = tmp_path / f"{skip}"
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, tmp_path)
            died = died_at(disk, root, rank, skip)
            disk.revive()
            disk.release_locks(0)
            if not died:
                break
        steps = complete_steps(root)
        seen.add(max(steps))
        assert {step: zero.open_checkpoint(steps_in(root)[step]).content for step in steps} == {
            step: reference[step] for step in steps
        }
        training = Training(None, 0)
        with CheckpointManager(root, training.optimizer) as checkpoints:
            assert checkpoints.latest_step() == max(steps)
            checkpoints.restore(rng=False)
            checkpoints.save(3, blocking=True)
        assert entries(root) == [".lock", *(f"step-0000000{step}" for step in (*steps, 3))]
    assert {1} <= seen <= {1, 2}


def test_a_reader_that_finds_only_the_trash_of_a_swap_uses_it(tmp_path: Path) -> None:
    training = Training(None, 0)
    training.step(0)
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


# -- what is complete for one rank is complete for all -----------------------------------------------------------------


def held(monkeypatch: pytest.MonkeyPatch, rank: int) -> threading.Event:
    """Let a rank look only after the event how a save has ended in which it has done its part."""
    wait, event = SaveFolder.wait_until_committed, threading.Event()

    def waiting(this: SaveFolder) -> str:
        assert this._rank != rank or event.wait(PATIENCE), "never released"
        return wait(this)

    monkeypatch.setattr(SaveFolder, "wait_until_committed", waiting)
    return event


@pytest.mark.parametrize("then", ["moved", "removed", "saved over"])
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.by_default
def test_a_checkpoint_may_be_moved_or_removed_as_soon_as_one_rank_has_returned(
    then: str, blocking: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = held(monkeypatch, 1)

    def program(transport: Transport) -> str:
        training = Training(transport, 1)
        training.step(0)
        with CheckpointManager(tmp_path / "run", training.optimizer) as checkpoints:
            saving = checkpoints.save(1, blocking=blocking)
            if transport.rank != 1:
                saving.result(PATIENCE)
            if transport.rank == 0:
                match then:
                    case "moved":
                        saving.path.rename(tmp_path / "best")
                    case "removed":
                        shutil.rmtree(saving.path)
                    case _:
                        shutil.rmtree(saving.path)
                        saving.path.mkdir()
                event.set()
            return saving.result(PATIENCE)

    assert len(set(on_threads(3, program, timeout=PATIENCE))) == 1
    left = {"saved over": [".lock", "step-00000001"]}.get(then, [".lock"])
    assert entries(tmp_path / "run") == left, "and nothing else is left"


@pytest.mark.parametrize("managed", [True, False])
def test_a_rank_that_can_read_nothing_knows_that_the_save_is_complete(
    managed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, wait = Disk(monkeypatch, tmp_path), SaveFolder.wait_until_committed

    def unreadable(this: SaveFolder) -> str:
        disk.fail_when(lambda call: call.rank == 1 and reading(call), errno.EIO)
        try:
            return wait(this)
        finally:
            disk.heal()

    monkeypatch.setattr(SaveFolder, "wait_until_committed", unreadable)

    def program(transport: Transport) -> str:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 1)
        training.step(0)
        if not managed:
            return zero.save(tmp_path / "saved", training.optimizer).result()
        with CheckpointManager(tmp_path / "run", training.optimizer) as checkpoints:
            saving = checkpoints.save(1, blocking=True)
            return saving.result(PATIENCE)

    assert len(set(on_threads(2, program, timeout=PATIENCE))) == 1


@pytest.mark.assumes("no warning")
def test_a_rank_that_sees_nothing_of_the_folder_says_so_and_learns_it_from_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not say that the save has failed, and neither do its peers."""
    monkeypatch.setattr("zero.checkpoint.write.save_folder._BLIND", 0.05)
    announced = SaveFolder._announced

    def blind(this: SaveFolder) -> str:
        if this._rank == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return announced(this)

    monkeypatch.setattr(SaveFolder, "_announced", blind)

    def program(transport: Transport) -> tuple[str, str]:
        training = Training(transport, 1)
        training.step(0)
        checkpoints = CheckpointManager(tmp_path / "run", training.optimizer)
        saving = checkpoints.save(1)
        saving.wait()
        if transport.rank == 1:
            assert isinstance(saving.error, UnseenError)
            assert "rank 1 cannot see whether" in str(saving.error)
            assert "Input/output error" in str(saving.error)
        training.optimizer.exchange(b"")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            training.step(1)
            checkpoints.close()
            return saving.result(), zero.save(tmp_path / "saved", training.optimizer).result()

    assert len(set(on_threads(2, program, timeout=PATIENCE))) == 1
    assert entries(tmp_path) == ["run", "saved"]


def test_a_rank_that_is_interrupted_when_the_save_is_complete_fails_it_for_no_other_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = SaveFolder.wait_until_committed

    def interrupted(this: SaveFolder) -> str:
        wait(this)
        raise KeyboardInterrupt

    monkeypatch.setattr(SaveFolder, "wait_until_committed", interrupted)
    warned: dict[str, list[str]] = {}
    monkeypatch.setattr(
        "zero.checkpoint.manager.warn_caller",
        lambda text: warned.setdefault(threading.current_thread().name, []).append(text),
    )

    def program(transport: Transport) -> None:
        training = Training(transport, 1)
        training.step(0)
        checkpoints = CheckpointManager(tmp_path, training.optimizer)
        saving = checkpoints.save(1)
        saving.wait()
        training.step(1)  # rank 1 reports its interrupt
        assert (saving.error is None) == (transport.rank == 0)
        if transport.rank == 0:
            assert saving.result() == zero.open_checkpoint(tmp_path / "step-00000001").content
            assert threading.current_thread().name not in warned
        with suppress(RuntimeError):
            checkpoints.close()

    on_threads(2, program, timeout=PATIENCE)


def test_a_rename_that_is_done_although_the_call_has_failed_is_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS may send a rename twice, and reports that the second one found nothing. So for the notes of ranks."""
    rename = files.rename

    def twice(source: Path, target: Path) -> None:
        rename(source, target)
        rename(source, target)

    def program(transport: Transport) -> None:
        with CheckpointManager(tmp_path, Training(transport, 1).optimizer) as checkpoints:
            checkpoints.save(1, blocking=True)

    monkeypatch.setattr(files, "rename", twice)
    on_threads(2, program, timeout=PATIENCE)
    assert entries(tmp_path) == [".lock", "step-00000001"]


def test_a_last_sync_that_fails_keeps_older_checkpoints_and_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path)
    with CheckpointManager(tmp_path / "run", Training(None, 1).optimizer, max_to_keep=1) as checkpoints:
        checkpoints.save(1, blocking=True)
        disk.fail_when(lambda call: call.name == "sync" and call.path == tmp_path / "run", errno.EIO, skip=1)
        with pytest.warns(RuntimeWarning, match=r"step-00000002 is complete, but may be lost if the machine crashes"):
            checkpoints.save(2, blocking=True)
        disk.heal()
        assert checkpoints.all_steps() == [1, 2]
        checkpoints.save(3, blocking=True)
    assert entries(tmp_path / "run") == [".lock", "step-00000003"]
