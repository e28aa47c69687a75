"""Uses of parameters that a rank does not hold, at every stage.

These are gradients of some parameters, conversions that change nothing, and `torch.func`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad, functional
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from collectives import Transport, on_threads, solo
from collectives.backends.gloo import connect
from zero import ZeroOptimizer

from ..contract.test_habits import MICRO_BATCHES, STEPS, batch, build
from ..support.cases import ROWS, WIDTH, Net, assert_nothing_is_here
from ..support.plain import assert_same_bits, assert_same_model
from ..support.pool import GlooPool
from ..support.sockets import on_sockets

Gradients = list[tuple[Tensor | None, ...]]
Run = Callable[[Net, Tensor], Gradients]
RANKS = {"threads": on_threads, "sockets": on_sockets}  # without and with shared memory
ALL = [(stage, world_size, ranks) for stage in (0, 1, 2, 3) for world_size in (1, 2) for ranks in RANKS]
EVERYWHERE = pytest.mark.parametrize(
    ("stage", "world_size", "ranks"),
    [
        pytest.param(*each, marks=() if each[0] > 1 and each[1] == 2 else pytest.mark.slow)
        for each in ALL
        if each[1:] != (1, "sockets")
    ],
)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def chosen(model: nn.Module) -> list[Tensor]:
    """Return some parameters of the root unit and some of another unit, not in order."""
    parameters = dict(model.named_parameters())
    return [parameters[name] for name in ("blocks.1.inner.weight", "embed.bias", "blocks.1.norm.weight", "head.weight")]


def gradients_in_passing(model: Net, x: Tensor) -> Gradients:
    loss = loss_of(model, x)
    whole = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    return [whole]


def gradients_alone(model: Net, x: Tensor) -> Gradients:
    """Call `torch.autograd.grad` before the backward and after it: neither call is a backward of the step."""
    first = torch.autograd.grad(loss_of(model, x), chosen(model))
    loss_of(model, x).backward()
    (second,) = torch.autograd.grad(loss_of(model, x), chosen(model)[0])
    return [first, (second,)]


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
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()
    return [tuple(gradient.detach() for gradient in gradients)]


def many_gradients_at_once(model: Net, x: Tensor) -> Gradients:
    out = model(x).mean(0)
    rows = torch.eye(len(out))
    found = torch.autograd.grad(out, chosen(model), rows, is_grads_batched=True, retain_graph=True)
    out.square().mean().backward()
    return [found]


def backward_for_some(model: Net, x: Tensor) -> Gradients:
    loss_of(model, x).backward(inputs=chosen(model))
    return []


def backwards_for_two_parts(model: Net, x: Tensor) -> Gradients:
    """Run a step of two losses, each for parameters of its own (an actor and a critic, say)."""
    own = {id(p) for p in chosen(model)}
    others = [p for p in model.parameters() if id(p) not in own]
    loss = loss_of(model, x)
    torch.autograd.backward([loss], inputs=chosen(model), retain_graph=True)
    torch.autograd.backward(loss, torch.tensor(2.0), inputs=others)
    return []


def backward_for_one_and_the_input(model: Net, x: Tensor) -> Gradients:
    x = x.clone().requires_grad_()
    loss_of(model, x).backward(inputs=[x, model.head.weight])
    return [(x.grad,)]


def conversions(model: Net, x: Tensor) -> Gradients:
    """Convert the model in ways that change nothing, at all moments of a loop."""
    assert model.to("cpu", torch.float32) is model
    loss = loss_of(model.float(), x)
    model.cpu()
    loss.backward()
    model.to(x)
    return []


RUNS = {
    run.__name__: run
    for run in (
        gradients_in_passing,
        gradients_alone,
        gradients_of_a_part,
        a_gradient_of_gradients,
        many_gradients_at_once,
        backward_for_some,
        backwards_for_two_parts,
        backward_for_one_and_the_input,
        conversions,
    )
}


def plain_loop(run: Run) -> tuple[Net, list[Gradients]]:
    """Train by hand.

    Several backwards of one micro-batch reach different parameters, so that their order cannot matter.
    """
    model, found = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            found.append(run(model, batch(step, number, None)))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
    return model, found


def train(transport: Transport, name: str, stage: int) -> tuple[Net, list[Gradients]]:
    """Train on this rank. Return the model, and the results of `torch.autograd.grad` for its own micro-batches."""
    model, found = build(), []
    optimizer = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=stage,
        process_group=transport,
        divisor=MICRO_BATCHES,
        bucket_cap_mb=6e-4,
        lr=0.05,
    )
    known = list(model.parameters())
    for step in range(STEPS):
        for number in range(transport.rank, MICRO_BATCHES, transport.world_size):
            found.append(RUNS[name](model, batch(step, number, None)))
        optimizer.step()
        optimizer.zero_grad()
    assert all(p is before for p, before in zip(model.parameters(), known, strict=True))
    optimizer.close()
    return model, found


def compare(name: str, results: list[tuple[Net, list[Gradients]]]) -> None:
    expected, gradients = plain_loop(RUNS[name])
    for rank, (model, found) in enumerate(results):
        assert_same_model(model, expected)
        for ours, theirs in zip(found, gradients[rank :: len(results)], strict=True):
            for mine, plain in zip(ours, theirs, strict=True):
                for a, b in zip(mine, plain, strict=True):
                    assert (a is None) == (b is None)
                    if a is not None and b is not None:
                        assert_same_bits(a, b)


@pytest.mark.parametrize("name", RUNS)
@EVERYWHERE
@pytest.mark.by_default(
    "2-2-threads-backward_for_one_and_the_input", "3-2-sockets-gradients_of_a_part", "3-2-sockets-conversions"
)
def test_gradients_for_chosen_parameters_and_idle_conversions_are_those_of_the_plain_loop(
    stage: int, world_size: int, ranks: str, name: str
) -> None:
    compare(name, RANKS[ranks](world_size, lambda transport: train(transport, name, stage), timeout=10))


def of_a_process(group: dist.ProcessGroup, rank: int, stage: int) -> dict[str, tuple[Net, list[Gradients]]]:
    return {name: train(connect(group), name, stage) for name in RUNS}


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.full
def test_the_same_on_real_processes(gloo: GlooPool, stage: int) -> None:
    results = gloo.run(of_a_process, stage)
    for name in RUNS:
        compare(name, [result[name] for result in results])


@pytest.mark.parametrize("function", [torch.autograd.grad, torch.autograd.backward])
def test_a_hook_inside_a_backward_for_parameters_never_sees_their_stand_ins(function: Any) -> None:
    model = build()
    optimizer = ZeroOptimizer(model, stage=3)
    loss, seen = loss_of(model, batch(0, 0, None)), []

    def look(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"'blocks\.0\.norm\.weight' is released"):
            seen.append(model.blocks[0].norm.weight + 1)
        seen.append("looked")

    model.head.bias.register_hook(look)
    function(loss, inputs=[model.head.bias, model.blocks[0].norm.weight])
    assert seen == ["looked"]
    optimizer.zero_grad()
    optimizer.close()


def test_a_gradient_for_a_frozen_parameter_is_an_error_as_in_torch() -> None:
    model = build()
    model.head.bias.requires_grad_(False)
    optimizer = ZeroOptimizer(model, stage=3)
    for function in (torch.autograd.grad, torch.autograd.backward):
        with pytest.raises(RuntimeError, match="not require grad"):
            function(loss_of(model, batch(0, 0, None)), inputs=[model.head.bias])
    optimizer.close()


# -- torch.func -------------------------------------------------------------------------------------------------------

Function = Callable[[Any, Tensor], Any]


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def made(model: nn.Module) -> dict[str, Tensor]:
    """Return other values for the parameters, as an ensemble or a meta-learner has them."""
    return {name: torch.linspace(-1, 1, p.numel()).view(p.shape) for name, p in model.named_parameters()}


def called(model: nn.Module, x: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda values: functional_call(model, values, (x,)).square().mean()


def ensemble(model: nn.Module, x: Tensor) -> Any:
    stacked = {name: torch.stack([value, value * 2]) for name, value in made(model).items()}
    return vmap(lambda values: functional_call(model, values, (x,)))(stacked)


def forward_mode(model: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def through_vmap(model: nn.Module, x: Tensor) -> Any:
    return torch.autograd.grad(vmap(model)(x).square().mean(), list(model.parameters()))


REFUSED: dict[str, Function] = {
    "grad for inputs": lambda model, x: grad(lambda y: model(y).square().mean())(x),
    "grad for parameters": lambda model, x: grad(called(model, x))(named(model)),
    "grad for values": lambda model, x: grad(called(model, x))(made(model)),
    "grad of each sample": lambda model, x: vmap(grad(lambda y: model(y).square().mean()))(x),
    "grad of vmap": lambda model, x: grad(lambda y: vmap(model)(y).square().mean())(x),
    "vjp": lambda model, x: vjp(model, x),
    "jvp": lambda model, x: jvp(model, (x,), (x,)),
    "jvp of a unit": lambda model, x: jvp(model.blocks[1], (torch.ones(ROWS, WIDTH),), (torch.ones(ROWS, WIDTH),)),
    "jvp for values": lambda model, x: jvp(called(model, x), (made(model),), (made(model),)),
    "jacrev": lambda model, x: jacrev(model)(x),
    "jacfwd": lambda model, x: jacfwd(model)(x),
    "hessian": lambda model, x: hessian(lambda y: model(y).sum())(x),
}
"""Transforms that differentiate through a unit."""

WORKS: dict[str, Function] = {
    "functional_call": lambda model, x: functional_call(model, named(model), (x,)),
    "functional_call with values": lambda model, x: functional_call(model, made(model), (x,)),
    "vmap": lambda model, x: vmap(model)(x),
    "vmap over values": ensemble,
    "a gradient through vmap": through_vmap,
    "forward mode": forward_mode,
    "jacobian": lambda model, x: functional.jacobian(model, x),
    "jacobian, vectorised": lambda model, x: functional.jacobian(model, x, vectorize=True),
    "jacobian, forward mode": lambda model, x: functional.jacobian(model, x, vectorize=True, strategy="forward-mode"),
    "hessian": lambda model, x: functional.hessian(lambda y: model(y).square().mean(), x),
    "jvp": lambda model, x: functional.jvp(model, x, x),
}
"""What the error and CONTRACT.md name as working, with the results of the plain model."""


def tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found.detach()]
    return [leaf for item in found for leaf in tensors(item)]


def transformed(group: dist.ProcessGroup | None, rank: int, use: dict[str, list[str]]) -> list[Net]:
    """Run each transform in the middle of a step. Return the model after that step, and the plain one."""
    models = []
    for kind, names in use.items():
        for name in names:
            model, plain = build(), build()
            x = batch(0, rank, None)
            optimizer = ZeroOptimizer(
                model, torch.optim.SGD, stage=3, process_group=solo() if group is None else group, divisor=1, lr=0.5
            )
            if kind == "refused":
                with pytest.raises(RuntimeError, match=r"inside a transform of torch\.func: .*deepcopy"):
                    REFUSED[name](model, x)
                assert_nothing_is_here(model, optimizer)
            else:
                for ours, theirs in zip(tensors(WORKS[name](model, x)), tensors(WORKS[name](plain, x)), strict=True):
                    assert_same_bits(ours, theirs)
            loss_of(model, batch(1, 0, None)).backward() if rank == 0 else (loss_of(model, x) * -0.0).backward()
            optimizer.step()
            optimizer.close()
            loss_of(plain, batch(1, 0, None)).backward()
            torch.optim.SGD(plain.parameters(), lr=0.5).step()
            assert_same_model(model, plain)
            models.append(model)
    return models


@pytest.mark.parametrize("name", REFUSED)
def test_a_transform_that_differentiates_through_a_unit_says_what_works(name: str) -> None:
    assert transformed(None, 0, {"refused": [name]})


@pytest.mark.parametrize("name", WORKS)
def test_what_is_named_instead_works(name: str) -> None:
    assert transformed(None, 0, {"works": [name]})


@pytest.mark.full
def test_transforms_on_real_processes(gloo: GlooPool) -> None:
    first, second = gloo.run(
        transformed, {"refused": ["grad for parameters", "jvp"], "works": ["vmap", "forward mode"]}
    )
    for one, other in zip(first, second, strict=True):
        assert_same_model(one, other)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.full
def test_every_transform_goes_through_a_copy_that_was_made_inside_gathered(name: str) -> None:
    model, plain, x = build(), build(), batch(0, 0, None)
    optimizer = ZeroOptimizer(model, stage=3)
    with optimizer.gathered():
        twin = copy.deepcopy(model)
    ours, theirs = REFUSED[name](twin, x), REFUSED[name](plain, x)
    if name != "vjp":
        ours, theirs = (list(found.values()) if isinstance(found, dict) else found for found in (ours, theirs))
        for a, b in zip(tensors(ours), tensors(theirs), strict=True):
            assert_same_bits(a, b)
    optimizer.close()


class Tries(Net):
    """A unit that catches the error inside its own forward, and continues with a parameter of its own."""

    caught = 0

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))

    def body(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.caught < 2:
            self.caught += 1
            with pytest.raises(RuntimeError, match=r"inside a transform of torch\.func"):
                jvp(self.forward if self.caught == 1 else self, (x[:, :5],), (x[:, :5],))
        return super().body(x * self.scale)


def test_a_transform_that_was_refused_inside_a_forward_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.contract.test_habits.Net", Tries)
    model, plain = build(), build()
    plain.caught = 2  # type: ignore[assignment]
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.5)
    other = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(3):
        for each, each_optimizer in ((model, optimizer), (plain, other)):
            loss_of(each, batch(step, 0, None)).backward()
            each_optimizer.step()
            each_optimizer.zero_grad()
    optimizer.close()
    assert_same_model(model, plain)
