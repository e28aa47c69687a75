"""Uses of a model at stage 3: forwards and backwards in any order, failures, hooks.

Each case has the plain loop's bits, and afterwards no unit is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..support.cases import (
    WIDTH,
    WORLD_SIZES,
    Apart,
    Batch,
    Block,
    Case,
    Fails,
    Net,
    check,
    loss_of,
    net_of,
    one_backward,
)

# -- several forwards -------------------------------------------------------------------------------------------------


def two_forwards(model: nn.Module, batch: Batch) -> None:
    (loss_of(model, batch) + model(-batch.x).exp().mean()).backward()


def without_gradient(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x.clone())
    model.eval()
    with torch.no_grad():
        model(x)
    model(x)  # a graph that is never used
    model.train()


def others_in_between(model: nn.Module, batch: Batch) -> None:
    without_gradient(model, batch.x)
    loss = loss_of(model, batch)
    without_gradient(model, batch.x)
    loss.backward()
    without_gradient(model, batch.x)


class InferenceInside(Net):
    """A model that computes a target with itself, in the middle of its forward."""

    def body(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            target = self.blocks[1](x)
        with torch.no_grad():
            other = self.blocks[2](x)
        found: Tensor = super().body(x) + other + target.clone()
        return found


def retained_graph(model: nn.Module, batch: Batch) -> Iterator[None]:
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    yield
    loss.backward()
    yield


def two_losses(model: nn.Module, batch: Batch) -> Iterator[None]:
    out = model(batch.x)
    out.square().mean().backward(retain_graph=True)
    yield
    out.exp().mean().backward()
    yield


def from_the_middle(model: Any, batch: Batch) -> None:
    """Use a loss of the first unit's output; the rest of the forward does not reach it."""
    kept: list[Tensor] = []
    handle = model.blocks[0].register_forward_hook(lambda module, args, out: kept.append(out))
    model(batch.x)
    handle.remove()
    kept[0].square().mean().backward()


def two_graphs(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Keep two graphs at once, and run the older one's backward first."""
    first, second = loss_of(model, batch), model(batch.x + 1).exp().mean()
    first.backward()
    yield
    second.backward()
    yield


# -- exceptions -------------------------------------------------------------------------------------------------------


def failing(where: str, error: type[BaseException], clear: bool = False) -> Any:
    """Fail in the first micro-batch of each step.

    Gradients that its backward has computed count, unless they are cleared.
    """

    def run(model: Any, batch: Batch) -> None:
        model.blocks[1].armed, model.blocks[1].error = where if batch.turn == 0 else "", error
        if batch.turn == 0:
            with pytest.raises(error):
                one_backward(model, batch)
            if clear:
                model.zero_grad()
        else:
            one_backward(model, batch)

    return run


def failing_and_again(model: Any, batch: Batch) -> None:
    """Run a forward that fails, and at once the same one without the failure."""
    model.blocks[1].armed = "forward"
    with pytest.raises(ZeroDivisionError):
        model(batch.x)
    model.blocks[1].armed = ""
    one_backward(model, batch)


# -- units, and their order -------------------------------------------------------------------------------------------


def two_roots(model: nn.Module, batch: Batch) -> None:
    out = model(batch.x)
    torch.autograd.backward([out, out.exp()], [torch.ones_like(out), torch.full_like(out, 2.0)])


def inside_gathered(model: nn.Module, batch: Batch) -> None:
    """Run forward and backward in one `gathered()`; then each in one of its own."""
    if batch.turn == 0:
        with batch.gathered():
            one_backward(model, batch)
    else:
        with batch.gathered():
            loss = loss_of(model, batch)
        with batch.gathered():
            loss.backward()


class SkipsOne(Net):
    def body(self, x: Tensor) -> Tensor:
        found: Tensor = self.blocks[2](self.blocks[0](x))
        return found


class TwiceEach(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


class Listed(Net):
    """One module at several places of a list, and under another name beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])
        self.alias = self.blocks[1]

    def body(self, x: Tensor) -> Tensor:
        found: Tensor = self.alias(super().body(x))
        return found


class Recursive(Block):
    """A unit that calls itself."""

    def forward(self, x: Tensor, depth: int = 2) -> Any:
        x = super().forward(x)
        return self(x, depth - 1) if depth else x


class Calls(Block):
    """A unit that calls other units."""

    others: tuple[nn.Module, ...] = ()

    def forward(self, x: Tensor) -> Any:
        hidden = self.norm(x)
        for other in self.others:
            hidden = other(hidden)
        return x + self.outer(torch.tanh(self.inner(hidden)))


def acquaint(model: Any) -> None:
    model.blocks[0].others = (model.blocks[1],)


def nest(model: Any) -> None:
    model.blocks[0].inside = model.blocks[1]
    acquaint(model)


class OutputUnused(Net):
    def body(self, x: Tensor) -> Tensor:
        self.blocks[1](x)
        found: Tensor = self.blocks[2](self.blocks[0](x))
        return found


class Changing(Net):
    """A model that draws its blocks, and their order, anew for every step."""

    count = 5
    step = 0

    def body(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.step)
        order = torch.randperm(self.count, generator=generator)[: 2 + self.step % 3]
        for number in order.tolist():
            x = self.blocks[number](x)
        return x


def note_step(model: Any, step: int) -> None:
    model.step = step


def direct_forward(model: Any, batch: Batch) -> None:
    model.forward(batch.x).square().mean().backward()


def unit_alone(model: Any, batch: Batch) -> None:
    model.blocks[1](batch.x[:, :1].expand(-1, WIDTH)).square().mean().backward()


def embedding_alone(model: Any, batch: Batch) -> None:
    model.embed(batch.x).square().mean().backward()


def part_alone(model: Any, batch: Batch) -> None:
    model.inside(batch.x).square().mean().backward()


def parts_in_turn(model: Any, batch: Batch) -> None:
    """Call the parts: the root's forward is never called."""
    hidden = model.embed(batch.x)
    for block in reversed(model.blocks):
        hidden = block(hidden)
    model.head(model.norm(hidden)).square().mean().backward()


def outer_net() -> nn.Module:
    model = nn.Module()
    model.inside, model.other = Net(), nn.Linear(2, 2)
    return model


# -- hooks of the user's ----------------------------------------------------------------------------------------------


def shift_input(module: Any, args: Any) -> Any:
    return (args[0] * module.norm.weight.mean(), *args[1:])


def shift_output(module: Any, args: Any, out: Tensor) -> Any:
    return out + module.outer.weight.sum()


def shift_gradient(module: Any, inward: Any, outward: Any) -> Any:
    return tuple(gradient * module.inner.weight.detach().square().sum() for gradient in inward)


def shift_outward_gradient(module: Any, outward: Any) -> Any:
    return tuple(gradient * module.inner.weight.detach().square().sum() for gradient in outward)


def hook_forward(model: Any) -> None:
    for block in model.blocks:
        block.register_forward_pre_hook(shift_input)
        block.register_forward_hook(shift_output)
        block.inner.register_forward_hook(lambda module, _, out: out * module.bias.sum())
    model.register_forward_hook(lambda module, _, out: out * module.head.weight.sum())
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.mean(),))


def hook_backward(model: Any) -> None:
    for block in model.blocks:
        block.register_full_backward_hook(shift_gradient)
        block.inner.register_full_backward_hook(lambda module, inward, _: (inward[0] * module.bias.detach().sum(),))


def hook_backward_first(model: Any) -> None:
    for block in model.blocks:
        block.register_full_backward_pre_hook(shift_outward_gradient)


def hook_first(model: Any) -> None:
    for block in model.blocks:
        block.register_forward_pre_hook(shift_input, prepend=True)
        block.register_forward_hook(shift_output, prepend=True)


class FailsOnce:
    """A hook that raises the first time."""

    def __init__(self) -> None:
        self.called = False

    def __call__(self, *_: Any) -> None:
        before, self.called = self.called, True
        if not before:
            raise ZeroDivisionError("in a hook")


def failing_hook(register: str, prepend: bool) -> Any:
    """Run each micro-batch with a hook that fails, and then again."""

    def run(model: Any, batch: Batch) -> None:
        handle = getattr(model.blocks[1], register)(FailsOnce(), prepend=prepend)
        with pytest.raises(ZeroDivisionError):
            model(batch.x)
        one_backward(model, batch)
        handle.remove()

    return run


def hook_parameters(model: Any) -> None:
    for parameter in model.blocks[1].parameters():
        parameter.register_hook(lambda gradient: gradient * 2)


# -- other parameters -------------------------------------------------------------------------------------------------


def own_parameters(model: nn.Module) -> None:
    """Give the modules other parameters of the user's own."""
    generator = torch.Generator().manual_seed(7)
    own = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    model.own = own  # type: ignore[assignment]


def distilled(model: Any, batch: Batch) -> None:
    with torch.no_grad():
        target = torch.func.functional_call(model, model.own, (batch.x,))
    (model(batch.x) - target).square().mean().backward()


def distilled_with_gradient(model: Any, batch: Batch) -> None:
    """Multiply the loss by the squared norm of a gradient for other parameters."""
    own = {name: p.clone().requires_grad_() for name, p in model.own.items()}
    other = torch.func.functional_call(model, own, (batch.x,))
    found = torch.autograd.grad(other.square().mean(), list(own.values()))
    (loss_of(model, batch) * sum(g.square().sum() for g in found)).backward()


CASES: dict[str, Case] = {
    "plain": Case(),
    "two forwards, one backward": Case(run=two_forwards),
    "forwards without gradient in between": Case(run=others_in_between),
    "forwards without gradient inside": Case(InferenceInside),
    "retain_graph and a second backward": Case(run=retained_graph),
    "two losses": Case(run=two_losses),
    "two outputs and their gradients": Case(run=two_roots),
    "inside gathered()": Case(run=inside_gathered),
    "a loss from the middle": Case(run=from_the_middle),
    "two graphs": Case(run=two_graphs),
    "exception in a forward": Case(net_of(Fails), failing("forward", ZeroDivisionError)),
    "exception in a forward, and again": Case(net_of(Fails), failing_and_again),
    "exception in a backward": Case(net_of(Fails), failing("backward", ZeroDivisionError)),
    "exception in a backward, cleared": Case(net_of(Fails), failing("backward", ZeroDivisionError, clear=True)),
    "interrupt in a forward": Case(net_of(Fails), failing("forward", KeyboardInterrupt)),
    "interrupt in a backward": Case(net_of(Fails), failing("backward", KeyboardInterrupt)),
    "a unit never used": Case(SkipsOne),
    "units twice": Case(TwiceEach),
    "units three times, apart": Case(Apart),
    "a module listed twice": Case(Listed),
    "a unit that calls itself": Case(net_of(Recursive)),
    "a unit that calls another": Case(net_of(Calls), prepared=acquaint),
    "a unit that holds another": Case(net_of(Calls), prepared=nest),
    "a unit whose output is not used": Case(OutputUnused),
    "another graph in every step": Case(Changing, begin=note_step, steps=5),
    "the root's forward() called directly": Case(run=direct_forward),
    "a unit alone": Case(run=unit_alone),
    "the embedding alone": Case(run=embedding_alone),
    "a part that holds units alone": Case(outer_net, part_alone),
    "parts in turn, without the root": Case(run=parts_in_turn),
    "forward hooks from before": Case(prepared=hook_forward),
    "forward hooks from after": Case(built=hook_forward),
    "forward hooks from after, put first": Case(built=hook_first),
    "a forward pre-hook that fails": Case(run=failing_hook("register_forward_pre_hook", False)),
    "a forward pre-hook that fails, put first": Case(run=failing_hook("register_forward_pre_hook", True)),
    "a forward hook that fails": Case(run=failing_hook("register_forward_hook", False)),
    "a forward hook that fails, put first": Case(run=failing_hook("register_forward_hook", True)),
    "full backward hooks from before": Case(prepared=hook_backward),
    "full backward hooks from after": Case(built=hook_backward),
    "full backward pre-hooks from before": Case(prepared=hook_backward_first),
    "full backward pre-hooks from after": Case(built=hook_backward_first),
    "hooks on parameters from before": Case(prepared=hook_parameters),
    "hooks on parameters from after": Case(built=hook_parameters),
    "functional_call": Case(prepared=own_parameters, run=distilled),
    "functional_call with a gradient": Case(prepared=own_parameters, run=distilled_with_gradient),
}


@WORLD_SIZES
@pytest.mark.parametrize("name", CASES)
@pytest.mark.by_default(
    "plain-3",
    "two forwards, one backward-3",
    "retain_graph and a second backward-3",
    "inside gathered()-3",
    "exception in a forward, and again-3",
    "exception in a backward-3",
    "units three times, apart-3",
    "a unit that holds another-3",
    "another graph in every step-3",
    "functional_call-1",
    "full backward hooks from before-3",
)
def test_training_equals_the_plain_loop_and_leaves_nothing_gathered(name: str, world_size: int) -> None:
    check(CASES[name], world_size)
