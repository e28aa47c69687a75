"""What is committed is the state at the save, whatever follows, at any speed of the disk.

Every checkpoint here is compared with one that `zero.save` has written before training went on: its content, which
names every byte of every file, and each rank's own file.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

import zero
from benchmarks.rank import live_storages
from collectives import Transport, on_threads
from zero import CheckpointManager, MixedPrecision, Offload
from zero.checkpoint.format.extents import Chunk
from zero.checkpoint.write.save_thread import Saving
from zero.checkpoint.write.snapshot import Snapshot

from ..support.limits import PATIENT
from .saves import Taker, Training, own_file, small_blocks

ALL = 10**6
BF16 = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)


def committed_is_saved(
    folder: Path,
    taker: Taker,
    training: Training,
    follows: Callable[[Training, int], None],
    counts: Sequence[int] = (),
    *,
    at_every_bucket: bool = False,
    **arguments: Any,
) -> int:
    """Save again and again while the thread may take no chunk, one, two ..., and let ``follows`` change everything.

    ``counts``: how many it may take; by default each number of them. ``at_every_bucket``: so many that of each bucket
    the disk has taken none, one, and all. Returns how many chunks a save of this rank has.
    """
    rank = training.rank
    training.step(0)
    with CheckpointManager(folder / "asynchronous", training.optimizer, **arguments) as checkpoints:
        taker.allow(rank, ALL)
        saving = checkpoints.save(0, {"n": 0, "t": torch.arange(0)}, {"rank": rank})
        saving.result(PATIENT)
        total = taker.taken(rank)
        if at_every_bucket:
            counts = [0, 1, *taker.one_of_each_bucket(rank), ALL]
        most = max(int(data) for data in training.optimizer.exchange(str(len(counts) or total + 1).encode()))
        counts = [*(counts or range(most)), *[ALL] * most][:most]
        for number, count in enumerate(counts, start=1):
            path = folder / f"blocking-{number}"
            state: dict[str, Any] = {"n": number, "t": torch.arange(number)}
            expected = zero.save(path, training.optimizer, state, {"rank": rank}, step=number).result()
            taker.allow(rank, count if count < total else ALL)
            saving = checkpoints.save(number, state, {"rank": rank})
            state["t"].fill_(-1)
            taker.wait_until(rank, min(count, total))
            follows(training, number)
            taker.allow(rank, None)
            assert saving.result(PATIENT) == expected, f"{count} of {total} chunks were taken before"
            assert own_file(saving.path, rank) == own_file(path, rank)
    return total


def one_step(training: Training, number: int) -> None:
    training.step(number)


@pytest.mark.parametrize("row", ["0-2", "1-3", "2-1", "3-2"])
def test_a_step_changes_nothing_of_a_save_of_which_the_disk_has_taken_none_one_some_or_all(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 1024)
    taker = Taker(monkeypatch)
    stage, world_size = map(int, row.split("-"))

    def program(transport: Transport) -> int:
        training = Training(transport, stage)
        return committed_is_saved(tmp_path, taker, training, one_step, at_every_bucket=True)

    assert min(on_threads(world_size, program)) > 8


def edits_in_place(training: Training, number: int) -> None:
    with training.optimizer.gathered(write=True), torch.no_grad():
        for parameter in training.model.parameters():
            parameter.add_(number)
        training.model.get_buffer("offset").mul_(2)
    training.step(number)


def edits_without_asking(training: Training, number: int) -> None:
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.data.add_(number)
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.5


def loads_a_dict(training: Training, number: int) -> None:
    older = training.plain()
    for state in older["state"].values():
        state["exp_avg"] = state["exp_avg"] + number
        state["step"] = state["step"] + number
    training.optimizer.load_state_dict(older)
    training.step(number)


def edits_states(training: Training, number: int) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg"].add_(number)
        state["step"].add_(number)
    training.step(number)


def resets_states(training: Training, number: int) -> None:
    training.optimizer.reset_states(list(training.model.parameters())[number % 2 :: 2])
    training.step(number)


def adds_a_group(training: Training, number: int) -> None:
    training.model.register_parameter(f"late_{number}", nn.Parameter(torch.full((7,), float(number))))
    training.optimizer.add_param_group({"params": [getattr(training.model, f"late_{number}")]})
    training.step(number)


def closes(training: Training, number: int) -> None:
    training.optimizer.close()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(number)


EVENTS: dict[str, tuple[Callable[[Training, int], None], int]] = {
    "edits in gathered": (edits_in_place, 3),
    "edits without asking": (edits_without_asking, 0),
    "load_state_dict": (loads_a_dict, 3),
    "states edited": (edits_states, 2),
    "states reset": (resets_states, 1),
    "add_param_group": (adds_a_group, 2),  # stage 3 takes no parameter that its module did not have
    "close": (closes, 3),
}


@pytest.mark.parametrize("event", EVENTS)
def test_whatever_follows_changes_nothing_of_a_save(
    event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 1024)
    taker = Taker(monkeypatch)
    follows, stage = EVENTS[event]
    counts = [5] if event == "close" else [0, 6]
    cls = torch.optim.Adagrad if event == "states reset" else torch.optim.AdamW  # it makes new states at once

    def program(transport: Transport) -> None:
        committed_is_saved(tmp_path, taker, Training(transport, stage, cls), follows, counts)

    on_threads(2, program)


@pytest.mark.parametrize("kind", ["disk", "bf16 on disk"])
def test_master_weights_and_states_on_disk_are_those_at_the_save(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 1024)
    taker = Taker(monkeypatch)
    (tmp_path / "states").mkdir()
    arguments: dict[str, Any] = {"offload": Offload(states=tmp_path / "states")}
    if "bf16" in kind:
        arguments["mixed_precision"] = BF16

    def follows(training: Training, number: int) -> None:
        (one_step, edits_in_place, loads_a_dict)[number % 3](training, number)

    def program(transport: Transport) -> None:
        training = Training(transport, 3 if "bf16" in kind else 1, **arguments)
        committed_is_saved(tmp_path, taker, training, follows, [0, 0, 0, 4])

    on_threads(2, program)


# -- memory ------------------------------------------------------------------------------------------------------------


class Stepping:
    """Holds each thread before its first chunk until the step of its rank asks for the first bucket; then it fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._asked: WeakKeyDictionary[Snapshot, threading.Event] = WeakKeyDictionary()
        before_update, take = Snapshot.before_update, Snapshot.take

        def asked(this: Snapshot, bucket: int) -> None:
            self._event(this).set()
            before_update(this, bucket)

        def taken(this: Snapshot, chunk: Chunk, out: Tensor) -> None:
            if threading.current_thread().name.startswith("zero-checkpoint"):
                assert self._event(this).wait(PATIENT), "no step came"
                raise OSError(errno.EIO, "of the test")
            take(this, chunk, out)

        monkeypatch.setattr(Snapshot, "before_update", asked)
        monkeypatch.setattr(Snapshot, "take", taken)

    def _event(self, this: Snapshot) -> threading.Event:
        return self._asked.setdefault(this, threading.Event())


def test_a_save_that_is_over_holds_nothing_of_what_it_wrote(tmp_path: Path) -> None:
    training = Training(None, 1)
    training.step(0)
    found: list[Saving] = []
    sizes = []
    with CheckpointManager(tmp_path / "a", training.optimizer) as checkpoints:
        for number in range(1, 4):
            saving = checkpoints.save(number, {"t": torch.zeros(100_000)})
            found.append(saving)
            training.step(number)
            saving.result(PATIENT)
            for thread in threading.enumerate():
                if thread.name.startswith("zero-checkpoint"):
                    thread.join(PATIENT)
            sizes.append(sum(live_storages().values()))
    # the caller's tensor alone has 400,000 bytes; a step makes small states, and what ran before may still be freed
    assert max(sizes[1:]) - sizes[0] < 10_000


@pytest.mark.filterwarnings("ignore:the save of step 1 has failed:RuntimeWarning")
@pytest.mark.timeout(20)  # for which a step would wait
def test_an_error_of_the_thread_never_blocks_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    Stepping(monkeypatch)

    def program(transport: Transport) -> tuple[str, str]:
        plain, training = Training(transport, 1), Training(transport, 1)
        checkpoints = CheckpointManager(tmp_path / "a", training.optimizer)
        plain.step(0)
        training.step(0)
        saving = checkpoints.save(1)
        for number in (1, 2):
            plain.step(number)
            training.step(number)
        with pytest.raises(RuntimeError, match=r"rank \d could not save .*step-00000001: OSError: .*of the test"):
            saving.result(PATIENT)
        checkpoints.close()
        return plain.optimizer.check_replicas(), training.optimizer.check_replicas()

    assert len({bits for pair in on_threads(2, program) for bits in pair}) == 1
    assert sorted(entry.name for entry in (tmp_path / "a").iterdir()) == [".lock"]
