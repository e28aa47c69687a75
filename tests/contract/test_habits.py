"""Other habits of training loops, at every stage and precision: compile, autocast, checkpoints, double backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from collectives import Transport, on_threads, solo
from collectives.backends.gloo import connect
from zero import MixedPrecision, ZeroOptimizer

from ..support.cases import _BUILDING, INPUTS, ROWS, Net
from ..support.narrowed import BF16, FP16, Narrowed
from ..support.plain import assert_same_bits, assert_same_model
from ..support.pool import GlooPool

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
PRECISIONS = {"fp32": None, "bf16": MixedPrecision(BF16), "fp16": MixedPrecision(FP16)}
EVERY_PRECISION = pytest.mark.parametrize("precision", PRECISIONS)
MICRO_BATCHES, STEPS = 4, 3
Run = Callable[[Any, Tensor], None]


def build() -> Net:
    with _BUILDING, torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


def batch(step: int, number: int, precision: MixedPrecision | None) -> Tensor:
    x = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(10 * step + number))
    return x if precision is None else x.to(precision.param_dtype)


def plain_loop(model: nn.Module, run: Run, precision: MixedPrecision | None) -> None:
    numbers = Narrowed(model, precision)
    optimizer = torch.optim.AdamW(numbers.updated, lr=0.05)
    for step in range(STEPS):
        total: dict[int, Tensor] = {}
        for number in range(MICRO_BATCHES):
            run(model, batch(step, number, precision))
            for index, p in enumerate(model.parameters()):
                if p.grad is not None:
                    gradient = numbers.travelling(p.grad)
                    total[index] = total[index] + gradient if index in total else gradient
                p.grad = None
        count = len(numbers.held)
        numbers.show([total[index] / MICRO_BATCHES if index in total else None for index in range(count)])
        numbers.step(optimizer)
        optimizer.zero_grad()


def train(model: nn.Module, run: Run, transport: Transport, stage: int, precision: MixedPrecision | None) -> list[int]:
    """Train on this rank; return the graphs that were compiled after each step."""
    optimizer = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=stage,
        process_group=transport,
        divisor=MICRO_BATCHES,
        bucket_cap_mb=6e-4,
        mixed_precision=precision,
        lr=0.05,
    )
    graphs = []
    for step in range(STEPS):
        for number in range(transport.rank, MICRO_BATCHES, transport.world_size):
            run(model, batch(step, number, precision))
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    optimizer.close()
    return graphs


def check(run: Run, stage: int, precision: str, world_size: int = 2) -> None:
    expected = build()
    plain_loop(expected, run, PRECISIONS[precision])

    def program(transport: Transport) -> nn.Module:
        model = build()
        train(model, run, transport, stage, PRECISIONS[precision])
        return model

    for model in on_threads(world_size, program, timeout=10):
        assert_same_model(model, expected)


def simple(model: Any, x: Tensor) -> None:
    model(x).float().square().mean().backward()


def autocast(model: Any, x: Tensor) -> None:
    with torch.autocast("cpu", dtype=BF16):
        loss = model(x).float().square().mean()
    loss.backward()


class Checkpointed(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def penalised(model: Any, x: Tensor) -> None:
    """Return a loss that contains the norm of a gradient, as in a WGAN's gradient penalty."""
    x = x.detach().requires_grad_()
    out = model(x).float()
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.square().mean() + slope.float().square().sum()).backward()


def twice(model: Any, x: Tensor) -> None:
    """Run the backwards of two losses over one graph."""
    out = model(x).float()
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@STAGES
@pytest.mark.by_default("3-bf16")
def test_autocast_is_that_of_the_plain_loop(stage: int, precision: str) -> None:
    check(autocast, stage, precision)


@EVERY_PRECISION
@STAGES
@pytest.mark.by_default("2-bf16")
def test_checkpoints_recompute_the_same(stage: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.contract.test_habits.Net", Checkpointed)
    assert type(build()) is Checkpointed
    check(simple, stage, precision)


@EVERY_PRECISION
@STAGES
@pytest.mark.by_default("3-fp16")
def test_a_double_backward_is_right(stage: int, precision: str) -> None:
    check(penalised, stage, precision)


@EVERY_PRECISION
@STAGES
@pytest.mark.by_default("1-fp32")
def test_averages_and_hooks_of_a_step_see_what_they_see_in_a_plain_loop(stage: int, precision: str) -> None:
    """With an exponential moving average of the weights, and the optimizer's own hooks."""
    mixed = PRECISIONS[precision]

    def average_of(model: nn.Module) -> Any:
        return torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=False
        )

    plain, averages = build(), []
    numbers = Narrowed(plain, mixed)
    optimizer = torch.optim.AdamW(numbers.updated, lr=0.05)
    average = average_of(plain)
    for step in range(STEPS):
        x = batch(step, 0, mixed)
        simple(plain, x)
        wide = [numbers.travelling(p.grad) for p in plain.parameters() if p.grad is not None]
        plain.zero_grad()
        numbers.show(wide)
        numbers.step(optimizer)
        plain.zero_grad()
        average.update_parameters(plain)
        averages.append([p.detach().clone() for p in average.module.parameters()])

    def program(transport: Transport) -> tuple[list[list[Tensor]], int]:
        model, called = build(), []
        optimizer = ZeroOptimizer(
            model, torch.optim.AdamW, stage=stage, process_group=transport, mixed_precision=mixed, lr=0.05, divisor=1
        )
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        with optimizer.gathered():
            average = average_of(model)
        seen = []
        for step in range(STEPS):
            if transport.rank == 0:
                simple(model, batch(step, 0, mixed))
            elif stage == 3:  # units are gathered, so all ranks run the same number of forwards and backwards
                (model(batch(step, 0, mixed)).float().square().mean() * -0.0).backward()
            optimizer.step()
            optimizer.zero_grad()
            with optimizer.gathered():
                average.update_parameters(model)
            seen.append([p.detach().clone() for p in average.module.parameters()])
        assert called == ["before", "after"] * STEPS
        assert "AdamW" in repr(optimizer)
        return seen, len(called)

    for seen, _ in on_threads(2, program, timeout=10):
        for ours, theirs in zip(seen, averages, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert_same_bits(a, b)


def compiled_training(group: dist.ProcessGroup | None, rank: int, stage: int, precision: str) -> list[int]:
    torch._dynamo.reset()
    try:
        transport = solo() if group is None else connect(group)
        model, expected = build(), build()
        for each in (expected, model):
            for part in each.blocks if stage == 3 else (each,):
                part.compile(backend="aot_eager")
        plain_loop(expected, simple, PRECISIONS[precision])
        torch._dynamo.reset()  # or graphs compiled for the plain model would be used for this one
        graphs = [counters["stats"]["unique_graphs"]]
        graphs += train(model, simple, transport, stage, PRECISIONS[precision])
        assert_same_model(model, expected)
        return graphs
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@STAGES
@pytest.mark.full
def test_a_compiled_model_is_the_compiled_plain_loops_and_compiled_once(stage: int, precision: str) -> None:
    before, first, *later = compiled_training(None, 0, stage, precision)
    assert before < first
    assert later == [first] * (STEPS - 1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@STAGES
def test_the_same_on_two_ranks(gloo: GlooPool, stage: int, precision: str) -> None:
    for before, first, *later in gloo.run(compiled_training, stage, precision, ranks=(0, 1), limit=120):
        assert before < first
        assert later == [first] * (STEPS - 1)
