"""Ranks agree on a save before a byte is written, and saves change nothing of what training sends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from collectives import CollectiveError, Tag, Transport, on_threads
from zero import CheckpointManager, ZeroOptimizer
from zero.checkpoint.contents import Contents
from zero.checkpoint.write import saver
from zero.checkpoint.write.plan import BucketTensor
from zero.checkpoint.write.snapshot import Source

from ..support.limits import PATIENT
from ..support.small import blocks
from .disk import Disk
from .saves import Training, entries

# -- agreement ---------------------------------------------------------------------------------------------------------


def other_state(rank: int) -> dict[str, Any]:
    return {"step": 1, "state": {"scheduler": {"last": rank}, "same": torch.ones(2)}}


DIFFERENCES: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "step": (lambda rank: {"step": rank}, r"the step is 1 on rank 1 \(host .*\), but 0 on rank 0"),
    "overwrite": (
        lambda rank: {"step": 1, "overwrite": rank == 1},
        r"overwrite is True on rank 1 .* but False on rank 0",
    ),
    "state": (other_state, r"state\['scheduler'\] differs between rank 0 and rank 1 .*belongs in rank_state"),
    "a tensor's bit": (
        lambda rank: {"step": 1, "state": {"t": torch.tensor([0.0, -0.0 if rank else 0.0])}},
        r"state\['t'\] differs between rank 0 and rank 1",
    ),
    "a float's bit": (
        lambda rank: {"step": 1, "state": {"s": {"losses": [0.5, -0.0 if rank else 0.0]}}},
        r"state\['s'\] differs between rank 0 and rank 1",
    ),
    "a list's place": (
        lambda rank: {"step": 1, "state": {"s": {"a": [0.5] if rank else [], "b": [] if rank else [0.5]}}},
        r"state\['s'\] differs between rank 0 and rank 1",
    ),
    "a key": (
        lambda rank: {"step": 1, "state": {"extra": 1} if rank else {}},
        r"state\['extra'\] differs between rank 0 and rank 1",
    ),
    "an unsavable value": (
        lambda rank: {"step": 1, "state": {"s": {"f": [print] if rank else []}}},
        r"state\['s'\]\['f'\]\[0\] is a function",
    ),
    "an unsavable value of a rank": (
        lambda rank: {"step": 1, "rank_state": {"f": {1, 2} if rank else 1}},
        r"rank_state.*'f'.* is a set",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_that_save_other_things_learn_the_rank_and_the_key_before_a_byte_is_written(
    difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, words = DIFFERENCES[difference]
    disk = Disk(monkeypatch, tmp_path)

    def program(transport: Transport) -> str:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 1)
        training.step(0)
        with CheckpointManager(tmp_path / "run", training.optimizer) as checkpoints:
            with pytest.raises((RuntimeError, ValueError, TypeError), match=words) as caught:
                checkpoints.save(**make(transport.rank))
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


# -- failures of one rank after the agreement --------------------------------------------------------------------------


def test_a_rank_that_fails_while_others_wait_for_its_part_of_a_tensor_ends_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather_permuted = saver.gather_permuted

    def fails(contents: Contents, permuted: Sequence[BucketTensor]) -> dict[Source, torch.Tensor]:
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


# -- what saves send ---------------------------------------------------------------------------------------------------


class Wire:
    """Records every call of a transport, with the thread that makes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: set[str] = set()
        self.calls: dict[int, list[tuple[str, str, str, int]]] = {}
        for name in ("isend", "irecv_chunks", "exchange", "meet", "announce", "expose", "map_buffers"):
            monkeypatch.setattr(Transport, name, self._recorded(name, getattr(Transport, name)))

    def _recorded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(this: Transport, *arguments: Any, **options: Any) -> Any:
            self.threads.add(threading.current_thread().name)
            tag = next(value for value in arguments if isinstance(value, Tag))
            sent = arguments[0].numel() if name == "isend" else 0
            self.calls.setdefault(this.rank, []).append((name, tag.kind.name, tag.label, sent))
            return call(this, *arguments, **options)

        return wrapped


OF_SAVES = ("save()", "saving ", "exchange()", "CheckpointManager")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_that_saves_after_every_step_sends_what_one_sends_that_never_saves(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    steps = 4
    for saves in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            wire = Wire(patch)

            def program(transport: Transport, saves: bool = saves) -> tuple[str, int, int]:
                model = blocks()
                optimizer = ZeroOptimizer(
                    model, torch.optim.AdamW, stage=stage, process_group=transport, bucket_cap_mb=0.00005
                )
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

            results = on_threads(2, program)
            calls = {
                rank: [call for call in made if not call[2].startswith(OF_SAVES)] for rank, made in wire.calls.items()
            }
            meetings = {
                rank: [call[2] for call in made if call[2].startswith(("save()", "saving "))]
                for rank, made in wire.calls.items()
            }
            found[saves] = (results, calls)
            assert meetings == {rank: ["save()"] * steps * saves for rank in (0, 1)}
            assert not [name for name in wire.threads if name.startswith("zero-checkpoint")]
    assert found[True] == found[False]
    assert entries(tmp_path / "True") == [".lock", *(f"step-{step:08d}" for step in range(steps))]
