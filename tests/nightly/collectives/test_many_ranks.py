"""64 ranks on several hosts train the plain loop's bits."""

from __future__ import annotations

from typing import Any

import pytest

from collectives import Hierarchical, Transport, on_threads

from ...support.programs import Program, Round, Step, compare, run_rank

pytestmark = pytest.mark.timeout(400)

RANKS, CLIPS = 64, ((0.5, 2.0),)


@pytest.mark.parametrize("case", [(3, 8), (0, 8), (2, 2), (3, 2)], ids=str)
def test_64_ranks_on_several_hosts_train_as_the_plain_loop_does(case: tuple[int, int]) -> None:
    """Where no unit travels, every third rank has no micro-batch in the second step, and catches up."""
    stage, hosts = case

    def by_hosts(transport: Transport) -> Hierarchical:
        by_host = [range(RANKS)[host * RANKS // hosts : (host + 1) * RANKS // hosts] for host in range(hosts)]
        transport.route(by_host)
        return Hierarchical(transport, by_host)

    whole, few = Step((Round(),), clips=CLIPS), Step((Round(ranks=None if stage == 3 else 43),), clips=CLIPS)
    program: Any = Program(RANKS, stage, collective=by_hosts, steps=(whole, few, whole))  # type: ignore[arg-type]
    compare(program, on_threads(RANKS, lambda transport: run_rank(program, transport), timeout=60.0))
