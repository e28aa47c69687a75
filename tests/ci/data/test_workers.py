"""With a loader's workers, each rank loads its own micro-batches alone, and a position is what was trained."""

from __future__ import annotations

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


def test_persistent_workers_load_a_ranks_micro_batches_alone_and_a_position_is_what_was_trained() -> None:
    """In the last epoch two ranks train three steps, while workers load more; three ranks train the rest."""
    plain = []
    for epoch in range(3):
        sampler = MicroBatchSampler(SAMPLES, SIZE, 0, 1, per_step=PER_STEP)
        sampler.set_epoch(epoch)
        plain.append(list(enumerate(sampler)))
    states = list[dict[str, Any]]()
    for rank in range(2):
        data = Counted()
        sampler = MicroBatchSampler(data, SIZE, rank, 2, per_step=PER_STEP)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2, persistent_workers=True, timeout=60)
        for epoch in range(2):
            data.loads.zero_()
            sampler.set_epoch(epoch)
            assert len(loader) == len(sampler)
            dealt = [batch.tolist() for batch in loader]
            assert dealt == [batch for number, batch in plain[epoch] if number % PER_STEP % 2 == rank]
            mine = {index for batch in dealt for index in batch}
            assert data.loads.tolist() == [int(index in mine) for index in range(SAMPLES)]
        sampler.set_epoch(2)
        batches = iter(loader)
        for _ in range(3):
            for _ in range(PER_STEP // 2):
                next(batches)
            sampler.step()
        states.append(sampler.state_dict())
        del batches, loader  # its workers end with it
    assert states[0] == states[1]
    assert (states[0]["epoch"], states[0]["trained"]) == (2, 3 * PER_STEP)
    for rank in range(3):
        sampler = MicroBatchSampler(SAMPLES, SIZE, rank, 3, per_step=PER_STEP)
        sampler.load_state_dict(states[0])
        sampler.set_epoch(2)
        rest = plain[2][3 * PER_STEP :]
        assert list(sampler) == [batch for number, batch in rest if number % PER_STEP % 3 == rank]
