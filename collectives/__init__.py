"""Moves flat tensors between ranks: reduce-scatter and all-gather with uneven splits, and buckets in order.

It has never heard of an optimizer. An algorithm is a class that is built on a transport; `ALGORITHMS` names them.
"""

from __future__ import annotations

from collections.abc import Callable

from .bucketing import BucketQueue
from .hierarchical import Hierarchical
from .loopback import Loopback, on_threads, solo
from .messages import (
    Chain,
    Collective,
    CollectiveError,
    Kind,
    MismatchError,
    PeerError,
    Region,
    Tag,
    Traffic,
    Work,
)
from .pairwise import Pairwise
from .ring import Ring
from .shared import Shared
from .topology import automatic, hierarchical, shared
from .transport import Transport

Algorithm = Callable[[Transport], Collective]


def _native(transport: Transport) -> Collective:
    from .native import Native  # the one module that needs torch.distributed

    return Native(transport)


ALGORITHMS: dict[str, Algorithm] = {
    "auto": automatic,
    "pairwise": Pairwise,
    "shared": shared,
    "hierarchical": hierarchical,
    "ring": Ring,
    "native": _native,
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "BucketQueue",
    "Chain",
    "Collective",
    "CollectiveError",
    "Hierarchical",
    "Kind",
    "Loopback",
    "MismatchError",
    "Pairwise",
    "PeerError",
    "Region",
    "Ring",
    "Shared",
    "Tag",
    "Traffic",
    "Transport",
    "Work",
    "on_threads",
    "solo",
]
