"""Which rank owns which parameter, or which block of one, where these have one owner because a class steps them by
their shapes.

Knows: shapes, bytes, a number of ranks. Does not know: buckets, classes.

Parameters are given out one after the other, the largest first, each to the rank that has the fewest bytes so far. Then
no rank has more than 1/W of the bytes and one largest parameter (Graham, "Bounds on Multiprocessing Timing Anomalies",
1969: when a rank takes its last parameter, no other has less). Among ranks with equal bytes, the one whose parameters
take the least work in a step gets the next.

Blocks lie in their parameters, so within a bucket their owners ascend. First, the rank that owns most of the bucket
owns as little of it as possible: at most 1/W and one largest block. Then each rank takes about as much as is missing to
an equal share of everything, so that one bucket evens out another.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence


def step_work(shape: Sequence[int]) -> int:
    """Return the multiplications, up to a factor, with which a class steps a matrix: m * m * n, where m <= n.

    So many has a product of a matrix with its transpose, of which Newton-Schulz iterations (Muon) and preconditioners
    (Shampoo) consist. More than two dimensions count as a matrix of the first and the rest; a vector's work is its
    size.
    """
    if len(shape) < 2:
        return math.prod(shape)
    rows = shape[0]
    columns = math.prod(shape[1:])
    return min(rows, columns) * rows * columns


def choose_owners(parameters: Iterable[tuple[int, int, int]], ranks: list[tuple[int, int, int]]) -> dict[int, int]:
    """Return the owner of each parameter.

    Args:
        parameters: of each its number, its bytes and its `step_work`, in the order in which equal ones are given out.
        ranks: a heap with, of each rank, the bytes and the work that it owns so far, and its number; updated.
    """
    owners: dict[int, int] = {}
    for number, nbytes, work in sorted(parameters, key=lambda parameter: -parameter[1]):
        held, done, rank = ranks[0]
        heapq.heapreplace(ranks, (held + nbytes, done + work, rank))
        owners[number] = rank
    return owners


def share_blocks(sizes: Sequence[int], held: list[int]) -> list[int]:
    """Return the owner of each block of a bucket, ascending.

    Args:
        sizes: of the blocks in their order, in bytes, each at least 1.
        held: the bytes that each rank owns so far; updated.
    """
    ends, world_size = list(itertools.accumulate(sizes, initial=0)), len(held)

    def after(block: int, most: int) -> int:  # the first block that a rank does not take if it begins with this one
        return bisect.bisect_right(ends, ends[block] + most) - 1

    def fits(most: int) -> bool:
        block = 0
        for _ in range(world_size):
            block = after(block, most)
        return block == len(sizes)

    least = max(*sizes, -(-ends[-1] // world_size))
    most = least + bisect.bisect_left(range(max(sizes)), True, key=lambda more: fits(least + more))
    needed = [0] * (len(sizes) + 1)  # ranks for a block and those behind it
    for block in reversed(range(len(sizes))):
        needed[block] = 1 + needed[after(block, most)]
    owners, begin, total = list[int](), 0, sum(held) + ends[-1]
    for rank in range(world_size):
        end, left, before = begin, world_size - rank, held[rank] - ends[begin]
        last = after(begin, most)
        while end < last and (needed[end] >= left or left * (2 * (before + ends[end]) + sizes[end]) <= 2 * total):
            end += 1  # other ranks cannot take it, or half of it is missing to an equal share
        total -= held[rank] + ends[end] - ends[begin]
        held[rank] += ends[end] - ends[begin]
        owners += [rank] * (end - begin)
        begin = end
    return owners
