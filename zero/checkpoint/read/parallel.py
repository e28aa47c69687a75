"""Work on the blocks of a file by several threads of one process.

Knows: threads. Does not know: files. Python's other threads run while one reads or sums a block, so that two take half
the time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

MOST = 4  # threads of one process: more of them wait for the same disk

_Block = TypeVar("_Block")


def threads_of_rank(world_size: int) -> int:
    """Return how many threads a rank uses if all ``world_size`` ranks may be on this host, and read at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST, cores // world_size))


def each_block(blocks: Sequence[_Block], read: Callable[[_Block], None], threads: int) -> None:
    """Call ``read`` for each block, in ``threads`` threads, of which the caller's is one.

    Returns when no thread reads any more. If reads fail, the error of the first of these blocks is raised.
    """
    numbers = iter(range(len(blocks)))
    failed: list[tuple[int, BaseException]] = []

    def work() -> None:
        while not failed and (number := next(numbers, None)) is not None:
            try:
                read(blocks[number])
            except BaseException as error:  # raised by the caller's thread
                failed.append((number, error))

    others = []
    try:
        for _ in range(min(threads, len(blocks)) - 1):
            other = threading.Thread(target=work, name="zero-read")
            other.start()
            others.append(other)
    except RuntimeError:  # no further thread can be started: those that there are do the work
        pass
    work()
    for other in others:
        other.join()
    if failed:
        raise min(failed, key=lambda pair: pair[0])[1]
