"""On real processes, whose hosts are pretended, sums go from host to host with the bits of the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from collectives import topology

from ...support.plain import assert_same_states
from ...support.pool import GlooPool
from ...support.programs import Program, Round, Step, compare, run_rank
from ...support.sockets import on_hosts

STEPS = (Step((Round(), Round(), Round()), clips=((0.1, 2.0),)), Step((Round(sync=False), Round())))
WAYS = [(collective, stage, hosts) for collective, stage in (("fold", 1), ("auto", 0), ("auto", 2), ("auto", 3))
        for hosts in ([0, 0, 1, 1], [0, 0, 0, 0])]  # fmt: skip


def on_pretended_hosts(group: dist.ProcessGroup, rank: int, program: Program, hosts: list[int]) -> Any:
    """Run the program on a rank. "auto" takes gloo's own collectives for NCCL's."""
    with pytest.MonkeyPatch.context() as patch:
        on_hosts(patch, hosts)
        patch.setattr(topology, "_all_have_nccl", lambda *_: program.collective == "auto")
        return run_rank(program, group)


@pytest.mark.parametrize(("collective", "stage", "hosts"), WAYS, ids=str)
def test_programs_on_hosts_of_two_give_the_bits_of_the_plain_loop(
    gloo: GlooPool, collective: str, stage: int, hosts: list[int]
) -> None:
    """And so does a fold that was asked for on one host."""
    program = Program(4, stage, collective=collective, steps=STEPS)
    results = gloo.run(on_pretended_hosts, program, hosts, ranks=range(4))
    assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())
