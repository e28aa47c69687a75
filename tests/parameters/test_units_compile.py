"""Compiled models at stage 3: the bits of the same compiled plain loop, and no compilation after the first step.

Units that are compiled by themselves have the plain loop's graphs, and so its bits. The graph of a compiled call around
several units is broken at each unit. If several pieces use a tensor, each piece first adds up its own gradients of it,
while one graph would add all of them in turn. So the bits may differ, and one warning says so. With a backend that
fuses nothing they are the same if no unit uses such a tensor twice.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from collectives import on_threads, solo
from collectives.backends.gloo import connect
from zero import ZeroOptimizer
from zero.core.units import find_units

from ..support.cases import (
    INPUTS,
    OUTPUTS,
    WIDTH,
    Batch,
    Block,
    Case,
    Fails,
    Net,
    assert_parameters,
    check_rank,
    net_of,
    one_backward,
    plain_loop,
    sharded,
    train,
)
from ..support.pool import GlooPool

BACKEND = "aot_eager"


def in_place(model: Any) -> None:
    model.compile(backend=BACKEND)


def blocks_in_place(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend=BACKEND)


def compiled_blocks(model: Any) -> None:
    """Return a list of compiled blocks, which changes the names of parameters."""
    made: list[Any] = [torch.compile(block, backend=BACKEND) for block in model.blocks]
    model.blocks = nn.ModuleList(made)


def compiled(model: Any) -> None:
    """Store the compiled model, which is another module, beside the model and not as a part of it."""
    object.__setattr__(model, "fast", torch.compile(model, backend=BACKEND))


def run_compiled(model: Any, batch: Batch) -> None:
    model.fast(batch.x).square().mean().backward()


def another_shape(model: Any, batch: Batch) -> None:
    """Make the second micro-batch longer, so that there is something to compile while gradients exist."""
    one_backward(model, replace(batch, x=torch.cat([batch.x] * (1 + batch.turn))))


CASES: dict[str, Case] = {
    "model.compile() before": Case(prepared=in_place),
    "model.compile() after": Case(built=in_place),
    "model.compile(), another shape": Case(prepared=in_place, run=another_shape),
    "block.compile(), another shape": Case(prepared=blocks_in_place, run=another_shape),
    "torch.compile(model) before": Case(prepared=compiled, run=run_compiled),
    "block.compile() before": Case(prepared=blocks_in_place),
    "block.compile() after": Case(built=blocks_in_place),
    "a list of torch.compile(block)": Case(prepared=compiled_blocks),
}


def compiled_training(group: dist.ProcessGroup | None, rank: int, name: str) -> list[int]:
    """Return the numbers of graphs compiled so far: at first, at the beginning of each step of this rank, and at the
    end.

    The first number is that before the plain loop. Each rank is a process: if several threads compile at once, torch
    may put off the compilation of some to a later step.
    """
    counts = [counters["stats"]["unique_graphs"]]

    def count(model: Any, step: int) -> None:
        counts.append(counters["stats"]["unique_graphs"])

    torch._dynamo.reset()
    try:
        case = replace(CASES[name], steps=3)
        transport = solo() if group is None else connect(group)
        _, expected = plain_loop(case, transport.world_size)
        check_rank(replace(case, begin=count), transport, expected)
        return [*counts, counters["stats"]["unique_graphs"]]
    finally:
        torch._dynamo.reset()


def assert_compiled_in_the_first_step_alone(counts: list[int]) -> None:
    before, _, after_first, *later = counts
    assert before < after_first
    assert later == [after_first, after_first]


# A model that is compiled as a whole has these bits if units share no tensor; this is not promised.
SLOW = [name for name in CASES if "model" in name]
EVERY_CASE = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)


@EVERY_CASE
@pytest.mark.by_default("block.compile() before")
def test_compiled_training_equals_the_compiled_plain_loop_and_compiles_once(name: str) -> None:
    assert_compiled_in_the_first_step_alone(compiled_training(None, 0, name))


@EVERY_CASE
@pytest.mark.full
def test_the_same_on_two_ranks(gloo: GlooPool, name: str) -> None:
    for counts in gloo.run(compiled_training, name, ranks=(0, 1), limit=120):
        assert_compiled_in_the_first_step_alone(counts)


# -- tensors that several units use ------------------------------------------------------------------------------------


class Conditioned(nn.Module):
    """A unit that uses twice the condition that all units share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.shift = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        hidden = nn.functional.silu(self.inner(x) * self.scale(condition) + self.shift(condition))
        found: Tensor = x + self.outer(hidden)
        return found


class Residual(nn.Module):
    """Blocks with a condition that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.condition = nn.Linear(INPUTS, WIDTH), nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList([Conditioned() for _ in range(3)])
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        condition, hidden = torch.tanh(self.condition(x)), self.embed(x)
        for block in self.blocks:
            hidden = block(hidden, condition)
        found: Tensor = self.head(hidden)
        return found


class Level(nn.Module):
    """A level of a UNet, which uses the time embedding twice."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv1d(n, outputs, 3, padding=1) for n in (inputs, outputs))
        self.scale, self.shift = nn.Linear(WIDTH, outputs), nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(x) * (1 + self.scale(time)[..., None]) + self.shift(time)[..., None]
        return nn.functional.silu(self.second(nn.functional.silu(hidden)))


class UNet(nn.Module):
    """Levels down and up, which share a time embedding; each level up uses the output of its level down."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.down = nn.ModuleList([Level(1, 2), Level(2, 3)])
        self.middle = Level(3, 3)
        self.up = nn.ModuleList([Level(6, 2), Level(4, 2)])
        self.head = nn.Conv1d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        time, hidden, kept = self.time(x), torch.cat([x, x * x], 1)[:, None, :8], list[Tensor]()
        for level in self.down:
            hidden = level(hidden, time)
            kept.append(hidden)
            hidden = nn.functional.avg_pool1d(hidden, 2)
        hidden = self.middle(hidden, time)
        for level in self.up:
            hidden = torch.cat([nn.functional.interpolate(hidden, scale_factor=2.0), kept.pop()], 1)
            hidden = level(hidden, time)
        found: Tensor = self.head(hidden)
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {"residual": Residual, "unet": UNet}
NEEDS_A_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
MODELS_AND_BACKENDS = pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("residual", BACKEND),
        pytest.param("residual", "inductor", marks=[pytest.mark.slow, NEEDS_A_COMPILER]),
        pytest.param("unet", BACKEND, marks=pytest.mark.slow),
        pytest.param("unet", "inductor", marks=[pytest.mark.slow, pytest.mark.long, NEEDS_A_COMPILER]),
    ],
)


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered as a whole."""
    return [entry.module for entry in find_units(model).entries if entry.needs and entry.needs[-1] != 0]


def each_unit(backend: str) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        for unit in units_of(model):
            unit.compile(backend=backend)

    return prepare


def broken_at_units(backend: str) -> Callable[[Any], None]:
    """Return a plain model, compiled as a whole, with the graph breaks of stage 3."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def nothing(*_: Any) -> None:
        return None

    def prepare(model: Any) -> None:
        for entry in find_units(model).entries:
            if entry.module is not model:
                entry.module.register_forward_pre_hook(nothing)
                entry.module.register_forward_hook(nothing)
        model.compile(backend=backend)

    return prepare


def each_unit_trains(group: dist.ProcessGroup | None, rank: int, name: str, backend: str) -> list[str]:
    """Train a model compiled unit by unit, with units that are sent; return the warnings."""
    torch._dynamo.reset()
    transport = solo() if group is None else connect(group)
    case = Case(MODELS[name], prepared=each_unit(backend))
    _, expected = plain_loop(case, transport.world_size)
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check_rank(case, transport, expected)
    return [str(each.message) for each in said if "stage 3" in str(each.message)]


@MODELS_AND_BACKENDS
@pytest.mark.full
def test_units_that_are_compiled_by_themselves_have_the_bits_of_the_plain_loop(name: str, backend: str) -> None:
    assert each_unit_trains(None, 0, name, backend) == []


@pytest.mark.slow
@MODELS_AND_BACKENDS
def test_they_have_them_on_two_ranks(gloo: GlooPool, name: str, backend: str) -> None:
    assert gloo.run(each_unit_trains, name, backend, ranks=(0, 1), limit=300) == [[], []]


def whole_below_stage_3(group: dist.ProcessGroup | None, rank: int, name: str, backend: str) -> None:
    transport = solo() if group is None else connect(group)
    case = Case(MODELS[name], prepared=lambda model: model.compile(backend=backend))
    _, expected = plain_loop(case, transport.world_size)
    for stage in range(3):
        model, optimizer = sharded(case, transport, stage=stage)
        for step in range(case.steps):
            train(case, model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
            assert_parameters(model, expected[step])
        optimizer.close()


@pytest.mark.slow
@MODELS_AND_BACKENDS
def test_whole_models_have_the_bits_of_the_plain_loop_below_stage_3(gloo: GlooPool, name: str, backend: str) -> None:
    whole_below_stage_3(None, 0, name, backend)
    gloo.run(whole_below_stage_3, name, backend, ranks=(0, 1), limit=300)


@pytest.mark.slow
@MODELS_AND_BACKENDS
def test_a_whole_model_is_at_stage_3_the_plain_one_with_its_graph_broken_at_units(name: str, backend: str) -> None:
    """This is the only difference: the unbroken model has other bits."""
    torch._dynamo.reset()
    whole = Case(MODELS[name], prepared=lambda model: model.compile(backend=backend))
    _, unbroken = plain_loop(whole, 1)
    torch._dynamo.reset()
    _, broken = plain_loop(replace(whole, prepared=broken_at_units(backend)), 1)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="the graph of a compiled call is broken at"):
        check_rank(whole, solo(), broken)
    assert any(not torch.equal(broken[-1][key], unbroken[-1][key]) for key in unbroken[-1])


# -- the graph of a unit -----------------------------------------------------------------------------------------------


class Hooked(Block):
    """A unit with hooks of the user's, which a compiler traces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (args[0] * self.inner.weight.sum(),))
        self.register_forward_hook(lambda module, args, output: output + self.outer.bias)


UNITS: dict[str, Callable[[], nn.Module]] = {
    "Block": Block,
    "Hooked": Hooked,
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "Sequential": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True),
}


class Recorder:
    """A backend that compiles nothing and keeps the source of each graph."""

    def __init__(self) -> None:
        self.graphs: list[str] = []
        self._before = counters["frames"]["total"]

    def frames(self) -> int:
        """The number of functions that Dynamo tried to trace."""
        return counters["frames"]["total"] - self._before

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph.code)
        return graph.forward


@pytest.mark.parametrize("in_place", [True, False], ids=["module.compile()", "torch.compile(module)"])
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.by_default("Linear-module.compile()", "Linear-torch.compile(module)", "Sequential-module.compile()")
def test_a_compiled_unit_has_the_graphs_of_the_plain_model(name: str, in_place: bool) -> None:
    def prepare(model: Any) -> None:
        for index, block in enumerate(model.blocks):
            if in_place:
                block.compile(backend=recorder, fullgraph=users)
            else:
                model.blocks[index] = torch.compile(block, backend=recorder, fullgraph=users)

    users = name in ("Block", "Hooked")  # torch compiles no module of its own in place
    case = Case(net_of(UNITS[name]), prepared=prepare)
    torch._dynamo.reset()
    recorder = plain = Recorder()
    _, expected = plain_loop(case, 1)
    frames = plain.frames()
    torch._dynamo.reset()
    recorder = Recorder()
    check_rank(case, solo(), expected)
    assert recorder.graphs == plain.graphs
    assert recorder.frames() == frames  # no function of the library
    assert bool(plain.graphs) == (users or not in_place)


@pytest.mark.parametrize("name", ["Linear", "Sequential"])
@pytest.mark.by_default("Sequential")
def test_a_compiled_unit_that_travels_has_the_graphs_of_the_plain_model(name: str) -> None:
    """Both ranks compile, one after the other; no rank compiles a function of the library."""

    def prepare(model: Any) -> None:
        for block in model.blocks:
            block.compile(backend=recorder)

    case = Case(net_of(UNITS[name]), prepared=prepare)
    torch._dynamo.reset()
    recorder = plain = Recorder()
    _, expected = plain_loop(case, 2)
    frames = plain.frames()
    torch._dynamo.reset()
    recorder = Recorder()
    try:
        on_threads(2, lambda transport: check_rank(case, transport, expected), timeout=20)
    except torch._dynamo.exc.TorchDynamoException as error:
        pytest.fail(str(error))
    assert set(recorder.graphs) == set(plain.graphs)
    assert recorder.frames() <= 2 * frames


# -- a graph that is broken --------------------------------------------------------------------------------------------


def by_itself(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def around(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def in_a_function(model: Any) -> Any:
    return torch.compile(lambda x: model(x), backend="eager")


BROKEN: dict[str, Callable[[Any], Any]] = {
    "model.compile()": by_itself,
    "torch.compile(model)": around,
    "a compiled function": in_a_function,
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize(
    "before", [pytest.param(True, marks=pytest.mark.slow, id="before"), pytest.param(False, id="after")]
)
@pytest.mark.by_default("after-model.compile()")
def test_a_graph_that_is_broken_at_units_is_said_once(name: str, before: bool) -> None:
    model = Net()
    call = BROKEN[name](model) if before else None
    optimizer = ZeroOptimizer(call if isinstance(call, nn.Module) else model, stage=3, process_group=solo(), lr=0.1)
    if call is None:
        call = BROKEN[name](model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            call(torch.ones(2, INPUTS)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    texts = [str(each.message) for each in said]
    assert len([text for text in texts if "stage 3: the graph of a compiled call is broken at" in text]) == 1
    assert not any("does not know how to trace" in text for text in texts)
    torch._dynamo.reset()


@pytest.mark.full
def test_nothing_is_said_where_no_graph_is_broken() -> None:
    """Without a compiler, below stage 3, and if a compiled function calls the model where the compiler is disabled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "stage 3")
        for stage, prepare in ((3, lambda model: model), (2, by_itself), (3, switched_off)):
            model = Net()
            optimizer = ZeroOptimizer(model, stage=stage, process_group=solo(), lr=0.1)
            prepare(model)(torch.ones(2, INPUTS)).sum().backward()
            optimizer.step()
    torch._dynamo.reset()


def switched_off(model: Any) -> Any:
    call = torch.compiler.disable(lambda x: model(x))
    return torch.compile(lambda x: call(x) * 2, backend="eager")


# -- after a compiled unit ---------------------------------------------------------------------------------------------


def test_close_gives_back_the_compiled_call() -> None:
    model = Net()
    optimizer = ZeroOptimizer(model, stage=3, process_group=solo(), lr=0.1)
    each_unit(BACKEND)(model)
    calls = [block._compiled_call_impl for block in model.blocks]
    model(torch.ones(2, INPUTS)).sum().backward()
    assert [block._compiled_call_impl for block in model.blocks] != calls
    optimizer.close()
    assert [block._compiled_call_impl for block in model.blocks] == calls
    torch._dynamo.reset()


@pytest.mark.full
def test_a_unit_may_be_compiled_anew_or_no_more() -> None:
    case = replace(CASES["block.compile() before"], begin=recompile, steps=3)
    _, expected = plain_loop(case, 1)
    check_rank(case, solo(), expected)
    torch._dynamo.reset()


def recompile(model: Any, step: int) -> None:
    for block in model.blocks:
        if step == 1:
            block.compile(backend=BACKEND)
        elif step == 2:
            block._compiled_call_impl = None


@pytest.mark.full
def test_a_compiled_unit_that_raises_leaves_an_object_that_goes_on() -> None:
    case = Case(net_of(Fails), prepared=blocks_in_place)
    _, expected = plain_loop(case, 1)
    model, optimizer = sharded(case, solo())
    for step in range(case.steps):
        model.blocks[1].armed = "forward"
        with pytest.raises(ZeroDivisionError):
            train(case, model, optimizer, step)
        model.blocks[1].armed = ""
        train(case, model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.gathered():
            assert_parameters(model, expected[step])
    torch._dynamo.reset()


def test_a_step_inside_a_compiled_unit_is_refused() -> None:
    class Steps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch.compiler.disable(optimizer.step)()
            return super().forward(x)

    model = Steps(INPUTS, OUTPUTS)
    model.compile(backend=BACKEND)
    optimizer = ZeroOptimizer(model, stage=3, process_group=solo(), lr=0.1)
    with pytest.raises(RuntimeError, match="inside a forward: leave it first"):
        model(torch.ones(2, INPUTS))
    torch._dynamo.reset()
