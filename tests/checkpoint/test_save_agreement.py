"""Ranks agree on a save before a byte is written, and saves change nothing of what training sends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from collectives import CollectiveError, Tag, Transport, on_threads
from zero import CheckpointManager, ZeroOptimizer
from zero.checkpoint.contents import Contents
from zero.checkpoint.write import saver

from ..support.limits import PATIENT
from ..support.rows import only, rows
from ..support.small import blocks
from .disk import Disk
from .saves import Training, entries


def state(value: object) -> dict[str, Any]:
    return {"state": {"s": value, "same": torch.ones(2)}}


DIFFERS = r"state\['s'\] differs between rank 0 and rank 1"
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "step": ({"step": 0}, {"step": 1}, r"the step is 1 on rank 1 \(host .*\), but 0 on rank 0"),
    "overwrite": ({}, {"overwrite": True}, r"overwrite is True on rank 1 .* but False on rank 0"),
    "state": (state({"last": 0}), state({"last": 1}), rf"{DIFFERS} .*belongs in rank_state"),
    "a tensor's bit": (state(torch.zeros(2)), state(torch.tensor([0.0, -0.0])), DIFFERS),
    "a float's bit": (state({"losses": [0.5, 0.0]}), state({"losses": [0.5, -0.0]}), DIFFERS),
    "a list's place": (state({"a": [], "b": [0.5]}), state({"a": [0.5], "b": []}), DIFFERS),
    "a key": ({"state": {}}, {"state": {"s": 1}}, DIFFERS),
    "an unsavable value": (state({"f": []}), state({"f": [print]}), r"state\['s'\]\['f'\]\[0\] is a function"),
    "that of a rank": ({"rank_state": {"f": 1}}, {"rank_state": {"f": {1, 2}}}, r"rank_state.*'f'.* is a set"),
}


@pytest.mark.parametrize("difference", only(DIFFERENCES, "step", "state", "a key"))
def test_ranks_that_save_other_things_learn_the_rank_and_the_key_before_a_byte_is_written(
    difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *arguments, words = DIFFERENCES[difference]
    disk = Disk(monkeypatch, tmp_path)

    def program(transport: Transport) -> str:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 1)
        training.step(0)
        with CheckpointManager(tmp_path / "run", training.optimizer) as checkpoints:
            with pytest.raises((RuntimeError, ValueError, TypeError), match=words) as caught:
                checkpoints.save(**{"step": 1, **arguments[transport.rank]})
            training.optimizer.exchange(b"")
            assert entries(tmp_path / "run") == [".lock"]
            training.step(1)
            checkpoints.save(7, blocking=True)
        return str(caught.value)

    first, _ = on_threads(2, program)
    assert "rank 1" in first
    assert entries(tmp_path / "run") == [".lock", "step-00000007"]


def test_ranks_that_save_to_other_paths_are_told(tmp_path: Path) -> None:
    def program(transport: Transport) -> None:
        training = Training(transport, 0)
        with pytest.raises(ValueError, match=r"the folder is '.*/1' on rank 1 .*, but '.*/0' on rank 0"):
            zero.save(tmp_path / f"{transport.rank}", training.optimizer)
        with pytest.raises(ValueError, match=r"the folder is '.*/run-1' on rank 1 .*, but '.*/run-0' on rank 0"):
            zero.save(tmp_path / f"run-{transport.rank}" / "saved", training.optimizer)
        training.optimizer.exchange(b"")
        assert entries(tmp_path) == ["run-0", "run-1"]

    for rank in (0, 1):
        (tmp_path / f"run-{rank}").mkdir()
    on_threads(2, program, timeout=PATIENT)  # for which each would wait for the other's part
    assert entries(tmp_path / "run-0") == []


def test_a_rank_that_fails_while_others_wait_for_its_part_of_a_tensor_ends_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather_permuted = saver.gather_permuted

    def fails(contents: Contents, permuted: Any) -> Any:
        if contents.transport.rank == 1:
            raise MemoryError("no room")
        return gather_permuted(contents, permuted)

    monkeypatch.setattr(saver, "gather_permuted", fails)

    def program(transport: Transport) -> None:
        training = Training(transport, 1)
        training.step(0)
        words = r"rank 1.*in save\(\): MemoryError: no room" if transport.rank == 0 else "no room"
        with (
            pytest.raises((CollectiveError, MemoryError), match=words),
            CheckpointManager(tmp_path, training.optimizer) as checkpoints,
        ):
            checkpoints.save(1)

    on_threads(2, program, timeout=PATIENT)


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
    assert entries(tmp_path / "True") == [".lock", *(f"step-{step:08d}" for step in range(steps))]
