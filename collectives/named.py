"""The algorithms that have a name, a row each: how one is built, and what it needs. The choice of an algorithm, the
engine, the plan and the tests read this table.

Knows: the algorithms. Does not know: how ranks find their hosts, which algorithm is the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from .algorithms.base import Collective
from .algorithms.fold import Fold
from .algorithms.hierarchical import Hierarchical
from .algorithms.pairwise import Pairwise
from .algorithms.process_group import AllToAll, Native
from .algorithms.ring import Ring
from .algorithms.shared import Shared
from .transport import Transport

Hosts = Sequence[Sequence[int]]
"""The ranks of each host."""


class Needs(Enum):
    """What an algorithm needs besides messages."""

    NOTHING = "nothing"
    ONE_HOST = "ranks of one host, which share memory"
    HOSTS = "memory that the ranks of each host share"
    ORDERED_HOSTS = "hosts of neighbouring ranks, as many on each"
    PROCESS_GROUP = "the collectives of a process group of exactly its ranks"


@dataclass(frozen=True)
class AlgorithmRow:
    """An algorithm.

    Attributes:
        build: makes it on a transport of ranks that have what it needs. Local.
        needs: what that is.
        folds: whether a bucket waits while its sum visits all hosts, so that two must be under way.
    """

    build: Callable[[Transport, Hosts], Collective]
    needs: Needs = Needs.NOTHING
    folds: bool = False

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of a host must share memory."""
        return self.needs in (Needs.ONE_HOST, Needs.HOSTS)


ALGORITHMS = {
    "pairwise": AlgorithmRow(lambda transport, _: Pairwise(transport)),
    "shared": AlgorithmRow(lambda transport, _: Shared(transport), Needs.ONE_HOST),
    "hierarchical": AlgorithmRow(Hierarchical, Needs.HOSTS),
    "fold": AlgorithmRow(lambda t, hosts: Fold(t, hosts, Pairwise(t)), Needs.ORDERED_HOSTS, folds=True),
    "ring": AlgorithmRow(lambda transport, _: Ring(transport)),
    "all_to_all": AlgorithmRow(lambda transport, _: AllToAll(transport), Needs.PROCESS_GROUP),
    "native": AlgorithmRow(lambda transport, _: Native(transport), Needs.PROCESS_GROUP),
}
"""The rows by name. ``collective=`` accepts the names."""


def folds(name: str) -> bool:
    """Return the row's `AlgorithmRow.folds`; False if no row has this name, as that of a user's class."""
    return name in ALGORITHMS and ALGORITHMS[name].folds
