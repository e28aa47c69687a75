"""The same on real processes over gloo: bits, overlap by the order of events, peaks of memory, failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from collectives import Collective, Kind, Tag
from collectives.algorithms.process_group import Native
from collectives.backends.gloo import connect
from zero import Offload, StochasticRounding

from .. import peaks
from ..peaks import BLOCKS
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_model, assert_same_states
from ..support.pool import GlooPool, ProgramError
from ..support.programs import Program, Round, Step, compare
from ..support.rows import rows
from . import on_processes

CLIPPED = (Step(clips=((0.1, 2.0),)), Step((Round(sync=False), Round())))
FEWER = (Step((Round(), Round(ranks=1))), Step((Round(ranks=1),)), Step(toggle=("frozen",), clips=((0.1, 3.0),)))


def check(gloo: GlooPool, program: Program, ranks: Sequence[int]) -> None:
    results = gloo.run(on_processes.whole_program, program, ranks=ranks)
    assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())


@pytest.mark.parametrize(
    "program",
    rows(
        [
            Program(4, 3, "shampoo", sharding_factor=2, steps=CLIPPED),
        ],
        [
            Program(2, 0, "adamw fused", steps=CLIPPED),
            Program(3, 1, "adamw fused", 1e-6, steps=FEWER),
            Program(3, 2, collective="all_to_all", steps=CLIPPED),
            Program(3, 3, dtype=torch.bfloat16, rounding=StochasticRounding(2), steps=CLIPPED),
            Program(4, 1, precision=PRECISIONS["bf16"], rounding=StochasticRounding(2), steps=FEWER),
        ],
    ),
    ids=lambda p: f"W{p.world_size}-stage{p.stage}",
)
def test_programs_give_the_bits_of_the_plain_loop(gloo: GlooPool, program: Program) -> None:
    check(gloo, program, range(program.world_size))


ON_HOST = Offload("cpu", parameters="cpu")
STEPPED_THERE = Offload("cpu", parameters="cpu", step="cpu")


@pytest.mark.parametrize(
    "program",
    rows(
        [],
        [
            Program(3, 3, "adamw", offload=ON_HOST, precision=PRECISIONS["bf16"], steps=CLIPPED),
            Program(4, 3, "shampoo", offload=ON_HOST, sharding_factor=2, steps=CLIPPED),
            Program(2, 3, "adamw fused", offload=ON_HOST, collective="all_to_all", steps=CLIPPED),
            Program(1, 3, "sgd momentum", offload=ON_HOST, collective="native", steps=CLIPPED),
            Program(3, 3, "adamw fused", offload=STEPPED_THERE, precision=PRECISIONS["bf16"], steps=CLIPPED),
            Program(2, 3, "adamw", offload=STEPPED_THERE, collective="all_to_all", steps=CLIPPED),
        ],
    ),
    ids=lambda p: f"W{p.world_size}-{p.collective}",
)
def test_parameters_on_the_host_change_no_bit(gloo: GlooPool, program: Program) -> None:
    results = gloo.run(on_processes.with_parameters_on_the_host, program, ranks=range(program.world_size))
    assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())


@pytest.mark.law("group ranks")
@pytest.mark.parametrize(("stage", "factor"), rows([(2, None)], [(3, 1)]))
def test_the_sub_group_1_3_of_four_trains_alone(gloo: GlooPool, stage: int, factor: int | None) -> None:
    check(gloo, Program(2, stage, sharding_factor=factor, steps=CLIPPED), (1, 3))


@pytest.mark.parametrize("stage", rows([], [0, 1, 2, 3]))
def test_groups_without_gloo_get_one_beside_them_that_their_ranks_alone_make(gloo: GlooPool, stage: int) -> None:
    """Once for all optimizers of a group, whatever other groups a rank is in. It is freed with the group."""
    program = Program(2, stage, steps=CLIPPED)
    results = gloo.run(on_processes.without_gloo, program, ranks=range(4))
    compare(program, [result for result, _ in results if result is not None])
    assert [sockets for _, sockets in results] == [0] * 4


@pytest.mark.law("every rank enters")
@pytest.mark.parametrize(("stage", "algorithm"), rows([(0, "native"), (1, "all_to_all")], [(2, "ring"), (2, "native")]))
def test_ranks_with_fewer_backwards_catch_up_with_every_algorithm(gloo: GlooPool, algorithm: str, stage: int) -> None:
    """And give the same bits on integers."""
    expected = gloo.run(on_processes.integer_gradients, "pairwise", 2, ranks=range(3))[0]
    for ours in gloo.run(on_processes.integer_gradients, algorithm, stage, ranks=range(3)):
        assert_same_model(ours, expected)


# -- overlap -----------------------------------------------------------------------------------------------------------


@pytest.mark.law("launch order")
@pytest.mark.parametrize("stage", [0, 2])
def test_buckets_are_launched_while_the_rest_of_the_backward_runs(gloo: GlooPool, stage: int) -> None:
    for events in gloo.run(on_processes.recorded, stage):
        launches = [event for event in events if event.startswith("launch")]
        assert launches == [f"launch {i}" for i in range(6)]
        assert events.index("launch 0") < events.index("backward 0")
        for i in range(4):  # bucket i holds layer 5 - i; it is launched before the second layer after it begins
            assert events.index(f"launch {i}") < events.index(f"backward {3 - i}")


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.law("memory")
def test_at_no_moment_a_rank_holds_more_than_its_stage_says_and_three_buckets(gloo: GlooPool) -> None:
    for found in gloo.run(peaks.measure, 64, 2, 0.13, ranks=range(2), limit=120):
        padding = 64 * (BLOCKS + 2) * 6
        for kind, factor in (("parameters", 1), ("gradients", 1 / 2), ("optimizer", 2 / 2)):
            assert abs(found.between[kind] - factor * found.whole) <= padding, kind
        assert found.bucket < found.whole / BLOCKS
        assert found.scratch <= 3 * found.bucket
        assert found.above <= 3 * found.bucket


# -- the baseline of torch's own collectives ---------------------------------------------------------------------------


def native_collectives(group: dist.ProcessGroup, rank: int, dtype: torch.dtype, bounds: list[int]) -> Tensor:
    algorithm: Collective = Native(connect(group))
    source = torch.arange(bounds[-1], dtype=dtype) + rank
    out = torch.empty(bounds[rank + 1] - bounds[rank], dtype=dtype)
    tag = Tag(Kind.REDUCE_SCATTER, "a test")
    algorithm.reduce_scatter(source.clone(), bounds, out, start=torch.ones_like(out), tag=tag).wait()
    whole = torch.full((bounds[-1],), -1, dtype=dtype)
    whole[bounds[rank] : bounds[rank + 1]] = out
    algorithm.all_gather(whole, bounds, tag=tag).wait()
    return whole


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_native_baseline_takes_uneven_and_empty_slices(gloo: GlooPool, dtype: torch.dtype) -> None:
    expected = torch.arange(17, dtype=dtype) * 3 + 3 + 1
    for bounds in ([0, 5, 5, 17], [0, 5, 11, 17]):  # each owner broadcasts its slice; slices are padded
        for whole in gloo.run(native_collectives, dtype, bounds, ranks=range(3)):
            assert torch.equal(whole, expected)


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.law("agreement at construction")
@pytest.mark.law("errors")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (on_processes.different_models, ("ValueError", "1.weight [8, 8]", "1.weight [9, 8]")),
        (on_processes.different_calls, ("step()", "consolidate_state_dict(to=0)")),
    ],
)
def test_ranks_that_differ_learn_of_it_at_once(gloo: GlooPool, program: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ProgramError) as caught:
        gloo.run(program, ranks=range(2))
    assert set(caught.value.errors) == {0, 1}
    for error in caught.value.errors.values():
        assert all(word in ": ".join(error) for word in words), error
        assert "no answer" not in error[1]
