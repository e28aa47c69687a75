"""Copies shared by fewer than all ranks: what is chosen, sums over replicas, scratch memory, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from collectives import (
    Algorithm,
    Collective,
    Hierarchical,
    Pairwise,
    Shared,
    Transport,
    build,
    on_threads,
)
from zero import ZeroOptimizer

from ..dials.loops import step, steps
from ..dials.record import config_with
from ..support.carried import FEWER, awkward, between_hosts, reduction
from ..support.errors import error_of, errors_on
from ..support.loops import seeded
from ..support.machine.hosts import Wires
from ..support.machine.program import Clip, Divide
from ..support.machine.run import run
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits
from ..support.rows import rows
from ..support.sockets import on_hosts, on_wires, routed


def wide() -> Any:
    return seeded(0, lambda: nn.Sequential(*(nn.Linear(67, 67) for _ in range(5))))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 67)).square().sum().backward()


# -- what is chosen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "factor", "name"),
    [
        ([0, 0, 0, 0], 2, "shared"),
        ([0, 0, 1, 1], 2, "shared"),
        ([0, 0, 1, 1], 1, "pairwise"),
        ([0, 0, 0, 1], 2, "hierarchical"),
        ([0, 1, 2, 3], 2, "hierarchical"),
    ],
)
def test_what_is_chosen_follows_from_where_the_ranks_of_a_replica_are(
    monkeypatch: pytest.MonkeyPatch, hosts: list[int], factor: int, name: str
) -> None:
    on_hosts(monkeypatch, hosts)

    def program(transport: Transport) -> tuple[str, bool]:
        choice = build(transport, "auto", factor=factor)
        if hosts == [0, 0, 0, 1]:
            assert "is for ranks of one host" in error_of(build, transport, "shared", factor=factor)
            assert "needs a torch" in error_of(build, transport, "all_to_all", factor=factor)
        return choice.collective.name, choice.shard_group.has_common

    found = on_wires(4, program)
    within = all(len(set(hosts[first : first + factor])) == 1 for first in range(0, 4, factor))
    assert found == [(name, within and factor > 1)] * 4


def test_an_algorithm_of_its_own_transport_is_counted_and_fails_with_the_group() -> None:
    def one_host(transport: Transport) -> Collective:
        return Hierarchical(routed(transport, [range(transport.world_size)]), [range(transport.world_size)])

    def program(transport: Transport) -> tuple[bool, bool]:
        choice = build(transport, one_host, factor=2)
        whole, replica = choice.collective.transport, choice.shard_group
        counted = whole.traffic
        assert replica is not whole
        replica.exchange(b"1234", reduction())
        counted = whole.traffic - counted
        return counted.control_sent > 0, whole.traffic == replica.traffic

    assert on_threads(4, program) == [(True, True)] * 4


def fails(model: Any, optimizer: Any) -> None:
    if optimizer.rank == 3:
        optimizer._transport.abort("rank 3: unplugged")


def freezes(model: Any, optimizer: Any) -> None:
    if optimizer.rank >= 2:
        model[4].bias.requires_grad_(False)


@pytest.mark.parametrize(
    ("stage", "name", "act", "text"),
    rows(
        [
            (1, "pairwise", fails, "rank 3: unplugged"),
            (2, "shared", fails, "rank 3: unplugged"),
        ],
        [
            (3, "hierarchical", fails, "rank 3: unplugged"),
            (2, "auto", freezes, "4.bias"),
        ],
    ),
)
def test_what_differs_in_one_replica_is_named_in_all(
    stage: int, name: str, act: Callable[[Any, Any], None], text: str
) -> None:
    """A rank that fails by its number in the group, whichever rank waits for it."""

    def program(transport: Transport) -> None:
        model = wide()
        own = {"stage": stage, "sharding_factor": 2, "collective": name, "process_group": transport}
        optimizer = ZeroOptimizer(model, **own)
        act(model, optimizer)
        backward(model)
        optimizer.step()

    for rank, told in enumerate(errors_on(4, program)):
        assert text in told, (rank, told)


@pytest.mark.parametrize("given", [{"stage": 0, "sharding_factor": 1}, {"stage": 2, "reshard_after_forward": False}])
def test_what_a_stage_has_no_use_for_is_told_to_all_ranks_if_one_alone_asks_for_it(given: dict[str, Any]) -> None:
    def program(transport: Transport) -> None:
        ZeroOptimizer(wide(), process_group=transport, **(given if transport.rank == 1 else {"stage": given["stage"]}))

    for told in errors_on(2, program):
        assert "rank 0 asked for stage=" in told


# -- the bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "changes"),
    rows([([0, 0, 0, 1], {"stage": 2, "sharding_factor": 2})], [([0, 0, 1, 1], {"stage": 3, "reshard": 2})]),
)
def test_training_on_several_hosts_is_that_of_the_plain_loop(
    monkeypatch: pytest.MonkeyPatch, hosts: list[int], changes: dict[str, Any]
) -> None:
    """If one replica lies on two hosts, no replica shares memory: all must cut their buckets alike."""
    on_hosts(monkeypatch, hosts)
    run(config_with({"world_size": 4, **changes}), *step(1, Clip(0.1)), Divide(7.5), *steps(2), backend=Wires())


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


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "precision"), rows([(1, "bf16")], [(2, "")]))
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
            return sum(each is not None for buffer in buffers for each in (buffer.unsharded, buffer.post_forward_shard))

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
