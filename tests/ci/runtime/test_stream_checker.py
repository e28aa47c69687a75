"""The checker of `support/stream_checker.py` finds what is unordered, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ...support.stream_checker import Stream, StreamChecker, pretend

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


def through_a_third(device: StreamChecker, one: Stream, other: Stream) -> None:
    third = device.stream("third")
    third.wait_stream(one)
    other.wait_stream(third)


def through_a_third_too_early(device: StreamChecker, one: Stream, other: Stream) -> None:
    third = device.stream("third")
    other.wait_stream(third)
    third.wait_stream(one)


def nothing(*_: Any) -> None:
    return None


def write(tensor: Tensor) -> None:
    tensor.add_(1)


def read(tensor: Tensor) -> None:
    tensor.sum()


def write_out(tensor: Tensor) -> None:
    torch.add(torch.ones(6), 1, out=tensor)


HERE = r"\(tests/ci/runtime/test_stream_checker\.py:\d+\)"
ACCESSES: list[tuple[Access, Access, str]] = [
    (write, read, rf"a write by aten::add_ on stream one {HERE} and a read by aten::sum on stream other {HERE}"),
    (read, write, rf"a read by aten::sum on stream one {HERE} and a write by aten::add_ on stream other {HERE}"),
    (write, write_out, r"by aten::add_ on stream one .* and a write by aten::add on stream other"),
    (write_out, read, r"a write by aten::add on stream one .* and a read by aten::sum on stream other"),
    (lambda tensor: tensor[2:].zero_(), read, r"a write by aten::zero_ on stream one .* and a read by aten::sum on"),
    (lambda tensor: torch._foreach_mul_([tensor], 2.0), read, r"a write by aten::_foreach_mul_ on stream one .* and a"),
]


@pytest.mark.parametrize("row", ACCESSES, ids=lambda row: row[2][:40])
def test_of_two_accesses_on_two_streams_one_must_wait_for_the_other(row: Any) -> None:
    first, then, said = row
    backwards: Any = lambda device, one, other: one.wait_stream(other)  # noqa: E731
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
    with StreamChecker() as device:  # other memory is new after it was freed
        for number in range(20):
            with device.stream(f"stream {number}"):
                torch.ones(64).mul_(2)
