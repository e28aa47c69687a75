"""Ranks agree on a save before a byte is written, send nothing for it, and hear of a signal together."""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from collectives import CollectiveError, Tag, Transport, on_threads
from zero import CheckpointManager, StopOnSignal, ZeroOptimizer
from zero.checkpoint import files
from zero.checkpoint.folder.directory import complete_steps
from zero.checkpoint.write import save_folder
from zero.checkpoint.write.save_folder import SaveError, SaveFolder
from zero.checkpoint.write.save_thread import Saving

from ..support.errors import assert_in_order, error_of
from ..support.limits import PATIENT
from ..support.parts import parts_of
from ..support.plain import assert_same_states
from ..support.pool import GlooPool
from ..support.rows import rows
from ..support.small import blocks
from .disk import Disk
from .saved import Taker, Training, entries, names, plain_dict, step_folder

OF_SAVES = ("save()", "saving ")
OF_ALL = (*OF_SAVES, "exchange()", "CheckpointManager")


@pytest.mark.parametrize("stage", rows([1], [3]))
def test_a_run_that_saves_after_every_step_sends_what_one_sends_that_never_saves(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of saves alone are the meetings of `save()`, one each; no thread of a save sends anything."""
    steps = 4
    calls: dict[int, list[tuple[Any, ...]]] = {}

    def record(name: str) -> None:
        call = getattr(Transport, name)

        def wrapped(this: Transport, *arguments: Any, **options: Any) -> Any:
            assert not threading.current_thread().name.startswith("zero-checkpoint")
            tag = next(value for value in arguments if isinstance(value, Tag))
            sent = arguments[0].numel() if name == "isend" else 0
            calls.setdefault(this.rank, []).append((tag.label, name, tag.kind.name, sent))
            return call(this, *arguments, **options)

        monkeypatch.setattr(Transport, name, wrapped)

    for name in ("isend", "irecv_chunks", "exchange", "meet", "announce", "expose", "map_buffers"):
        record(name)

    def found(saves: bool) -> tuple[Any, ...]:
        def program(transport: Transport) -> tuple[str, int, int]:
            model = blocks()  # whose saves gather nothing, as no memory is permuted
            optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=transport)
            checkpoints = CheckpointManager(tmp_path / str(saves), optimizer)
            for step in range(steps):
                model(torch.full((2, 4), transport.rank + step + 1.0)).square().sum().backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                if saves:
                    assert checkpoints.save(step, {"step": step}) is not None
            checkpoints.close()
            return optimizer.check_replicas(), optimizer.traffic.payload_sent, optimizer.traffic.payload_received

        calls.clear()
        results = on_threads(2, program)
        meetings = {rank: [each[0] for each in made if each[0].startswith(OF_SAVES)] for rank, made in calls.items()}
        assert meetings == {rank: ["save()"] * steps * saves for rank in (0, 1)}
        others = {rank: [each for each in made if not each[0].startswith(OF_ALL)] for rank, made in calls.items()}
        return results, others

    assert found(saves=True) == found(saves=False)
    assert entries(tmp_path / "True") == names(*range(steps))


def test_a_restore_waits_for_the_save_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: ZeroOptimizer
) -> None:
    """And so does a save."""
    taker, wait = Taker(monkeypatch), Saving.wait

    def released(this: Saving) -> None:
        taker.release(0)
        wait(this)

    with CheckpointManager(tmp_path, optimizer) as checkpoints:
        monkeypatch.setattr(Saving, "wait", released)
        taker.begin(0, 0)
        first = checkpoints.save(1)
        checkpoints.save(2)
        assert first.done()
        taker.begin(0, 0)
        checkpoints.save(3)
        restored = checkpoints.restore()
        assert restored is not None
        assert restored.step == 3


class Clock:
    def __init__(self, script: Callable[[float], None]) -> None:
        self.now, self._script = 0.0, script

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._script(self.now)


def test_a_rank_waits_as_long_as_the_others_write_and_no_longer_once_it_knows_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank tells it of a failure, or it finds nothing of the save."""

    def of_rank(rank: int) -> SaveFolder:
        return SaveFolder(tmp_path / "step-00000001", "0" * 16, rank, 2, timeout=10.0)

    def waiting(script: Callable[[float], None]) -> tuple[SaveFolder, Clock]:
        clock = Clock(script)
        monkeypatch.setattr(save_folder, "time", clock)
        made = of_rank(0)
        made.make()
        made.make_files({"model/a": 10})
        made.report_done({})
        return of_rank(1), clock

    def writes_for_a_minute(now: float) -> None:
        if now < 60:
            os.utime(tmp_path / f".tmp-step-00000001-{'0' * 16}" / "model" / "a", ns=(0, 4 * 10**18 + int(now * 1e9)))

    folder, clock = waiting(writes_for_a_minute)
    with pytest.raises(SaveError, match=r"rank 1 cannot see whether .*step-00000001 is complete.*in time \(10 s\)"):
        folder.wait_until_committed()
    assert 68 < clock.now < 72
    with pytest.raises(SaveError, match=r"rank 1 did not write its part of .* in time"):
        of_rank(0).collect()
    folder.remove_rest()
    folder, clock = waiting(lambda now: folder.abandon("rank 0 is gone", 5) if now > 1 else None)
    with pytest.raises(SaveError, match="rank 0 is gone"):
        folder.wait_until_committed()
    assert 6 < clock.now < 6.1
    folder.remove_rest()
    folder, clock = waiting(lambda now: None)
    folder.remove_rest()
    for call in (folder.wait_until_ready, folder.wait_until_committed):
        with pytest.raises(SaveError, match="rank 0 has given up saving"):
            call()
    assert clock.now == 0


@pytest.mark.parametrize("leaves", [False, True], ids=["closes", "leaves"])
@pytest.mark.parametrize("grace", [0.0, PATIENT], ids=["in vain", "in time"])
def test_a_rank_that_has_lost_the_others_waits_a_moment_for_their_part_of_a_save(
    grace: float, leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero.checkpoint.manager._GRACE", grace)
    taker, closed = Taker(monkeypatch), threading.Event()

    def program(transport: Transport) -> None:
        training, rank = Training(transport, 1), transport.rank
        checkpoints = CheckpointManager(tmp_path, training.optimizer)
        taker.begin(rank, 0 if rank and not grace else math.inf)
        checkpoints.save(1)
        if rank:
            parts_of(training.optimizer).transport.abort("of the test")
            assert closed.wait(PATIENT)
            taker.release(rank)
        else:
            with pytest.raises(CollectiveError):
                training.optimizer.exchange(b"")
        if leaves:
            with pytest.raises(ZeroDivisionError), checkpoints:
                raise ZeroDivisionError
        else:
            with nullcontext() if grace else pytest.raises(RuntimeError, match=r"rank \d has lost the other ranks"):
                checkpoints.close()
        closed.set()

    on_threads(2, program, timeout=PATIENT)
    assert complete_steps(tmp_path) == ([1] if grace else [])


class At(Training):
    """A rank, with a folder and its manager, before a call that is refused: of rank 1, if arguments are given."""

    def __init__(self, transport: Transport, stage: int, folder: Path) -> None:
        super().__init__(transport, stage)
        self.transport, self.folder = transport, folder
        self.checkpoints = CheckpointManager(folder / "run", self.optimizer)

    def save(self, **own: Any) -> None:
        self.checkpoints.save(**{"step": 1, **(own if self.rank else {})})

    def states(self, *of_ranks: Any) -> None:
        self.checkpoints.save(1, {"s": of_ranks[self.rank], "same": torch.ones(2)})

    def one(self, name: str = "saved", **own: Any) -> None:
        zero.save(self.folder / (name if self.rank else "saved"), self.optimizer, **(own if self.rank else {}))

    def manager(self, name: str = "other", **own: Any) -> None:
        path = self.folder / (name if self.rank else "other")
        CheckpointManager(path, self.optimizer, **(own if self.rank else {}))


def named_metadata(at: At) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(2)))
    zero.save(at.folder / "saved", ZeroOptimizer(model, torch.optim.SGD, process_group=at.transport))


DIFFERS = "state['s'] differs between rank 0 and rank 1"
NO_NUMBER = "max_shard_size must be a number of bytes"
Row = tuple[Callable[[At], object], str]
ROWS: list[Row] = [
    (lambda at: at.save(step=2), "the step is 2 on rank 1 (host … but 1 on rank 0"),
    (lambda at: at.save(overwrite=True), "overwrite is True on rank 1 … but False on rank 0"),
    (lambda at: at.states({"last": 0}, {"last": 1}), f"{DIFFERS} … belongs in rank_state"),
    (lambda at: at.states(torch.zeros(2), torch.tensor([0.0, -0.0])), DIFFERS),
    (lambda at: at.states([0.5, 0.0], [0.5, -0.0]), DIFFERS),
    (lambda at: at.states({"a": [], "b": [0.5]}, {"a": [0.5], "b": []}), DIFFERS),
    (lambda at: at.save(state={"s": 1}), DIFFERS),
    (lambda at: at.save(state={"s": {"f": [print]}}), "state['s']['f'][0] is a function"),
    (lambda at: at.save(rank_state={"f": {1, 2}}), "rank_state … 'f' … is a set"),
    (lambda at: at.one("1"), "the folder is ' … /1' on rank 1 … /saved' on rank 0"),
    (lambda at: at.one("run-1/saved"), "the folder is ' … /run-1' on rank 1 … ' on rank 0"),
    (lambda at: at.manager("1"), "the folder is ' … /1' on rank 1 (host … /other' on rank 0: every rank"),
    (lambda at: at.manager(max_to_keep=0), "max_to_keep is 0: it must be at least 1, or None"),
    (lambda at: at.manager(max_to_keep=""), "max_to_keep is '': it must be at least 1, or None"),
    (lambda at: at.manager(keep_period=0), "keep_period is 0: it must be at least 1, or None"),
    (
        lambda at: CheckpointManager("" if at.rank else at.folder / "other", at.optimizer),
        "rank 1: directory is empty: name a folder",
    ),
    (lambda at: at.manager(max_shard_size="many"), NO_NUMBER),
    (lambda at: at.manager(max_shard_size=0), NO_NUMBER),
    (lambda at: at.one(max_shard_size="0GB"), NO_NUMBER),
    *((lambda at, step=step: at.one(step=step), "step must be ") for step in (-1, 1.0, True, 2**63)),
    *((lambda at, n=n: at.one(n), "which no checkpoint can have as its name: name a folder") for n in ("/", "..")),
    *((lambda at, n=n: at.one(assets=at.folder / n), "cannot be the name of a file of a") for n in ("back", "bytes")),
    (lambda at: at.one(assets=at.folder / "missing"), "/missing': name a folder that exists"),
    (lambda at: at.one(assets=""), "assets is '': name a folder that exists"),
    (named_metadata, "of the name '__metadata__', which a safetensors file keeps"),
    (
        lambda at: CheckpointManager(at.folder / "file" / "run", at.optimizer),
        "cannot be written on host … File exists: '",
    ),
    (lambda at: zero.save(at.folder / "file" / "b" / "c", at.optimizer), "/file/b cannot be written on host … File ex"),
]


def test_what_is_refused_is_so_on_every_rank_and_nothing_changes(tmp_path: Path) -> None:
    for folder, name in (("back", b"a\\b.json"), ("bytes", b"\xff.json"), ("whole", b"config.json"), ("run-1", b"a")):
        (tmp_path / folder).mkdir()
        Path(os.fsdecode(os.fsencode(tmp_path / folder) + b"/" + name)).touch()
    (tmp_path / "file").touch()

    def nothing_is_written() -> None:
        assert [name for name in entries(tmp_path / "run") if not name.startswith(".saved-")] == names(0)

    def program(transport: Transport) -> None:
        at = At(transport, 2, tmp_path)
        at.step(0)
        at.checkpoints.save(0, blocking=True)
        before = plain_dict(at.optimizer)
        for call, words in ROWS:
            assert_in_order(words, error_of(call, at))
            assert_same_states(plain_dict(at.optimizer), before)
            at.on_rank_0(nothing_is_written)
        at.step(1)
        at.checkpoints.save(1, blocking=True)
        zero.save(tmp_path / "a" / "b" / "saved", at.optimizer, assets=tmp_path / "whole")
        at.optimizer.close()
        assert "this optimizer is closed" in error_of(at.checkpoints.save, 2)
        at.checkpoints.close()
        for call in (at.save, at.checkpoints.restore):
            assert "this CheckpointManager is closed: build a new one" in error_of(call)

    on_threads(2, program, timeout=PATIENT)  # for which a rank would wait that is not told
    assert set(entries(tmp_path)) == {"a", "back", "bytes", "file", "other", "run", "run-1", "whole"}
    assert entries(tmp_path / "run-1") == ["a"]
    assert (tmp_path / "a" / "b" / "saved" / "model" / "config.json").exists()
    for path in (step_folder(tmp_path / "run", 1), tmp_path / "a" / "b" / "saved"):
        zero.open_checkpoint(path).verify()


def test_the_first_backward_of_a_process_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch counts them, from 0."""
    at = Training()
    at.model.last.bias.register_hook(lambda _: zero.save(tmp_path / "saved", at.optimizer) and None)
    monkeypatch.setattr("zero.engine.current_graph_task_id", lambda: 0)
    assert_in_order("save() … inside a backward or inside join(): leave it first", error_of(at.backward, 1))


def test_a_folder_that_a_rank_cannot_use_names_it_and_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, run = Disk(monkeypatch, tmp_path), tmp_path / "run"

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 0)

        def refused(path: Path, words: str, call: Callable[..., Any], name: str, number: int) -> None:
            training.on_rank_0(partial(disk.fail_when, lambda each: each.rank == 1 and each.name == name, number))
            assert_in_order(words, error_of(call, path, training.optimizer))
            training.on_rank_0(disk.failing.clear)

        unseen = "rank 1 (host … pid … ) cannot use this folder: it does not see it"
        refused(run, unseen, CheckpointManager, "open", errno.ENOENT)
        refused(run / "saved", unseen, zero.save, "open", errno.ENOENT)
        words = "rank 1 (host … cannot read or write there (Read-only file system)"
        refused(run, words, CheckpointManager, "write_at", errno.EROFS)

    on_threads(2, program)
    assert entries(run) == [".lock"]


def test_a_folder_that_loses_what_a_rank_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_at = files.write_at
    loses = lambda n, data, at: None if at == 3 and len(data) == 1 else write_at(n, data, at)  # noqa: E731
    monkeypatch.setattr(files, "write_at", loses)

    def program(transport: Transport) -> None:
        optimizer = Training(transport, 0).optimizer
        for call in (partial(CheckpointManager, tmp_path), partial(zero.save, tmp_path / "saved")):
            words = "does not see what other ranks have written there: a file system that"
            assert words in error_of(call, optimizer)

    on_threads(2, program)
    assert entries(tmp_path) == [".lock"]


def _stops(group: Any, rank: int) -> tuple[int, str | None]:
    training = Training(group, 2)
    signal.signal(signal.SIGTERM, lambda *_: None)  # a signal that nobody has heard is sent again
    with StopOnSignal(training.optimizer) as stop:
        for step in range(6):
            if (rank, step) == (1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            training.step(step)
            if stop.requested:
                break
    assert not parts_of(training.optimizer).update.watchers
    return step, stop.why


@pytest.mark.first(0)
def test_all_ranks_hear_of_a_signal_in_the_same_step(gloo: GlooPool) -> None:
    assert gloo.run(_stops, ranks=(0, 1, 2)) == [(2, "rank 1 got SIGTERM")] * 3


@pytest.fixture
def caught() -> Iterator[list[int]]:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def test_inside_the_block_a_signal_does_not_end_the_process_and_after_it_what_was_there_handles_it(
    caught: list[int],
) -> None:
    training = Training(None, 0)
    optimizer = training.optimizer
    with StopOnSignal(optimizer) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.requested
        training.step(0)
        assert stop.requested
    assert caught == []
    with StopOnSignal(optimizer) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert not stop.requested
    assert caught == [signal.SIGTERM], "no step came after it, so the process gets it at the end of the block"

    def lose_the_others() -> None:
        with StopOnSignal(optimizer):
            os.kill(os.getpid(), signal.SIGTERM)
            raise KeyError("what a rank reports that has lost the others, although its agent has sent SIGTERM")

    with pytest.raises(KeyError):
        lose_the_others()
    assert caught == [signal.SIGTERM]


def test_what_no_process_can_handle_is_an_error_that_names_it() -> None:
    optimizer = Training(None, 0).optimizer
    with pytest.raises(ValueError, match="signals has SIGKILL, which no process can handle: leave it out"):
        StopOnSignal(optimizer, [signal.SIGTERM, signal.SIGKILL])
    with ThreadPoolExecutor(1) as pool:
        assert "main thread" in str(pool.submit(StopOnSignal(optimizer).__enter__).exception())
