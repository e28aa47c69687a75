"""`zero.register_forward_method`: at stage 3 such a method gathers the same units as the forward, until `close`."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..contract.test_habits import MICRO_BATCHES, STAGES, STEPS, batch, build
from ..support.cases import (
    INPUTS,
    ROWS,
    WIDTH,
    WORLD_SIZES,
    Batch,
    Block,
    Case,
    Net,
    assert_nothing_is_here,
    batches_of,
    check,
    check_rank,
    manager_of,
    plain_loop,
    sharded,
    train,
)
from ..support.plain import assert_same_bits, assert_same_model
from ..support.pool import GlooPool


class Acting(Block):
    """A unit with further methods that use its weights."""

    scale = 2.0

    def act(self, x: Tensor, *, bias: float = 0.0) -> Tensor:
        """Use the weight itself, too."""
        return torch.tanh(self.inner(x)) @ self.inner.weight * self.scale + bias

    def again(self, x: Tensor) -> Tensor:
        hidden: Tensor = self(self.act(x)) + self.act(x)
        return hidden

    def fails(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError(str(self.inner.weight.sum() + x.sum()))

    @staticmethod
    def fixed(x: Tensor) -> Tensor:
        return x * 3

    @classmethod
    def doubled(cls, x: Tensor) -> Tensor:
        return x * cls.scale


class Agent(Net):
    """A model whose other methods are called, too."""

    block = Acting

    def encode(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.embed(x) + self.embed.bias
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def decode(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(hidden)) * self.head.weight.sum()
        return found

    def both(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def generate(self, x: Tensor, count: int = 2) -> Tensor:
        for _ in range(count):
            x = torch.cat([x[:, 1:], self(x)[:, :1]], 1)
        return x

    def parts(self, x: Tensor) -> Tensor:
        """A method that is not registered: the modules that it calls gather their units themselves."""
        found: Tensor = self.head(self.norm(self.blocks[1](self.embed(x))))
        return found


def register(model: Any) -> None:
    for name in ("encode", "decode", "both", "generate"):
        zero.register_forward_method(model, name)
    for block in model.blocks:
        for name in ("act", "again", "fails", "fixed", "doubled"):
            zero.register_forward_method(block, name)


def of_a_unit(model: Any, batch: Batch) -> None:
    x = model.blocks[1].act(model.embed(batch.x), bias=0.5)
    model.blocks[0](x).square().mean().backward()


def of_a_unit_and_its_forward(model: Any, batch: Batch) -> None:
    x = model.blocks[1].again(model.embed(batch.x))
    (model.blocks[2].act(x) + model.blocks[1](x)).square().mean().backward()


def of_the_model(model: Any, batch: Batch) -> None:
    hidden = model.encode(batch.x)
    model.decode(hidden).square().mean().backward()


def of_the_model_nested(model: Any, batch: Batch) -> None:
    (model.both(batch.x) + model(batch.x)).square().mean().backward()


def generated(model: Any, batch: Batch) -> None:
    model.generate(batch.x).square().mean().backward()


def generated_without_graph(model: Any, batch: Batch) -> None:
    with torch.no_grad():
        x = model.generate(batch.x, 3) + model.blocks[0].act(model.embed(batch.x)).sum()
    with torch.inference_mode():
        mean = model.both(batch.x).mean().item()
    model(x + mean).square().mean().backward()


def of_no_unit(model: Any, batch: Batch) -> None:
    model.parts(batch.x).square().mean().backward()


def after_an_error(model: Any, batch: Batch) -> None:
    x = model.embed(batch.x)
    for name in ("fails", "act"):
        with suppress(ZeroDivisionError, TypeError):
            getattr(model.blocks[1], name)(x, *(["too many", "arguments"] if name == "act" else []))
    model.blocks[1].act(x).square().mean().backward()


def static(model: Any, batch: Batch) -> None:
    block = model.blocks[1]
    block.doubled(block.fixed(x=block(model.embed(batch.x)))).square().mean().backward()


RUNS = [
    of_a_unit,
    of_a_unit_and_its_forward,
    of_the_model,
    of_the_model_nested,
    generated,
    generated_without_graph,
    of_no_unit,
    after_an_error,
    static,
]


def assert_methods_are_plain(model: Any) -> None:
    for part in model.modules():
        assert not any(type(value).__module__.startswith("zero") for value in vars(part).values())
    assert model.encode.__func__ is Agent.encode
    assert model.blocks[1].act.__func__ is Acting.act


def case_of(run: Callable[[Any, Batch], None]) -> Case:
    return Case(Agent, run, built=register)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.by_default("of_a_unit-3", "of_the_model-3", "generated-3", "after_an_error-3")
def test_registered_methods_train_as_in_the_plain_loop(world_size: int, run: Any) -> None:
    check(case_of(run), world_size)


def on_a_process(group: dist.ProcessGroup, rank: int) -> None:
    from collectives.backends.gloo import connect

    for run in (of_a_unit_and_its_forward, of_the_model_nested, generated_without_graph, after_an_error):
        case = case_of(run)
        check_rank(case, connect(group), plain_loop(case, dist.get_world_size(group))[1])


@pytest.mark.full
def test_they_do_on_real_processes(gloo: GlooPool) -> None:
    gloo.run(on_a_process)


@STAGES
def test_the_same_lines_serve_every_stage(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.contract.test_habits.Net", Agent)

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> nn.Module:
        register(model)
        for step in range(STEPS):
            for number in range(MICRO_BATCHES):
                x = batch(step, number, None)
                (model.both(x) + model.blocks[0].act(model.embed(x)).sum()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    plain = build()
    expected = loop(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    model = build()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.01)
    loop(model, optimizer)
    assert ("act" in vars(model.blocks[0])) == (stage == 3)
    optimizer.close()
    assert_same_model(model, expected)
    assert_methods_are_plain(model)


@WORLD_SIZES
def test_close_takes_them_away_and_nothing_stays_gathered_before(world_size: int) -> None:
    case = case_of(of_the_model_nested)

    def program(transport: Transport) -> None:
        model, optimizer = sharded(case, transport)
        train(case, model, optimizer, 0)
        with torch.no_grad():
            model.blocks[1].act(torch.ones(ROWS, WIDTH))
        optimizer.step()
        optimizer.zero_grad()
        assert_nothing_is_here(model, optimizer)
        with torch.no_grad():
            for method in (model.blocks[1].act, model.blocks[1].again):
                method(torch.ones(ROWS, WIDTH))
                assert_nothing_is_here(model, optimizer)
            with pytest.raises(ZeroDivisionError):
                model.blocks[1].fails(torch.ones(ROWS, WIDTH))
            assert_nothing_is_here(model, optimizer)
        with pytest.raises(ZeroDivisionError):
            model.blocks[1].fails(torch.ones(ROWS, WIDTH))
        assert_nothing_is_here(model, optimizer)
        optimizer.close()
        assert_methods_are_plain(model)
        assert torch.isfinite(model.both(torch.ones(ROWS, INPUTS))).all()

    on_threads(world_size, program, timeout=10)


def one_rank(**arguments: Any) -> tuple[Any, ZeroOptimizer]:
    model = Case(Agent).make()
    return model, ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1, **arguments)


def copied(model: Any) -> Any:
    return copy.deepcopy(model)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied_by", [copied, pickled, lambda model: copied(pickled(copied(model)))])
@pytest.mark.by_default("copied")
def test_a_copy_has_the_plain_method(copied_by: Callable[[Any], Any]) -> None:
    model, optimizer = one_rank()
    register(model)
    with optimizer.gathered():
        twin = copied_by(model)
    plain = Case(Agent).make()
    x = torch.ones(ROWS, INPUTS)
    optimizer.close()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for mine, theirs in ((twin, plain),):
        assert_same_bits(mine.both(x), theirs.both(x))
        assert_same_bits(mine.blocks[1].act(theirs.embed(x)), theirs.blocks[1].act(theirs.embed(x)))
    assert twin.blocks[1].act.__self__ is twin.blocks[1]
    assert twin.blocks[1].act.__func__ is Acting.act
    reference = weakref.ref(twin)
    del twin, mine
    gc.collect()
    assert reference() is None


def test_registering_twice_is_harmless_and_what_the_user_puts_there_stays() -> None:
    model, optimizer = one_rank()
    block = model.blocks[0]
    zero.register_forward_method(block, "act")
    first = vars(block)["act"]
    zero.register_forward_method(block, "act")
    assert vars(block)["act"] is first
    zero.register_forward_method(block, "again")
    x = torch.ones(ROWS, WIDTH)
    expected = Case(Agent).make().blocks[0].act(x)
    del block.act  # remove it, as if it had never been registered
    zero.register_forward_method(block, "act")
    assert_same_bits(block.act(x), expected)
    block.again = lambda value: value + 1  # the user's own method, which close() must keep
    optimizer.zero_grad()
    optimizer.close()
    assert_same_bits(block.again(x), x + 1)
    del block.again
    assert_methods_are_plain(model)


def test_a_method_that_was_assigned_to_one_module_alone_comes_back() -> None:
    model = Case(Agent).make()
    block = model.blocks[0]
    block.act = types.MethodType(lambda self, x: self.inner.weight.sum() * x, block)
    block.partly = functools.partial(Acting.act, block, bias=1.0)
    own, partly = vars(block)["act"], vars(block)["partly"]
    x = torch.ones(ROWS, WIDTH)
    expected = own(x), partly(x)
    optimizer = ZeroOptimizer(model, stage=3)
    for name in ("act", "partly"):
        zero.register_forward_method(block, name)
    assert_same_bits(block.act(x), expected[0])
    assert_same_bits(block.partly(x), expected[1])
    with optimizer.gathered():
        twin = copy.deepcopy(model)
    assert twin.blocks[0].act.__self__ is twin.blocks[0]
    optimizer.close()
    assert vars(block)["act"] is own
    assert vars(block)["partly"] is partly


def test_a_registered_method_looks_like_the_plain_one() -> None:
    model, optimizer = one_rank()
    register(model)
    block = model.blocks[0]
    for name in ("act", "fixed", "doubled"):
        zero.register_forward_method(block, name)
    for module, name in ((block, "act"), (block, "fixed"), (block, "doubled"), (model, "encode")):
        method, plain = vars(module)[name], inspect.getattr_static(type(module), name).__get__(module, type(module))
        assert not isinstance(method, (types.MethodType, types.FunctionType))
        assert inspect.signature(method) == inspect.signature(plain)
        for attribute in (*functools.WRAPPER_ASSIGNMENTS, "__code__", "__defaults__", "__kwdefaults__", "__globals__"):
            assert getattr(method, attribute, None) == getattr(plain, attribute, None), (name, attribute)
        assert inspect.unwrap(method) == method.__wrapped__ == plain
        assert getattr(method, "__self__", None) is getattr(plain, "__self__", None)
        assert getattr(method, "__func__", None) is getattr(plain, "__func__", None)
        assert inspect.getsource(method) == inspect.getsource(plain)
        assert not hasattr(method, "no_such_attribute")
    assert block.act.__self__ is block
    assert not is_overridden("encode", model, Agent)
    assert is_overridden("forward", block, nn.Module)
    optimizer.close()
    method = type(method)(model, "encode", lambda _: None, lambda *_: None)
    del optimizer
    gc.collect()
    del model, module, block, plain
    assert not hasattr(method, "__code__"), "it holds the module"


def is_overridden(name: str, module: nn.Module, parent: type[nn.Module]) -> bool:
    """Compare as `lightning` does to know which methods a user has written."""
    return bool(getattr(module, name).__code__ != getattr(getattr(parent, name, None), "__code__", None))


@STAGES
def test_what_is_no_method_is_an_error(stage: int) -> None:
    model = Case(Agent).make()
    optimizer = ZeroOptimizer(model, stage=stage)
    for name in ("nothing", "scale", "inner", ""):
        with pytest.raises(ValueError, match=f"register_forward_method: Acting has no method '{name}'"):
            zero.register_forward_method(model.blocks[0], name)
    with pytest.raises(ValueError, match="has no method 3"):
        zero.register_forward_method(model.blocks[0], 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a module is needed, not 'act'"):
        zero.register_forward_method("act", "act")  # type: ignore[arg-type]
    optimizer.close()


def test_a_method_inside_a_unit_is_an_error_and_one_around_units_needs_nothing() -> None:
    model, optimizer = one_rank()
    with pytest.raises(ValueError, match=r"Linear, with the parameter 'weight', lies inside a unit, .*of the unit"):
        zero.register_forward_method(model.blocks[0].inner, "extra_repr")
    zero.register_forward_method(model.blocks, "append")
    assert "append" not in vars(model.blocks)
    with pytest.raises(RuntimeError, match=r"'blocks\.0\.inner\.weight' is released: .*register_forward_method"):
        model.blocks[0].act(torch.ones(ROWS, WIDTH))
    optimizer.close()


@pytest.mark.full
def test_nothing_holds_the_module_or_the_optimizer() -> None:
    model, optimizer = one_rank()
    register(model)
    act, gone = model.blocks[0].act, weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    with pytest.raises(RuntimeError, match="the optimizer that held this parameter's values is gone"):
        act(torch.ones(ROWS, WIDTH))
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()
    gc.collect()
    with pytest.raises(ReferenceError, match="the module of this method 'act' is gone"):
        act(torch.ones(ROWS, WIDTH))


def test_a_step_inside_a_registered_method_is_refused_as_inside_a_forward() -> None:
    model, optimizer = one_rank()

    def act(self: Any, x: Tensor) -> Tensor:
        for call in (optimizer.step, optimizer.close):
            with pytest.raises(RuntimeError, match="inside a forward"):
                call()
        found: Tensor = x @ self.inner.weight.T
        return found

    model.blocks[0].act = types.MethodType(act, model.blocks[0])
    zero.register_forward_method(model.blocks[0], "act")
    model.blocks[0].act(torch.ones(ROWS, WIDTH))
    optimizer.zero_grad()
    optimizer.step()
    optimizer.close()


class Halves(Agent):
    """A model whose forward calls two methods, which are also called by themselves."""

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))

    def first(self, x: Tensor) -> Any:
        return self.blocks[1](self.blocks[0](self.embed(x)))

    def second(self, x: Tensor) -> Any:
        return self.head(self.blocks[0](self.blocks[2](x)))


def test_methods_inside_a_forward_begin_no_order_of_their_own() -> None:
    """Units are gathered ahead through both methods, as without them; the next forward begins anew."""

    def program(transport: Transport) -> list[list[int]]:
        model, optimizer = sharded(Case(Halves), transport)
        for name in ("first", "second"):
            zero.register_forward_method(model, name)
        manager, seen = manager_of(optimizer), list[list[int]]()
        fetch = manager.unshard

        def noted(number: int) -> None:
            seen[-1].append(number)
            fetch(number)

        manager.unshard = noted  # type: ignore[method-assign]
        for _ in range(3):
            seen.append([])
            with torch.no_grad():
                model(batches_of(0, 1)[0].x)
        manager.unshard = fetch  # type: ignore[method-assign]
        return seen

    for seen in on_threads(2, program, timeout=10):
        assert [number for number in seen[1] if number] == [1, 2, 1, 2, 3, 2, 3, 1, 3, 1, 1]
        assert seen[2] == seen[1]
