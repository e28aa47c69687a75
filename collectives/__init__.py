"""Reduce-scatter and all-gather of flat tensors with uneven shards, and a pipeline that keeps buckets in order.

An algorithm is a class that is built on a transport; `ALGORITHMS` lists the named ones. This package knows nothing of
optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from . import named
from .algorithms.base import Collective, all_gather_from
from .algorithms.fold import Fold
from .algorithms.hierarchical import Hierarchical
from .algorithms.hybrid_sharding import Replicated
from .algorithms.pairwise import Pairwise
from .algorithms.process_group import AllToAll
from .algorithms.ring import Ring
from .algorithms.shared import Shared
from .backend import Region
from .backends.threads import Loopback, on_threads, solo
from .broadcast import ring_broadcast
from .messages import (
    Chain,
    CollectiveError,
    Kind,
    MismatchError,
    PeerError,
    Tag,
    Traffic,
    Work,
    pass_on,
)
from .named import folds
from .pipeline import Pipeline, PipelineStage
from .topology import CPU, Choice, algorithm_for, by_name, choose, replicate, route_by_hosts
from .transport import Transport, as_a_whole
from .watching import behind_a_meeting, watch

LOG = logging.getLogger(__name__)
ALGORITHMS = named.ALGORITHMS
"""The named algorithms, a row each, by the name that ``collective=`` accepts."""
Algorithm = Callable[[Transport], Collective]
"""What ``collective=`` accepts besides a name: a class or function that builds a `Collective` on a transport."""


def check_name(algorithm: str | Algorithm) -> None:
    """Raise `ValueError` if ``algorithm`` is neither "auto", a name in `ALGORITHMS` nor a class. Local."""
    if not callable(algorithm) and algorithm not in ("auto", *ALGORITHMS):
        raise ValueError(f"collective must be one of auto, {', '.join(ALGORITHMS)} or a class, not {algorithm!r}")


def build(
    transport: Transport, algorithm: str | Algorithm, device: torch.device = CPU, factor: int | None = None
) -> Choice:
    """Build an algorithm on a transport. Collective.

    Args:
        transport: of all ranks.
        algorithm: "auto", a name in `ALGORITHMS`, or a class.
        device: the device of the tensors that will be moved; "auto" depends on it.
        factor: the number of ranks per replica, a divisor of the number of all ranks; None for a single replica.

    Raises:
        ValueError: there is no algorithm of this name.
        CollectiveError: the algorithm does not work with the hosts or the process group of these ranks.
    """
    choice = _build(transport, algorithm, device, factor)
    route_by_hosts(choice.collective.transport)
    watch(choice.collective.transport, choice.shard_group.world_size, device)
    LOG.info(
        "%s of %d: collective %s (%s)",
        transport.rank_label,
        transport.world_size,
        choice.collective.name,
        choice.reason,
    )
    return choice


def _build(transport: Transport, algorithm: str | Algorithm, device: torch.device, factor: int | None) -> Choice:
    check_name(algorithm)
    if factor is not None and factor < transport.world_size:
        return replicate(transport, factor, algorithm, device)
    if algorithm == "auto":
        return choose(transport, device)
    if isinstance(algorithm, str):
        return by_name(transport, algorithm, device)
    return Choice(algorithm(transport), "asked for as a class")


__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AllToAll",
    "Chain",
    "Choice",
    "Collective",
    "CollectiveError",
    "Fold",
    "Hierarchical",
    "Kind",
    "Loopback",
    "MismatchError",
    "Pairwise",
    "PeerError",
    "Pipeline",
    "PipelineStage",
    "Region",
    "Replicated",
    "Ring",
    "Shared",
    "Tag",
    "Traffic",
    "Transport",
    "Work",
    "algorithm_for",
    "all_gather_from",
    "as_a_whole",
    "behind_a_meeting",
    "build",
    "check_name",
    "folds",
    "on_threads",
    "pass_on",
    "ring_broadcast",
    "solo",
]
