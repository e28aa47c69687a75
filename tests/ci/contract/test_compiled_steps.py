"""A compiled model, step or loop has the eager bits, nothing of the library in a graph, and is compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import symbolic_convert
from torch._dynamo.utils import counters

import collectives
import zero
from collectives import solo
from zero import CheckpointManager, MixedPrecision, ShardedAverage, StopOnSignal, ZeroOptimizer

from ...support.cases import INPUTS, ROWS, Net
from ...support.loops import PlainLoop, constant, seeded
from ...support.plain import assert_same_model

FOLDERS = tuple(str(Path(package.__file__ or "").parent) for package in (zero, collectives))
STEPS, MICRO_BATCHES, MAX_NORM = 4, 2, 0.1
BATCHES = torch.randn(STEPS * MICRO_BATCHES, ROWS, INPUTS, generator=torch.Generator().manual_seed(1)).split(1)
pytestmark = pytest.mark.filterwarnings("ignore:stage 3. the graph of a compiled call is broken")


def build() -> Any:
    return seeded(0, Net)


def mean_square(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    found: Tensor = model(batch[0])
    return found.float().square().mean()


def compile_units(model: Any, stage: int) -> None:
    for part in model.blocks if stage == 3 else (model,):
        part.compile(backend="aot_eager")


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield a list to which each function of the library that Dynamo traces is added."""
    found: list[str] = []
    run = symbolic_convert.InstructionTranslatorBase.run

    def noted(self: Any) -> Any:
        if self.f_code.co_filename.startswith(FOLDERS):
            found.append(self.f_code.co_qualname)
        return run(self)

    monkeypatch.setattr(symbolic_convert.InstructionTranslatorBase, "run", noted)
    torch._dynamo.reset()
    counters.clear()
    yield found
    torch._dynamo.reset()


def train(way: str, stage: int, backend: str, precision: MixedPrecision | None) -> tuple[nn.Module, list[int]]:
    """Train with a compiled part. Return the model, and the number of what has been compiled after each step."""
    model = build()
    if way == "model":
        compile_units(model, stage)
    options: dict[str, Any] = {"bucket_cap_mb": 1e-4, "divisor": MICRO_BATCHES, "lr": 1e-2}
    optimizer = ZeroOptimizer(model, stage=stage, process_group=solo(), mixed_precision=precision, **options)
    scheduler = (falling if way == "scheduled step" else constant)(optimizer)
    frames = []

    def whole(*micro_batches: Any) -> None:
        for micro_batch in micro_batches:
            mean_square(model, micro_batch).backward()
        optimizer.clip_grad_norm_(MAX_NORM)
        (compiled if "step" in way else optimizer.step)()
        optimizer.zero_grad()

    compiled: Any = torch.compile(whole if way == "function" else optimizer.step, backend=backend)
    for step in range(STEPS):
        own = BATCHES[MICRO_BATCHES * step : MICRO_BATCHES * (step + 1)]
        (compiled if way == "function" else whole)(*own)
        scheduler.step()
        frames.append(counters["frames"]["total"] + counters["stats"]["unique_graphs"])
    optimizer.close()
    return model, frames


@pytest.mark.parametrize(
    ("way", "stage", "backend"),
    [
        *(("model", stage, "aot_eager") for stage in range(4)),
        ("step", 1, "aot_eager"),
        ("step", 2, "inductor"),
        ("step", 3, "inductor"),
        ("scheduled step", 3, "aot_eager"),
        ("function", 0, "aot_eager"),
        ("function", 2, "inductor"),
        ("function", 3, "aot_eager"),
    ],
)
def test_what_is_compiled_has_the_eager_bits_and_is_compiled_once(
    way: str, stage: int, backend: str, traced: list[str]
) -> None:
    precision = MixedPrecision(torch.bfloat16) if way == "model" and stage % 2 else None
    model, frames = train(way, stage, backend, precision)
    assert way == "model" or traced == []
    assert frames[0] > 0
    assert frames == frames[:1] * STEPS
    torch._dynamo.reset()  # or graphs compiled for one model would be used for the other
    plain, scheduler = build(), falling if way == "scheduled step" else constant
    if way == "model":
        compile_units(plain, stage)
    loss_of: Any = torch.compile(mean_square) if (way, backend) == ("function", "inductor") else mean_square
    PlainLoop(loss_of, precision=precision, scheduler=scheduler, max_norm=MAX_NORM).run(plain, BATCHES)
    assert_same_model(model, plain)


def test_no_public_call_is_traced() -> None:
    for cls in (ZeroOptimizer, ShardedAverage, CheckpointManager, StopOnSignal):
        for name, member in vars(cls).items():
            for function in (member.fget, member.fset) if isinstance(member, property) else (member,):
                if callable(function) and hasattr(function, "__code__"):
                    assert vars(function).get("_torchdynamo_disable"), name
    for function in (zero.clip_grad_norm_, zero.save, zero.load):
        assert vars(function)["_torchdynamo_disable"]


def test_a_compiled_function_that_uses_a_released_parameter_gets_an_error_with_the_remedy() -> None:
    model = build()
    optimizer = ZeroOptimizer(model, stage=3, process_group=solo())
    clear: Any = torch.compile(lambda: model.zero_grad(), backend="aot_eager")
    try:
        with pytest.raises(RuntimeError, match=r"only its module can use .*\. Call optimizer\.zero_grad\(\) there"):
            clear()
    finally:
        torch._dynamo.reset()
        optimizer.close()
