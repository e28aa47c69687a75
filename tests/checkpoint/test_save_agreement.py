"""What ranks agree on before a byte is written, and that saves change nothing of what training sends."""

from __future__ import annotations

import gc
import resource
import sys
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
from zero.checkpoint.write.capture import Capture
from zero.checkpoint.write.plan import BucketTensor, WritePlan
from zero.checkpoint.write.snapshot import Source

from ..support.descriptors import opened
from ..support.small import blocks
from .disk import Disk
from .saves import PATIENCE, Training, entries

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
    "a step below 0": (lambda rank: {"step": -rank}, r"step must be an int of 0 or more, not -1"),
    "no number": (lambda rank: {"step": "1" if rank else 1}, r"step must be an int of 0 or more, not '1'"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.by_default
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
    on_threads(2, program, timeout=PATIENCE)  # for which each would wait for the other's part
    assert entries(tmp_path / "run-0") == []


def test_a_file_to_copy_that_one_rank_lacks_is_told_to_all(tmp_path: Path) -> None:
    def program(transport: Transport) -> None:
        training = Training(transport, 0)
        folder = tmp_path / ("missing" if transport.rank else "there")
        checkpoints = CheckpointManager(tmp_path / "run", training.optimizer, assets=folder)
        with pytest.raises((RuntimeError, FileNotFoundError), match=r"No such file .*missing"):
            checkpoints.save(1)
        training.optimizer.exchange(b"")
        checkpoints.close()
        assert entries(tmp_path / "run") == [".lock"]

    (tmp_path / "there").mkdir()
    on_threads(2, program)


# -- failures of one rank after the agreement --------------------------------------------------------------------------


def test_a_rank_that_cannot_copy_its_values_fails_the_save_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_buckets = Capture._capture_buckets

    def no_memory(this: Capture, plan: WritePlan) -> None:
        if this._contents.transport.rank == 1 and threading.current_thread() in failing:
            raise MemoryError("no room for copies")
        capture_buckets(this, plan)

    failing: set[threading.Thread] = set()
    monkeypatch.setattr(Capture, "_capture_buckets", no_memory)

    def program(transport: Transport) -> str:
        training = Training(transport, 2)
        training.step(0)
        with CheckpointManager(tmp_path, training.optimizer) as checkpoints:
            failing.add(threading.current_thread())
            saving = checkpoints.save(1)
            with pytest.raises(RuntimeError, match=r"rank 1 could not save .*MemoryError: no room for copies"):
                saving.result(PATIENCE)
            failing.discard(threading.current_thread())
            training.step(1)
            checkpoints.save(2, blocking=True)
        return training.optimizer.check_replicas()

    assert len(set(on_threads(2, program))) == 1
    assert entries(tmp_path) == [".lock", "step-00000002"]


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

    on_threads(2, program, timeout=PATIENCE)


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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.by_default("1", "3")
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


@pytest.mark.full
def test_200_saves_leave_memory_descriptors_threads_and_the_folder_flat(tmp_path: Path) -> None:
    def program(transport: Transport) -> None:
        training = Training(transport, 1)
        training.step(0)
        before: tuple[int, int, int] | None = None
        descriptors: set[tuple[int, int, int]] = set()
        with CheckpointManager(tmp_path, training.optimizer, max_to_keep=2) as checkpoints:
            for step in range(200):
                saving = checkpoints.save(step, {"step": step, "t": torch.zeros(100)})
                training.step(step)
                if step in (49, 199):
                    saving.result(PATIENCE)
                    for thread in threading.enumerate():
                        if thread.name.startswith("zero-checkpoint"):
                            thread.join(PATIENCE)  # it ends after its result is there
                    training.optimizer.exchange(b"")
                    if transport.rank == 0:
                        gc.collect()
                        objects, threads = len(gc.get_objects()), threading.active_count()
                        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                        if before is None:
                            before, descriptors = (objects, threads, peak), opened()
                        else:
                            traced = sys.gettrace() is not None  # coverage keeps objects for each thread that it saw
                            assert traced or objects - before[0] < 150, "not one object a save"
                            assert threads <= before[1]
                            assert peak - before[2] < 2 * 4096, "two buffers of a block, in KiB"
                            assert not opened() - descriptors
                        assert len([name for name in entries(tmp_path) if not name.startswith(".saved-")]) == 3
                    training.optimizer.exchange(b"")

    on_threads(2, program)
    assert entries(tmp_path) == [".lock", "step-00000198", "step-00000199"]
