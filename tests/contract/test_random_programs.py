"""Random models and random programs: after every command every rank has the plain loop's results, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import settings

from ..support.machine.hosts import Sockets, ThreadsOnHosts
from ..support.machine.random_programs import EDGES, UNITS, Collectives, RandomPrograms
from ..support.rows import ALL

pytestmark = pytest.mark.filterwarnings(
    "ignore:gaps in the memory of:UserWarning", "ignore:.*set aside:UserWarning", "ignore:not restored from"
)
THOROUGH = settings.default.max_examples > 100


@pytest.mark.law("states from steps")
@pytest.mark.hypothesis
@pytest.mark.timeout(1500)
def test_random_programs_on_threads_give_the_bits_of_the_plain_loop() -> None:
    class OnThreads(RandomPrograms):
        make_backend = ThreadsOnHosts
        collectives = Collectives(
            ("auto", "shared", "one host", "two hosts", "hosts in a row"), ("ring",), UNITS, stacks=True, edges=EDGES
        )
        begins = (0, 1, 2) if THOROUGH else (2,)  # a load may change it

    OnThreads.check(150 if THOROUGH else 7 if ALL else 4, 40 if THOROUGH else 20)


@pytest.mark.hypothesis
@pytest.mark.timeout(1500)
def test_random_programs_in_common_memory_give_the_bits_of_the_plain_loop() -> None:
    class OnSockets(RandomPrograms):
        make_backend = Sockets
        most_ranks = 4
        collectives = Collectives(("auto", "pairwise"), ("ring",), UNITS, edges=EDGES)
        begins = (3,)
        precisions = ("", "", "bf16", "by kind")

    OnSockets.check(50 if THOROUGH else 5 if ALL else 4, 40 if THOROUGH else 20)
