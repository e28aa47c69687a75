"""Every algorithm sums and gathers alike, whatever the splits, dtypes, hosts, delays and number in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collectives import (
    ALGORITHMS,
    CollectiveError,
    Kind,
    Loopback,
    Pairwise,
    PeerError,
    Tag,
    Traffic,
    Transport,
    on_threads,
    solo,
)

from ..support.carried import reduction


@given(
    orders=st.integers(2, 5).flatmap(lambda w: st.lists(st.permutations(range(4)), min_size=w, max_size=w)),
)
def test_direct_exchanges_may_be_waited_for_in_any_order(orders: list[list[int]]) -> None:
    world_size = len(orders)
    bounds = [5 * rank for rank in range(world_size + 1)]

    def program(transport: Transport) -> list[Tensor]:
        outs = [torch.empty(5) for _ in range(4)]
        works = [
            Pairwise(transport).reduce_scatter(
                torch.full((bounds[-1],), 10.0**index + transport.rank),
                bounds,
                out,
                start=None,
                tag=reduction(index=index),
            )
            for index, out in enumerate(outs)
        ]
        for index in orders[transport.rank]:
            works[index].wait()
        return outs

    for outs in on_threads(world_size, program):
        for index, out in enumerate(outs):
            assert out.tolist() == [world_size * 10.0**index + sum(range(world_size))] * 5


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_half_a_sum_is_no_sum_on_any_rank(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(parts: Any, out: Any) -> None:
        raise error("in the middle")

    def program(transport: Transport) -> str:
        work = Pairwise(transport).reduce_scatter(
            torch.ones(4), [0, 2, 4], torch.empty(2), start=None, tag=Tag(Kind.REDUCE_SCATTER, "bucket 0")
        )
        with pytest.raises(error):
            work.wait()
        with pytest.raises(CollectiveError) as caught:
            transport.exchange(b"", Tag(Kind.EXCHANGE, "later"))
        transport.abort("another reason")
        with pytest.raises(CollectiveError, match="while adding up"):
            transport.check()
        return str(caught.value)

    monkeypatch.setattr("collectives.algorithms.pairwise.ordered_sum", fail)
    for rank, message in enumerate(on_threads(2, program)):
        assert f"rank {rank}, while adding up: {error.__name__}: in the middle" in message


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_single_rank_sends_nothing(name: str) -> None:
    transport = solo()
    collective = ALGORITHMS[name](transport)
    out = torch.tensor([10.0, 20.0])
    collective.reduce_scatter(torch.tensor([1.0, 2.0]), [0, 2], out, start=out, tag=reduction()).wait()
    collective.all_gather(out, [0, 2], tag=Tag(Kind.ALL_GATHER, "bucket 0")).wait()
    assert out.tolist() == [11.0, 22.0]
    assert transport.exchange(b"mine", Tag(Kind.EXCHANGE, "step()")) == [b"mine"]
    meeting = Tag(Kind.MEET, "step()", 3)
    assert transport.meet(meeting, lambda: pytest.fail("nobody is ahead"), lambda: b"mine") == [b"mine"]
    assert transport.fork().rank == 0
    assert transport.traffic == Traffic()


def test_no_other_name_is_taken_for_an_algorithm() -> None:
    from collectives import build, check_name

    for name in ("auto", *ALGORITHMS, Pairwise):
        check_name(name)
    for check_it in (check_name, lambda name: build(solo(), name)):
        with pytest.raises(ValueError, match=r"collective must be one of auto, pairwise, .* not 'pair'"):
            check_it("pair")


def test_only_flat_tensors_travel() -> None:
    transport = Loopback[None](2).transports[0]
    for tensor in (torch.zeros(2, 2), torch.zeros(()), torch.zeros(4)[::2]):
        with pytest.raises(ValueError, match="1-D contiguous"):
            transport.isend(tensor, 1, reduction())
        with pytest.raises(ValueError, match="1-D contiguous"):
            transport.irecv(tensor, 1, reduction())
    assert transport.traffic == Traffic()


def test_a_backend_never_cuts_a_message_to_fit() -> None:
    def program(transport: Transport) -> None:
        tensor = torch.zeros(3 + transport.rank, dtype=torch.uint8)
        backend = transport.backend
        side = backend.recv(tensor, 0, 0) if transport.rank else backend.send(tensor, 1, 0)
        with pytest.raises(PeerError, match="3 bytes came where 4 fit"):
            side.wait(1.0)

    on_threads(2, program)
