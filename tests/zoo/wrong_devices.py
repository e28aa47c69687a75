"""Bugs of what runs on devices, and between hosts, as functions: see `wrong_training`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from collectives.launches.ledger import count

_HERE = threading.local()  # what a rank keeps, which is a thread


WRONG: dict[str, Callable[..., Any]] = {
    "one-rank-alone-gathers-nothing": lambda real, self, own, buffer, bounds, *, tag: self._all_gather(
        own, buffer, bounds, tag
    ),
    "frozen-parameters-on-the-host-get-masters": lambda real, self: (self._flats(), real(self))[1],
    "a-digest-without-bounds": lambda real, digest, bounds, dtype: real(digest, [], dtype),
    "a-rank-outside-is-lost": lambda real, self, other: other.waits[0] > count(self.launches),
    "limbs-overflow-32-bits": lambda real, self, limbs, max_norm: real(self, limbs & 0xFFFFFFFF, max_norm),
    "shards-are-even-for-the-ranks-of-all-replicas": lambda real, end, spec, world_size: real(
        end, spec, 2 * world_size
    ),
}
"""The bugs that an expression makes, by name."""
