"""Meetings and exchanges among many ranks: by a star in each host and a tree between the hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from collectives import (
    CollectiveError,
    Hierarchical,
    Kind,
    Loopback,
    MismatchError,
    Pairwise,
    Tag,
    Transport,
    control_plane,
    peer_links,
)
from collectives import build as build_collective
from collectives.control_plane import GRACE, MESH_RANKS, Tree, TreeNode, pack_messages, unpack_messages
from collectives.messages import HEADER_BYTES
from collectives.messenger import SMALL, Messenger
from zero import ZeroOptimizer

from ..support.carried import FEWER, SOON, each, hosts_of, jitter
from ..support.plain import assert_same_model, plain_step

TAG = Tag(Kind.EXCHANGE, "telling")


def groups(ranks: Sequence[int], count: int) -> list[Sequence[int]]:
    """Return ``count`` hosts, between which ranks alternate."""
    return [ranks[host::count] for host in range(count)]


# -- the geometry ------------------------------------------------------------------------------------------------------


@given(st.data())
def test_every_rank_has_one_way_to_the_root(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(2, 40))
    hosts = data.draw(hosts_of(world_size))
    places = [TreeNode.of(rank, hosts) for rank in range(world_size)]
    order = [rank for host in hosts for rank in host]
    for rank, place in enumerate(places):
        came = [rank, *(other for ranks in place.below.values() for other in ranks)]
        assert came == order[order.index(rank) :][: len(came)]
        assert len(came) == world_size if place.parent is None else rank in places[place.parent].below
        assert all(places[child].parent == rank and ranks[0] == child for child, ranks in place.below.items())
        if all(rank != host[0] for host in hosts):
            assert not place.below
            assert any(place.parent == host[0] and rank in host for host in hosts)
    assert [place.parent for place in places].count(None) == 1
    assert len(places[hosts[0][0]].below) == len(hosts[0]) - 1 + (len(hosts) - 1).bit_length()


@given(st.data())
def test_whoever_waits_for_a_rank_waits_longer_than_that_rank(data: st.DataObject) -> None:
    """So the error of the one that waits for the culprit itself comes first."""
    world_size = data.draw(st.integers(2, 40))
    hosts = data.draw(hosts_of(world_size))
    places = [TreeNode.of(rank, hosts) for rank in range(world_size)]
    for rank, place in enumerate(places):
        assert set(place.chains) == {*place.below, place.parent} - {None}
        for neighbour, chain in place.chains.items():
            others = [length for other, length in places[neighbour].chains.items() if other != rank]
            assert chain > max(others, default=-1)
            assert chain <= 2 * len(hosts).bit_length() + 1


@given(st.lists(st.sampled_from([b"", b"a", b"bb", bytes(1000)])))
def test_messages_are_packed_and_equal_ones_once(messages: list[bytes]) -> None:
    assert unpack_messages(pack_messages(messages)) == messages
    assert len(pack_messages(messages)) <= 4 + 4 * len(messages) + sum(4 + len(message) for message in set(messages))


# -- messages ----------------------------------------------------------------------------------------------------------


@given(data=st.data())
@FEWER
def test_every_rank_has_every_message(data: st.DataObject) -> None:
    """Short ones, long ones, and those that are too long together."""
    world_size = data.draw(st.integers(2, 7))
    hosts = data.draw(hosts_of(world_size))
    lengths = st.sampled_from([0, 1, 300, SMALL // 2, SMALL, SMALL + 1, 3 * SMALL])
    plan = data.draw(st.lists(st.lists(lengths, min_size=world_size, max_size=world_size), min_size=1, max_size=3))
    seed = data.draw(st.none() | st.integers(0, 1000), "delays")

    def program(transport: Transport) -> None:
        transport.route(hosts)
        for number, sizes in enumerate(plan):
            messages = [bytes([rank]) * size for rank, size in enumerate(sizes)]
            tag = Tag(Kind.EXCHANGE, "telling", number)
            assert transport.exchange(messages[transport.rank], tag) == messages

    Loopback[None](world_size, interfere=None if seed is None else jitter(seed)).run(program)


@pytest.mark.parametrize("hosts", [1, 2, 8])
@pytest.mark.by_default
def test_the_messages_of_a_rank_that_is_not_its_host_s_first_do_not_grow(hosts: int) -> None:
    """A meeting is one message there and one back; that of others, as many as their neighbours in the tree."""

    def program(transport: Transport) -> tuple[int, int, int]:
        transport.route(groups(range(transport.world_size), hosts))
        before = transport.traffic
        message = bytes([transport.rank]) * 100
        transport.meet(Tag(Kind.MEET, "step()"), lambda: pytest.fail("nobody is ahead"), lambda: message)
        found = transport.traffic - before
        return found.messages, found.control_sent, found.control_received

    for world_size in (16, 32, 64):
        patient = Loopback[tuple[int, int, int]](world_size, timeout=6400.0)  # so that no rank says that it waits
        found = patient.run(program)
        packed = pack_messages([bytes([rank]) * 100 for rank in range(world_size)])
        assert set(found[hosts:]) == {(1, HEADER_BYTES + len(pack_messages([bytes(100)])), HEADER_BYTES + len(packed))}
        assert found[0][0] == world_size // hosts - 1 + (hosts - 1).bit_length()


def test_long_messages_take_a_second_one_each_way() -> None:
    def program(transport: Transport) -> int:
        transport.route(groups(range(8), 2))
        before = transport.traffic.messages
        transport.exchange(bytes([transport.rank]) * (SMALL // 7), TAG)
        return transport.traffic.messages - before

    assert Loopback[int](8).run(program)[2:] == [2] * 6


def test_many_ranks_find_their_hosts_when_a_collective_is_built() -> None:
    def program(transport: Transport) -> bool:
        return build_collective(transport, Pairwise).collective.transport.is_routed

    assert Loopback[bool](MESH_RANKS).run(program) == [False] * MESH_RANKS
    assert Loopback[bool](MESH_RANKS + 1).run(program) == [True] * (MESH_RANKS + 1)


# -- ranks that are late, elsewhere, or gone ---------------------------------------------------------------------------


def test_ranks_in_different_calls_learn_of_both() -> None:
    def program(transport: Transport) -> None:
        transport.route(groups(range(5), 2))
        transport.exchange(b"", Tag(Kind.EXCHANGE, "this call" if transport.rank < 4 else "that call"))

    for error in each(Loopback(5, timeout=SOON), program):
        assert isinstance(error, CollectiveError)
        assert "rank 4 is in that call" in str(error)
        assert "rank 2 is in this call" in str(error) or "rank 0 is in this call" in str(error)
    assert any(isinstance(error, MismatchError) for error in each(Loopback(5, timeout=SOON), program))


@pytest.mark.parametrize("late", [{4: 0.6, 5: 1.2, 6: 1.8}, {0: 0.6, 1: 1.3}, {3: 0.6, 4: 1.2}], ids=str)
def test_ranks_that_come_one_after_another_are_all_waited_for(
    late: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each within the time limit after the one before, and together far beyond it: a rank that waits says so. The first
    of a host comes within the limit after the others."""
    monkeypatch.setattr(control_plane, "GRACE", 0.05)  # but a part of the limit, as of one of half an hour

    def program(transport: Transport) -> list[bytes]:
        transport.route([[0, 1, 2], [3, 4, 5, 6]])
        time.sleep(late.get(transport.rank, 0.0))
        return transport.exchange(bytes([transport.rank]), TAG)

    everything = [bytes([rank]) for rank in range(7)]
    assert Loopback[list[bytes]](7, timeout=1.0).run(program) == [everything] * 7


@pytest.mark.parametrize("late", [0, 3])
def test_a_rank_that_came_late_is_not_taken_for_the_one_that_is_silent(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "GRACE", 0.2)
    silent, limit, done = 5, 1.0, threading.Barrier(7, timeout=SOON)

    def program(transport: Transport) -> None:
        transport.route([[0, 1, 2], [3, 4, 5, 6]])
        if transport.rank != silent:
            time.sleep(0.75 * limit * (transport.rank == late))
            with pytest.raises(CollectiveError, match=rf"(no answer from rank|rank) {silent} (after|failed)"):
                transport.exchange(b"", TAG)
        done.wait()

    Loopback[None](7, timeout=limit).run(program)


@given(st.data())
@FEWER
def test_whoever_waits_for_a_rank_gives_up_after_that_rank(data: st.DataObject) -> None:
    """By the limits themselves, where ranks of a host share memory and others are reached over a network."""
    world_size = data.draw(st.integers(2, 12))
    hosts = data.draw(hosts_of(world_size))
    host = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}

    def program(transport: Transport) -> dict[int, float]:
        transport.backend.needs_posted_recv = lambda other: host[other] != host[transport.rank]  # type: ignore[method-assign]
        messenger = Messenger(transport.backend, range(world_size), 7)
        before = [state.limit for state in messenger.states]
        tree = Tree(messenger, hosts)
        assert [state.limit for state in messenger.states] == before, "payload is waited for as long as without a tree"
        return {peer: messenger.states[peer].limit + extra for peer, extra in tree.patience.items()}

    limits = Loopback[dict[int, float]](world_size, timeout=64.0).run(program)
    for rank, of_rank in enumerate(limits):
        for neighbour, limit in of_rank.items():
            assert all(limit >= other + GRACE for peer, other in limits[neighbour].items() if peer != rank)


@pytest.mark.parametrize("silent", range(7))
def test_a_rank_that_is_silent_is_named_by_all(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that hears from nobody else raises after its own patience; the others as soon as a first one raises."""
    for module in (control_plane, peer_links):
        monkeypatch.setattr(module, "GRACE", 0.1)
    ready, done = threading.Barrier(7, timeout=SOON), threading.Barrier(7, timeout=SOON)

    def program(transport: Transport) -> None:
        transport.route([[0, 1, 2], [3, 4], [5], [6]])
        ready.wait()
        if transport.rank != silent:
            with pytest.raises(CollectiveError, match=rf"(no answer from rank|rank) {silent} (after|failed)"):
                transport.exchange(b"", TAG)
        done.wait()

    Loopback[None](7, timeout=0.3).run(program)


# -- training ----------------------------------------------------------------------------------------------------------


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


@pytest.mark.parametrize(
    ("stage", "hosts"), [(3, 8), *(pytest.param(*case, marks=pytest.mark.long) for case in ((0, 8), (2, 2), (3, 2)))]
)
@pytest.mark.full
@pytest.mark.timeout(400)
def test_64_ranks_on_several_hosts_train_as_the_plain_loop_does(
    stage: int, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With clipping; where no unit travels, every third rank has no micro-batch in the second step, and catches up."""
    world_size, steps = 64, 3
    batches = torch.randn(steps, world_size, 2, 6, generator=torch.Generator().manual_seed(1))
    sent: dict[tuple[int, str], int] = {}
    send_control = Messenger.send_control

    def counted(messenger: Messenger, data: bytes, to: int, tag: Tag, **options: Any) -> Any:
        if len(messenger.ranks) == world_size:
            key = messenger.rank, tag.label
            sent[key] = sent.get(key, 0) + 1
        return send_control(messenger, data, to, tag, **options)

    monkeypatch.setattr(Messenger, "send_control", counted)

    def contributes(step: int, rank: int) -> bool:
        return step != 1 or rank % 3 != 2 or stage == 3

    def by_hosts(transport: Transport) -> Hierarchical:
        by_host = [range(world_size)[host * 64 // hosts : (host + 1) * 64 // hosts] for host in range(hosts)]
        transport.route(by_host)
        return Hierarchical(transport, by_host)

    def program(transport: Transport) -> nn.Module:
        model = models[transport.rank]
        optimizer = ZeroOptimizer(
            model, torch.optim.AdamW, stage=stage, process_group=transport, collective=by_hosts, lr=0.1
        )
        for step in range(steps):
            if contributes(step, transport.rank):
                loss_of(model, batches[step, transport.rank]).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return model

    torch.set_num_threads(1)
    models = [small_model() for _ in range(world_size)]
    plain = small_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(steps):
        took_part = [batches[step, rank] for rank in range(world_size) if contributes(step, rank)]
        plain_step(plain, plain_optimizer, loss_of, took_part, world_size, max_norm=0.5)
        plain_optimizer.zero_grad()
    for model in Loopback[nn.Module](world_size, timeout=60.0).run(program):
        assert_same_model(model, plain)
    firsts = {host * 64 // hosts for host in range(hosts)}
    norms = [sent[rank, "gradient norm"] for rank in range(world_size) if rank not in firsts]
    assert norms == [steps] * (world_size - hosts)
    meetings = [sent[rank, "step()"] + sent[rank, "clip_grad_norm_()"] for rank in range(world_size)]
    assert all(2 * steps <= meetings[rank] <= 2 * steps + 1 for rank in range(world_size) if rank not in firsts)
