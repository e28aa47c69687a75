"""The timed cases: a reduce-scatter or an all-gather by each algorithm, by gloo, and by memory alone (the roofline).

    roofline of a reduce-scatter    add up W private slices
    roofline of an all-gather       copy W - 1 private slices
    in common                       an all-gather into a buffer that all ranks share, so that nothing is copied
    in common, released             the same, and the kernel reports which pages this rank has written, as when a
                                    gathered unit is released

The rooflines are the reads and writes of a collective through shared memory, without the other ranks. An algorithm's
transport allocates its contribution; gloo's lies in ordinary memory, in equal slices, so that gloo needs no padding.
Values are small integers, so that a sum is the same in any order.

Knows: algorithms by name, their buffers, and the right results. Does not know: when they run, or clocks.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import Collective, Kind, Region, Tag, Transport
from collectives.algorithms.ordered_sum import ordered_sum

GLOO, ROOFLINE = "gloo", "roofline"
IN_COMMON, RELEASED = "in common", "in common, released"
CPU, DTYPE = torch.device("cpu"), torch.float32
_PERIOD = 1021  # a prime: all slices begin at different places of the period


class Operation(Enum):
    """A collective, by the name that a table prints."""

    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"


@dataclass(frozen=True)
class Case:
    """One algorithm with its buffers.

    ``given``: this rank's contribution, or its slice. ``result``: the buffer for the result. In an all-gather in place,
    ``given`` is part of ``result``.
    """

    name: str
    run: Callable[[], None]
    given: Tensor
    result: Tensor
    transport: Transport | None = None  # whose traffic is counted; None for gloo and the roofline
    before: Callable[[], object] = lambda: None  # called before each timing
    stays: bool = False  # no byte of the buffer moves, so the time of a run does not follow from its size


@dataclass(frozen=True)
class Shape:
    """A buffer of ``numel`` elements in equal slices, seen from one rank."""

    rank: int
    world_size: int
    numel: int

    @property
    def width(self) -> int:
        return self.numel // self.world_size

    @property
    def bounds(self) -> list[int]:
        return [self.width * rank for rank in range(self.world_size + 1)]


def cases(operation: Operation, shape: Shape, algorithms: Sequence[Collective], roofline: bool) -> list[Case]:
    """Return one case of each algorithm, of gloo and, if ``roofline``, of the roofline, in fresh buffers."""
    own = _reduce_scatter if operation is Operation.REDUCE_SCATTER else _all_gather
    theirs = _gloo_reduce_scatter if operation is Operation.REDUCE_SCATTER else _gloo_all_gather
    made = [*(own(algorithm, shape) for algorithm in algorithms), theirs(shape)]
    if operation is Operation.ALL_GATHER:
        for algorithm in algorithms:
            made += _in_common(algorithm.transport, shape)
    if roofline:
        made.append((_fold_alone if operation is Operation.REDUCE_SCATTER else _copy_alone)(shape))
    return made


def check(operation: Operation, shape: Shape, case: Case) -> None:
    """Run a case once on known values. Raise `AssertionError` if its result is wrong. All ranks must call this."""
    case.result.fill_(torch.nan)
    case.before()
    begin = 0 if operation is Operation.REDUCE_SCATTER else shape.rank * shape.width
    write_values(case.given, shape.rank, begin)
    case.run()
    if case.name == ROOFLINE:
        return
    expected = torch.zeros_like(case.result)
    part = torch.empty(shape.width, dtype=DTYPE)
    for rank in range(shape.world_size):
        if operation is Operation.REDUCE_SCATTER:
            write_values(part, rank, shape.rank * shape.width)
            expected += part
        else:
            write_values(expected[rank * shape.width : (rank + 1) * shape.width], rank, rank * shape.width)
    if not torch.equal(case.result, expected):
        raise AssertionError(f"{case.name} gave a wrong {operation.value} of {shape.numel} elements")


def write_values(out: Tensor, rank: int, begin: int) -> None:
    """Write the contribution of ``rank`` from element ``begin`` on: small integers, another row for each rank."""
    row = (torch.arange(_PERIOD) * (2 * rank + 3) % _PERIOD).to(DTYPE).repeat(257)
    shift = begin % _PERIOD
    for low in range(0, out.numel(), 256 * _PERIOD):
        part = out[low : low + 256 * _PERIOD]
        part.copy_(row[shift : shift + part.numel()])


def _tags(kind: Kind, label: str) -> Callable[[], Tag]:
    # A single round: messages that an algorithm sends once a backward are no cost of a bucket.
    count = itertools.count()
    return lambda: Tag(kind, label, round=1, index=next(count))


def _reduce_scatter(algorithm: Collective, shape: Shape) -> Case:
    tag = _tags(Kind.REDUCE_SCATTER, "a reduce-scatter")
    source = algorithm.transport.empty(shape.numel, DTYPE, CPU)
    out = torch.empty(shape.width, dtype=DTYPE)

    def run() -> None:
        algorithm.reduce_scatter(source, shape.bounds, out, start=None, tag=tag()).wait()

    return Case(algorithm.name, run, source, out, algorithm.transport)


def _all_gather(algorithm: Collective, shape: Shape) -> Case:
    tag = _tags(Kind.ALL_GATHER, "an all-gather")
    buffer = algorithm.transport.empty(shape.numel, DTYPE, CPU)
    own = buffer[shape.bounds[shape.rank] : shape.bounds[shape.rank + 1]]

    def run() -> None:
        algorithm.all_gather(buffer, shape.bounds, tag=tag()).wait()

    return Case(algorithm.name, run, own, buffer, algorithm.transport)


def _in_common(transport: Transport, shape: Shape) -> list[Case]:
    """Return the gather of a unit as in stage 3 of the optimizer; no case if the ranks cannot share memory."""
    nbytes, regions = shape.numel * DTYPE.itemsize, transport.common([shape.numel * DTYPE.itemsize] * 2)
    if regions is None:
        return []
    tag = _tags(Kind.ALL_GATHER, "an all-gather in common")
    made = []
    for name, region in zip((IN_COMMON, RELEASED), regions, strict=True):
        whole, width = region.whole().view(DTYPE), nbytes // shape.world_size
        own = region.own(shape.rank * width, (shape.rank + 1) * width).view(DTYPE)

        def fresh(region: Region = region, whole: Tensor = whole) -> None:
            region.refresh()
            whole[:: mmap.PAGESIZE // DTYPE.itemsize].sum()  # map every page, so that the kernel has to report on it

        after: Callable[[], object] = region.written if name == RELEASED else lambda: None

        def run(after: Callable[[], object] = after) -> None:
            transport.announce(tag()).wait()
            after()

        made.append(Case(name, run, own, whole, transport, before=fresh, stays=True))
    return made


def _gloo_reduce_scatter(shape: Shape) -> Case:
    source, out = torch.empty(shape.numel, dtype=DTYPE), torch.empty(shape.width, dtype=DTYPE)
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return Case(GLOO, lambda: call(out, source), source, out)


def _gloo_all_gather(shape: Shape) -> Case:
    own, out = torch.empty(shape.width, dtype=DTYPE), torch.empty(shape.numel, dtype=DTYPE)
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Case(GLOO, lambda: call(out, own), own, out)


def _fold_alone(shape: Shape) -> Case:
    source, out = torch.empty(shape.numel, dtype=DTYPE), torch.empty(shape.width, dtype=DTYPE)
    parts = _slices(source, shape.width)
    return Case(ROOFLINE, lambda: ordered_sum(parts, out), source, out)


def _copy_alone(shape: Shape) -> Case:
    source = torch.empty(shape.numel - shape.width, dtype=DTYPE)
    out = torch.empty_like(source)
    pairs = list(zip(_slices(out, shape.width), _slices(source, shape.width), strict=True))

    def run() -> None:
        for target, part in pairs:
            target.copy_(part)

    return Case(ROOFLINE, run, source, out)


def _slices(tensor: Tensor, width: int) -> list[Tensor]:
    return [tensor[low : low + width] for low in range(0, tensor.numel(), width)]
