"""The open descriptors of this process, so that a test can ask whether any is left."""

from __future__ import annotations

import contextlib
import gc
import os


def opened() -> set[tuple[int, int, int]]:
    """Return the open descriptors as (number, device, inode), after garbage of earlier tests has been collected.

    Compare two results in one direction only: a descriptor of the later set that the earlier set lacks was left open,
    even if its number was used before. A descriptor that is missing later means nothing: garbage of an earlier test may
    go at any time.
    """
    gc.collect()
    return listed()


def listed() -> set[tuple[int, int, int]]:
    """Return the same without a collection, which takes longer than a small test."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            status = os.fstat(int(name))
            found.add((int(name), status.st_dev, status.st_ino))
    return found
