"""The checker of `stream_checker.py` finds what is unordered, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from collectives import ALGORITHMS, Kind, Tag, Transport, pool
from collectives.pool import Pool
from zero.core.bits import same_bits

from .stream_backend import on_streams
from .stream_checker import Stream, StreamChecker, pretend

CPU = torch.device("cpu")
HERE = r"\(tests/runtime/test_stream_checker\.py:\d+\)"
Access = Callable[[Tensor], object]


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


def two_accesses(first: Access, then: Access, order: Callable[[StreamChecker, Stream, Stream], object]) -> None:
    """Access a tensor on one stream, call ``order``, and access it on another."""
    tensor = torch.ones(6)
    with StreamChecker() as device:
        one, other = device.stream("one"), device.stream("other")
        with one:
            first(tensor)
        order(device, one, other)
        with other:
            then(tensor)


def nothing(device: StreamChecker, one: Stream, other: Stream) -> None:
    pass


def through_a_third(device: StreamChecker, one: Stream, other: Stream) -> None:
    third = device.stream("third")
    third.wait_stream(one)
    other.wait_stream(third)


def backwards(device: StreamChecker, one: Stream, other: Stream) -> None:
    one.wait_stream(other)


def through_a_third_too_early(device: StreamChecker, one: Stream, other: Stream) -> None:
    third = device.stream("third")
    other.wait_stream(third)
    third.wait_stream(one)


def write(tensor: Tensor) -> None:
    tensor.add_(1)


def read(tensor: Tensor) -> None:
    tensor.sum()


def write_out(tensor: Tensor) -> None:
    torch.add(torch.ones(6), 1, out=tensor)


def write_a_view(tensor: Tensor) -> None:
    tensor[2:].zero_()


def write_several(tensor: Tensor) -> None:
    torch._foreach_mul_([tensor], 2.0)


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (write, read, rf"a write by aten::add_ on stream one {HERE} and a read by aten::sum on stream other {HERE}"),
        (read, write, rf"a read by aten::sum on stream one {HERE} and a write by aten::add_ on stream other {HERE}"),
        (write, write_out, r"by aten::add_ on stream one .* and a write by aten::add on stream other"),
        (write_out, read, r"a write by aten::add on stream one .* and a read by aten::sum on stream other"),
        (write_a_view, read, r"a write by aten::zero_ on stream one .* and a read by aten::sum on stream other"),
        (
            write_several,
            read,
            r"a write by aten::_foreach_mul_ on stream one .* and a read by aten::sum on stream other",
        ),
    ],
)
def test_of_two_accesses_on_two_streams_one_must_wait_for_the_other(first: Access, then: Access, said: str) -> None:
    for order in (nothing, backwards, through_a_third_too_early):
        with pytest.raises(AssertionError, match=f"^nothing orders .*{said}"):
            two_accesses(first, then, order)
    two_accesses(first, then, lambda device, one, other: other.wait_stream(one))
    two_accesses(first, then, lambda device, one, other: device.synchronize())
    two_accesses(first, then, through_a_third)


def test_reads_need_no_order_and_shapes_are_no_accesses() -> None:
    two_accesses(read, read, nothing)
    two_accesses(write, lambda tensor: tensor.view(2, 3).t(), nothing)
    two_accesses(write, torch.zeros_like, nothing)
    two_accesses(lambda tensor: tensor[1:], write, nothing)


def test_a_wait_counts_the_work_before_it_alone() -> None:
    def program() -> None:
        with StreamChecker() as device:
            other = device.stream("other")
            tensor = torch.ones(6)
            other.wait_stream(device.default)
            tensor.mul_(2)
            with other:
                tensor.sum()

    with pytest.raises(AssertionError, match=r"a write by aten::mul_ on stream default .* and a read by aten::sum on"):
        program()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_block_of_a_pool_is_one_storage_whoever_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "worth_keeping", lambda device: True)

    def program(*, waits: bool) -> None:
        pool = Pool()
        with StreamChecker() as device:
            other = device.stream("other")
            pool.take(64, torch.float32, CPU).fill_(1.0)
            if waits:
                other.wait_stream(device.default)
            with other:
                pool.take(64, torch.float32, CPU).fill_(2.0)

    with pytest.raises(AssertionError, match=r"a write by aten::fill_ on stream default .* and a write by aten::fill_"):
        program(waits=False)
    program(waits=True)


def test_other_memory_is_new_after_it_was_freed() -> None:
    with StreamChecker() as device:
        for number in range(20):
            with device.stream(f"stream {number}"):
                torch.ones(64).mul_(2)


@pytest.mark.parametrize("waits", ["", "allocating stream", "allocator"])
def test_memory_that_the_library_read_elsewhere_goes_back_to_its_stream_in_order(waits: str) -> None:
    def program() -> None:
        with StreamChecker() as device:
            other = device.stream("other")
            tensor = torch.ones(64)
            other.wait_stream(device.default)
            with other:
                same_bits(tensor, tensor)
            if waits == "allocator":
                tensor.record_stream(other)  # type: ignore[arg-type]
            del tensor
            if waits == "allocating stream":
                device.default.wait_stream(other)
            torch.ones(64)

    if waits:
        program()
    else:
        said = r"a read by aten::equal on stream other \(zero/core/bits.py:\d+\) and the next allocation, by aten::ones"
        with pytest.raises(AssertionError, match=said):
            program()


def test_an_allocation_is_a_write() -> None:
    def program() -> None:
        with StreamChecker() as device:
            made = torch.empty(6)
            with device.stream("copies"):
                made.copy_(torch.ones(6))

    with pytest.raises(AssertionError, match=r"a write by aten::empty on stream default .* and a write by aten::copy_"):
        program()


# -- collectives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("touches", ["before the wait", "on another stream", "after it"])
def test_a_collective_has_a_stream_of_its_own_until_its_wait(touches: str) -> None:
    def program(transport: Transport) -> None:
        with StreamChecker() as device:
            other, whole = device.stream("other"), torch.arange(8.0)
            work = ALGORITHMS["all_to_all"](transport).all_gather(whole, [0, 4, 8], tag=Tag(Kind.ALL_GATHER, "it"))
            if touches == "before the wait":
                whole.sum()
            with other:
                work.wait()
            if touches == "after it":
                device.default.wait_stream(other)
            whole.sum()

    if touches == "after it":
        on_streams(2, program)
    else:
        said = r"a write by all_gather on stream of collectives, rank \d .* and a read by aten::sum on stream default"
        with pytest.raises(AssertionError, match=said):
            on_streams(2, program)


# -- autograd ----------------------------------------------------------------------------------------------------------


def gradients_of_two_towers(read_on: str) -> None:
    """Run two layers on two streams, the backward on a third, and read their gradients."""
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    batch = torch.ones(2, 4)
    with StreamChecker() as device:
        streams = {name: device.stream(name) for name in ("one", "two", "caller", "another")}
        with streams["one"]:
            left = one(batch)
        with streams["two"]:
            right = two(batch)
            streams["two"].wait_stream(streams["one"])
            loss = (left * right).square().sum()
        with streams["caller"]:
            device.backward(loss)
        with streams[read_on]:
            for parameter in (*one.parameters(), *two.parameters()):
                assert parameter.grad is not None
                parameter.grad.sum()


def test_autograd_runs_a_node_on_the_stream_of_its_forward_and_the_caller_waits() -> None:
    gradients_of_two_towers("caller")
    with pytest.raises(AssertionError, match=r"a write by aten::\w+ on stream (one|two) .* and a read by aten::sum on"):
        gradients_of_two_towers("another")


def test_nodes_wait_for_those_that_made_their_gradients_alone() -> None:
    """What the hooks of two towers write is unordered, although the engine runs them in turn."""
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    kept = torch.zeros(4, 4)
    for layer in (one, two):
        layer.weight.register_hook(lambda gradient: kept.add_(gradient))  # type: ignore[no-untyped-call]

    def program() -> None:
        with StreamChecker() as device:
            streams = device.stream("one"), device.stream("two")
            batch = torch.ones(2, 4)
            for stream in streams:
                stream.wait_stream(device.default)
            with streams[0]:
                left = one(batch)
            with streams[1]:
                right = two(batch)
            for stream in streams:
                device.default.wait_stream(stream)
            device.backward((left + right).square().sum())

    said = r"^nothing orders a write by aten::add_ on stream two .* and a write by aten::add_ on stream one"
    with pytest.raises(AssertionError, match=said):
        program()
