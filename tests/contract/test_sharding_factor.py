"""Copies shared by fewer than all ranks have the plain loop's bits, and the formulas' bytes and traffic."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from collectives import Algorithm, Pairwise, Shared, Transport, build, on_threads
from zero import ZeroOptimizer

from ..support.carried import FEWER, awkward, between_hosts, reduction
from ..support.loops import seeded
from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits
from ..support.programs import Program, Round, Step, check, locked_build
from ..support.sides import Side, same_as_plain
from ..support.sockets import on_hosts, on_wires

STEPS = (
    Step((Round(), Round()), clips=((0.1, 2.0), (0.05, 3.0))),
    Step((Round(sync=False), Round()), divisor=7.5),
    Step((Round(), Round(sync=False)), clear="zeros"),
    Step(step=False),
    Step(clips=((0.1, float("inf")),)),
)
PSI = 5 * (67 * 67 + 67)  # numbers in `Wide`


def wide() -> nn.Module:
    return seeded(0, lambda: nn.Sequential(*(nn.Linear(67, 67) for _ in range(5))))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 67)).square().sum().backward()


# -- the bits ----------------------------------------------------------------------------------------------------------

PROGRAMS: dict[str, tuple[list[int], Program]] = {  # with the hosts of the ranks
    "replicas of one": ([0, 0], Program(2, 1, "adamw fused", sharding_factor=1, steps=STEPS)),
    "what two ranks keep": ([0, 0, 0, 0], Program(4, 3, reshard=2, steps=STEPS[:3])),
    "a replica on two hosts": ([0, 0, 0, 1], Program(4, 2, sharding_factor=2, steps=STEPS[:2])),
    "what two of a host keep": ([0, 0, 1, 1], Program(4, 3, reshard=2, steps=STEPS[:2])),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_is_that_of_the_plain_loop(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """If one replica lies on two hosts, no replica shares memory: all must cut their buckets alike."""
    hosts, program = PROGRAMS[name]
    on_hosts(monkeypatch, hosts)
    check(program, run=on_wires if any(hosts) else on_threads)


@pytest.mark.parametrize("factor", [1, 2])
def test_without_a_word_the_sum_is_divided_by_all_ranks(factor: int) -> None:
    def loop(side: Side) -> None:
        side.train(lambda model, rank: odd_loss(model, odd_batches(4)[rank]))
        side.step()

    same_as_plain(
        loop, partial(locked_build, 0), world_size=4, settings={"stage": 2, "sharding_factor": factor}, lr=1.0
    )


@FEWER
@given(st.data(), st.sampled_from([Pairwise, Shared, between_hosts]))
def test_a_sum_over_replicas_is_the_fold_in_rank_order(data: st.DataObject, algorithm: Algorithm) -> None:
    replicas, factor = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    cuts = sorted(data.draw(st.lists(st.integers(0, 99), min_size=factor - 1, max_size=factor - 1)))
    bounds, ranks = [0, *cuts, 99], range(replicas * factor)
    started, seed = data.draw(st.booleans()), data.draw(st.integers(0, 99))
    given_, before = [awkward(99, torch.float32, seed + rank) for rank in ranks], awkward(99, torch.float32, 1000)
    expected = before.clone() if started else given_[0].clone()
    for contribution in given_ if started else given_[1:]:
        expected += contribution

    def program(transport: Transport) -> list[Tensor]:
        collective = build(transport, algorithm, factor=factor).collective
        place = transport.rank % factor
        low, high = bounds[place], bounds[place + 1]
        found, works = list[Tensor](), list[Any]()
        for index in range(3):
            whole = given_[transport.rank].clone()
            start = before[low:high].clone() if started else None
            tag = reduction(f"bucket {index}", 1, index)
            works.append(collective.reduce_scatter(whole, bounds, whole[low:high], start=start, tag=tag))
            found.append(whole)
        for work in works:
            work.wait()
            work.wait()
        for whole in found:
            collective.all_gather(whole, bounds, tag=reduction("all", 1)).wait()
        return found

    for found in on_threads(len(ranks), program):
        for whole in found:
            assert_same_bits(whole, expected)


# -- bytes and traffic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "ranks", "factor", "precision", "reshard"),
    [
        (1, 2, 1, "", True),
        (2, 4, 2, "bf16", True),
        (3, 4, 2, "", True),
        (3, 1, None, "", False),
        (3, 4, None, "bf16", 2),
        (3, 4, 2, "", False),
    ],
)
def test_bytes_and_traffic_are_those_of_the_formulas(
    stage: int, ranks: int, factor: int | None, precision: str, reshard: bool | int
) -> None:
    """What is kept for a backward need not travel again."""
    mixed = PRECISIONS.get(precision)
    arguments: dict[str, Any] = {"sharding_factor": factor, "reshard_after_forward": reshard, "mixed_precision": mixed}

    def program(transport: Transport) -> tuple[Any, int]:
        model = wide()
        own = {"stage": stage, "process_group": transport, "bucket_cap_mb": 0.03}
        optimizer = ZeroOptimizer(model, torch.optim.Adam, **own, **arguments)
        for _ in range(3):
            before, gradients = optimizer.traffic, 0
            for _ in range(2):
                backward(model)
                gradients = optimizer.describe().bytes["gradients"]
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        description = optimizer.describe()
        description.bytes["gradients"] = gradients
        return description, (optimizer.traffic - before).payload_sent

    results, shared = on_threads(ranks, program), factor or ranks
    for description, _ in results:
        assert (description.sharding_factor, description.world_size) == (shared, ranks)
        assert factor is None or f"sharding factor {factor}" in str(description)
        weight, sums = 2 if precision else 4, 4 * PSI // shared
        expected = {
            "parameters": weight * PSI // (shared if stage == 3 else 1),
            "optimizer": (12 if precision else 8) * PSI // shared,
            "gradients": weight * PSI + (sums if precision else 0) if stage == 1 else sums,
        }
        for kind, nbytes in expected.items():
            assert description.formula_bytes[kind] == description.bytes[kind], kind
            assert nbytes <= description.bytes[kind] <= 1.03 * nbytes + 4096, kind
        if stage == 3:
            assert description.bytes["gathered_peak"] <= description.formula_bytes["gathered_peak"] + 4096
            assert reshard is not False or shared == 1 or description.bytes["gathered_peak"] >= weight * PSI
    assert sum(sent for _, sent in results) == results[0][0].formula_traffic_bytes(2, 2)


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "")])
def test_buckets_on_their_way_between_replicas_take_no_scratch_memory(stage: int, precision: str) -> None:
    """Five buckets are under way to the fourth replica and back; of three at most a rank keeps what it contributes."""
    arguments: dict[str, Any] = {"bucket_cap_mb": 0.015, "sharding_factor": 2}

    def program(transport: Transport) -> Any:
        model, mixed = wide(), PRECISIONS.get(precision)
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, mixed_precision=mixed, **arguments)
        for _ in range(2):
            backward(model)
        optimizer.step()
        return optimizer.describe()

    for description in on_threads(8, program):
        assert len(description.buckets) >= 5
        assert "sharding factor 2 (sums of up to 6 buckets under way between 4 replicas)" in str(description)
        assert 0 < description.bytes["scratch_peak"] <= description.formula_bytes["scratch_peak"]


@pytest.mark.parametrize("reshard", [False, 2])
def test_after_an_evaluation_or_a_step_nothing_is_kept(reshard: bool | int) -> None:
    def program(transport: Transport) -> None:
        model = wide()
        optimizer = ZeroOptimizer(model, stage=3, process_group=transport, reshard_after_forward=reshard)
        manager: Any = optimizer._storage.manager  # type: ignore[attr-defined]

        def kept() -> int:
            buffers = [buffer for unit in manager.units for buffer in unit.gathered.buffers]
            whole = sum(buffer.unsharded is not None for buffer in buffers)
            return whole + sum(buffer.post_forward_shard is not None for buffer in buffers)

        with torch.no_grad():
            model(torch.ones(2, 67))
        assert not kept()
        loss = model(torch.ones(2, 67)).square().sum()
        assert kept() >= 5
        loss.backward()
        assert not kept()
        model(torch.ones(2, 67))
        assert kept()
        optimizer.step()
        assert not kept()

    on_threads(4, program)
