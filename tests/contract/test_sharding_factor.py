"""Copies shared by fewer than all ranks: what is chosen, the plain loop's bits, the formulas' bytes and traffic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

from ..support.carried import FEWER, awkward, between_hosts, reduction
from ..support.errors import error_of, errors_on
from ..support.loops import seeded
from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits
from ..support.programs import Program, Round, Step, check, locked_build
from ..support.rows import rows, without
from ..support.sides import Side, same_as_plain
from ..support.sockets import on_hosts, on_wires, routed
from ..support.trainings import trained

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
        model.get_parameter("last.bias").requires_grad_(False)


@pytest.mark.parametrize(
    ("stage", "name", "act", "text"),
    rows(
        [
            (1, "pairwise", fails, "rank 3: unplugged"),
            (2, "shared", fails, "rank 3: unplugged"),
        ],
        [
            (3, "hierarchical", fails, "rank 3: unplugged"),
            (2, "auto", freezes, "last.bias"),
        ],
    ),
)
def test_what_differs_in_one_replica_is_named_in_all(
    stage: int, name: str, act: Callable[[Any, Any], None], text: str
) -> None:
    """A rank that fails by its number in the group, whichever rank waits for it."""

    def program(transport: Transport) -> None:
        model, optimizer = trained(transport, stage, sharding_factor=2, collective=name)
        optimizer.zero_grad()
        act(model, optimizer)
        odd_loss(model, odd_batches(4, 9)[transport.rank]).backward()
        optimizer.step()

    for rank, told in enumerate(errors_on(4, program)):
        assert text in told, (rank, told)


@pytest.mark.parametrize("given", [{"stage": 0, "sharding_factor": 1}, {"stage": 2, "reshard_after_forward": False}])
def test_what_a_stage_has_no_use_for_is_told_to_all_ranks_if_one_alone_asks_for_it(given: dict[str, Any]) -> None:
    def program(transport: Transport) -> None:
        trained(transport, **(given if transport.rank == 1 else {"stage": given["stage"]}))

    for told in errors_on(2, program):
        assert "rank 0 asked for stage=" in told


# -- the bits ----------------------------------------------------------------------------------------------------------

PROGRAMS: dict[str, tuple[list[int], Program]] = {  # with the hosts of the ranks
    "replicas of one": ([0, 0], Program(2, 1, "adamw fused", sharding_factor=1, steps=STEPS)),
    "what two ranks keep": ([0, 0, 0, 0], Program(4, 3, reshard=2, steps=STEPS[:3])),
    "a replica on two hosts": ([0, 0, 0, 1], Program(4, 2, sharding_factor=2, steps=STEPS[:2])),
    "what two of a host keep": ([0, 0, 1, 1], Program(4, 3, reshard=2, steps=STEPS[:2])),
}


@pytest.mark.parametrize("name", without(PROGRAMS, "what two ranks keep", "what two of a host keep"))
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
    rows(
        [
            (1, 2, 1, "", True),
            (3, 4, 2, "", True),
            (3, 1, None, "", False),
        ],
        [
            (2, 4, 2, "bf16", True),
            (3, 4, None, "bf16", 2),
            (3, 4, 2, "", False),
        ],
    ),
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
        assert (f"sharding factor {shared}" in str(description)) is (shared < ranks)
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
