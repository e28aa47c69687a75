"""Random programs at each stage, in each precision and on gloo processes give the plain loop's bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings

from ...support.machine.backends import Processes
from ...support.machine.hosts import ThreadsOnHosts, ThreadsWithParametersOnTheHost
from ...support.machine.random_programs import EDGES, UNITS, Collectives, RandomPrograms
from ...support.narrowed import PRECISIONS
from ...support.pool import SIZE, GlooPool

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:gaps in the memory of:UserWarning", "ignore:.*set aside:UserWarning", "ignore:not restored from"
    ),
    pytest.mark.hypothesis,
    pytest.mark.timeout(1500),
]
THOROUGH = settings.default.max_examples > 100
ON_HOSTS = ("auto", "shared", "one host", "two hosts", "hosts in a row")
KINDS: dict[str, tuple[Sequence[int], Sequence[str]]] = {
    **{f"stage {stage}": ((stage,), ("",)) for stage in (0, 1, 3)},
    **{precision: ((0, 1, 2, 3), (precision,)) for precision in (*PRECISIONS, "by kind", "ends in fp16", "policy")},
}


class OnThreads(RandomPrograms):
    make_backend = ThreadsOnHosts
    collectives = Collectives(ON_HOSTS, ("ring",), UNITS, stacks=True, rounds=True, edges=EDGES)


@pytest.mark.law("states from steps")
@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_on_threads_give_the_bits_of_the_plain_loop(kind: str) -> None:
    class OfKind(OnThreads):
        begins, precisions = KINDS[kind]

    OfKind.check(30 if THOROUGH else 8, 40 if THOROUGH else 20)


@pytest.mark.usefixtures("copied_from_the_host", "launched", "accelerated")
def test_random_programs_with_parameters_on_the_host_give_the_bits_of_the_plain_loop() -> None:
    class OnTheHost(OnThreads):
        make_backend = ThreadsWithParametersOnTheHost
        collectives = replace(
            OnThreads.collectives,
            edges=tuple(edge for edge in EDGES if edge != "averages"),  # which are refused there
        )
        begins, precisions = (3,), ("", "", "bf16", "fp16", "by kind")

    OnTheHost.check(30 if THOROUGH else 8, 40 if THOROUGH else 20)


def test_random_programs_on_processes_give_the_bits_of_the_plain_loop(gloo: GlooPool) -> None:
    class OnProcesses(RandomPrograms):
        make_backend = staticmethod(lambda: Processes(gloo))
        most_ranks = SIZE
        collectives = Collectives(
            ("auto", "pairwise", "hierarchical", "fold"),
            ("ring", "native", "all_to_all"),
            UNITS,
            meshes=True,
            stacks=True,
            rounds=True,
            edges=EDGES,
        )
        precisions = ("", "", "bf16", "fp16", "by kind", "policy")

    OnProcesses.check(40 if THOROUGH else 8, 30 if THOROUGH else 20)
