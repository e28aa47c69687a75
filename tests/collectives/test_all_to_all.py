"""Sums in rank order over collectives of the process group itself, on gloo processes, and when they are chosen.

NCCL is not available here: the selection is made to believe in it, and the chosen algorithm runs over gloo.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from hypothesis import given, settings
from torch import Tensor, nn

from collectives import ALGORITHMS, AllToAll, CollectiveError, Kind, Loopback, MismatchError, PeerError, Tag, Transport
from collectives.algorithms.process_group import Native
from collectives.backends.gloo import GlooBackend, connect
from collectives.topology import choose
from zero import ZeroOptimizer
from zero.core.parameter_specs import device_of

from ..support.carried import MIXED, SAME, assert_same_bits, awkward, reduction, whole_numbers
from ..support.late import on_late_threads
from ..support.models import odd_batches, odd_loss
from ..support.plain import assert_same_states
from ..support.pool import SIZE, GlooPool
from ..support.programs import Program, Round, Step, compare, locked_build, run_rank
from ..support.shampoo import Shampoo
from .test_collectives import WAYS
from .test_rendezvous import on_hosts, works
from .test_shared import Job, equal_numbers, jobs, program

FEWER = settings(max_examples=settings().max_examples // 2)
SOON = 10.0
OWN = [way for way in WAYS if way[1] == "out of its own"]
BY_THE_GROUP = pytest.mark.parametrize("algorithm", ["all_to_all", "native"])


# -- the sum -----------------------------------------------------------------------------------------------------------


def run_job(group: dist.ProcessGroup, rank: int, job: Job, make: Any, names: Sequence[str]) -> list[list[Tensor]]:
    return [program(job, make, ALGORITHMS[name], connect(group)) for name in names]


def check(gloo: GlooPool, job: Job, make: Any, names: Sequence[str], equal: Any) -> None:
    found = gloo.run(run_job, job, make, names, ranks=range(job.world_size))
    for which, number in itertools.product(range(len(names)), range(job.in_flight)):
        expected = job.sums(make, number)
        for rank in range(job.world_size):
            equal(found[rank][which][number], expected[rank])
            equal(found[rank][which][job.in_flight + number], torch.cat(expected))


@given(job=jobs(SAME, most_ranks=SIZE))
@FEWER
def test_all_to_all_is_the_fold_in_rank_order_and_pairwise_bit_for_bit(gloo: GlooPool, job: Job) -> None:
    """All dtypes, uneven and empty slices, 1 to 4 ranks, several in flight, sums in place and not in place."""
    check(gloo, job, awkward, ("all_to_all", "pairwise"), assert_same_bits)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bounds", [(0, 300), (0, 257, 300), (0, 257, 257, 401), (0, 0, 257, 300, 600)])
@pytest.mark.by_default("bounds1-way2", "bounds3-way4")
def test_the_sum_so_far_comes_first_wherever_it_is(
    gloo: GlooPool, bounds: tuple[int, ...], way: tuple[str, str]
) -> None:
    for dtypes in SAME:
        job = Job(bounds, (0,) * (len(bounds) - 1), dtypes, way, 2, 7, False)
        check(gloo, job, awkward, ("all_to_all", "pairwise"), assert_same_bits)


@given(job=jobs(MIXED, OWN, most_ranks=SIZE))
@FEWER
def test_all_to_all_adds_narrow_contributions_in_the_wide_accumulator(gloo: GlooPool, job: Job) -> None:
    check(gloo, job, awkward, ("all_to_all", "pairwise"), assert_same_bits)


@given(job=jobs(SAME, most_ranks=SIZE))
@FEWER
def test_native_gives_the_same_sums_of_whole_numbers(gloo: GlooPool, job: Job) -> None:
    check(gloo, job, whole_numbers, ("native",), equal_numbers)


def counted(group: dist.ProcessGroup, rank: int, bounds: list[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    transport = connect(group)
    collective, whole = AllToAll(transport), torch.ones(bounds[-1])
    out = torch.empty(bounds[rank + 1] - bounds[rank])
    collective.reduce_scatter(whole.clone(), bounds, out, start=None, tag=reduction(round_=1)).wait()
    between = transport.traffic
    collective.all_gather(whole, bounds, tag=Tag(Kind.ALL_GATHER, "whole", 1)).wait()
    rest = transport.traffic - between
    return (between.payload_sent, between.payload_received), (rest.payload_sent, rest.payload_received)


@pytest.mark.parametrize(
    ("bounds", "padded"), [([0, 4, 8, 12], 4 * 4), ([0, 4, 8, 13], 4 * 5), ([0, 5, 5, 12], 0), ([0, 0, 12, 12], 0)]
)
def test_a_rank_sends_all_but_its_own_slice_and_gathers_the_longest_or_each_as_it_is(
    gloo: GlooPool, bounds: list[int], padded: int
) -> None:
    """Counts bytes. Slices are padded to the longest if that adds at most half; else each owner broadcasts its own."""
    for rank, (reduced, whole) in enumerate(gloo.run(counted, bounds, ranks=range(3))):
        own, every = 4 * (bounds[rank + 1] - bounds[rank]), 4 * bounds[-1]
        assert reduced == (every - own, 2 * own)
        assert whole == ((2 * padded, 2 * padded) if padded else (2 * own, every - own))


PROGRAMS = [
    Program(world_size, stage, optimizer, cap, "all_to_all", steps=steps)
    for world_size, cap, optimizer in ((2, 0.0005, "adamw"), (3, 1e-6, "adamw fused"), (4, 25.0, "adamw"))
    for stage, steps in (
        (0, (Step((Round(), Round(ranks=1))), Step((Round(ranks=1),)))),
        (1, (Step(clips=((0.1, 2.0),)), Step((Round(sync=False), Round())))),
        (2, (Step((Round(), Round(ranks=1))), Step((Round(ranks=1),)), Step(toggle=("frozen",), clips=((0.1, 3.0),)))),
        (3, (Step(clips=((0.1, 2.0),)), Step((Round(sync=False), Round())))),
    )
]


def whole_program(group: dist.ProcessGroup, rank: int, program: Program) -> Any:
    return run_rank(program, group)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"W{p.world_size}-stage{p.stage}")
@pytest.mark.by_default("W2-stage1", "W2-stage3")
def test_training_by_all_to_all_gives_the_bits_of_the_plain_loop(gloo: GlooPool, program: Program) -> None:
    results = gloo.run(whole_program, program, ranks=range(program.world_size))
    assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())


# -- the selection -----------------------------------------------------------------------------------------------------


def told_of_nccl(patch: pytest.MonkeyPatch, name: str = "nccl") -> None:
    """Make every process group report NCCL for CUDA; tensors on the CPU still use gloo."""
    patch.setattr(GlooBackend, "device_backend", lambda _, device: {"cuda": name, "cpu": "gloo"}[device.type])


def chosen(
    group: dist.ProcessGroup, rank: int, hosts: list[int], devices: list[str], nccl: str, containers: Sequence[int] = ()
) -> tuple[str, str]:
    """Return the name of the chosen algorithm, whether it works, and the reason of the choice."""
    with pytest.MonkeyPatch.context() as patch:
        if nccl:
            told_of_nccl(patch, nccl)
        on_hosts(patch, hosts, containers)
        choice = choose(connect(group).fork(), torch.device(devices[rank]))
    return works(choice.collective), choice.reason


@pytest.mark.parametrize(
    ("hosts", "devices", "nccl", "name"),
    [
        ([0, 0, 0], ["cuda"] * 3, "nccl", "all_to_all"),
        ([0, 0, 0], ["cuda"] * 3, "nccl2", "all_to_all"),
        ([0, 0, 0], ["cuda"] * 3, "nccl-legacy", "all_to_all"),
        ([0, 1, 0], ["cuda"] * 3, "nccl", "native"),
        ([0, 0, 0], ["cuda"] * 3, "", "shared"),
        ([0, 0, 0], ["cpu"] * 3, "nccl", "shared"),
        ([0, 1, 0], ["cpu"] * 3, "nccl", "hierarchical"),
        ([0, 0, 0], ["cuda", "cpu", "cuda"], "nccl", "shared"),
    ],
)
def test_nccl_is_used_where_every_rank_s_tensors_are_on_gpus_that_have_it(
    gloo: GlooPool, hosts: list[int], devices: list[str], nccl: str, name: str
) -> None:
    found = gloo.run(chosen, hosts, devices, nccl, ranks=range(3))
    assert [each for each, _ in found] == [name] * 3
    (why,) = {why for _, why in found}
    if name == "all_to_all":
        assert why == "all 3 ranks are on one host, with NCCL"
    if name == "native":
        assert why.startswith("3 ranks are on 2 hosts, where NCCL's own reduce-scatter sends less")
        assert "collective='pairwise' keeps the bits" in why


def test_containers_of_one_machine_are_one_host_for_nccl_and_several_for_the_kernel(gloo: GlooPool) -> None:
    for devices, nccl, name in ((["cuda"] * 3, "nccl", "all_to_all"), (["cpu"] * 3, "", "pairwise")):
        found = gloo.run(chosen, [0, 0, 0], devices, nccl, [1, 2, 3], ranks=range(3))
        assert [each for each, _ in found] == [name] * 3


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-legacy"])
def test_torchs_names_of_nccl_are_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another name the host would wait for each collective."""
    backend = object.__new__(GlooBackend)
    monkeypatch.setattr(GlooBackend, "device_backend", lambda _, device: name if device.type == "cuda" else "gloo")
    assert backend.stays_on(torch.device("cuda"))
    assert not backend.stays_on(torch.device("cpu"))


def described(group: dist.ProcessGroup, rank: int, hosts: list[int]) -> tuple[str, Tensor]:
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 2.0)
    with pytest.MonkeyPatch.context() as patch:
        told_of_nccl(patch)
        on_hosts(patch, hosts)
        patch.setattr("zero.optimizer.device_of", lambda groups: torch.device("cuda"))
        optimizer = ZeroOptimizer(model, torch.optim.SGD, process_group=group, lr=0.5)
    model(torch.full((1, 3), 1.0 + rank)).sum().backward()
    optimizer.step()
    return str(optimizer.describe()), model.weight.detach()


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ([0, 0], "all_to_all (all 2 ranks are on one host, with NCCL)"),
        ([0, 1], "native (2 ranks are on 2 hosts, where"),
    ],
)
def test_an_optimizer_on_gpus_says_what_it_chose_and_why(gloo: GlooPool, hosts: list[int], words: str) -> None:
    for text, weight in gloo.run(described, hosts):
        assert f"collective {words}" in text
        assert weight.tolist() == [[2 - 0.5 * (1 + 2) / 2] * 3]


def test_what_is_chosen_is_told_where_the_parameters_are() -> None:
    class ToldError(Exception):
        pass

    model = nn.Linear(2, 2, device="meta")
    for params in (model, model.parameters(), model.named_parameters(), [{"params": model.weight}]):
        there = mock.patch("torch.get_default_device", return_value=torch.device("cuda"))  # the target of meta tensors
        told = mock.patch("zero.setup.build_collective", side_effect=ToldError)
        with there, told as build, pytest.raises(ToldError):
            ZeroOptimizer(params, torch.optim.SGD, lr=0.1)
        assert build.call_args.args[2] == torch.device("cuda")
    assert device_of([{"params": []}]) == torch.device("cpu")


def table(group: dist.ProcessGroup, rank: int) -> list[tuple[str, str, str]]:
    both = dist.new_group(range(SIZE), backend="cpu:gloo,cuda:fake")
    assert works(AllToAll(connect(both))) == "all_to_all"
    kinds = ("cpu", "cuda", "xpu")
    return [
        tuple(GlooBackend(each, 5.0).device_backend(torch.device(kind)) for kind in kinds) for each in (group, both)
    ]


def test_a_group_tells_what_moves_a_device_s_tensors(gloo: GlooPool) -> None:
    for alone, both in gloo.run(table, ranks=range(SIZE)):
        assert alone[:2] == ("gloo", "gloo"), "staged through the host, which is not NCCL"
        assert both == ("gloo", "fake", "")


# -- failures ----------------------------------------------------------------------------------------------------------


def different(group: dist.ProcessGroup, rank: int, algorithm: str, other: str) -> tuple[str, str]:
    transport = connect(group).fork()
    collective, bounds, second = ALGORITHMS[algorithm](transport), [0, 2, 4, 6], rank == 1
    whole, tag = torch.ones(6), reduction("bucket 0", 3, 4)

    def enter() -> None:
        if second and other == "exchange":
            transport.exchange(b"", Tag(Kind.EXCHANGE, "consolidate"))
        elif second and other == "gather":
            collective.all_gather(whole, bounds, tag=Tag(Kind.ALL_GATHER, "parameters", 3, 4))
        elif second and other == "cut":
            collective.reduce_scatter(whole, [0, 1, 4, 6], whole[1:4], start=None, tag=tag)
        else:
            source = whole.double() if second else whole
            collective.reduce_scatter(source, bounds, whole[2 * rank : 2 * rank + 2], start=None, tag=tag)

    begin = time.monotonic()
    with pytest.raises(MismatchError) as caught:
        enter()
    assert time.monotonic() - begin < SOON
    return str(caught.value), works(ALGORITHMS[algorithm](connect(group).fork()))


@BY_THE_GROUP
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("exchange", "consolidate [exchange, round 0, index 0]"),
        ("gather", "parameters [all_gather, round 3, index 4]"),
        ("cut", "bucket 0 [reduce_scatter, round 3, index 4]"),
        ("dtype", "bucket 0 [reduce_scatter, round 3, index 4]"),
    ],
)
def test_ranks_in_different_collectives_learn_of_both_before_a_byte_moves(
    gloo: GlooPool, algorithm: str, other: str, said: str
) -> None:
    """The process group remains usable."""
    found = gloo.run(different, algorithm, other, ranks=range(3))
    assert [name for _, name in found] == [algorithm] * 3
    for message, _ in found:
        assert "bucket 0 [reduce_scatter, round 3, index 4]" in message
        assert f"rank 1 is in {said}" in message


def while_adding_up(group: dist.ProcessGroup, rank: int) -> str:
    transport, whole = connect(group).fork(), torch.ones(4)
    work = AllToAll(transport).reduce_scatter(whole, [0, 2, 4], torch.empty(2), start=None, tag=reduction())
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(
                "collectives.algorithms.process_group.ordered_sum", mock.Mock(side_effect=MemoryError("in the middle"))
            )
        caught = pytest.raises(MemoryError) if rank == 1 else nullcontext()
        with caught:
            work.wait()
    with pytest.raises(CollectiveError) as later:
        transport.exchange(b"", Tag(Kind.EXCHANGE, "later"))
    return str(later.value)


def test_an_exception_in_the_sum_of_one_rank_reaches_every_rank(gloo: GlooPool) -> None:
    for message in gloo.run(while_adding_up):
        assert "rank 1, while adding up: MemoryError: in the middle" in message


def refused(group: dist.ProcessGroup, rank: int, error: Exception) -> tuple[str, str]:
    transport, whole = connect(group).fork(), torch.ones(4)
    collective = AllToAll(transport)
    with mock.patch("torch.distributed.all_to_all_single", side_effect=error), pytest.raises(type(error)) as caught:
        collective.reduce_scatter(whole, [0, 2, 4], torch.empty(2), start=None, tag=reduction("bucket 0"))
    with pytest.raises(CollectiveError, match="closed since an earlier failure") as later:
        collective.all_gather(whole, [0, 2, 4], tag=Tag(Kind.ALL_GATHER, "whole"))
    return str(caught.value), str(later.value)


@pytest.mark.parametrize("error", [PeerError("unplugged"), KeyError("a bug")])
def test_a_collective_of_the_group_that_cannot_begin_is_named(gloo: GlooPool, error: Exception) -> None:
    for rank, (first, later) in enumerate(gloo.run(refused, error)):
        assert "unplugged" in first or "a bug" in first
        assert f"rank {rank}, in bucket 0" in later


def strangers(group: dist.ProcessGroup, rank: int) -> list[str]:
    said = []
    for algorithm, ranks in itertools.product((AllToAll, Native), ([0, 1], [2, 1, 0])):
        if rank in ranks:
            with pytest.raises(CollectiveError, match="exactly these ranks, in their order") as caught:
                algorithm(connect(group).split(ranks))
            said.append(str(caught.value))
    return said


def test_a_part_of_a_group_and_another_order_of_its_ranks_are_refused(gloo: GlooPool) -> None:
    assert [len(each) for each in gloo.run(strangers, ranks=range(3))] == [4, 4, 2]


def test_a_failed_wait_fails_again(gloo: GlooPool) -> None:
    for first, again in gloo.run(lost):
        assert "in bucket 0: the process group's own collective failed (connection closed)" in first
        assert "no answer from" not in first, "all could be told"
        assert "closed since an earlier failure" in again


def lost(group: dist.ProcessGroup, rank: int) -> tuple[str, str]:
    transport, whole = connect(group).fork(), torch.ones(4)
    broken = mock.Mock()
    broken.wait.side_effect = RuntimeError("connection\nclosed")
    with mock.patch("torch.distributed.all_to_all_single", return_value=broken):
        tag = reduction("bucket 0")
        work = AllToAll(transport).reduce_scatter(whole, [0, 2, 4], torch.empty(2), start=None, tag=tag)
    with pytest.raises(PeerError, match=r"\(connection closed\)") as first:
        work.wait()
    with pytest.raises(CollectiveError) as again:
        work.wait()
    return str(first.value), str(again.value)


def test_threads_have_no_collectives_of_their_own() -> None:
    for transport in Loopback[None](2).transports:
        with pytest.raises(CollectiveError, match=r"'all_to_all' needs a torch\.distributed process group"):
            AllToAll(transport)


def step_with_owners(transport: Transport) -> tuple[int, int]:
    """Return the bytes that a rank sends in a step, and what the formula says of all ranks."""
    model, batches = locked_build(0), odd_batches(transport.world_size, extra=False)
    optimizer = ZeroOptimizer(
        model,
        Shampoo,
        stage=1,
        process_group=transport,
        collective="all_to_all",
        partition="parameter",
        bucket_cap_mb=0.005,
        lr=0.05,
    )
    before = optimizer.traffic.payload_sent
    odd_loss(model, batches[transport.rank]).backward()
    optimizer.step()
    found = optimizer.traffic.payload_sent - before, optimizer.describe().formula_traffic_bytes(1, 1)
    optimizer.close()
    return found


def test_parameters_with_one_owner_each_travel_without_padding() -> None:
    """Padded to the longest, the slices of eight owners would be several times as many bytes."""
    found = on_late_threads(8, step_with_owners)
    assert sum(sent for sent, _ in found) == found[0][1]
