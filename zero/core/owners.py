"""Which rank owns which parameter, where a parameter has one owner because its class steps it by its shape.

Knows: shapes, bytes, a number of ranks. Does not know: buckets, classes.

Parameters are given out one after the other, the largest first, each to the rank that has the fewest bytes so far. Then
no rank has more than 1/W of the bytes and one largest parameter (Graham, "Bounds on Multiprocessing Timing Anomalies",
1969: when a rank takes its last parameter, no other has less). Among ranks with equal bytes, the one whose parameters
take the least work in a step gets the next.
"""

from __future__ import annotations

import heapq
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
