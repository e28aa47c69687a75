"""Training programs whose transfers finish at the wait (`late.py`).

They have the plain loop's bits, and do not touch the memory of a transfer between its launch and its wait. On one
stream such a program is safe over NCCL, too.

`sharding_factor` is left out. There a rank posts a receive into memory that it sends next: the peer answers only after
it has received the message, which this checker cannot know.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives import ALGORITHMS, Kind, Tag, Transport

from ..support.carried import assert_same_bits, reduction
from ..support.late import LateBackend, on_late_threads
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_states
from ..support.programs import Program, Round, Step, compare, run_rank

EVERY_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])
CAP = 0.001  # MiB: several buckets, and several under way at once
STEPS = (
    Step(clips=((0.1, 2.0),)),
    Step((Round(sync=False), Round(), Round(sync=False))),
    Step(toggle=("frozen",), clips=((0.1, 3.0),)),
)
FEWER = (Step((Round(), Round(ranks=1))), Step((Round(ranks=1),)))  # not at stage 3, where all ranks run all forwards


def check(program: Program) -> int:
    """Compare a program with the plain loop. Return the most collectives of the backend that were under way."""

    def run(transport: Transport) -> tuple[Any, int]:
        assert isinstance(transport.backend, LateBackend)
        return run_rank(program, transport), transport.backend.most_launched

    results = on_late_threads(program.world_size, run)
    states = results[0][0][3]
    assert states is not None
    assert_same_states(states, compare(program, [found for found, _ in results]).optimizer.state_dict())
    return min(most for _, most in results)


@pytest.mark.parametrize("collective", ["all_to_all", "pairwise"])
@EVERY_STAGE
@pytest.mark.by_default("2-all_to_all", "3-pairwise")
def test_training_has_the_plain_loops_bits_when_every_transfer_finishes_late(stage: int, collective: str) -> None:
    """With clips, `no_sync`, missing gradients, an unfrozen parameter, and ranks without micro-batches."""
    steps = STEPS + (FEWER if stage < 3 else ())
    exact = Program(3, stage, bucket_cap_mb=CAP, collective=collective, steps=steps)
    mixed = Program(2, stage, bucket_cap_mb=CAP, collective=collective, precision=PRECISIONS["bf16"], steps=steps)
    for program in (exact, mixed):
        assert check(program) >= (2 if collective == "all_to_all" else 0)


@EVERY_STAGE
@pytest.mark.by_default("2")
def test_training_by_the_groups_own_reduce_scatter_touches_nothing_under_way(stage: int) -> None:
    """With one round a step, the sums of `late.py` have the order of the plain loop's."""
    assert check(Program(3, stage, collective="native", steps=(Step((Round(),), clips=((0.1, 2.0),)),) * 2)) >= 2


@pytest.mark.parametrize("waits", [1, 1000])
@pytest.mark.by_default("1000")
def test_a_backend_may_hold_the_tensors_of_a_transfer_after_its_wait(
    waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL's does for a while. A unit's memory is gathered into again when nobody holds it, and not before."""
    held = threading.local()
    collective = LateBackend._collective

    def holding(self: LateBackend, name: str, out: Tensor, source: Tensor, *given: Any) -> Any:
        vars(held).setdefault("tensors", deque(maxlen=waits)).append((out, source))
        return collective(self, name, out, source, *given)

    monkeypatch.setattr(LateBackend, "_collective", holding)
    check(Program(3, 3, bucket_cap_mb=CAP, collective="all_to_all", steps=STEPS))


# -- errors that the backend reports -----------------------------------------------------------------------------------

BOUNDS = [0, 3, 8]
GATHER = Tag(Kind.ALL_GATHER, "parameters")
Access = Callable[[Tensor, Tensor], object]


def reduce_and_touch(algorithm: str, touch: Access) -> list[Tensor]:
    """Reduce on two ranks. Rank 1 calls ``touch`` on its contribution and its output before the wait."""

    def program(transport: Transport) -> Tensor:
        source = torch.arange(8.0) + transport.rank
        out = torch.zeros(BOUNDS[transport.rank + 1] - BOUNDS[transport.rank])
        work = ALGORITHMS[algorithm](transport).reduce_scatter(source, BOUNDS, out, start=None, tag=reduction())
        if transport.rank == 1:
            touch(source, out)
        work.wait()
        return out

    return on_late_threads(2, program)


def gather_and_touch(algorithm: str, touch: Access, bounds: list[int]) -> list[Tensor]:
    """Gather on two ranks. Rank 1 calls ``touch`` on its slice and on rank 0's before the wait."""

    def program(transport: Transport) -> Tensor:
        whole = torch.arange(8.0)
        work = ALGORITHMS[algorithm](transport).all_gather(whole, bounds, tag=GATHER)
        if transport.rank == 1:
            touch(whole[bounds[1] :], whole[: bounds[1]])
        work.wait()
        return whole

    return on_late_threads(2, program)


@pytest.mark.parametrize(("algorithm", "operation"), [("all_to_all", "all_to_all"), ("pairwise", "send to rank 0")])
def test_a_contribution_that_is_written_before_the_wait_is_found(algorithm: str, operation: str) -> None:
    said = rf"^rank 1: {operation} in bucket 0 \[reduce_scatter, round 0, index 0\]: its input was written"
    with pytest.raises(AssertionError, match=said):
        reduce_and_touch(algorithm, lambda source, out: source.add_(1))


@pytest.mark.parametrize(
    ("algorithm", "sends", "receives"),
    [("all_to_all", "all_gather", "all_gather"), ("pairwise", "send to rank 0", "receive from rank 0")],
)
def test_a_write_to_a_gather_under_way_is_found(algorithm: str, sends: str, receives: str) -> None:
    tag = r"in parameters \[all_gather, round 0, index 0\]: its"
    with pytest.raises(AssertionError, match=f"^rank 1: {sends} {tag} input was written"):
        gather_and_touch(algorithm, lambda own, others: own.add_(1), [0, 4, 8])
    with pytest.raises(AssertionError, match=f"^rank 1: {receives} {tag} output was written"):
        gather_and_touch(algorithm, lambda own, others: others.fill_(2), [0, 4, 8])


@pytest.mark.parametrize("algorithm", ["all_to_all", "pairwise"])
def test_what_is_read_before_the_wait_is_nan(algorithm: str) -> None:
    seen: list[Tensor] = []
    found = gather_and_touch(algorithm, lambda own, others: seen.extend([own.clone(), others.clone()]), [0, 4, 8])
    assert_same_bits(seen[0], torch.arange(4.0, 8.0))
    assert seen[1].isnan().all()
    for whole in found:
        assert_same_bits(whole, torch.arange(8.0))


def test_a_collective_that_is_never_waited_for_is_found() -> None:
    def program(transport: Transport) -> None:
        ALGORITHMS["all_to_all"](transport).all_gather(torch.ones(8), [0, 4, 8], tag=GATHER)

    with pytest.raises(AssertionError, match=r"all_gather in parameters .*: it was never waited for"):
        on_late_threads(2, program)
