"""Saves on two ranks while the disk fails at one call after the other. Knows: what every failed save must do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager
from zero.checkpoint.folder.directory import complete_steps

from ..support.limits import PATIENT
from .disk import ERRORS, Call, Disk
from .saves import Training, entries

WORLD = 2


@dataclass(frozen=True)
class Failure:
    """Calls of a rank during a save that fail: one after ``skip`` others, or from then on all."""

    rank: int
    skip: int
    number: int
    for_good: bool = False

    def fits(self, call: Call) -> bool:
        return call.rank == self.rank


def run(root: Path, failures: Sequence[Failure | None], monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], Disk]:
    """Save once with each failure, and once without in between. Returns which saves have failed, and the disk."""
    disk = Disk(monkeypatch, root.parent)
    warned: dict[int, list[str]] = {rank: [] for rank in range(WORLD)}
    monkeypatch.setattr("zero.checkpoint.manager.warn_caller", lambda text: warned[disk.rank()].append(text))

    def program(transport: Transport) -> list[bool]:
        rank = transport.rank
        disk.this_thread_is(rank)
        plain, training = Training(transport, 1), Training(transport, 1)
        checkpoints = CheckpointManager(root, training.optimizer, max_to_keep=2)

        def step(number: int) -> None:
            for each in (plain, training):
                each.step(number)

        failed = []
        step(0)
        for number, failure in enumerate(failures):
            good, bad = 2 * number + 1, 2 * number + 2
            saving = checkpoints.save(good, blocking=True)
            if rank == 0:
                assert not [name for name in entries(root) if name.startswith(".tmp")]
                assert complete_steps(root)[-1] == good
            training.optimizer.exchange(b"")
            if rank == 0:
                disk.calls.clear()
                if failure is not None:
                    disk.fail_when(
                        failure.fits, failure.number, skip=failure.skip, most=None if failure.for_good else 1
                    )
            training.optimizer.exchange(b"")
            saving = checkpoints.save(bad)
            if failure is None or rank == failure.rank:
                saving.wait()
            training.optimizer.exchange(b"")
            step(number)
            saving.wait()
            told = training.optimizer.exchange(b"" if saving.error is None else str(saving.error).encode())
            failed.append(saving.error is not None)
            texts = [text for text in warned[rank] if "the save of step" in text]
            if failed[-1]:
                assert failure is not None
                assert all(told), f"{failure}: {told}"
                cause = f"rank {failure.rank} could not "
                assert len(texts) == 1, f"{failure}: {texts}"
                assert texts[0].startswith(f"the save of step {bad} has failed, and training goes on: {cause}"), texts
                for text in (texts[0], str(saving.error)):
                    assert cause in text
                    assert os.strerror(failure.number) in text, f"{failure}: {text}"
            else:
                assert not any(told), f"{failure}: {told}"
                assert texts == []
            training.optimizer.exchange(b"")
            warned[rank].clear()
            if rank == 0:
                disk.heal()
                zero.open_checkpoint(root / f"step-{good:08d}").verify()
                if not failed[-1]:
                    zero.open_checkpoint(root / f"step-{bad:08d}").verify()
            training.optimizer.exchange(b"")
        checkpoints.save(10**6, blocking=True)
        checkpoints.close()
        assert training.optimizer.check_replicas() == plain.optimizer.check_replicas()
        return failed

    (found, _) = on_threads(WORLD, program, timeout=PATIENT)
    left = entries(root)
    assert left[0] == ".lock"
    assert [name for name in left[1:] if not name.startswith("step-")] == []
    return found, disk


def calls_of_a_save(folder: Path) -> dict[int, int]:
    """Return how many calls a save takes, by rank; those that wait for another rank are not counted."""
    with pytest.MonkeyPatch.context() as patch:
        failed, disk = run(folder / "run", [None, None, None], patch)
    assert failed == [False] * 3
    counts = {rank: len({(call.name, call.path) for call in disk.of(rank)}) for rank in range(WORLD)}
    assert min(counts.values()) > 10
    return counts


def failures(calls: dict[int, int], turn: int) -> list[Failure]:
    """Return a failure of each call: for turn 0 the first call fails once, the second one for good, and so on; for
    turn 1 the other way round."""
    found = []
    for rank, count in calls.items():
        for skip in range(count + 5):
            for_good = (skip + turn) % 2
            found.append(Failure(rank, skip, ERRORS[(skip + for_good) % len(ERRORS)], for_good=bool(for_good)))
    return found
