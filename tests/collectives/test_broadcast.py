"""The broadcast of rank 0's values: every rank has them, and every rank but the last sends each byte once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collectives import Kind, Loopback, MismatchError, Tag, Traffic, Transport, Work, ring_broadcast
from collectives.backends.gloo import connect
from collectives.broadcast import AHEAD, CHUNK
from collectives.messages import HEADER_BYTES
from zero.consistency import broadcast

from ..support.carried import FEWER, PATIENT, assert_same_bits, each, jitter, seeds
from ..support.pool import GlooPool

CHUNKS = {
    "nothing": 0,
    "a byte": 1,
    "less than one": CHUNK - 1,
    "one": CHUNK,
    "more than one": CHUNK + 1,
    "several": 4 * CHUNK + 5,
}
SIZES = list(CHUNKS.values())  # bytes
TAG = Tag(Kind.BROADCAST, "rank 0's values", 3)


def values(nbytes: int, rank: int) -> Tensor:
    """Return bytes that differ between ranks and between chunks."""
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


def copied(transport: Transport, sizes: Sequence[int]) -> tuple[bool, Traffic]:
    """Broadcast tensors of these sizes. Return whether they have rank 0's values, and the traffic."""
    before, mine = transport.traffic, [values(nbytes, transport.rank) for nbytes in sizes]
    ring_broadcast(transport, mine, TAG)
    same = [torch.equal(ours, values(nbytes, 0)) for ours, nbytes in zip(mine, sizes, strict=True)]
    return all(same), transport.traffic - before


def check(results: Sequence[tuple[bool, Traffic]], sizes: Sequence[int]) -> None:
    last = len(results) - 1
    messages = sum(max(1, -(-nbytes // CHUNK)) for nbytes in sizes)
    for rank, (same, traffic) in enumerate(results):
        assert same, f"rank {rank} of {last + 1} has not rank 0's values"
        assert traffic.payload_sent == (sum(sizes) if rank < last else 0)
        assert traffic.payload_received == (sum(sizes) if rank else 0)
        assert traffic.messages == last + (messages if rank < last else 0), "a header to each rank, and the chunks"
        assert traffic.control_sent == HEADER_BYTES * traffic.messages


@pytest.mark.parametrize("nbytes", SIZES, ids=list(CHUNKS))
@pytest.mark.parametrize("world_size", range(1, 7))
def test_every_rank_has_rank_0s_bytes_and_sends_each_at_most_once(world_size: int, nbytes: int) -> None:
    check(Loopback[tuple[bool, Traffic]](world_size).run(lambda t: copied(t, [nbytes])), [nbytes])


@given(world_size=st.integers(1, 6), sizes=st.lists(st.sampled_from(SIZES), max_size=3), seed=seeds)
@FEWER
def test_several_tensors_follow_each_other_whatever_is_late(world_size: int, sizes: list[int], seed: int) -> None:
    group = Loopback[tuple[bool, Traffic]](world_size, interfere=jitter(seed))
    check(group.run(lambda t: copied(t, sizes)), sizes)


def over_gloo(group: dist.ProcessGroup, rank: int, sizes: Sequence[int]) -> list[tuple[bool, Traffic]]:
    transport = connect(group).fork()
    return [copied(transport, [nbytes]) for nbytes in sizes] + [copied(transport, sizes)]


@pytest.mark.parametrize("ranks", [(0,), (1, 3), (0, 1, 2), (0, 1, 2, 3)])
@pytest.mark.by_default("ranks2")
def test_processes_have_rank_0s_bytes_and_send_each_at_most_once(gloo: GlooPool, ranks: tuple[int, ...]) -> None:
    results = gloo.run(over_gloo, SIZES, ranks=ranks)
    for number, sizes in enumerate([*([nbytes] for nbytes in SIZES), SIZES]):
        check([found[number] for found in results], sizes)


# -- memory ------------------------------------------------------------------------------------------------------------


class Counted:
    """A work that counts itself among those that were begun and not waited for."""

    def __init__(self, work: Work, under_way: list[Work]) -> None:
        self._work, self._under_way = work, under_way
        under_way.append(self)

    def wait(self) -> None:
        self._work.wait()
        if self in self._under_way:
            self._under_way.remove(self)


def test_few_chunks_are_under_way_at_a_time_however_large_the_tensor_is() -> None:
    """A backend may copy what is under way; the tensor itself is copied nowhere."""

    def program(transport: Transport) -> list[int]:
        most = [0, 0]

        def counting(number: int, call: Callable[..., Work]) -> Callable[..., Work]:
            under_way: list[Work] = []

            def begin(tensor: Tensor, *given: Any, **named: Any) -> Work:
                assert tensor.numel() <= CHUNK
                assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
                work = Counted(call(tensor, *given, **named), under_way)
                most[number] = max(most[number], len(under_way))
                return work

            return begin

        buffer = values(9 * CHUNK, transport.rank)
        transport.isend = counting(0, transport.isend)  # type: ignore[method-assign]
        transport.irecv = counting(1, transport.irecv)  # type: ignore[method-assign]
        ring_broadcast(transport, [buffer], TAG)
        return most

    first, *between, last = Loopback[list[int]](4).run(program)
    assert first == [AHEAD + 1, 0]
    assert between == [[AHEAD + 1, AHEAD]] * 2
    assert last == [0, AHEAD]


# -- tensors of any kind -----------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[int], Tensor]] = {
    "transposed": lambda rank: torch.arange(12.0).add(rank).view(3, 4).t(),
    "every other": lambda rank: torch.arange(20, dtype=torch.int16).add(rank)[::2],
    "conjugate": lambda rank: torch.full((5,), complex(1 + rank, 2)).conj(),
    "negative": lambda rank: torch.full((5,), complex(1, 2 + rank)).conj().imag,
    "bf16": lambda rank: torch.full((3, 1), 1.5 + rank, dtype=torch.bfloat16),
    "bool": lambda rank: torch.tensor([rank == 0, rank == 1]),
    "scalar": lambda rank: torch.tensor(2.5 + rank, dtype=torch.float64),
    "empty": lambda rank: torch.empty(0, 3),
}


def plain(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1)


def test_tensors_of_any_dtype_and_strides_have_rank_0s_values() -> None:
    def program(transport: Transport) -> list[Tensor]:
        mine = [make(transport.rank) for make in KINDS.values()]
        broadcast(transport, mine)
        return mine

    for tensors in Loopback[list[Tensor]](3).run(program):
        for ours, (name, make) in zip(tensors, KINDS.items(), strict=True):
            theirs = make(0)
            assert ours.stride() == theirs.stride(), name
            assert ours.shape == theirs.shape
            assert_same_bits(plain(ours), plain(theirs))


# -- ranks that differ -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "other", [[2, 3], [3], [3, 2, 1], []], ids=["other sizes in sum alike", "fewer", "more", "none"]
)
def test_ranks_that_broadcast_other_tensors_all_raise(world_size: int, other: list[int]) -> None:
    """The last rank differs; the others hear of it although it sends nothing to most of them."""

    def program(transport: Transport) -> None:
        sizes = other if transport.rank == world_size - 1 else [3, 2]
        transport.exchange(b"", Tag(Kind.EXCHANGE, "all are here"))
        broadcast(transport, [torch.zeros(numel) for numel in sizes])
        transport.exchange(b"", Tag(Kind.EXCHANGE, "the next"))

    for rank, error in enumerate(each(Loopback(world_size, timeout=PATIENT), program)):
        assert isinstance(error, MismatchError) or "failed" in str(error), error
        assert f"rank {rank}" in str(error)
        assert f"rank {world_size - 1}" in str(error)
        assert "the copy of rank 0's values (tensors: 2, bytes: 20)" in str(error)
