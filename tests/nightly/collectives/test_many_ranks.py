"""64 ranks on several hosts train the plain loop's bits."""

from __future__ import annotations

import pytest

from collectives import Hierarchical, Transport, on_threads

from ...dials.loops import step
from ...dials.record import config_with
from ...support.machine.program import Clip, Step, Uneven, ZeroGrad
from ...support.machine.run import Played, play, run

pytestmark = pytest.mark.timeout(400)

RANKS = 64


@pytest.mark.parametrize(("stage", "hosts"), [(3, 8), (0, 8), (2, 2), (3, 2)])
def test_64_ranks_on_several_hosts_train_as_the_plain_loop_does(stage: int, hosts: int) -> None:
    """Where no unit travels, every third rank has no micro-batch in the second step, and catches up."""

    def by_hosts(transport: Transport) -> Hierarchical:
        by_host = [range(RANKS)[host * RANKS // hosts : (host + 1) * RANKS // hosts] for host in range(hosts)]
        transport.route(by_host)
        return Hierarchical(transport, by_host)

    config = config_with({"stage": stage, "world_size": RANKS, "collective": by_hosts})
    few = [Uneven(2, (1, 1, stage // 3)), Clip(0.5), Step(), ZeroGrad()]
    commands = [*step(1), *few, *step(3)]
    results = on_threads(RANKS, lambda transport: play(config, commands, transport), timeout=60.0)
    run(config, *commands, backend=Played(results))
