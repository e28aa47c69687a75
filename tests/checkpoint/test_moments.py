"""Saves at a wrong moment, and saves that meet the end of a run: errors that say what to do, and nothing waits long."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from collectives import CollectiveError, Transport, on_threads
from zero import CheckpointManager, ZeroOptimizer
from zero.checkpoint import files
from zero.checkpoint.folder.directory import complete_steps
from zero.checkpoint.write import save_folder
from zero.checkpoint.write.save_folder import SaveError, SaveFolder
from zero.checkpoint.write.save_thread import Saving
from zero.checkpoint.write.snapshot import Snapshot

from ..support.parts import parts_of
from ..support.plain import assert_same_states
from ..support.pool import GROUP_TIMEOUT, GlooPool
from ..support.small import blocks
from .disk import Disk
from .saves import PATIENCE, Taker, Training, entries

# -- wrong moments -----------------------------------------------------------------------------------------------------

Save = Callable[[], Any]


def in_a_forward(training: Training, save: Save) -> None:
    handle = training.model.first.register_forward_hook(lambda *_: save())
    try:
        training.backward(1)
    finally:
        handle.remove()


def in_a_backward(training: Training, save: Save) -> None:
    handle = training.model.get_parameter("last.bias").register_hook(lambda _: save())  # type: ignore[no-untyped-call]
    try:
        training.backward(1)
    finally:
        handle.remove()


def in_gathered(training: Training, save: Save) -> None:
    with training.optimizer.gathered(write=True):
        save()


def in_join(training: Training, save: Save) -> None:
    with training.optimizer.join():
        save()


def with_gradients(training: Training, save: Save) -> None:
    training.backward(1)
    save()


def with_sums(training: Training, save: Save) -> None:
    with training.optimizer.no_sync():
        training.backward(1)
    save()


def with_a_clip(training: Training, save: Save) -> None:
    training.backward(1)
    training.optimizer.clip_grad_norm_(1.0)
    save()


MOMENTS: dict[str, tuple[Callable[[Training, Save], None], list[int], str]] = {
    "a forward": (in_a_forward, [3], r"save\(\) inside gathered\(\) or inside a forward: leave it first"),
    "a backward": (in_a_backward, [0, 3], r"save\(\) inside a backward or inside join\(\): leave it first"),
    "gathered": (in_gathered, [1, 3], r"save\(\) inside gathered\(\) or inside a forward: leave it first"),
    "join": (in_join, [2, 3], r"save\(\) inside a backward or inside join\(\): leave it first"),
    "gradients": (with_gradients, [0, 2, 3], r"call it after step\(\) or zero_grad\(\)"),
    "sums of no_sync": (with_sums, [1, 2], r"call it after step\(\) or zero_grad\(\)"),
    "clipped gradients": (with_a_clip, [0, 2], r"call it after step\(\) or zero_grad\(\)"),
}


@pytest.mark.parametrize(
    ("moment", "stage"), [(moment, stage) for moment, (_, stages, _) in MOMENTS.items() for stage in stages]
)
@pytest.mark.by_default(
    "a forward-3",
    "a backward-0",
    "gathered-1",
    "gathered-3",
    "join-2",
    "gradients-0",
    "sums of no_sync-2",
    "clipped gradients-2",
)
def test_a_save_at_a_wrong_moment_says_what_to_do(moment: str, stage: int, tmp_path: Path) -> None:
    at, _, words = MOMENTS[moment]
    training = Training(None, stage)
    training.step(0)
    with CheckpointManager(tmp_path, training.optimizer) as checkpoints:
        with pytest.raises(RuntimeError, match=words):
            at(training, lambda: checkpoints.save(1))
        assert entries(tmp_path) == [".lock"]
        training.optimizer.zero_grad()
        training.step(1)
        checkpoints.save(2, blocking=True)
    zero.open_checkpoint(tmp_path / "step-00000002").verify()


@pytest.mark.parametrize(("at", "stage"), [(with_gradients, 0), (with_gradients, 3), (with_sums, 2), (with_a_clip, 1)])
@pytest.mark.by_default
def test_a_restore_with_gradients_that_no_step_has_used_is_an_error_on_every_rank_and_changes_nothing(
    at: Callable[[Training, Save], None], stage: int, tmp_path: Path
) -> None:
    """Sums of `no_sync` are those of one rank alone."""

    def program(transport: Transport) -> None:
        training = Training(transport, stage)
        with CheckpointManager(tmp_path, training.optimizer) as checkpoints:
            training.step(0)
            checkpoints.save(0, blocking=True)
            training.step(1)
            digest, states = training.optimizer.check_replicas(), training.plain()

            def refused() -> None:
                saved = tmp_path / "step-00000000"
                calls = {"restore": checkpoints.restore, "zero.load": lambda: zero.load(saved, training.optimizer)}
                for name, call in calls.items():
                    told = rf"{name}\(\) with gradients that no step .* zero_grad\(\)"
                    with pytest.raises(RuntimeError, match=told):
                        call()

            if at is with_sums and transport.rank == 0:
                refused()
            else:
                at(training, refused)
            training.optimizer.zero_grad()
            assert training.optimizer.check_replicas() == digest
            assert_same_states(training.plain(), states)
            checkpoints.restore()
            training.step(1)
            assert training.optimizer.check_replicas() == digest
            assert_same_states(training.plain(), states)

    on_threads(2, program)


def test_after_a_step_gradients_may_stay(tmp_path: Path) -> None:
    training = Training(None, 1)
    training.backward(0)
    training.optimizer.step()
    with CheckpointManager(tmp_path, training.optimizer) as checkpoints:
        checkpoints.save(1, blocking=True)
        assert checkpoints.latest_step() == 1


def test_a_closed_manager_and_a_closed_optimizer_say_so(tmp_path: Path) -> None:
    training = Training(None, 1)
    training.step(0)
    checkpoints = CheckpointManager(tmp_path, training.optimizer)
    checkpoints.close()
    checkpoints.close()
    for call in (lambda: checkpoints.save(1), checkpoints.restore):
        with pytest.raises(RuntimeError, match="this CheckpointManager is closed: build a new one"):
            call()
    with CheckpointManager(tmp_path, training.optimizer) as checkpoints:
        training.optimizer.close()
        with pytest.raises(RuntimeError, match="this optimizer is closed"):
            checkpoints.save(1)
    assert entries(tmp_path) == [".lock"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_a_blocking_save_is_no_failed_save(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(number: int) -> None:
        raise error

    training = Training(None, 0)
    with CheckpointManager(tmp_path, training.optimizer) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(files, "sync", interrupted)
        with pytest.raises(error):
            checkpoints.save(1, blocking=True)
        with pytest.raises(error):
            zero.save(tmp_path / "saved", training.optimizer)
    assert complete_steps(tmp_path) == []


# -- folders that cannot be used ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-1, 1.0, "1", True, 2**63])
@pytest.mark.by_default
def test_a_step_that_no_reader_takes_is_refused_before_a_byte_is_written(step: Any, tmp_path: Path) -> None:
    training = Training(None, 0)
    with pytest.raises(ValueError, match="step must be"):
        zero.save(tmp_path / "saved", training.optimizer, step=step)
    with (
        CheckpointManager(tmp_path, training.optimizer) as checkpoints,
        pytest.raises(ValueError, match="step must be"),
    ):
        checkpoints.save(step)
    assert entries(tmp_path) == [".lock"]


@pytest.mark.parametrize("name", [b"a\\b.json", b"\xff.json"])
@pytest.mark.by_default
def test_a_file_to_copy_whose_name_no_manifest_can_hold_is_refused(name: bytes, tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    with open(os.fsencode(tmp_path / "assets") + b"/" + name, "w"):
        pass
    with pytest.raises(ValueError, match="cannot be the name of a file of a checkpoint"):
        zero.save(tmp_path / "saved", Training(None, 0).optimizer, assets=tmp_path / "assets")
    assert entries(tmp_path) == ["assets"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_to_keep": 0}, "max_to_keep is 0: it must be at least 1, or None"),
        ({"keep_period": 0}, "keep_period is 0: it must be at least 1, or None"),
        ({"max_shard_size": "many"}, "max_shard_size must be a number of bytes"),
    ],
)
def test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_all(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    def program(transport: Transport) -> None:
        training = Training(transport, 0)
        with pytest.raises(ValueError, match=f"rank 1: {words}"):
            CheckpointManager(tmp_path, training.optimizer, **(arguments if transport.rank else {}))
        training.optimizer.exchange(b"")
        CheckpointManager(tmp_path, training.optimizer).close()

    on_threads(2, program)


def test_a_tensor_cannot_have_the_name_that_a_safetensors_file_keeps_for_itself(tmp_path: Path) -> None:
    def program(transport: Transport) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        model.register_parameter("__metadata__", nn.Parameter(torch.ones(2)))
        optimizer = ZeroOptimizer(model, torch.optim.SGD, process_group=transport)
        words = "a parameter or a buffer of the name '__metadata__', which a safetensors file keeps .*: give it another"
        with CheckpointManager(tmp_path / "run", optimizer) as checkpoints, pytest.raises(ValueError, match=words):
            checkpoints.save(1)
        with pytest.raises(ValueError, match=words):
            zero.save(tmp_path / "saved", optimizer)
        optimizer.close()
        model[0].register_parameter("__metadata__", model._parameters.pop("__metadata__"))
        zero.save(tmp_path / "below", ZeroOptimizer(model, torch.optim.SGD, process_group=transport))

    on_threads(2, program)
    assert entries(tmp_path) == ["below", "run"]
    assert zero.open_checkpoint(tmp_path / "below").model_state_dict()["0.__metadata__"].tolist() == [1, 1]


@pytest.mark.parametrize("path", ["/", ".."])
@pytest.mark.by_default
def test_a_path_without_a_name_is_refused_on_every_rank(path: str, tmp_path: Path) -> None:
    def program(transport: Transport) -> None:
        with pytest.raises(ValueError, match=r"path is '.*', which no checkpoint can have as its name: name a folder"):
            zero.save(path if transport.rank == 1 else tmp_path / "saved", Training(transport, 0).optimizer)

    on_threads(2, program, timeout=PATIENCE)
    with pytest.raises(ValueError, match=r"name a folder inside it"):
        zero.save(path, Training(None, 0).optimizer)
    assert entries(tmp_path) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_folders_above_a_checkpoint_are_made(world_size: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def program(transport: Transport) -> None:
        optimizer = Training(transport, 1).optimizer
        zero.save(tmp_path / "a" / "b" / "saved", optimizer)
        with pytest.raises(ValueError, match=r"/file/b cannot be written on host \S+: .*File exists: '.*/file'"):
            zero.save(tmp_path / "file" / "b" / "saved", optimizer)

    on_threads(world_size, program)
    assert (entries(tmp_path), entries(tmp_path / "a" / "b")) == (["a", "file"], ["saved"])
    zero.open_checkpoint(tmp_path / "a" / "b" / "saved").verify()


def test_a_folder_that_cannot_be_written_or_is_not_seen_names_rank_and_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    disk = Disk(monkeypatch, tmp_path)

    def refused(training: Training, path: Path, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            CheckpointManager(path, training.optimizer)
        training.optimizer.exchange(b"")

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training, rank = Training(transport, 0), transport.rank
        refused(
            training, tmp_path / "file" / "run", r"rank 0: .* cannot be written on host \S+: .*File exists: '.*/file'"
        )
        other = tmp_path / ("other" if rank else "run")
        refused(training, other, r"the folder is '.*/other' on rank 1 \(host \S+\), but '.*/run' on rank 0: every rank")
        if rank == 0:
            disk.fail_when(lambda call: call.rank == 1 and call.name == "open", errno.ENOENT)
        training.optimizer.exchange(b"")
        not_seen = r"rank 1 \(host \S+, pid \d+\) cannot use this folder: it does not see it"
        refused(training, tmp_path / "run", not_seen)
        with pytest.raises(ValueError, match=not_seen):
            zero.save(tmp_path / "run" / "saved", training.optimizer)
        training.optimizer.exchange(b"")
        if rank == 0:
            disk.heal()
            disk.fail_when(lambda call: call.rank == 1 and call.name == "write_at", errno.EROFS)
        training.optimizer.exchange(b"")
        refused(training, tmp_path / "run", r"rank 1 \(host .*cannot read or write there \(Read-only file system\)")

    on_threads(2, program)
    assert entries(tmp_path / "run") == [".lock"]


@pytest.mark.assumes("pwrite")
def test_a_folder_that_loses_what_a_rank_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_at = files.write_at
    monkeypatch.setattr(
        files, "write_at", lambda n, data, at: None if at == 3 and len(data) == 1 else write_at(n, data, at)
    )

    def program(transport: Transport) -> None:
        words = r"does not see what other ranks have written there: a file system that"
        with pytest.raises(ValueError, match=words):
            CheckpointManager(tmp_path, Training(transport, 0).optimizer)
        with pytest.raises(ValueError, match=words):
            zero.save(tmp_path / "saved", Training(transport, 0).optimizer)

    on_threads(2, program)
    assert entries(tmp_path) == [".lock"]


# -- a save under way --------------------------------------------------------------------------------------------------


def test_a_save_while_another_is_under_way_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taker = Taker(monkeypatch)

    def program(transport: Transport) -> None:
        training, rank = Training(transport, 1), transport.rank
        training.step(0)
        checkpoints = CheckpointManager(tmp_path, training.optimizer)
        taker.allow(rank, 0 if rank else None)
        first = checkpoints.save(1)
        assert first is not None
        if rank:
            taker.wait_until(rank, 0)
        training.optimizer.exchange(b"")
        if rank:
            releasing = threading.Timer(0, taker.allow, (rank, None))
            releasing.start()
        checkpoints.save(2)
        assert first.done()
        training.optimizer.exchange(b"")
        taker.allow(rank, None)
        checkpoints.close()

    on_threads(2, program)
    assert complete_steps(tmp_path) == [1, 2]
    assert len(entries(tmp_path)) == 3


def test_a_restore_waits_for_the_save_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taker, wait = Taker(monkeypatch), Saving.wait

    def released(this: Saving) -> None:
        taker.allow(0, None)
        wait(this)

    training = Training(None, 1)
    training.step(0)
    with CheckpointManager(tmp_path, training.optimizer) as checkpoints:
        checkpoints.save(1, blocking=True)
        training.step(1)
        monkeypatch.setattr(Saving, "wait", released)
        taker.allow(0, 0)
        checkpoints.save(2)
        taker.wait_until(0, 0)
        restored = checkpoints.restore()
        assert restored is not None
        assert restored.step == 2


class Clock:
    """The time for `save_folder`: it passes while a rank waits, and ``script`` is called then."""

    def __init__(self, script: Callable[[float], None]) -> None:
        self.now, self._script = 0.0, script

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._script(self.now)


def waiting(folder: Path, script: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> tuple[SaveFolder, Clock]:
    clock = Clock(script)
    monkeypatch.setattr(save_folder, "time", clock)
    made = SaveFolder(folder / "step-00000001", "0" * 16, 0, 2, timeout=10.0)
    made.make()
    made.make_files({"model/a": 10})
    made.report_done({})
    return SaveFolder(folder / "step-00000001", "0" * 16, 1, 2, timeout=10.0), clock


@pytest.mark.assumes("pwrite")
def test_a_rank_waits_as_long_as_the_others_write_and_not_longer_than_the_group_s_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / f".tmp-step-00000001-{'0' * 16}" / "model" / "a"

    def writes_for_a_minute(now: float) -> None:
        if now < 60:
            os.utime(written, ns=(0, 4 * 10**18 + int(now * 1e9)))

    folder, clock = waiting(tmp_path, writes_for_a_minute, monkeypatch)
    with pytest.raises(SaveError, match=r"rank 1 cannot see whether .*step-00000001 is complete.*in time \(10 s\)"):
        folder.wait_until_committed()
    assert 68 < clock.now < 72
    with pytest.raises(SaveError, match=r"rank 1 did not write its part of .* in time"):
        SaveFolder(tmp_path / "step-00000001", "0" * 16, 0, 2, timeout=10.0).collect()


@pytest.mark.assumes("pwrite")
def test_a_rank_that_is_told_of_a_failure_waits_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, clock = waiting(tmp_path, lambda now: folder.abandon("rank 0 is gone", 5) if now > 1 else None, monkeypatch)
    with pytest.raises(SaveError, match="rank 0 is gone"):
        folder.wait_until_committed()
    assert 6 < clock.now < 6.1


@pytest.mark.assumes("pwrite")
def test_a_rank_that_finds_nothing_of_a_save_knows_that_it_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, clock = waiting(tmp_path, lambda now: None, monkeypatch)
    folder.remove_rest()
    for call in (folder.wait_until_ready, folder.wait_until_committed):
        with pytest.raises(SaveError, match="rank 0 has given up saving"):
            call()
    assert clock.now == 0


# -- the end of a run --------------------------------------------------------------------------------------------------


def test_an_error_in_the_block_completes_the_save_under_way_if_all_ranks_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(transport: Transport) -> None:
        training = Training(transport, 1)
        training.step(0)
        checkpoints = CheckpointManager(tmp_path, training.optimizer)
        checkpoints.save(1)
        checkpoints.__exit__(ZeroDivisionError, ZeroDivisionError(), None)

    on_threads(2, program)
    lock, announcement, step = entries(tmp_path)  # no rank knows that the others have seen it: the next run removes it
    assert (lock, announcement[:7], step) == (".lock", ".saved-", "step-00000001")


def test_close_waits_for_no_rank_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero.checkpoint.manager._GRACE", 0.0)
    taker, closed = Taker(monkeypatch), threading.Event()

    def program(transport: Transport) -> None:
        training, rank = Training(transport, 1), transport.rank
        training.step(0)
        checkpoints = CheckpointManager(tmp_path, training.optimizer)
        taker.allow(rank, 0 if rank else None)
        checkpoints.save(1)
        if rank:
            parts_of(training.optimizer).transport.abort("of the test")
            assert closed.wait(PATIENCE)
            taker.allow(rank, None)
        else:
            with pytest.raises(CollectiveError):
                training.optimizer.exchange(b"")
        with pytest.raises(RuntimeError, match=r"rank \d has lost the other ranks"):
            checkpoints.close()
        closed.set()

    on_threads(2, program, timeout=PATIENCE)
    assert complete_steps(tmp_path) == []


def leaves(group: Any, rank: int, folder: str, how: str) -> tuple[str, float]:
    """Leave the block, or die, on one rank while a save is under way. Returns what the other rank sees."""
    model = blocks()
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=2, process_group=group)

    def step() -> None:
        model(torch.full((2, 4), rank + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    seen = "nothing"
    took = 0.0
    victim = 0 if how == "dies after the rename" else 1
    sync_folder = files.sync_folder

    def dies(path: Path) -> bool:
        if (Path(folder) / "step-00000002").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return sync_folder(path)

    def never(*_: Any) -> None:
        threading.Event().wait()

    patch = pytest.MonkeyPatch()
    if how == "leaves":
        patch.setattr("zero.checkpoint.manager._GRACE", PATIENCE)  # as long as this disk takes
    try:
        with CheckpointManager(folder, optimizer) as checkpoints:
            checkpoints.save(1, blocking=True)
            optimizer.exchange(b"")
            if rank == victim and how == "dies after the rename":
                patch.setattr(files, "sync_folder", dies)
            elif rank == victim and how == "dies":
                patch.setattr(Snapshot, "take", never)
            saving = checkpoints.save(2)
            began = time.monotonic()
            if how == "dies after the rename":
                seen = saving.result(20)
                took = time.monotonic() - began
            elif rank == victim:
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ZeroDivisionError("of the test")
            else:
                try:
                    step()
                finally:
                    took = time.monotonic() - began
    except (CollectiveError, ZeroDivisionError) as error:
        if seen == "nothing":
            seen = "a CollectiveError" if isinstance(error, CollectiveError) else "its own"
    finally:
        patch.undo()
    (Path(folder) / f"seen-by-{rank}").write_text(f"{seen} {took}")
    return seen, took


@pytest.mark.parametrize("how", ["leaves", "dies", "dies after the rename"])
def test_a_rank_that_leaves_or_dies_while_a_save_is_under_way(gloo: GlooPool, how: str, tmp_path: Path) -> None:
    if how == "leaves":
        (first, _), (second, _) = gloo.run(leaves, str(tmp_path), how)
        assert (first, second) == ("a CollectiveError", "its own")
    else:
        with pytest.raises(RuntimeError, match=r"the process of rank \d died"):
            gloo.run(leaves, str(tmp_path), how)
        gloo.stop()
    survivor = tmp_path / f"seen-by-{1 if how == 'dies after the rename' else 0}"
    seen, _, took = survivor.read_text().rpartition(" ")
    assert float(took) < GROUP_TIMEOUT, "a message brought it, no time limit"
    if how == "dies after the rename":
        assert seen == zero.open_checkpoint(tmp_path / "step-00000002").content
    else:
        assert seen == "a CollectiveError"
    assert complete_steps(tmp_path) == ([1] if how == "dies" else [1, 2])
    for step in complete_steps(tmp_path):
        zero.open_checkpoint(tmp_path / f"step-{step:08d}").verify()
    with CheckpointManager(tmp_path, Training(None, 0).optimizer) as checkpoints:
        assert checkpoints.latest_step() == max(complete_steps(tmp_path))
    assert not [name for name in entries(tmp_path) if name.startswith(".tmp")]
