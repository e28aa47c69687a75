"""Helpers for the tests of collectives: awkward numbers, uneven splits, delays, and errors returned as results."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from collectives import (
    ALGORITHMS,
    Collective,
    CollectiveError,
    Fold,
    Hierarchical,
    Kind,
    Loopback,
    Pairwise,
    Tag,
    Transport,
)

from .plain import assert_same_bits as assert_same_bits

T = TypeVar("T")
CPU = torch.device("cpu")
FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
SAME = [(dtype, dtype) for dtype in (FP64, FP32, BF16, FP16)]
MIXED = [(BF16, FP32), (FP16, FP32), (FP32, FP64)]


def between_hosts(transport: Transport) -> Collective:
    """Return the hierarchical algorithm, as if every other rank were on one host and the rest on another."""
    ranks = range(transport.world_size)
    return Hierarchical(transport, [ranks[::2], ranks[1::2]] if len(ranks) > 1 else [ranks])


def equal_hosts(transport: Transport, hosts: int = 2) -> list[range]:
    """Return so many hosts of neighbouring ranks, or one if they do not divide the ranks."""
    width = transport.world_size // hosts if transport.world_size % hosts == 0 else transport.world_size
    return [range(first, first + width) for first in range(0, transport.world_size, width)]


def folded(transport: Transport, hosts: int = 2) -> Collective:
    return Fold(transport, equal_hosts(transport, hosts), Pairwise(transport))


def built(name: str, hosts: Sequence[Sequence[int]] | None = None) -> Callable[[Transport], Collective]:
    """Return what builds the algorithm of this name for ranks that have what it needs, on these hosts. None, or if sums
    go from host to host: on two equal ones."""
    row = ALGORITHMS[name]
    return lambda t: row.build(t, equal_hosts(t) if hosts is None or row.folds else hosts)


FEWER = settings(max_examples=settings().max_examples // 3)  # a third of the profile's: each example starts threads


def reduction(label: str = "bucket 0", round_: int = 0, index: int = 0, digest: int = 0) -> Tag:
    return Tag(Kind.REDUCE_SCATTER, label, round_, index, digest)


def splits(world_size: int) -> st.SearchStrategy[list[int]]:
    """Draw the bounds of a flat tensor: uneven, and with empty slices."""
    sizes = st.lists(st.sampled_from([0, 0, 1, 3, 16, 64, 257]), min_size=world_size, max_size=world_size)
    return sizes.map(lambda drawn: list(itertools.accumulate(drawn, initial=0)))


@st.composite
def hosts_of(draw: st.DrawFn, world_size: int) -> list[list[int]]:
    by_host: dict[int, list[int]] = {}
    for rank in range(world_size):
        by_host.setdefault(draw(st.integers(0, world_size)), []).append(rank)
    return list(by_host.values())


def awkward(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return numbers that break sums, also NaN. Every seventh is -0.0 whatever the seed, as must be the sum there."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    exponents = torch.randint(-12, 12, (numel,), generator=generator, dtype=FP64)
    plain = (torch.randn(numel, generator=generator, dtype=FP64) * 2**exponents).to(dtype)
    special = torch.tensor(
        [-0.0, 0.0, math.inf, -math.inf, math.nan, info.max, -info.max, info.tiny, -info.tiny / 4], dtype=FP64
    ).to(dtype)
    chosen = special[torch.randint(0, len(special), (numel,), generator=generator)]
    mixed = torch.where(torch.rand(numel, generator=generator) < 0.3, chosen, plain)
    mixed[::7] = -0.0
    return mixed


def whole_numbers(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return integers so small that every sum of nine is exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-15, 16, (numel,), generator=generator).to(dtype)


def plain_sum(start: Tensor | None, contributions: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum as a loop in one process forms it: the first tensor is copied, the others are added one by one."""
    parts = [*([] if start is None else [start]), *contributions]
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total


def each(group: Loopback[Any], program: Callable[[Transport], T]) -> list[T | CollectiveError]:
    """Run ``program`` on each rank. Return each rank's result, or the `CollectiveError` that it raised."""

    def guarded(transport: Transport) -> T | CollectiveError:
        try:
            return program(transport)
        except CollectiveError as error:
            return error

    return group.run(guarded)


def jitter(seed: int) -> Callable[[int, str, int], None]:
    sources = [random.Random(seed + rank) for rank in range(8)]

    def interfere(rank: int, event: str, peer: int) -> None:
        if sources[rank].random() < 0.3:
            time.sleep(sources[rank].random() * 1e-3)

    return interfere
