"""Channels and parts of a group have messages and ranks of their own, told apart by tags that survive the wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collectives import Kind, Pairwise, Tag, Transport, on_threads
from collectives.messages import HEADER_BYTES, LABEL_BYTES, header_offset, with_offset

from ..support.carried import FP32, assert_same_bits, awkward, plain_sum, reduction


def test_exchange_and_meet_are_possible_while_a_collective_is_under_way() -> None:
    bounds = [0, 2, 4, 6]

    def program(transport: Transport) -> tuple[list[bytes], list[bytes], list[float]]:
        out = torch.empty(2)
        work = Pairwise(transport).reduce_scatter(torch.ones(6), bounds, out, start=None, tag=reduction(round_=1))
        mine = bytes([transport.rank])
        met = transport.meet(Tag(Kind.MEET, "step()", 1), lambda: pytest.fail("nobody is ahead"), lambda: mine)
        data = transport.exchange(mine, Tag(Kind.EXCHANGE, "step()", 1))
        work.wait()
        return data, met, out.tolist()

    told = [bytes([rank]) for rank in range(3)]
    assert on_threads(3, program) == [(told, told, [3.0] * 2)] * 3


def gathered_ranks(transport: Transport, label: str) -> list[float]:
    """Gather every rank's number in the group, to show that the group works."""
    buffer = torch.full((transport.world_size,), float(transport.rank))
    tag = Tag(Kind.ALL_GATHER, label)
    Pairwise(transport).all_gather(buffer, range(transport.world_size + 1), tag=tag).wait()
    return buffer.tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_of_forked_channels_do_not_mix(world_size: int) -> None:
    """Ranks use three channels in different orders. On one channel that would be a mismatch."""
    bounds = list(range(world_size + 1))

    def program(transport: Transport) -> list[float]:
        channels = [transport, transport.fork(), transport.fork()]
        outs = [torch.empty(1) for _ in channels]
        order = [(i + transport.rank) % 3 for i in range(3)]
        works = {
            i: Pairwise(channels[i]).reduce_scatter(
                torch.full((world_size,), 10.0**i), bounds, outs[i], start=None, tag=reduction(f"user {i}")
            )
            for i in order
        }
        for i in reversed(order):
            works[i].wait()
        return [out.item() for out in outs]

    expected = [world_size * 10.0**i for i in range(3)]
    assert on_threads(world_size, program) == [expected] * world_size


@pytest.mark.law("group ranks")
@pytest.mark.parametrize("ranks", [[3, 1], [3, 0, 2], [2], [3, 2, 1, 0]], ids=str)
def test_a_part_of_a_group_has_ranks_of_its_own(ranks: list[int]) -> None:
    """The ranks have the requested order, while the whole group is at work."""
    contributions = [awkward(8 * len(ranks), FP32, rank) for rank in range(4)]
    bounds = [8 * i for i in range(len(ranks) + 1)]

    def program(transport: Transport) -> tuple[int, Tensor, list[float]] | None:
        out = torch.empty(1)
        above = Pairwise(transport).reduce_scatter(
            torch.ones(4), range(5), out, start=None, tag=reduction("the whole group")
        )
        result = None
        if transport.rank in ranks:
            part = transport.split(ranks)
            own = torch.empty(8)
            source = contributions[transport.rank].clone()
            Pairwise(part).reduce_scatter(source, bounds, own, start=None, tag=reduction("the part")).wait()
            assert part.peers() == [*range(part.rank + 1, len(ranks)), *range(part.rank)]
            result = part.rank, own, gathered_ranks(part, "the part")
        else:
            with pytest.raises(ValueError, match=rf"rank {transport.rank} is not one of the group's ranks \["):
                transport.split(ranks)
        above.wait()
        assert out.item() == 4.0
        return result

    results = on_threads(4, program)
    for group_rank, rank in enumerate(ranks):
        found = results[rank]
        assert found is not None
        assert found[0] == group_rank
        low = bounds[group_rank]
        assert_same_bits(found[1], plain_sum(None, [contributions[r][low : low + 8] for r in ranks], FP32))
        assert found[2] == [float(i) for i in range(len(ranks))]


int64 = st.integers(-(2**63), 2**63 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
labels = st.text(st.characters(exclude_categories=["Cs"]), max_size=100) | st.text("aé漢🙂", min_size=20, max_size=60)
tags = st.builds(Tag, st.sampled_from(Kind), labels, int64, int32, int64)


@given(tags, int64)
def test_a_tag_survives_the_wire_but_for_a_long_labels_end(tag: Tag, size: int) -> None:
    header = with_offset(tag.pack(size), 7)
    assert len(header) == HEADER_BYTES
    found, found_size = Tag.unpack(header)
    assert header_offset(header) == 7
    assert found_size == size
    assert (found.kind, found.round, found.index, found.digest) == (tag.kind, tag.round, tag.index, tag.digest)
    assert tag.same(found)
    assert found.same(tag)
    assert tag.label.startswith(found.label)
    if found.label != tag.label:
        assert len(found.label.encode()) <= LABEL_BYTES
        assert len(tag.label[: len(found.label) + 1].encode()) > LABEL_BYTES, "one more character would not fit"
