"""Which collective a replica has follows from its hosts; what cannot be shared or differs is told to every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from collectives import Collective, CollectiveError, Hierarchical, Transport, build, on_threads
from zero import ZeroOptimizer

from ..support.carried import reduction
from ..support.errors import errors_on
from ..support.models import odd_batches, odd_loss
from ..support.programs import locked_build
from ..support.sockets import on_hosts, on_wires, routed
from ..support.trainings import trained


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
        if name == "hierarchical" and hosts[:3] == [0, 0, 0]:
            with pytest.raises(CollectiveError, match="is for ranks of one host"):
                build(transport, "shared", factor=factor)
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


FACTOR = r"must divide the number of ranks, 4, so be one of \[1, 2, 4\]"
KEPT = r"divides the 4 ranks that share a copy, so one of"
REFUSED: list[tuple[int, dict[str, Any], type[Exception], str]] = [
    *((4, {"sharding_factor": factor}, ValueError, FACTOR) for factor in (0, 3, -1, 2.0, True, "2")),
    *((4, {"stage": 3, "reshard_after_forward": kept}, ValueError, KEPT) for kept in (0, 3, 8, "2", None)),
    *((1, {"stage": stage, "reshard_after_forward": False}, ValueError, "is for stage 3") for stage in (0, 2)),
    (1, {"stage": 0, "sharding_factor": 1}, ValueError, "stage 0 shards nothing: leave sharding_factor=1 out"),
    (4, {"sharding_factor": 2, "collective": "all_to_all"}, CollectiveError, "needs a torch"),
]


@pytest.mark.parametrize(("ranks", "arguments", "error", "text"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_shared_is_refused_on_every_rank(
    ranks: int, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    def program(transport: Transport) -> None:
        with pytest.raises(error, match=text):
            ZeroOptimizer(locked_build(0), process_group=transport, **arguments)

    on_threads(ranks, program)


def fails(model: Any, optimizer: Any) -> None:
    if optimizer.rank == 3:
        optimizer._transport.abort("rank 3: unplugged")


def freezes(model: Any, optimizer: Any) -> None:
    if optimizer.rank >= 2:
        model.get_parameter("last.bias").requires_grad_(False)


@pytest.mark.parametrize(
    ("stage", "name", "act", "text"),
    [
        (1, "pairwise", fails, "rank 3: unplugged"),
        (2, "shared", fails, "rank 3: unplugged"),
        (3, "hierarchical", fails, "rank 3: unplugged"),
        (2, "auto", freezes, "last.bias"),
    ],
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
