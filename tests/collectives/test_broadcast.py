"""A broadcast gives every rank rank 0's values, and every rank but the last sends each byte once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from collectives import Kind, Loopback, Tag, Traffic, Transport, Work, broadcast, ring_broadcast
from collectives.broadcast import AHEAD
from collectives.messages import HEADER_BYTES

from ..support.carried import jitter

CHUNK = 1 << 10  # bytes of a chunk here
SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 5]
TAG = Tag(Kind.BROADCAST, "rank 0's values", 3)


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "CHUNK", CHUNK)
        yield


def values(nbytes: int, rank: int) -> Tensor:
    """Return bytes that differ between ranks and between chunks."""
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


@pytest.mark.law("traffic")
@given(
    world_size=st.integers(1, 6),
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=3),
    seed=st.none() | st.integers(0, 1000),
)
@example(2, SIZES, None)
def test_every_rank_has_rank_0s_bytes_and_sends_each_at_most_once(
    world_size: int, sizes: list[int], seed: int | None
) -> None:
    """Several tensors follow each other, whatever is late."""

    def program(transport: Transport) -> Traffic:
        before, mine = transport.traffic, [values(nbytes, transport.rank) for nbytes in sizes]
        ring_broadcast(transport, mine, TAG)
        assert all(torch.equal(ours, values(nbytes, 0)) for ours, nbytes in zip(mine, sizes, strict=True))
        return transport.traffic - before

    group = Loopback[Traffic](world_size, interfere=None if seed is None else jitter(seed))
    last, messages = world_size - 1, sum(max(1, -(-nbytes // CHUNK)) for nbytes in sizes)
    for rank, traffic in enumerate(group.run(program)):
        assert traffic.payload_sent == (sum(sizes) if rank < last else 0)
        assert traffic.payload_received == (sum(sizes) if rank else 0)
        assert traffic.messages == last + (messages if rank < last else 0), "a header to each rank, and the chunks"
        assert traffic.control_sent == HEADER_BYTES * traffic.messages


def test_few_chunks_are_under_way_however_large_the_tensor_is() -> None:
    """A backend may copy what is under way; the tensor itself is copied nowhere."""

    def program(transport: Transport) -> list[int]:
        most = [0, 0]

        def counting(number: int, call: Callable[..., Work]) -> Callable[..., Work]:
            under_way = set[int]()

            def begin(tensor: Tensor, *given: Any, **named: Any) -> Work:
                assert tensor.numel() <= CHUNK
                assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
                work, address = call(tensor, *given, **named), tensor.data_ptr()
                under_way.add(address)
                most[number] = max(most[number], len(under_way))
                return SimpleNamespace(wait=lambda: (work.wait(), under_way.discard(address)))

            return begin

        buffer = values(9 * CHUNK, transport.rank)
        transport.isend = counting(0, transport.isend)  # type: ignore[method-assign]
        transport.irecv = counting(1, transport.irecv)  # type: ignore[method-assign]
        ring_broadcast(transport, [buffer], TAG)
        return most

    ahead = AHEAD + 1
    assert Loopback[list[int]](4).run(program) == [[ahead, 0], [ahead, AHEAD], [ahead, AHEAD], [0, AHEAD]]
