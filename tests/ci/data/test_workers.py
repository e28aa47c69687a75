"""With a loader's workers, each rank loads its own micro-batches alone, and a position is what was trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from zero import MicroBatchSampler

PER_STEP, SAMPLES, SIZE = 4, 46, 2


class Counted(Dataset[int]):
    """Samples that are their own indices. The workers count how often each was loaded."""

    def __init__(self) -> None:
        self.loads = torch.zeros(SAMPLES, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        self.loads[index] += 1
        return index


@contextmanager
def loaded(rank: int, world: int, workers: int) -> Iterator[tuple[MicroBatchSampler, Any, Counted]]:
    data = Counted()
    sampler = MicroBatchSampler(data, SIZE, rank, world, per_step=PER_STEP)
    more: dict[str, Any] = {"persistent_workers": True, "timeout": 60} if workers else {}
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers, **more)
    yield sampler, loader, data
    del loader  # its workers end with it


def plain(epoch: int, start: int = 0) -> list[list[int]]:
    sampler = MicroBatchSampler(SAMPLES, SIZE, 0, 1, per_step=PER_STEP)
    sampler.set_epoch(epoch, start)
    return list(sampler)


def test_persistent_workers_load_a_ranks_micro_batches_alone_in_every_epoch() -> None:
    for rank in range(2):
        with loaded(rank, 2, workers=2) as (sampler, loader, data):
            for epoch in range(3):
                data.loads.zero_()
                sampler.set_epoch(epoch)
                assert len(loader) == len(sampler)
                dealt = [batch.tolist() for batch in loader]
                assert dealt == [b for number, b in enumerate(plain(epoch)) if number % PER_STEP % 2 == rank]
                mine = {index for batch in dealt for index in batch}
                assert data.loads.tolist() == [int(index in mine) for index in range(SAMPLES)]


def test_a_position_is_what_was_trained_though_workers_have_loaded_more() -> None:
    """Two ranks train three steps of an epoch; three ranks train the rest, without workers."""
    states = []
    for rank in range(2):
        with loaded(rank, 2, workers=2) as (sampler, loader, _):
            sampler.set_epoch(1)
            batches = iter(loader)
            for _ in range(3):
                for _ in range(PER_STEP // 2):
                    next(batches)
                sampler.step()
            states.append(sampler.state_dict())
            batches = None
    assert states[0] == states[1]
    assert (states[0]["epoch"], states[0]["trained"]) == (1, 3 * PER_STEP)
    rest: list[list[list[int]]] = []
    for rank in range(3):
        with loaded(rank, 3, workers=0) as (sampler, loader, _):
            sampler.load_state_dict(states[0])
            sampler.set_epoch(1)
            rest.append([batch.tolist() for batch in loader])
    expected: list[list[list[int]]] = [[], [], []]
    for number, batch in enumerate(plain(1, 3 * PER_STEP)):
        expected[number % PER_STEP % 3].append(batch)
    assert rest == expected
