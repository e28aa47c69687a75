"""Ranks agree on a save before a byte is written, send nothing for it, and wait no longer than needed."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives import CollectiveError, Tag, Transport, on_threads
from zero import CheckpointManager, ZeroOptimizer
from zero.checkpoint.folder.directory import complete_steps
from zero.checkpoint.write import save_folder
from zero.checkpoint.write.save_folder import GivenUpError, SaveError, SaveFolder
from zero.checkpoint.write.save_thread import Saving

from ..support.limits import PATIENT
from ..support.parts import parts_of
from ..support.rows import rows
from ..support.small import blocks
from .saved import Taker, Training, entries, names

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


@pytest.mark.assumes("pwrite")
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
    saving = Saving(1, of_rank(1), GivenUpError("rank 0 has given up"), None, lambda *_: None)
    saving.start(asynchronous=False)
    assert len(saving.hear([{saving.report: "rank 2 could not save: no room"}, {}])) == 1
    with pytest.raises(SaveError, match="rank 2 could not save: no room"):
        saving.result()


def test_close_waits_for_no_rank_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero.checkpoint.manager._GRACE", 0.0)
    taker, closed = Taker(monkeypatch), threading.Event()

    def program(transport: Transport) -> None:
        training, rank = Training(transport, 1), transport.rank
        checkpoints = CheckpointManager(tmp_path, training.optimizer)
        taker.begin(rank, 0 if rank else math.inf)
        checkpoints.save(1)
        if rank:
            parts_of(training.optimizer).transport.abort("of the test")
            assert closed.wait(PATIENT)
            taker.release(rank)
        else:
            with pytest.raises(CollectiveError):
                training.optimizer.exchange(b"")
        with pytest.raises(RuntimeError, match=r"rank \d has lost the other ranks"):
            checkpoints.close()
        closed.set()

    on_threads(2, program, timeout=PATIENT)
    assert complete_steps(tmp_path) == []
