"""What loops do to parameters that a rank does not hold, at every stage: gradients for chosen ones, conversions that
change nothing, `torch.func`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import Transport, on_threads
from collectives.native import connect
from zero import ZeroOptimizer

from .cases import Net
from .plain import assert_same_bits, assert_same_model
from .pool import GlooPool
from .sockets import on_sockets
from .test_habits import MICRO_BATCHES, STEPS, batch, build

Gradients = list[tuple[Tensor | None, ...]]
Run = Callable[[Net, Tensor], Gradients]
RANKS = {"threads": on_threads, "sockets": on_sockets}  # without and with memory in common
ALL = [(stage, world_size, ranks) for stage in (0, 1, 2, 3) for world_size in (1, 2) for ranks in RANKS]
EVERYWHERE = pytest.mark.parametrize(
    ("stage", "world_size", "ranks"),
    [
        pytest.param(*each, marks=() if each[0] == 3 or each[1:] == (2, "threads") else pytest.mark.slow)
        for each in ALL
        if each[1:] != (1, "sockets")
    ],
)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def chosen(model: nn.Module) -> list[Tensor]:
    """Some of the root's rest and some of a unit, not in order."""
    parameters = dict(model.named_parameters())
    return [parameters[name] for name in ("blocks.1.inner.weight", "embed.bias", "blocks.1.norm.weight", "head.weight")]


def gradients_in_passing(model: Net, x: Tensor) -> Gradients:
    loss = loss_of(model, x)
    whole = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    return [whole]


def gradients_alone(model: Net, x: Tensor) -> Gradients:
    """Before the backward, and after it: neither is a backward of the step."""
    first = torch.autograd.grad(loss_of(model, x), chosen(model))
    loss_of(model, x).backward()
    (second,) = torch.autograd.grad(loss_of(model, x), chosen(model)[0])
    return [first, (second,)]


def gradients_of_a_part(model: Net, x: Tensor) -> Gradients:
    """Parameters that the loss does not reach, and an input beside them."""
    x = x.clone().requires_grad_()
    inputs = [*model.blocks[0].parameters(), x, *model.blocks[2].parameters()]
    hidden = model.blocks[0](model.embed(x)).square().sum()
    none = torch.autograd.grad(hidden, inputs, retain_graph=True, allow_unused=True)
    zeros = torch.autograd.grad(hidden, inputs, materialize_grads=True)
    loss_of(model, x.detach()).backward()
    return [none, zeros]


def a_gradient_of_gradients(model: Net, x: Tensor) -> Gradients:
    """The size of the parameters' gradient as a part of the loss."""
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
    """A step of two losses, each for parameters of its own (an actor and a critic, say)."""
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
    """Ones that change nothing, wherever a loop may have them."""
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
    """By hand: several backwards of one micro-batch reach other parameters each, so their order cannot matter."""
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
    """This rank's part: the model, and what `torch.autograd.grad` gave for its own micro-batches."""
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
def test_gradients_for_chosen_parameters_and_idle_conversions_are_those_of_the_plain_loop(
    stage: int, world_size: int, ranks: str, name: str
) -> None:
    compare(name, RANKS[ranks](world_size, lambda transport: train(transport, name, stage), timeout=10))


def of_a_process(group: dist.ProcessGroup, rank: int, stage: int) -> dict[str, tuple[Net, list[Gradients]]]:
    return {name: train(connect(group), name, stage) for name in RUNS}


@pytest.mark.parametrize("stage", [2, 3])
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
