"""The same promises on real processes over gloo, for defects that threads could hide."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import Collective, Kind, Pairwise, Tag, Transport, Work
from collectives.algorithms.process_group import Native
from collectives.backends.gloo import connect
from collectives.messages import REPORT_BYTES
from zero import ZeroOptimizer

from .. import peaks
from ..peaks import BLOCKS
from ..support.models import build, odd_batches, odd_loss
from ..support.plain import assert_same_model, assert_same_states, plain_step, share
from ..support.pool import GlooPool, ProgramError
from ..support.programs import Program, Round, Step, compare, run_rank

PROGRAMS = [
    pytest.param(
        Program(world_size, stage, optimizer, cap, steps=steps),
        marks=() if (world_size + stage + ("fused" in optimizer)) % 2 else pytest.mark.slow,
    )
    for world_size, cap in ((1, 25.0), (2, 0.0005), (3, 1e-6), (4, 25.0))
    for stage in (0, 1, 2, 3)
    for optimizer in ("adamw", "adamw fused")
    for steps in (
        (Step(clips=((0.1, 2.0),)), Step((Round(sync=False), Round()))),
        (Step((Round(), Round(ranks=1))), Step((Round(ranks=1),)), Step(toggle=("frozen",), clips=((0.1, 3.0),))),
    )
    if stage < 3 or all(round_.ranks is None for step in steps for round_ in step.rounds)
]


def whole_program(group: dist.ProcessGroup, rank: int, program: Program) -> Any:
    model, norms, trace, states = run_rank(program, group)
    return model, norms, trace, states


@pytest.mark.parametrize(
    "program", PROGRAMS, ids=lambda p: f"W{p.world_size}-stage{p.stage}-{p.optimizer}-{len(p.steps)}"
)
@pytest.mark.by_default(
    "W2-stage0-adamw fused-2",
    "W3-stage1-adamw fused-3",
    "W4-stage2-adamw fused-2",
    "W2-stage3-adamw-2",
    "W4-stage3-adamw-2",
)
def test_programs_give_the_bits_of_the_plain_loop(gloo: GlooPool, program: Program) -> None:
    results = gloo.run(whole_program, program, ranks=range(program.world_size))
    plain = compare(program, results)
    assert_same_states(results[0][3], plain.optimizer.state_dict())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.by_default("3")
def test_parameters_with_one_owner_each_give_the_bits_of_the_plain_loop(gloo: GlooPool, stage: int) -> None:
    program = Program(4, stage, "shampoo", steps=(Step(clips=((0.1, 2.0),)), Step((Round(sync=False), Round()))))
    results = gloo.run(whole_program, program, ranks=range(4))
    assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.by_default("2")
def test_the_sub_group_1_3_of_four_trains_alone(gloo: GlooPool, stage: int) -> None:
    program = Program(2, stage, steps=(Step(clips=((0.1, 2.0),)), Step()))
    results = gloo.run(whole_program, program, ranks=(1, 3))
    assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())


def uneven_rounds(group: dist.ProcessGroup, rank: int, algorithm: str) -> nn.Module:
    model = nn.Linear(5, 3)
    nn.init.constant_(model.weight, 2)
    nn.init.constant_(model.bias, 1)
    optimizer = ZeroOptimizer(
        model, torch.optim.SGD, process_group=group, collective=algorithm, lr=0.5, bucket_cap_mb=1e-6
    )
    for _ in range(3 - rank):
        model(torch.full((1, 5), 1.0 + rank)).sum().backward()
    optimizer.divisor = 4
    optimizer.step()
    optimizer.close()
    return model


@pytest.mark.parametrize("algorithm", ["pairwise", "ring", "all_to_all", "native"])
def test_ranks_with_fewer_backwards_catch_up_with_every_algorithm(gloo: GlooPool, algorithm: str) -> None:
    for model in gloo.run(uneven_rounds, algorithm, ranks=range(3)):
        expected = 2 - 0.5 * (3 * 1 + 2 * 2 + 1 * 3) / 4
        assert bool((model.weight == expected).all())


class Recording:
    """`Pairwise` that records when a bucket's reduction or gather was launched."""

    name = "recording"
    exact = True
    events: list[str]

    def __init__(self, transport: Transport) -> None:
        self.transport, self._inner = transport, Pairwise(transport)
        Recording.events = []

    def reduce_scatter(self, source: Tensor, bounds: Any, out: Tensor, *, start: Tensor | None, tag: Tag) -> Work:
        self.events.append(f"launch {tag.index}")
        return self._inner.reduce_scatter(source, bounds, out, start=start, tag=tag)

    def all_gather(self, buffer: Tensor, bounds: Any, *, tag: Tag) -> Work:
        self.events.append(f"gather {tag.index}")
        return self._inner.all_gather(buffer, bounds, tag=tag)


def overlapping(group: dist.ProcessGroup, rank: int, stage: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    inputs = torch.randn(8, 64, requires_grad=True)
    optimizer = ZeroOptimizer(model, stage=stage, process_group=group, bucket_cap_mb=0.02, collective=Recording)
    for number, layer in enumerate(model):
        layer.register_full_backward_pre_hook(lambda *_, n=number: Recording.events.append(f"backward {n}"))
    for _ in range(2):
        Recording.events.clear()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Recording.events


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_buckets_are_launched_while_the_rest_of_the_backward_runs(gloo: GlooPool, stage: int) -> None:
    for events in gloo.run(overlapping, stage):
        launches = [event for event in events if event.startswith("launch")]
        assert launches == [f"launch {i}" for i in range(6)]
        assert events.index("launch 0") < events.index("backward 0")
        for i in range(4):  # bucket i holds layer 5 - i; it is launched before the second layer after it begins
            assert events.index(f"launch {i}") < events.index(f"backward {3 - i}")


def units_under_way(group: dist.ProcessGroup, rank: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    for number, layer in enumerate(model):
        layer.register_forward_hook(lambda *_, n=number: Recording.events.append(f"forward {n} ends"))
        layer.register_full_backward_hook(lambda *_, n=number: Recording.events.append(f"backward {n} ends"))
    inputs = torch.randn(8, 64, requires_grad=True)
    optimizer = ZeroOptimizer(model, stage=3, process_group=group, collective=Recording)
    for _ in range(2):
        Recording.events.clear()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Recording.events


def test_units_are_gathered_one_ahead_and_buckets_launched_while_earlier_units_run(gloo: GlooPool) -> None:
    for events in gloo.run(units_under_way):
        gathers = [event for event in events if event.startswith("gather")]
        forward, backward = range(6), range(4, -1, -1)  # the last unit is still gathered when the backward begins
        assert gathers == [f"gather {5 - n}" for n in (*forward, *backward)], "of bucket 5 - n, which holds unit n"
        for n in range(5):
            assert events.index(f"gather {5 - n - 1}") < events.index(f"forward {n} ends")
        later = events[events.index("forward 5 ends") :]
        for n in range(5, 0, -1):
            assert later.index(f"gather {5 - n + 1}") < later.index(f"backward {n} ends")
            assert later.index(f"launch {5 - n}") < later.index(f"backward {n - 1} ends")


@pytest.mark.parametrize("collective", ["auto", "pairwise", "all_to_all"])
@pytest.mark.parametrize("ranks", [(0,), (0, 1), (0, 1, 2, 3)])
@pytest.mark.full
def test_a_rank_holds_its_shards_the_root_two_units_and_three_buckets_at_most(
    gloo: GlooPool, ranks: tuple[int, ...], collective: str
) -> None:
    """Ranks that share memory gather nothing: all of them can read every slice."""
    cap = 100 if collective != "auto" else 0.3  # between a unit and the model, of which no unit has to be gathered
    for found in gloo.run(peaks.measure, 64, 3, cap, collective, ranks=ranks, limit=120):
        share, padding = found.whole / len(ranks), 64 * (BLOCKS + 2) * 6
        for kind, factor in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            assert abs(found.between[kind] - factor * share) <= padding, kind
        gathered = found.root + 2 * found.unit if len(ranks) > 1 else 0
        assert found.gathered == (0 if collective == "auto" else gathered)
        if collective == "auto" or len(ranks) == 1:
            assert found.unit < found.bucket <= cap * 2**20
        else:
            assert found.bucket <= found.unit
        assert found.scratch <= 3 * found.bucket
        own = found.unit / len(ranks) if collective == "all_to_all" else 0  # a rank also sends its own slice to itself
        words = REPORT_BYTES * (len(ranks) - 1)  # buffers for the failure reports of other ranks
        assert found.above <= gathered + 3 * found.bucket + own + padding + words


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.by_default("2")
def test_at_no_moment_a_rank_holds_more_than_its_stage_says_and_three_buckets(gloo: GlooPool, stage: int) -> None:
    for found in gloo.run(peaks.measure, 64, stage, 0.13, ranks=range(4), limit=120):
        padding = 64 * (BLOCKS + 2) * 6
        gradients = {0: 5 / 4, 1: 1, 2: 1 / 4}[stage]
        for kind, factor in (("parameters", 1), ("gradients", gradients), ("optimizer", 2 if stage == 0 else 2 / 4)):
            assert abs(found.between[kind] - factor * found.whole) <= padding, kind
        assert found.bucket < found.whole / BLOCKS
        assert found.scratch <= 3 * found.bucket
        assert found.above <= 3 * found.bucket


def torch_default_group(group: dist.ProcessGroup, rank: int) -> nn.Module:
    model = build(dist.get_rank())
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=2, lr=1e-2)
    assert optimizer.world_size == dist.get_world_size()
    for batch in share(odd_batches(8), optimizer.rank, optimizer.world_size):
        odd_loss(model, batch).backward()
    optimizer.divisor = 8
    optimizer.step()
    optimizer.close()
    return model


def test_without_a_group_the_world_is_used(gloo: GlooPool) -> None:
    model = build(0)
    plain_step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), odd_loss, odd_batches(8), 8)
    for ours in gloo.run(torch_default_group, ranks=range(4)):
        assert_same_model(ours, model)


def integer_gradients(group: dist.ProcessGroup, rank: int, algorithm: str, stage: int) -> nn.Module:
    """Train with weights and inputs that are small integers, so that a sum has the same bits in any order."""
    model = nn.Linear(37, 11)
    nn.init.constant_(model.weight, 2)
    nn.init.constant_(model.bias, 1)
    optimizer = ZeroOptimizer(
        model, torch.optim.SGD, stage=stage, process_group=group, collective=algorithm, lr=0.5, bucket_cap_mb=0.0005
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        inputs = torch.randint(-4, 5, (5, 37), generator=generator).float()
        model(inputs).sum().backward()
    optimizer.divisor = 4
    optimizer.step()
    optimizer.close()
    return model


@pytest.mark.parametrize("algorithm", ["pairwise", "ring", "all_to_all", "native"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_algorithm_gives_the_same_bits_on_integers(gloo: GlooPool, algorithm: str, stage: int) -> None:
    expected = gloo.run(integer_gradients, "pairwise", 2, ranks=range(3))[0]
    for ours in gloo.run(integer_gradients, algorithm, stage, ranks=range(3)):
        assert_same_model(ours, expected)


def native_collectives(
    group: dist.ProcessGroup, rank: int, dtype: torch.dtype, bounds: list[int]
) -> tuple[Tensor, Tensor]:
    transport = connect(group)
    algorithm: Collective = Native(transport)
    source = torch.arange(bounds[-1], dtype=dtype) + rank
    out = torch.empty(bounds[rank + 1] - bounds[rank], dtype=dtype)
    tag = Tag(Kind.REDUCE_SCATTER, "a test")
    algorithm.reduce_scatter(source.clone(), bounds, out, start=torch.ones_like(out), tag=tag).wait()
    whole = torch.full((bounds[-1],), -1, dtype=dtype)
    whole[bounds[rank] : bounds[rank + 1]] = out
    algorithm.all_gather(whole, bounds, tag=tag).wait()
    return out, whole


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_native_baseline_takes_uneven_and_empty_slices(gloo: GlooPool, dtype: torch.dtype) -> None:
    expected = torch.arange(17, dtype=dtype) * 3 + 3 + 1
    for bounds in ([0, 5, 5, 17], [0, 5, 11, 17]):  # each owner broadcasts its slice; slices are padded
        for _, whole in gloo.run(native_collectives, dtype, bounds, ranks=range(3)):
            assert torch.equal(whole, expected)


def contribution(rank: int) -> Tensor:
    return torch.randn(501, generator=torch.Generator().manual_seed(rank))


def native_slice(group: dist.ProcessGroup, rank: int) -> Tensor:
    bounds = [0, 200, 200, 351, 501]
    out = torch.empty(bounds[rank + 1] - bounds[rank])
    tag = Tag(Kind.REDUCE_SCATTER, "a test", 1)
    Native(connect(group)).reduce_scatter(contribution(rank), bounds, out, start=None, tag=tag).wait()
    return out


def test_the_native_baseline_stays_within_the_bound_of_a_sum_in_any_order(gloo: GlooPool) -> None:
    """The bound is (W - 1) 2^-24 sum |x|: W - 1 roundings to fp32, compared with the exact sum."""
    sums = torch.cat(gloo.run(native_slice, ranks=range(4))).tolist()
    columns = list(zip(*(contribution(rank).tolist() for rank in range(4)), strict=True))
    assert sums != [math.fsum(column) for column in columns], "else nothing was rounded, and nothing is shown"
    for ours, column in zip(sums, columns, strict=True):
        assert abs(ours - math.fsum(column)) <= 3 * 2.0**-24 * math.fsum(map(abs, column))


def different_models(group: dist.ProcessGroup, rank: int) -> None:
    width = 8 if rank == 0 else 9
    ZeroOptimizer(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, width)), process_group=group)


def test_ranks_with_different_models_learn_the_first_difference(gloo: GlooPool) -> None:
    with pytest.raises(ProgramError) as caught:
        gloo.run(different_models, ranks=range(3))
    assert set(caught.value.errors) == {0, 1, 2}
    for name, message in caught.value.errors.values():
        assert name == "ValueError"
        assert "1.weight [8, 8]" in message
        assert "1.weight [9, 8]" in message


def different_calls(group: dist.ProcessGroup, rank: int) -> str:
    model = nn.Linear(4, 4)
    optimizer = ZeroOptimizer(model, process_group=group)
    model(torch.ones(2, 4)).sum().backward()
    try:
        if rank == 0:
            optimizer.step()
        else:
            optimizer.consolidate_state_dict()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_in_different_calls_learn_of_both_at_once(gloo: GlooPool) -> None:
    for message in gloo.run(different_calls):
        assert "step()" in message
        assert "consolidate_state_dict(to=0)" in message
        assert "no answer" not in message


def one_rank_unfreezes(group: dist.ProcessGroup, rank: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = ZeroOptimizer(model, process_group=group)
    if rank == 1:
        model[0].weight.requires_grad_(True)
    try:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_rank_that_alone_unfreezes_a_parameter_is_an_error_that_names_it(gloo: GlooPool) -> None:
    messages = gloo.run(one_rank_unfreezes)
    assert all("'0.weight'" in message or "0.weight" in message for message in messages), messages


def a_rank_fails(group: dist.ProcessGroup, rank: int) -> str:
    model = nn.Linear(4, 4)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, process_group=group, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        optimizer._user_optimizers.step = None  # type: ignore[assignment, method-assign]
    try:
        optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_inside_one_ranks_step_reaches_every_rank(gloo: GlooPool) -> None:
    messages = gloo.run(a_rank_fails)
    assert "no answer" not in messages[0]
    assert "rank 1 failed" in messages[0]
    assert "in step()" in messages[0]
    assert messages[1] != "nothing"


def fork_sees(group: dist.ProcessGroup, rank: int, stage: int) -> tuple[bool, bool]:
    model = build(rank)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=group, lr=0.5, bucket_cap_mb=0.0005)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    go, told = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.read(go[0], 1)
        same = all(map(torch.equal, before, (parameter.detach() for parameter in model.parameters())))
        os.write(told[1], b"y" if same else b"n")
        os._exit(0)
    odd_loss(model, odd_batches(1)[0]).backward()
    optimizer.step()
    optimizer.close()
    os.write(go[1], b"!")
    answer = os.read(told[0], 1)
    os.waitpid(child, 0)
    for end in (*go, *told):
        os.close(end)
    changed = not all(map(torch.equal, before, (parameter.detach() for parameter in model.parameters())))
    return changed, answer == b"y"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_fork_keeps_the_parameters_as_they_were(gloo: GlooPool, stage: int) -> None:
    """A forked process evaluates or saves while training continues."""
    assert gloo.run(fork_sees, stage, ranks=range(2)) == [(True, True)] * 2
