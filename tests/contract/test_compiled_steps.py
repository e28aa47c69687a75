"""`torch.compile` around calls of the library: the eager bits, nothing of the library in a graph, one compilation.

Each public call and each hook of the library is one graph break. A loop that compiles ``optimizer.step``, or
one function with forward, backward and step, trains as if these calls stood outside of what is compiled.
"""

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

from ..support.plain import assert_same_bits, assert_same_model
from ..support.pool import GlooPool

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
WAYS = ("step", "scheduled step", "function")
FOLDERS = tuple(str(Path(package.__file__ or "").parent) for package in (zero, collectives))
STEPS, MICRO_BATCHES, MAX_NORM = 4, 2, 0.1


class Net(nn.Sequential):
    """Three units, and a method beside the forward."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)))
        for number, parameter in enumerate(self.parameters()):
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.data.copy_(values)

    def twice(self, x: Tensor) -> Any:
        return self(self(x))


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


def plain_loop(way: str, forward: Callable[..., Tensor] = loss_of) -> nn.Module:
    """Train eagerly, but for the ``forward``; the step is clipped as the library's is."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            forward(model, batch(MICRO_BATCHES * step + number)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(MICRO_BATCHES)
        zero.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if way == "scheduled step":
            scheduler.step()
    return model


def train(way: str, stage: int, transport: Transport, backend: str) -> tuple[nn.Module, list[int]]:
    """Train with a compiled part. Return the model, and the number of compiled frames after each step."""
    model = Net()
    optimizer = optimizer_of(model, stage, transport)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if way == "scheduled step" else None
    per_rank, frames = MICRO_BATCHES // transport.world_size, []

    def whole(x: Tensor) -> None:
        for number in range(per_rank):
            loss_of(model, x[number]).backward()
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    call: Any = torch.compile(whole if way == "function" else optimizer.step, backend=backend)
    for step in range(STEPS):
        own = range(transport.rank, MICRO_BATCHES, transport.world_size)
        x = torch.stack([batch(MICRO_BATCHES * step + number) for number in own])
        if way == "function":
            call(x)
        else:
            for number in range(per_rank):
                loss_of(model, x[number]).backward()
            optimizer.clip_grad_norm_(MAX_NORM)
            call()
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        frames.append(counters["frames"]["total"])
    optimizer.close()
    return model, frames


@STAGES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.by_default("step-1", "scheduled step-3", "function-0", "function-2", "function-3")
@pytest.mark.filterwarnings("ignore:stage 3. the graph of a compiled call is broken")
def test_a_compiled_step_has_the_eager_bits_and_is_compiled_once(way: str, stage: int, traced: list[str]) -> None:
    before = counters["frames"]["total"]
    model, frames = train(way, stage, solo(), "aot_eager")
    assert traced == []
    assert before < frames[0]
    assert frames == frames[:1] * STEPS
    assert_same_model(model, plain_loop(way))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.full
def test_a_function_that_inductor_compiles_has_the_bits_of_the_forward_that_it_compiles(
    stage: int, traced: list[str]
) -> None:
    model, frames = train("function", stage, solo(), "inductor")
    assert traced == []
    assert frames == frames[:1] * STEPS
    forward: Any = torch.compile(loss_of)
    assert_same_model(model, plain_loop("function", forward))


@STAGES
@pytest.mark.full
def test_a_step_that_inductor_compiles_has_the_eager_bits(stage: int, traced: list[str]) -> None:
    model, frames = train("step", stage, solo(), "inductor")
    assert traced == []
    assert frames == frames[:1] * STEPS
    assert_same_model(model, plain_loop("step"))


def on_two_ranks(group: dist.ProcessGroup, rank: int, way: str, stage: int) -> list[int]:
    torch._dynamo.reset()
    try:
        model, frames = train(way, stage, connect(group), "aot_eager")
        assert_same_model(model, plain_loop(way))
        return frames
    finally:
        torch._dynamo.reset()


@STAGES
@pytest.mark.full
@pytest.mark.parametrize("way", ["step", "function"])
def test_the_same_on_two_ranks(gloo: GlooPool, way: str, stage: int) -> None:
    for frames in gloo.run(on_two_ranks, way, stage, ranks=(0, 1), limit=120):
        assert frames == frames[:1] * STEPS


# -- every call --------------------------------------------------------------------------------------------------------


def every_call(model: Net, optimizer: ZeroOptimizer, average: ShardedAverage, path: Path, x: Tensor) -> list[Tensor]:
    """Make every call that a training loop makes, in the middle of what is compiled. Return what was computed."""
    with optimizer.no_sync():
        loss_of(model, x).backward()
    with optimizer.join():
        optimizer.divisor = optimizer.divisor + x.shape[0]
        loss_of(model, x + 1).backward()
        norm = optimizer.clip_grad_norm_(1.0)
        loss = optimizer.step()
        assert loss is None
        optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()

    def closure() -> Tensor:
        model.twice(x).square().mean().backward()
        return norm

    found = [norm, optimizer.step(closure) + 1]
    average.update_parameters()
    optimizer.zero_grad()
    with optimizer.gathered(write=True), torch.no_grad():
        model[0][0].weight.mul_(1.5)
    with average.applied(), torch.no_grad():
        found.append(model(x).sum() + average.n_averaged)
    with torch.inference_mode():
        found.append(model.twice(x).sum() + optimizer.sum_over_ranks(optimizer.rank + optimizer.world_size))
    optimizer.consolidate_state_dict(to=None)
    optimizer.load_state_dict(optimizer.state_dict())
    zero.save(path, optimizer, overwrite=True)
    zero.load(path, optimizer)
    optimizer.broadcast_buffers()
    assert optimizer.exchange(b"bytes") == [b"bytes"]
    assert optimizer.check_replicas() is not None
    assert optimizer.describe() is not None
    assert len(optimizer.state) == len(optimizer.param_groups[0]["params"])
    assert optimizer.traffic is not None
    optimizer.zero_grad()
    weight = (x * 0.5).detach().requires_grad_()
    (weight * weight).sum().backward()
    found.append(zero.clip_grad_norm_([weight], 0.25) + 1)
    return found


@STAGES
@pytest.mark.by_default("1", "3")
@pytest.mark.filterwarnings("ignore:stage 3. the graph of a compiled call is broken")
def test_every_call_is_a_graph_break_with_the_eager_result(stage: int, traced: list[str], tmp_path: Path) -> None:
    def trained(compile_it: Callable[..., Any]) -> tuple[nn.Module, list[Tensor], list[int]]:
        model, found, frames = Net(), list[Tensor](), list[int]()
        optimizer = optimizer_of(model, stage, solo())
        zero.register_forward_method(model, "twice")
        average = ShardedAverage(optimizer)
        call = compile_it(lambda x: every_call(model, optimizer, average, tmp_path / "saved", x))
        for step in range(3):
            found += call(batch(step))
            frames.append(counters["frames"]["total"])
        optimizer.close()
        return model, found, frames

    expected, values, _ = trained(lambda call: call)
    model, found, frames = trained(lambda call: torch.compile(call, backend="aot_eager"))
    assert traced == []
    assert frames[0] == frames[-1]
    for value, other in zip(found, values, strict=True):
        assert_same_bits(value, other)
    assert_same_model(model, expected)


@STAGES
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.by_default("bf16-3")
@pytest.mark.filterwarnings("ignore:stage 3. the graph of a compiled call is broken")
def test_a_scaled_step_in_16_bits_has_the_eager_bits(stage: int, precision: str, traced: list[str]) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def trained(compile_it: Callable[..., Any]) -> nn.Module:
        model = Net()
        optimizer = optimizer_of(model, stage, solo(), mixed_precision=MixedPrecision(dtype))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)

        def step(x: Tensor) -> None:
            scaler.scale(loss_of(model, x)).backward()
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        call = compile_it(step)
        for number in range(STEPS):
            call(batch(number))
        optimizer.close()
        return model

    expected = trained(lambda call: call)
    assert_same_model(trained(lambda call: torch.compile(call, backend="aot_eager")), expected)
    assert [name for name in traced if not name.startswith(("InputCast", "_cast", "Parts", "changed"))] == []


@pytest.mark.parametrize("cls", [ZeroOptimizer, ShardedAverage, CheckpointManager, StopOnSignal])
def test_no_public_method_is_traced(cls: type) -> None:
    for name, member in vars(cls).items():
        for function in (member.fget, member.fset) if isinstance(member, property) else (member,):
            if callable(function) and hasattr(function, "__code__"):
                assert vars(function).get("_torchdynamo_disable"), name


@pytest.mark.parametrize("function", [zero.clip_grad_norm_, zero.save, zero.load])
def test_no_public_function_is_traced(function: Any) -> None:
    assert vars(function)["_torchdynamo_disable"]


def test_a_compiled_function_that_uses_a_released_parameter_gets_an_error_with_the_remedy() -> None:
    model = Net()
    optimizer = optimizer_of(model, 3, solo())
    clear: Any = torch.compile(lambda: model.zero_grad(), backend="aot_eager")
    try:
        with pytest.raises(RuntimeError, match=r"by their modules alone\. Call optimizer\.zero_grad\(\) there"):
            clear()
    finally:
        torch._dynamo.reset()
        optimizer.close()
