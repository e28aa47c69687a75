"""A copy shared by fewer than all ranks: the bits of the plain loop, the formulas' bytes and traffic, and agreement.

Some decisions must be made by all ranks, not by one replica alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collectives import (
    Algorithm,
    Collective,
    CollectiveError,
    Hierarchical,
    Pairwise,
    Replicated,
    Shared,
    Transport,
    build,
    on_threads,
)
from zero import ZeroOptimizer

from ..collectives.test_rendezvous import on_hosts
from ..state.test_bytes import locked_wide
from ..support.carried import FEWER, PATIENT, awkward, between_hosts, reduction
from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.parts import parts_of
from ..support.plain import assert_same_bits, assert_same_states
from ..support.pool import GlooPool
from ..support.programs import CLASSES, Program, Round, Step, compare, locked_build, run_rank
from ..support.sockets import on_sockets, on_wires, routed
from ..support.trainings import SHARDED, trained

FACTORS = [
    pytest.param(size, factor, marks=() if (size, factor) in ((2, 1), (4, 2), (6, 2)) else pytest.mark.slow)
    for size in (2, 4, 6)
    for factor in range(1, size + 1)
    if size % factor == 0
]
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
STEPS = (
    Step((Round(), Round()), clips=((0.1, 2.0), (0.05, 3.0))),
    Step((Round(sync=False), Round()), divisor=7.5),
    Step((Round(), Round(sync=False)), clear="zeros"),
    Step(step=False),
    Step(clips=((0.1, float("inf")),)),
)


def check(program: Program, run: Callable[..., Any] = on_threads) -> None:
    results = run(program.world_size, lambda transport: run_rank(program, transport), timeout=10)
    assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())


# -- the bits ----------------------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.parametrize(("world_size", "factor"), FACTORS)
@pytest.mark.by_default("2-1-1", "4-2-2", "4-2-3")
def test_training_is_that_of_the_plain_loop(stage: int, world_size: int, factor: int) -> None:
    check(Program(world_size, stage, "adamw fused", sharding_factor=factor, steps=STEPS))


def test_without_a_word_the_sum_is_divided_by_all_ranks() -> None:
    def program(transport: Transport, factor: int) -> Tensor:
        model = locked_build(0)
        optimizer = ZeroOptimizer(
            model, torch.optim.SGD, stage=2, process_group=transport, sharding_factor=factor, lr=1.0
        )
        batch = odd_batches(1)[0]
        odd_loss(model, batch).backward()
        optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    expected = on_threads(4, partial(program, factor=4))
    for factor in (1, 2):
        for ours, theirs in zip(on_threads(4, partial(program, factor=factor)), expected, strict=True):
            assert_same_bits(ours, theirs)


@STAGES
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.full
def test_so_it_is_in_mixed_precision(stage: int, precision: str) -> None:
    check(Program(4, stage, sharding_factor=2, steps=STEPS[:3], precision=PRECISIONS[precision]))


@pytest.mark.slow
@STAGES
@pytest.mark.parametrize("optimizer", CLASSES)
def test_so_it_is_for_every_class_and_path(stage: int, optimizer: str) -> None:
    for world_size, factor in ((2, 1), (6, 3)):
        check(Program(world_size, stage, optimizer, sharding_factor=factor, steps=STEPS[:3]))


@STAGES
@pytest.mark.parametrize("name", ["pairwise", "shared", "hierarchical"])
@pytest.mark.by_default("shared-2")
def test_every_exact_algorithm_works_inside_a_replica(stage: int, name: str) -> None:
    check(Program(4, stage, sharding_factor=2, collective=name, steps=STEPS[:2]))


@STAGES
@pytest.mark.by_default("3")
def test_on_one_host_ranks_read_each_others_memory(stage: int) -> None:
    for world_size, factor in ((2, 1), (4, 2)):
        check(Program(world_size, stage, sharding_factor=factor, steps=STEPS[:3]), on_sockets)


@STAGES
@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1], [0, 1, 2, 3]])
@pytest.mark.by_default("hosts2-2")
def test_replicas_may_lie_across_hosts(monkeypatch: pytest.MonkeyPatch, stage: int, hosts: list[int]) -> None:
    """If one replica lies on two hosts, no replica shares memory: all must cut their buckets alike."""
    on_hosts(monkeypatch, hosts)
    check(Program(4, stage, sharding_factor=2, steps=STEPS[:2]), on_wires)


@SHARDED
@pytest.mark.by_default("2")
def test_ranks_that_have_fewer_micro_batches_contribute_nothing(stage: int) -> None:
    steps = (Step((Round(), Round(ranks=1))), Step((Round(ranks=3), Round(ranks=2, sync=False))), Step((Round(),)))
    check(Program(4, stage, sharding_factor=2, steps=steps))


PROGRAMS = [
    Program(world_size, stage, sharding_factor=factor, steps=STEPS)
    for (world_size, factor), stage in (((2, 1), 1), ((4, 2), 2), ((4, 2), 3), ((4, 1), 3))
]


def whole_program(group: dist.ProcessGroup, rank: int, program: Program) -> Any:
    return run_rank(program, group)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"W{p.world_size}-F{p.sharding_factor}-stage{p.stage}")
@pytest.mark.by_default("W4-F2-stage3")
def test_so_it_is_on_processes(gloo: GlooPool, program: Program) -> None:
    results = gloo.run(whole_program, program, ranks=range(program.world_size))
    assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())


@STAGES
@pytest.mark.by_default("2")
def test_so_it_is_on_the_sub_group_1_3_of_four(gloo: GlooPool, stage: int) -> None:
    program = Program(2, stage, sharding_factor=1, steps=STEPS[:2])
    compare(program, gloo.run(whole_program, program, ranks=[1, 3]))


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

    def program(transport: Transport) -> list[torch.Tensor]:
        collective = build(transport, algorithm, factor=factor).collective
        place = transport.rank % factor
        low, high = bounds[place], bounds[place + 1]
        found = []
        works = []
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


@STAGES
@pytest.mark.parametrize(("world_size", "factor", "precision"), [(2, 1, ""), (4, 2, ""), (4, 2, "bf16"), (6, 3, "")])
@pytest.mark.by_default("4-2-bf16-2", "4-2--3")
def test_bytes_and_traffic_are_those_of_the_formulas(stage: int, world_size: int, factor: int, precision: str) -> None:
    mixed = PRECISIONS[precision] if precision else None

    def program(transport: Transport) -> tuple[Any, int]:
        model = locked_wide()
        optimizer = ZeroOptimizer(
            model,
            torch.optim.Adam,
            stage=stage,
            process_group=transport,
            bucket_cap_mb=0.03,
            sharding_factor=factor,
            mixed_precision=mixed,
        )
        for _ in range(3):
            before = optimizer.traffic
            gradients = 0
            for _ in range(2):
                model(torch.ones(2, 67)).square().sum().backward()
                gradients = optimizer.describe().bytes["gradients"]
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        description = optimizer.describe()
        description.bytes["gradients"] = gradients
        return description, (optimizer.traffic - before).payload_sent

    results = on_threads(world_size, program)
    psi = 5 * (67 * 67 + 67)
    for description, _ in results:
        assert (description.sharding_factor, description.world_size) == (factor, world_size)
        assert f"sharding factor {factor}" in str(description)
        weight = 2 if precision else 4
        expected = {
            "parameters": weight * psi // (factor if stage == 3 else 1),
            "optimizer": (12 if precision else 8) * psi // factor,
            "gradients": {
                1: weight * psi + (4 * psi // factor if precision else 0),
                2: 4 * psi // factor,
                3: 4 * psi // factor,
            }[stage],
        }
        for kind, nbytes in expected.items():
            assert description.formula_bytes[kind] == description.bytes[kind], kind
            assert nbytes <= description.bytes[kind] <= 1.03 * nbytes + 4096, kind
    assert sum(sent for _, sent in results) == results[0][0].formula_traffic_bytes(2, 2)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("precision", ["", "bf16"])
@pytest.mark.by_default("-2", "bf16-1")
def test_buckets_on_their_way_between_replicas_take_no_scratch_memory(stage: int, precision: str) -> None:
    """Five buckets are under way to the fourth replica and back; of three at most a rank keeps what it contributes."""
    mixed = PRECISIONS[precision] if precision else None

    def program(transport: Transport) -> Any:
        model = locked_wide()
        optimizer = ZeroOptimizer(
            model, stage=stage, process_group=transport, bucket_cap_mb=0.015, sharding_factor=2, mixed_precision=mixed
        )
        for _ in range(2):
            model(torch.ones(2, 67)).square().sum().backward()
        optimizer.step()
        return optimizer.describe()

    for description in on_threads(8, program):
        assert len(description.buckets) >= 5
        assert "sharding factor 2 (sums of up to 6 buckets under way between 4 replicas)" in str(description)
        assert 0 < description.bytes["scratch_peak"] <= description.formula_bytes["scratch_peak"]


def test_between_hosts_only_sums_travel_once_there_and_once_home() -> None:
    """With two hosts and a replica on each, a slice's running sum goes to the other host, and the total comes back."""
    hosts, numel = [range(2), range(2, 4)], 1 << 16

    def program(transport: Transport) -> tuple[int, int]:
        near = routed(transport, hosts)
        mine, crossed = hosts[transport.rank // 2], list[int]()
        send, send_bytes = near.backend.send, near.backend.send_bytes

        def counted(tensor: Tensor, to: int, slot: int) -> Any:
            crossed.append(tensor.nbytes * (to not in mine))
            return send(tensor, to, slot)

        def counted_bytes(data: bytes, to: int, *given: Any) -> Any:
            crossed.append(len(data) * (to not in mine))
            return send_bytes(data, to, *given)

        near.backend.send, near.backend.send_bytes = counted, counted_bytes
        collective = Replicated(near, Shared(near.split(list(mine))))
        bounds = [0, numel // 2, numel]
        source = collective.shard_group.empty(numel, torch.float32, torch.device("cpu")).fill_(1.0)
        out = collective.shard_group.empty(numel // 2, torch.float32, torch.device("cpu"))
        collective.reduce_scatter(source, bounds, out, start=None, tag=reduction()).wait()
        assert out.eq(4.0).all()
        reduced = sum(crossed)
        collective.all_gather(source, bounds, tag=reduction()).wait()
        return reduced, sum(crossed) - reduced

    found = on_threads(4, program)
    for reduced, gathered in found:
        assert gathered == 0
        assert numel // 2 * 4 <= reduced <= numel // 2 * 4 + 1024  # with headers, and a byte after each part


# -- units kept for the backward ---------------------------------------------------------------------------------------

RESHARDED = [
    (1, None, False),
    (2, None, False),
    (4, None, 2),
    (4, 2, False),
    *(pytest.param(*kept, marks=pytest.mark.slow) for kept in ((4, None, False), (4, 1, False), (4, None, 1))),
    pytest.param(6, None, 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world_size", "factor", "reshard"), RESHARDED)
@pytest.mark.parametrize("precision", ["", "bf16"])
@pytest.mark.by_default("-4-None-2", "bf16-2-None-False")
def test_what_is_kept_for_the_backward_changes_no_bit(
    world_size: int, factor: int | None, reshard: bool | int, precision: str
) -> None:
    mixed = PRECISIONS[precision] if precision else None
    check(Program(world_size, 3, sharding_factor=factor, reshard=reshard, precision=mixed, steps=STEPS))


@pytest.mark.parametrize("name", ["pairwise", "shared", "hierarchical"])
@pytest.mark.parametrize("reshard", [pytest.param(False, marks=pytest.mark.slow), 2])
@pytest.mark.full
def test_nor_does_the_algorithm_that_gathers_it(name: str, reshard: bool | int) -> None:
    check(Program(4, 3, reshard=reshard, collective=name, steps=STEPS[:2]))
    check(Program(4, 3, reshard=reshard, collective=name, steps=STEPS[:2]), on_sockets)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 1]])
@pytest.mark.by_default("hosts0")
def test_ranks_of_a_host_may_share_what_is_kept(monkeypatch: pytest.MonkeyPatch, hosts: list[int]) -> None:
    on_hosts(monkeypatch, hosts)
    check(Program(4, 3, reshard=2, steps=STEPS[:2]), on_wires)


@pytest.mark.parametrize(("world_size", "factor", "reshard"), RESHARDED)
def test_what_is_kept_need_not_travel_again(world_size: int, factor: int | None, reshard: bool | int) -> None:
    def program(transport: Transport) -> tuple[Any, int]:
        model = locked_wide()
        optimizer = ZeroOptimizer(
            model,
            stage=3,
            process_group=transport,
            bucket_cap_mb=0.03,
            sharding_factor=factor,
            reshard_after_forward=reshard,
        )
        for _ in range(2):
            before = optimizer.traffic
            for _ in range(2):
                model(torch.ones(2, 67)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.describe(), (optimizer.traffic - before).payload_sent

    results = on_threads(world_size, program)
    description = results[0][0]
    assert sum(sent for _, sent in results) == description.formula_traffic_bytes(2, 2)
    shared = factor or world_size
    for description, _ in results:
        assert description.bytes["gathered_peak"] <= description.formula_bytes["gathered_peak"] + 4096
        if shared > 1 and reshard in (False, 1):
            assert description.bytes["gathered_peak"] >= 4 * 5 * (67 * 67 + 67)


@pytest.mark.parametrize("reshard", [False, 2])
def test_after_an_evaluation_or_a_step_nothing_is_kept(reshard: bool | int) -> None:
    def program(transport: Transport) -> None:
        model = locked_wide()
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


# -- results that do not depend on the factor --------------------------------------------------------------------------


@STAGES
@pytest.mark.parametrize("to", [0, 1, 2, 3])
@pytest.mark.full
def test_a_checkpoint_does_not_know_how_many_ranks_shared_a_copy(stage: int, to: int) -> None:
    def run(transport: Transport, factor: int | None, states: Any = None) -> Any:
        _, optimizer = trained(transport, stage, sharding_factor=factor)
        if states is not None:
            optimizer.zero_grad()
            optimizer.load_state_dict(states)
        optimizer.consolidate_state_dict(to)
        return optimizer.state_dict() if transport.rank == to else None

    plain = on_threads(4, lambda transport: run(transport, None))[to]
    for factor in (1, 2):
        found = on_threads(4, lambda transport: run(transport, factor))  # noqa: B023
        assert_same_states(found[to], plain)
        again = on_threads(4, lambda transport: run(transport, factor, found[to]))[to]  # noqa: B023
        assert_same_states(again, plain)


@STAGES
@pytest.mark.full
def test_full_gradients_masters_and_gathered_parameters_are_whole_on_every_rank(stage: int) -> None:
    def program(transport: Transport, factor: int | None) -> list[Any]:
        model, optimizer = trained(transport, stage, sharding_factor=factor)
        found: list[Any] = [optimizer.full_grad(parameter) for parameter in optimizer.param_groups[0]["params"]]
        found += [optimizer.full_master(parameter) for parameter in optimizer.param_groups[0]["params"]]
        with optimizer.gathered(write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1 + transport.rank)
        found.append(optimizer.check_replicas())
        return found

    whole = on_threads(4, lambda transport: program(transport, None))
    for found in on_threads(4, lambda transport: program(transport, 2)):
        for ours, theirs in zip(found, whole[0], strict=True):
            if isinstance(theirs, torch.Tensor):
                assert_same_bits(ours, theirs)
            else:
                assert ours == theirs


@pytest.mark.parametrize(("stage", "reshard"), [(1, True), (2, True), (3, True), (3, False), (3, 2)])
@pytest.mark.full
def test_a_rank_that_runs_out_of_batches_follows_ranks_of_other_replicas(stage: int, reshard: bool | int) -> None:
    def program(transport: Transport, factor: int | None) -> str:
        model = locked_build(0)
        optimizer = ZeroOptimizer(
            model,
            stage=stage,
            process_group=transport,
            bucket_cap_mb=0.0005,
            lr=1e-2,
            sharding_factor=factor,
            reshard_after_forward=True if factor == 1 else reshard,
        )
        with optimizer.join():
            for step in range(1 + transport.rank % 3):
                odd_loss(model, odd_batches(4, step, stage < 3)[transport.rank]).backward()
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        return optimizer.check_replicas()

    whole = on_threads(4, lambda transport: program(transport, None))
    for factor in (1, 2):
        assert on_threads(4, lambda transport: program(transport, factor)) == whole  # noqa: B023


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0, 3, 5, -1, 2.0, True, "2"])
def test_a_factor_that_does_not_divide_the_ranks_is_refused_with_those_that_do(factor: Any) -> None:
    def program(transport: Transport) -> None:
        ZeroOptimizer(locked_build(0), process_group=transport, sharding_factor=factor)

    with pytest.raises(ValueError, match=r"must divide the number of ranks, 4, so be one of \[1, 2, 4\], not"):
        on_threads(4, program)


@pytest.mark.parametrize("reshard", [0, 3, 8, "2", 1.5, None])
def test_what_is_kept_must_be_shared_by_a_part_of_those_who_share_a_copy(reshard: Any) -> None:
    def program(transport: Transport) -> None:
        ZeroOptimizer(locked_build(0), stage=3, process_group=transport, reshard_after_forward=reshard)

    with pytest.raises(ValueError, match=r"divides the 4 ranks that share a copy, so one of \[1, 2, 4\], not"):
        on_threads(4, program)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_there_is_nothing_to_reshard(stage: int) -> None:
    with pytest.raises(ValueError, match=rf"reshard_after_forward=False with stage {stage}, .* is for stage 3"):
        ZeroOptimizer(locked_build(0), stage=stage, reshard_after_forward=False)


def test_stage_0_has_nothing_to_share() -> None:
    with pytest.raises(ValueError, match="stage 0 shards nothing: leave sharding_factor=1 out"):
        ZeroOptimizer(locked_build(0), stage=0, sharding_factor=1)


def test_ranks_that_ask_for_different_factors_are_told() -> None:
    def program(transport: Transport) -> str:
        with pytest.raises(ValueError, match="rank 0 asked for") as caught:
            ZeroOptimizer(locked_build(0), process_group=transport, sharding_factor=None if transport.rank else 1)
        return str(caught.value)

    told = (
        "the ranks built different models or optimizers: rank 0 asked for stage=2, sharding_factor=1, "
        "reshard_after_forward=True, offload=None, but rank 1 for stage=2, sharding_factor=None, "
        "reshard_after_forward=True, offload=None"
    )
    assert on_threads(2, program) == [told, told]


@STAGES
@pytest.mark.parametrize("name", ["pairwise", "shared", "hierarchical"])
@pytest.mark.by_default("shared-2")
def test_who_fails_in_one_replica_is_named_at_once_in_all(stage: int, name: str) -> None:
    """By its number in the group, whichever rank waits for it."""

    def program(transport: Transport) -> str:
        model, optimizer = trained(transport, stage, sharding_factor=2, collective=name)
        optimizer.zero_grad()
        begin = time.monotonic()
        try:
            if transport.rank == 3:
                optimizer._transport.abort("rank 3: unplugged")
            odd_loss(model, odd_batches(4, 9)[transport.rank]).backward()
            optimizer.step()
        except CollectiveError as error:
            assert time.monotonic() - begin < PATIENT, "a message brought it, no time limit"
            return str(error)
        return "nothing"

    for rank, told in enumerate(on_threads(4, program, timeout=PATIENT)):
        assert "rank 3" in told, (rank, told)
        assert "unplugged" in told, (rank, told)


@STAGES
@pytest.mark.by_default("2")
def test_replicas_whose_ranks_froze_other_parameters_are_told_apart(stage: int) -> None:
    def program(transport: Transport) -> str:
        model, optimizer = trained(transport, stage, sharding_factor=2)
        optimizer.zero_grad()
        if transport.rank >= 2:
            model.get_parameter("last.bias").requires_grad_(False)
        try:
            odd_loss(model, odd_batches(4, 9)[transport.rank]).backward()
            optimizer.step()
        except (RuntimeError, ValueError) as error:
            return str(error)
        return "nothing"

    for told in on_threads(4, program, timeout=PATIENT):
        assert "last.bias" in told or "frozen" in told, told


def test_algorithms_that_need_the_whole_process_group_say_so() -> None:
    def program(transport: Transport) -> None:
        ZeroOptimizer(locked_build(0), process_group=transport, sharding_factor=2, collective="all_to_all")

    with pytest.raises(CollectiveError, match="needs a torch"):
        on_threads(4, program)


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
        return choice.collective.name, choice.shard_group.has_common

    found = on_wires(4, program)
    within = all(len(set(hosts[first : first + factor])) == 1 for first in range(0, 4, factor))
    assert found == [(name, within and factor > 1)] * 4


def test_ranks_of_a_replica_on_several_hosts_cannot_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hosts(monkeypatch, [0, 0, 0, 1])

    def program(transport: Transport) -> Collective:
        return build(transport, "shared", factor=2).collective

    with pytest.raises(CollectiveError, match="is for ranks of one host"):
        on_wires(4, program)


def test_ranks_that_share_what_is_kept_are_called_what_the_group_calls_them() -> None:
    def program(transport: Transport) -> list[str]:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, stage=3, process_group=transport, reshard_after_forward=2)
        manager: Any = optimizer._storage.manager  # type: ignore[attr-defined]
        post_forward_group = manager.gathered._post_forward_group.shard_group
        return [post_forward_group.rank_label, parts_of(optimizer).shard_group.rank_label]

    assert on_wires(4, program) == [[f"rank {rank}"] * 2 for rank in range(4)]


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
