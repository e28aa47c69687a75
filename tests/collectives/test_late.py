"""Training has the plain loop's bits, and touches no memory of a transfer between its launch and its wait.

Every transfer finishes at its wait (`tests.support.late`). On one stream such a program is safe over NCCL, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from collectives import ALGORITHMS, Kind, Tag, Transport

from ..support.carried import reduction
from ..support.late import LateBackend, on_late_threads
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_states
from ..support.programs import Program, Round, Step, compare, run_rank
from ..support.rows import only

GATHER = Tag(Kind.ALL_GATHER, "parameters")
STEPS = (
    Step(clips=((0.1, 2.0),)),
    Step((Round(sync=False), Round(), Round(sync=False))),
    Step(toggle=("frozen",), clips=((0.1, 3.0),)),
)
FEWER = (Step((Round(), Round(ranks=1))), Step((Round(ranks=1),)))  # not at stage 3, where all ranks run all forwards
ONE_ROUND = (Step((Round(),), clips=((0.1, 2.0),)),) * 2  # for sums in the order of the plain loop's, by `late.py`
SEVERAL = Program(3, 2, bucket_cap_mb=0.001, collective="all_to_all", steps=STEPS)  # several buckets under way
MIXED = replace(SEVERAL, world_size=2, precision=PRECISIONS["bf16"])
PROGRAMS = {
    "all_to_all, stage 0": replace(SEVERAL, stage=0, steps=STEPS + FEWER),
    "all_to_all, stage 2": replace(SEVERAL, steps=STEPS + FEWER),
    "all_to_all, stage 3": replace(SEVERAL, stage=3),
    "all_to_all, stage 1, bf16": replace(MIXED, stage=1, steps=STEPS + FEWER),
    "all_to_all, stage 3, bf16": replace(MIXED, stage=3),
    "pairwise, stage 1": replace(SEVERAL, stage=1, collective="pairwise"),
    "pairwise, stage 3, bf16": replace(MIXED, stage=3, collective="pairwise"),
    "replicas, stage 2": Program(3, 2, sharding_factor=1, steps=STEPS + FEWER),
    "replicas, stage 3": Program(4, 3, sharding_factor=2, steps=STEPS),
    "native, stage 2": Program(3, 2, collective="native", steps=ONE_ROUND),
    "native, stage 3": Program(3, 3, collective="native", steps=ONE_ROUND),
}


@pytest.mark.parametrize(
    "name", only(PROGRAMS, "all_to_all, stage 3, bf16", "pairwise, stage 3, bf16", "native, stage 3")
)
def test_training_has_the_plain_loops_bits_when_every_transfer_finishes_late(name: str) -> None:
    """With clips, `no_sync`, missing gradients, an unfrozen parameter, and ranks without micro-batches. Collectives of
    the backend are under way at once."""
    program = PROGRAMS[name]

    def run(transport: Transport) -> tuple[Any, int]:
        assert isinstance(transport.backend, LateBackend)
        return run_rank(program, transport), transport.backend.most_launched

    results = on_late_threads(program.world_size, run)
    states = results[0][0][3]
    assert states is not None
    assert_same_states(states, compare(program, [found for found, _ in results]).optimizer.state_dict())
    assert min(most for _, most in results) >= (2 if program.collective in ("all_to_all", "native") else 0)


@pytest.mark.parametrize("bounds", [[0, 4, 8, 13], [0, 5, 5, 12]], ids=str)
def test_slices_are_padded_to_the_longest_if_that_adds_at_most_half(bounds: list[int]) -> None:
    """Else each owner broadcasts its own. Counts the bytes of a gather."""

    def program(transport: Transport) -> tuple[int, int]:
        ALGORITHMS["all_to_all"](transport).all_gather(torch.ones(bounds[-1]), bounds, tag=GATHER).wait()
        return transport.traffic.payload_sent, transport.traffic.payload_received

    for rank, found in enumerate(on_late_threads(3, program)):
        own = bounds[rank + 1] - bounds[rank]
        assert found == ((40, 40) if bounds[-1] == 13 else (8 * own, 4 * (bounds[-1] - own)))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("all_to_all", r"rank 1: all_to_all in bucket 0 \[reduce_scatter, round 0, index 0\]: its input was written"),
        ("pairwise", r"rank 1: send to rank 0 in bucket 0 \[reduce_scatter, round 0, index 0\]: its input was written"),
        ("forgotten", r"all_gather in parameters .*: it was never waited for"),
    ],
)
def test_what_is_written_before_its_wait_or_never_waited_for_is_found(algorithm: str, said: str) -> None:
    def program(transport: Transport) -> None:
        source = torch.ones(8)
        if algorithm == "forgotten":
            ALGORITHMS["all_to_all"](transport).all_gather(source, [0, 4, 8], tag=GATHER)
            return
        collective, out = ALGORITHMS[algorithm](transport), torch.zeros(4)
        work = collective.reduce_scatter(source, [0, 4, 8], out, start=None, tag=reduction())
        source.add_(transport.rank)
        work.wait()

    with pytest.raises(AssertionError, match=said):
        on_late_threads(2, program)
