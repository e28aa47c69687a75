"""Exchanges, channels and subgroups over the threads of one process, and the tags of their messages."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collectives import (
    Chain,
    CollectiveError,
    Kind,
    Loopback,
    Pairwise,
    Tag,
    Transport,
    on_threads,
)
from collectives.algorithms.process_group import Native
from collectives.backends.gloo import DEFAULT_TIMEOUT, _timeout, connect
from collectives.messages import HEADER_BYTES, LABEL_BYTES, header_offset, with_offset

from ..support.carried import (
    FP32,
    assert_same_bits,
    awkward,
    plain_sum,
    reduction,
)
from ..support.pool import GlooPool

# -- exchange ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.binary(max_size=300), min_size=2, max_size=2), min_size=1, max_size=8))
def test_exchange_gives_every_rank_all_bytes_in_rank_order(data: list[list[bytes]]) -> None:
    def program(transport: Transport) -> list[list[bytes]]:
        mine = data[transport.rank]
        return [transport.exchange(mine[i], Tag(Kind.EXCHANGE, "step()", index=i)) for i in range(2)]

    for first, second in on_threads(len(data), program):
        assert first == [pair[0] for pair in data]
        assert second == [pair[1] for pair in data]


@pytest.mark.parametrize("world_size", [2, 3])
def test_exchange_and_meet_are_possible_while_a_collective_is_under_way(world_size: int) -> None:
    bounds = [2 * rank for rank in range(world_size + 1)]

    def program(transport: Transport) -> tuple[list[bytes], list[bytes], list[float]]:
        out = torch.empty(2)
        work = Pairwise(transport).reduce_scatter(
            torch.ones(bounds[-1]), bounds, out, start=None, tag=reduction(round_=1)
        )
        mine = bytes([transport.rank])
        met = transport.meet(Tag(Kind.MEET, "step()", 1), lambda: pytest.fail("nobody is ahead"), lambda: mine)
        data = transport.exchange(mine, Tag(Kind.EXCHANGE, "step()", 1))
        work.wait()
        return data, met, out.tolist()

    told = [bytes([rank]) for rank in range(world_size)]
    expected = (told, told, [float(world_size)] * 2)
    assert on_threads(world_size, program) == [expected] * world_size


# -- groups ------------------------------------------------------------------------------------------------------------


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


def test_a_failure_of_one_channel_leaves_the_group_whole() -> None:
    def program(transport: Transport) -> list[float]:
        channel = transport.fork()
        with pytest.raises(CollectiveError):
            channel.exchange(b"", Tag(Kind.EXCHANGE, f"call {transport.rank}"))
        return gathered_ranks(transport, "parent") + gathered_ranks(transport.fork(), "another")

    assert on_threads(2, program) == [[0.0, 1.0, 0.0, 1.0]] * 2


@pytest.mark.parametrize("ranks", [[1, 3], [3, 1], [3, 0, 2], [2], [0, 1, 2, 3], [3, 2, 1, 0]])
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
            assert part.world_size == len(ranks)
            result = part.rank, own, gathered_ranks(part, "the part")
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


def test_parts_of_parts_count_from_their_parent() -> None:
    def program(transport: Transport) -> list[float] | None:
        if transport.rank not in (1, 3, 4):
            return None
        part = transport.split([4, 3, 1])
        return gathered_ranks(part.split([2, 0]), "inner") if part.rank in (0, 2) else None

    assert on_threads(5, program) == [None, [0.0, 1.0], None, None, [0.0, 1.0]]


def test_channels_of_one_part_do_not_mix() -> None:
    def program(transport: Transport) -> list[float]:
        first, second = transport.split([1, 0], 0), transport.split([1, 0], 1)
        pair = (first, second) if transport.rank else (second, first)
        outs = {part: torch.empty(1) for part in pair}
        works = [
            Pairwise(part).reduce_scatter(
                torch.ones(2), [0, 1, 2], outs[part], start=None, tag=reduction("ab"[part is second])
            )
            for part in pair
        ]
        Chain(works).wait()
        return [outs[first].item(), outs[second].item()]

    assert on_threads(2, program) == [[2.0, 2.0]] * 2


def test_who_is_not_in_a_part_cannot_open_it() -> None:
    with pytest.raises(ValueError, match=r"rank 0 is not one of the group's ranks \[1, 3\]"):
        Loopback[None](4).transports[0].split([1, 3])


# -- tags --------------------------------------------------------------------------------------------------------------

int64 = st.integers(-(2**63), 2**63 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
labels = st.text(st.characters(exclude_categories=["Cs"]), max_size=100) | st.text("aé漢🙂", min_size=20, max_size=60)
tags = st.builds(Tag, st.sampled_from(Kind), labels, int64, int32, int64)


@given(tags, int64)
def test_a_tag_survives_the_wire_but_for_the_end_of_a_long_label(tag: Tag, size: int) -> None:
    header = with_offset(tag.pack(size), 7)
    assert len(header) == HEADER_BYTES
    found, found_size = Tag.unpack(header)
    assert header_offset(header) == 7
    assert found_size == size
    assert (found.kind, found.round, found.index, found.digest) == (tag.kind, tag.round, tag.index, tag.digest)
    assert tag.label.startswith(found.label)
    if found.label != tag.label:
        assert len(found.label.encode()) <= LABEL_BYTES
        assert len(tag.label[: len(found.label) + 1].encode()) > LABEL_BYTES, "one more character would not fit"


@given(tags)
def test_a_tag_is_recognised_by_who_receives_it(tag: Tag) -> None:
    found, _ = Tag.unpack(tag.pack(0))
    assert tag.same(found)
    assert found.same(tag)


@given(tags, st.sampled_from(["kind", "round", "index", "digest", "label"]))
def test_tags_that_differ_in_anything_are_not_the_same(tag: Tag, field: str) -> None:
    other = {
        "kind": Tag(Kind(tag.kind % len(Kind) + 1), tag.label, tag.round, tag.index, tag.digest),
        "round": Tag(tag.kind, tag.label, tag.round ^ 1, tag.index, tag.digest),
        "index": Tag(tag.kind, tag.label, tag.round, tag.index ^ 1, tag.digest),
        "digest": Tag(tag.kind, tag.label, tag.round, tag.index, tag.digest ^ 1),
        "label": Tag(tag.kind, "x" + tag.label, tag.round, tag.index, tag.digest),
    }[field]
    if field == "label" and tag.label.startswith("x" * LABEL_BYTES):
        return  # the difference lies behind the end
    assert not tag.same(Tag.unpack(other.pack(0))[0])
    assert not tag.same(other)


def test_long_labels_in_many_scripts_are_no_mismatch() -> None:
    label = "bucket 0 (модель.слой.0.вес ... модель.слой.31.вес" + "é" * 40

    def program(transport: Transport) -> list[bytes]:
        return transport.exchange(b"x", Tag(Kind.EXCHANGE, "a" + label)) + transport.exchange(
            b"y", Tag(Kind.EXCHANGE, label)
        )

    assert on_threads(2, program) == [[b"x", b"x", b"y", b"y"]] * 2


def strange_groups(group: dist.ProcessGroup, rank: int) -> list[str]:
    with pytest.raises(ValueError, match="not a rank of the process group") as stranger:
        connect(dist.GroupMember.NON_GROUP_MEMBER)
    other = pytest.raises(NotImplementedError, match="'cpu:gloo,cuda:nccl'")
    with mock.patch("torch.distributed.get_backend_config", return_value="cuda:nccl"), other:
        connect(group)
    with pytest.raises(CollectiveError, match="exactly these ranks") as part:
        Native(connect(group).split([0, 1] if rank < 2 else [2, 1]))
    work = Native(connect(group)).all_gather(torch.zeros(3), [0, 1, 2, 3], tag=Tag(Kind.ALL_GATHER, "twice"))
    work.wait()
    work.wait()
    return [str(each.value) for each in (stranger, part)]


def test_groups_that_cannot_be_used_say_why(gloo: GlooPool) -> None:
    assert all(len(found) == 2 for found in gloo.run(strange_groups, ranks=range(3)))


def test_where_torch_does_not_tell_a_time_limit_it_is_torchs_default() -> None:
    assert _timeout(SimpleNamespace()) == DEFAULT_TIMEOUT  # type: ignore[arg-type]
