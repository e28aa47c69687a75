"""Gradients for chosen parameters and `torch.func` have the plain results, or an error says what works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import functional
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from collectives import Transport, solo

from ..support.cases import (
    OUTPUTS,
    ROWS,
    WIDTH,
    Batch,
    Case,
    Net,
    assert_nothing_is_here,
    assert_parameters,
    batches_of,
    plain_loop,
    sharded,
    train,
)
from ..support.errors import error_of
from ..support.plain import assert_same_bits, assert_same_model
from ..support.rows import only
from .worlds import on, size_of

Gradients = list[tuple[Tensor | None, ...]]
X = batches_of(0, 1)[0].x


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def chosen(model: nn.Module) -> list[Tensor]:
    """Return some parameters of the root unit and some of another unit, not in order."""
    parameters = dict(model.named_parameters())
    return [parameters[name] for name in ("blocks.1.inner.weight", "embed.bias", "blocks.1.norm.weight", "head.weight")]


def gradients_of_a_part(model: Net, x: Tensor) -> Gradients:
    """Differentiate for parameters that the loss does not reach, and for an input."""
    x = x.clone().requires_grad_()
    inputs = [*model.blocks[0].parameters(), x, *model.blocks[2].parameters()]
    hidden = model.blocks[0](model.embed(x)).square().sum()
    none = torch.autograd.grad(hidden, inputs, retain_graph=True, allow_unused=True)
    zeros = torch.autograd.grad(hidden, inputs, materialize_grads=True)
    loss_of(model, x.detach()).backward()
    return [none, zeros]


def a_gradient_of_gradients(model: Net, x: Tensor) -> Gradients:
    """Add the norm of the parameters' gradient to the loss."""
    loss = loss_of(model, x)
    gradients = torch.autograd.grad(loss, chosen(model), create_graph=True)
    batched = torch.autograd.grad(model(x).mean(0), chosen(model), torch.eye(OUTPUTS), is_grads_batched=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()
    return [tuple(gradient.detach() for gradient in gradients), batched]


def backwards_for_two_parts(model: Net, x: Tensor) -> Gradients:
    """Run a step of two losses, each for parameters of its own and one for the input (an actor and a critic, say)."""
    x = x.clone().requires_grad_()
    own = {id(p) for p in chosen(model)}
    others = [p for p in model.parameters() if id(p) not in own]
    loss = loss_of(model, x)
    torch.autograd.backward([loss], inputs=[x, *chosen(model)], retain_graph=True)
    torch.autograd.backward(loss, torch.tensor(2.0), inputs=others)
    return [(x.grad,)]


RUNS = [gradients_of_a_part, a_gradient_of_gradients, backwards_for_two_parts]
EVERYWHERE = [
    *((run, 3, world) for run in RUNS for world in ("travel", "common")),
    *zip(RUNS, (0, 1, 2), ("several", "travel", "common"), strict=True),
]
FIRST = [
    (gradients_of_a_part, 3, "common"),
    (a_gradient_of_gradients, 3, "travel"),
    (backwards_for_two_parts, 3, "common"),
]


@pytest.mark.parametrize(("run", "stage", "world"), only(EVERYWHERE, *FIRST))
def test_gradients_for_chosen_parameters_are_those_of_the_plain_loop(run: Any, stage: int, world: str) -> None:
    found: dict[int, list[Gradients]] = {}

    def remembering(model: Any, batch: Batch) -> None:
        found.setdefault(id(model), []).append(run(model, batch.x))

    case, ranks = Case(run=remembering), size_of(world)
    plain, expected = plain_loop(case, ranks)

    def program(transport: Transport) -> None:
        model, optimizer = sharded(case, transport, stage=stage)
        known = list(model.parameters())
        for step in range(case.steps):
            train(case, model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
        assert all(p is before for p, before in zip(model.parameters(), known, strict=True))
        optimizer.close()
        assert_parameters(model, expected[-1])
        for ours, theirs in zip(found[id(model)], found[id(plain)][transport.rank :: ranks], strict=True):
            for a, b in zip(sum(ours, ()), sum(theirs, ()), strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert_same_bits(a, b)

    on(world, program)


@pytest.mark.parametrize("function", [torch.autograd.grad, torch.autograd.backward])
def test_a_hook_inside_a_backward_for_parameters_never_sees_their_stand_ins(function: Any) -> None:
    model, optimizer = sharded(Case(), solo())
    said = list[str]()
    model.head.bias.register_hook(lambda _: said.append(error_of(torch.exp, model.blocks[0].norm.weight)))
    function(loss_of(model), inputs=[model.head.bias, model.blocks[0].norm.weight])
    assert len(said) == 1
    assert "'blocks.0.norm.weight' is released" in said[0]
    optimizer.close()


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def made(model: nn.Module) -> dict[str, Tensor]:
    """Return other values for the parameters, as an ensemble or a meta-learner has them."""
    return {name: torch.linspace(-1, 1, p.numel()).view(p.shape) for name, p in model.named_parameters()}


def called(model: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda values: functional_call(model, values, (X,)).square().mean()


def ensemble(model: nn.Module) -> Any:
    stacked = {name: torch.stack([value, value * 2]) for name, value in made(model).items()}
    return vmap(lambda values: functional_call(model, values, (X,)))(stacked)


HIDDEN = torch.ones(ROWS, WIDTH)
REFUSED: dict[str, Callable[[Any], Any]] = {
    "grad for inputs": lambda model: grad(lambda y: model(y).square().mean())(X),
    "grad for parameters": lambda model: list(grad(called(model))(named(model)).values()),
    "vjp": lambda model: vjp(model, X)[0],
    "jvp of a unit": lambda model: jvp(model.blocks[1], (HIDDEN,), (HIDDEN,)),
    "jacrev": lambda model: jacrev(model)(X),
    "hessian": lambda model: hessian(lambda y: model(y).sum())(X),
}
"""Transforms that differentiate through a unit."""

WORKS: dict[str, Callable[[Any], Any]] = {
    "functional_call with values": lambda model: functional_call(model, made(model), (X,)),
    "vmap over values": ensemble,
    "jacobian": lambda model: functional.jacobian(model, X, vectorize=True),
    "hessian": lambda model: functional.hessian(lambda y: model(y).square().mean(), X),
}
"""What the error and contract/stage3.md name as working, with the results of the plain model."""


def tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found.detach()]
    return [leaf for item in found for leaf in tensors(item)]


@pytest.mark.parametrize(
    "name",
    only(
        [*(f"{name}, refused" for name in REFUSED), *WORKS],
        "grad for inputs, refused",
        "jvp of a unit, refused",
        "functional_call with values",
        "jacobian",
    ),
)
def test_a_transform_has_the_plain_models_result_or_says_what_has_it(name: str) -> None:
    """As the error says, a copy that was made inside `gathered()` and is used after it serves every transform."""
    plain = Case().make()
    model, optimizer = sharded(Case(), solo(), divisor=1)
    if name in WORKS:
        transform, of = WORKS[name], model
    else:
        transform = REFUSED[name.removesuffix(", refused")]
        with pytest.raises(RuntimeError, match=r"inside a transform of torch\.func: .*deepcopy"):
            transform(model)
        assert_nothing_is_here(model, optimizer)
        with optimizer.gathered():
            of = copy.deepcopy(model)
    for ours, theirs in zip(tensors(transform(of)), tensors(transform(plain)), strict=True):
        assert_same_bits(ours, theirs)
    adam = torch.optim.AdamW(plain.parameters(), lr=optimizer.param_groups[0]["lr"])
    for each, each_optimizer in ((model, optimizer), (plain, adam)):
        loss_of(each).backward()
        each_optimizer.step()
    optimizer.close()
    assert_same_model(model, plain)
