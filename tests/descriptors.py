"""What this process has open, so that a test can ask whether something is left."""

from __future__ import annotations

import contextlib
import gc
import os


def opened() -> set[tuple[int, int, int]]:
    """Descriptors as (number, device, inode), after what earlier tests left in cycles is gone.

    What is left of a test is in the later set and not in the earlier one, a number that was used again too. The other
    way round says nothing: what an earlier test left may go at any time.
    """
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            status = os.fstat(int(name))
            found.add((int(name), status.st_dev, status.st_ino))
    return found
