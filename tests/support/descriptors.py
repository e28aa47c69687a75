"""The open descriptors of this process, so that a test can ask whether any is left."""

from __future__ import annotations

import contextlib
import gc
import os


def opened() -> set[tuple[int, int, int]]:
    """Return the open descriptors as (number, device, inode), after a collection of garbage."""
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
