"""The bytes that a rank holds and sends are those of the formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.trainings import ALL_STAGES

pytestmark = pytest.mark.contract


def wide() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(67, 67) for _ in range(5)))


@ALL_STAGES
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("cap", [0.01, 0.04, 25.0])
@pytest.mark.by_default("0.01-4-2", "0.04-2-1")
def test_bytes_of_a_rank_are_those_of_the_formulas(stage: int, world_size: int, cap: float) -> None:
    def program(transport: Transport) -> None:
        with torch.random.fork_rng(enabled=False):
            model = locked_wide()
        optimizer = ZeroOptimizer(model, torch.optim.Adam, stage=stage, process_group=transport, bucket_cap_mb=cap)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 67)).square().sum().backward()
            gradients = optimizer.describe().bytes["gradients"]
            optimizer.step()
        description = optimizer.describe()
        psi, parameters, slices = 5 * (67 * 67 + 67), 10, len(description.buckets)
        share_ = 1 if stage == 0 else world_size
        formula = {
            "parameters": 4 * psi,
            "gradients": {0: 4 * psi + 4 * psi // world_size, 1: 4 * psi, 2: 4 * psi // world_size}[stage],
            "optimizer": 8 * psi // share_,
        }
        measured = {**description.bytes, "gradients": gradients}
        for kind, nbytes in formula.items():
            assert description.formula_bytes[kind] == measured[kind], kind
            tensors = 3 if kind == "optimizer" else 2 if kind == "gradients" else 1
            slack = tensors * 64 * (parameters + slices)
            assert nbytes - slack <= measured[kind] <= nbytes + slack, (kind, nbytes, measured[kind])
        largest = max(b.parameter_bytes for b in description.buckets)
        assert measured["scratch_peak"] <= 3 * largest

    on_threads(world_size, program)


def locked_wide() -> nn.Module:
    from ..support.programs import _BUILDING

    with _BUILDING:
        return wide()


@ALL_STAGES
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("backwards", "synchronised"), [(1, 1), (3, 3), (3, 1)])
@pytest.mark.by_default("1-1-3-2", "3-3-1-2", "3-3-4-2")
def test_traffic_is_the_closed_form(stage: int, world_size: int, backwards: int, synchronised: int) -> None:
    def program(transport: Transport) -> tuple[int, int, int]:
        model = locked_wide()
        model[2].requires_grad_(False)
        optimizer = ZeroOptimizer(model, torch.optim.Adam, stage=stage, process_group=transport, bucket_cap_mb=0.03)
        for _ in range(2):
            before = optimizer.traffic
            for index in range(backwards):
                loss = model(torch.ones(2, 67)).square().sum()
                if index < backwards - synchronised:
                    with optimizer.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        spent = optimizer.traffic - before
        padded = 4 * sum(b.bounds[-1] for b in optimizer.describe().buckets if b.trainable)
        return spent.payload_sent, optimizer.describe().formula_traffic_bytes(backwards, synchronised), padded

    results = on_threads(world_size, program)
    passes = {0: 2 * synchronised, 1: synchronised + 1, 2: synchronised + 1}[stage]
    assert sum(sent for sent, _, _ in results) == passes * (world_size - 1) * results[0][2]
    assert results[0][1] == passes * (world_size - 1) * results[0][2]


def test_at_stage_2_no_rank_holds_all_reduced_gradients_after_backward() -> None:
    def program(transport: Transport) -> int:
        model = locked_wide()
        optimizer = ZeroOptimizer(model, stage=2, process_group=transport, bucket_cap_mb=0.02)
        model(torch.ones(2, 67)).square().sum().backward()
        model(torch.ones(2, 67)).square().sum().backward()
        return optimizer.describe().bytes["gradients"]

    whole = 4 * 5 * (67 * 67 + 67)
    for held in on_threads(4, program):
        assert held <= whole / 4 + 64 * 15
