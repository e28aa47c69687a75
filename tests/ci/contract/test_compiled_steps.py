"""A compiled model, step or loop has the eager bits, nothing of the library in a graph, and is compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import symbolic_convert
from torch._dynamo.utils import counters

import collectives
import zero
from collectives import Transport, solo
from collectives.backends.gloo import connect
from zero import CheckpointManager, MixedPrecision, ShardedAverage, StopOnSignal, ZeroOptimizer

from ...support.loops import seeded
from ...support.plain import PlainRanks, assert_same_model
from ...support.pool import GlooPool

FOLDERS = tuple(str(Path(package.__file__ or "").parent) for package in (zero, collectives))
STEPS, MICRO_BATCHES, MAX_NORM = 4, 2, 0.1
WAYS = ("model", "step", "scheduled step", "function")
pytestmark = pytest.mark.filterwarnings("ignore:stage 3. the graph of a compiled call is broken")


class Layer(nn.Module):
    """A unit. Dynamo compiles no forward of torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    """Three units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build() -> Any:
    return seeded(0, Net)


def batch(number: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 + number))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


def optimizer_of(model: nn.Module, stage: int, transport: Transport, **arguments: Any) -> ZeroOptimizer:
    sizes: dict[str, Any] = {"bucket_cap_mb": 1e-4, "divisor": MICRO_BATCHES, "lr": 0.05}
    return ZeroOptimizer(model, stage=stage, process_group=transport, **sizes, **arguments)


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
    yield found
    torch._dynamo.reset()


def compiled_so_far() -> int:
    return counters["frames"]["total"] + counters["stats"]["unique_graphs"]


def compile_units(model: Any, stage: int) -> None:
    for part in model.layers if stage == 3 else (model,):
        part.compile(backend="aot_eager")


def plain_loop(way: str, stage: int, precision: MixedPrecision | None, forward: Callable[..., Tensor]) -> nn.Module:
    """Train eagerly, but for the model or the ``forward``."""
    model = build()
    if way == "model":
        compile_units(model, stage)
    loop = PlainRanks(model, lambda updated: torch.optim.AdamW(updated, lr=0.05), precision=precision)
    loop.divisor = MICRO_BATCHES
    scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9 if way == "scheduled step" else 1.0)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            x = batch(MICRO_BATCHES * step + number)
            loop.backward(0, forward(model, x if precision is None else x.to(precision.param_dtype)).backward)
        loop.clip(MAX_NORM)
        loop.step()
        loop.clear()
        scheduler.step()
    return model


def train(
    way: str, stage: int, transport: Transport, backend: str, precision: MixedPrecision | None = None
) -> tuple[nn.Module, list[int]]:
    """Train with a compiled part. Return the model, and the number of what has been compiled after each step."""
    model = build()
    if way == "model":
        compile_units(model, stage)
    optimizer = optimizer_of(model, stage, transport, mixed_precision=precision)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9 if way == "scheduled step" else 1.0)
    frames = []

    def backwards(*micro_batches: Tensor) -> None:
        for x in micro_batches:
            loss_of(model, x).backward()
        optimizer.clip_grad_norm_(MAX_NORM)

    def whole(*micro_batches: Tensor) -> None:
        backwards(*micro_batches)
        optimizer.step()
        optimizer.zero_grad()

    compiled: Any = torch.compile(whole if way == "function" else optimizer.step, backend=backend)
    for step in range(STEPS):
        own = range(transport.rank, MICRO_BATCHES, transport.world_size)
        micro_batches = [batch(MICRO_BATCHES * step + number) for number in own]
        if way == "function":
            compiled(*micro_batches)
        else:
            backwards(*micro_batches)
            optimizer.step() if way == "model" else compiled()
            optimizer.zero_grad()
        scheduler.step()
        frames.append(compiled_so_far())
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
    before = compiled_so_far()
    precision = MixedPrecision(torch.bfloat16) if way == "model" and stage % 2 else None
    model, frames = train(way, stage, solo(), backend, precision)
    assert way == "model" or traced == []
    assert before < frames[0]
    assert frames == frames[:1] * STEPS
    forward: Any = torch.compile(loss_of) if (way, backend) == ("function", "inductor") else loss_of
    torch._dynamo.reset()  # or graphs compiled for one model would be used for the other
    assert_same_model(model, plain_loop(way, stage, precision, forward))


def on_two_ranks(group: dist.ProcessGroup, rank: int, way: str, stage: int) -> list[int]:
    torch._dynamo.reset()
    try:
        model, frames = train(way, stage, connect(group), "aot_eager")
        torch._dynamo.reset()
        assert_same_model(model, plain_loop(way, stage, None, loss_of))
        return frames
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize(("way", "stage"), [("model", 3), ("step", 0), ("function", 2), ("function", 3)])
def test_so_it_is_on_two_ranks(gloo: GlooPool, way: str, stage: int) -> None:
    for frames in gloo.run(on_two_ranks, way, stage, ranks=(0, 1), limit=120):
        assert frames == frames[:1] * STEPS


# -- calls -------------------------------------------------------------------------------------------------------------


def test_no_public_call_is_traced() -> None:
    """So each is a graph break, and runs as it does outside of what is compiled."""
    for cls in (ZeroOptimizer, ShardedAverage, CheckpointManager, StopOnSignal):
        for name, member in vars(cls).items():
            for function in (member.fget, member.fset) if isinstance(member, property) else (member,):
                if callable(function) and hasattr(function, "__code__"):
                    assert vars(function).get("_torchdynamo_disable"), name
    for function in (zero.clip_grad_norm_, zero.save, zero.load):
        assert vars(function)["_torchdynamo_disable"]


def test_a_compiled_function_that_uses_a_released_parameter_gets_an_error_with_the_remedy() -> None:
    model = build()
    optimizer = optimizer_of(model, 3, solo())
    clear: Any = torch.compile(lambda: model.zero_grad(), backend="aot_eager")
    try:
        with pytest.raises(RuntimeError, match=r"by their modules alone\. Call optimizer\.zero_grad\(\) there"):
            clear()
    finally:
        torch._dynamo.reset()
        optimizer.close()
