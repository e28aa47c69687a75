"""Models that stage 3 trains and uses of them: units in any order, with any parameters and outputs.

A case gives what one micro-batch does, the ``forward`` of a unit (`units`), what is between the first and the last
layer (`body`), or what is done to the usual model before or after the optimizer is built.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import functional
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from ..support.cases import (
    OUTPUTS,
    ROWS,
    WIDTH,
    Batch,
    Block,
    Case,
    Fails,
    Net,
    batches_of,
    loss_of,
    net_of,
    one_backward,
)


def units(forward: Callable[[Any, Tensor], Any], **more: Any) -> type[Net]:
    """Return the net whose units have another forward, and more attributes of their class."""
    return net_of(type("Unit", (Block,), {"forward": forward, **more}))


def body(through: Callable[[Any, Tensor], Any], **more: Any) -> type[Net]:
    """Return a net that goes through its units in another way."""
    return type("OtherNet", (Net,), {"body": through, **more})


def inside_gathered(model: Any, batch: Batch) -> None:
    """Run forward and backward inside; or only a forward, a part of which a checkpoint computes anew outside."""
    with batch.gathered():
        loss = loss_of(model, batch)
        if batch.turn == 0:
            loss.backward()
            return
        hidden = checkpoint(lambda y: y @ model.blocks[1].inner.weight.t(), model.embed(batch.x), use_reentrant=False)
    (loss + hidden.square().mean()).backward()


def parameters_inside_gathered(model: nn.Module, batch: Batch) -> None:
    """Compute a loss of the parameters themselves inside, and run its backward there or after it."""
    with batch.gathered():
        loss = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        if batch.turn == 0:
            loss.backward()
    if batch.turn:
        loss.backward()


def failing(where: str, error: type[BaseException] = KeyboardInterrupt) -> Any:
    """Fail in the first micro-batch of each step. Gradients that its backward has computed count."""

    def run(model: Any, batch: Batch) -> None:
        model.blocks[1].armed, model.blocks[1].error = where if batch.turn == 0 else "", error
        if batch.turn == 0:
            with pytest.raises(error):
                one_backward(model, batch)
        model.blocks[1].armed = ""
        if batch.turn or where == "forward":
            one_backward(model, batch)

    return run


def hook_forward(model: Any) -> None:
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] * module.norm.weight.mean(),))
        block.register_forward_hook(lambda module, args, out: out + module.outer.weight.sum(), prepend=True)
        block.inner.register_forward_hook(lambda module, _, out: out * module.bias.sum())


def hook_backward(model: Any) -> None:
    for block in model.blocks:
        block.register_full_backward_pre_hook(lambda module, given: (given[0] * module.inner.bias.detach().sum(),))
        block.register_full_backward_hook(lambda module, given, _: (given[0] * module.outer.weight.detach().mean(),))
    model.blocks[1].inner.weight.register_hook(lambda gradient: gradient * 2)


def every_unit_again(model: Any) -> None:
    for block in model.blocks:
        composable_checkpoint(block)


def around_another(unit: Any, x: Tensor) -> Any:
    """Use weights before and after another unit's forward: in a checkpoint, and in a hook of its gradient."""
    first = checkpoint(lambda y: torch.tanh(unit.inner(y)), unit.norm(x), use_reentrant=False) * 1.0
    first.register_hook(lambda gradient: gradient * unit.inner.weight.detach().mean())
    hidden = unit.outer(first)
    for other in unit.others:
        hidden = other(hidden)
    return x + Linear.apply(hidden, unit.outer.weight.t(), False) @ unit.inner.weight.sum(1)[:, None]


def acquaint(model: Any) -> None:
    model.blocks[0].others = (model.blocks[1],)
    model.blocks[0].inside = model.blocks[1]


def side_by_side(model: Any, x: Tensor) -> Any:
    """Let nodes of units be reached in turns, and leave the output of one unused."""
    outputs = [block(x) for block in model.blocks]
    return outputs[0] + outputs[1] * outputs[0] + model.blocks[0](outputs[1])


def forces(unit: Any, x: Tensor) -> Any:
    """Give out a derivative."""
    x = x.clone() if x.requires_grad else x.clone().requires_grad_()
    (force,) = torch.autograd.grad(Block.forward(unit, x).exp().sum(), x, create_graph=True)
    return force


class Linear(torch.autograd.Function):
    """A linear function in Python that stores the parameter itself on its context, or saves it as torch documents."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, holds: bool) -> Tensor:
        ctx.held = (x.detach(), weight) if holds else None
        ctx.save_for_backward(*(() if holds else (x, weight)))
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.held or ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, None


def holds_weight(unit: Any, x: Tensor) -> Any:
    return x + unit.outer(torch.tanh(Linear.apply(unit.norm(x), unit.inner.weight, True) + unit.inner.bias))


def keeps_view(unit: Any, x: Tensor) -> Any:
    """Make a view of a weight once, which must follow the weight, and one as an array."""
    if unit.kept is None:
        unit.kept = unit.inner.weight.view(-1)
    array = unit.outer.weight.detach().numpy()
    return Block.forward(unit, x) * unit.kept[:WIDTH] * torch.from_numpy(array).sum(1)


class Opaque:
    """An output that the library cannot look into."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


PACKS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a dict": (lambda x: {"a": {"b": x}, "c": None}, lambda out: out["a"]["b"]),
    "an opaque object": (lambda x: [Opaque(x), x.detach()], lambda out: out[0].hidden + out[1]),
}


def packing(name: str) -> type[Net]:
    pack, unpack = PACKS[name]

    def unpacks(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = unpack(block(x))
        return x

    packed = type("Packed", (Block,), {"forward": lambda unit, x: pack(Block.forward(unit, x))})
    return body(unpacks, block=packed)


def passes_through(unit: Any, x: Tensor) -> Any:
    """Return the input unchanged, and store a loss of the weight in an attribute."""
    unit.aside = Linear.apply(Block.forward(unit, x), unit.inner.weight, False).mean()
    return x


def what_is_aside(model: Any, batch: Batch) -> None:
    """Train on what no output leads to."""
    model(batch.x)
    torch.autograd.backward(sum(block.aside for block in model.blocks))


def edited(model: Any, x: Tensor) -> Tensor:
    """Edit outputs of units in place."""
    for edit, block in zip((torch.relu_, lambda y: y[:, 1:3].mul_(2), torch.exp_), model.blocks, strict=True):
        x = block(x)
        edit(x)
        x = torch.tanh(x)
    return x


# -- gradients for chosen parameters, and torch.func: what they find multiplies a loss ---------------------------------


def total(found: Any) -> Any:
    """Return the sum of all elements of nested tensors."""
    if isinstance(found, Tensor):
        return found.detach().double().sum().float()
    return sum(total(each) for each in found if each is not None)


def chosen(model: nn.Module) -> list[Tensor]:
    """Return some parameters of the root unit and some of another unit, not in order."""
    parameters = dict(model.named_parameters())
    return [parameters[name] for name in ("blocks.1.inner.weight", "embed.bias", "blocks.1.norm.weight", "head.weight")]


def gradients_of_a_part(model: Any, batch: Batch) -> None:
    """Differentiate for parameters that the loss does not reach, and for an input."""
    x = batch.x.clone().requires_grad_()
    inputs = [*model.blocks[0].parameters(), x, *model.blocks[2].parameters()]
    hidden = model.blocks[0](model.embed(x)).square().sum()
    none = torch.autograd.grad(hidden, inputs, retain_graph=True, allow_unused=True)
    zeros = torch.autograd.grad(hidden, inputs, materialize_grads=True)
    assert [each is None for each in none] == [False] * 7 + [True] * 6
    (loss_of(model, batch) * total([none, zeros])).backward()


def a_gradient_of_gradients(model: Any, batch: Batch) -> None:
    """Add the norm of the parameters' gradient to the loss."""
    loss = loss_of(model, batch)
    gradients = torch.autograd.grad(loss, chosen(model), create_graph=True)
    batched = torch.autograd.grad(model(batch.x).mean(0), chosen(model), torch.eye(OUTPUTS), is_grads_batched=True)
    (loss * total(batched) + sum(gradient.square().sum() for gradient in gradients)).backward()


def backwards_for_two_parts(model: Any, batch: Batch) -> None:
    """Run a step of two losses, each for parameters of its own and one for the input (an actor and a critic, say)."""
    x = batch.x.clone().requires_grad_()
    own = {id(p) for p in chosen(model)}
    others = [p for p in model.parameters() if id(p) not in own]
    loss = model(x).square().mean()
    torch.autograd.backward([loss], inputs=[x, *chosen(model)], retain_graph=True)
    torch.autograd.backward(loss, total(x.grad), inputs=others)


def hooked(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Let a hook of the gradients of all parameters see those of a backward, which scale those of the next one."""
    seen = list[Any]()
    handle = register_multi_grad_hook(list(model.parameters()), lambda *found: seen.extend(found), mode="all")
    one_backward(model, batch)
    handle.remove()
    yield
    (loss_of(model, batch) * total(seen)).backward()
    yield


def made(model: nn.Module) -> dict[str, Tensor]:
    """Return other values for the parameters, as an ensemble or a meta-learner has them."""
    return {name: torch.linspace(-1, 1, p.numel()).view(p.shape) for name, p in model.named_parameters()}


def called(model: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda values: functional_call(model, values, (X,)).square().mean()


def ensemble(model: nn.Module) -> Any:
    stacked = {name: torch.stack([value, value * 2]) for name, value in made(model).items()}
    return vmap(lambda values: functional_call(model, values, (X,)))(stacked)


X = batches_of(0, 1)[0].x
HIDDEN = torch.ones(ROWS, WIDTH)
REFUSED: dict[str, Callable[[Any], Any]] = {
    "grad for parameters": lambda model: list(grad(called(model))(dict(model.named_parameters())).values()),
    "jvp of a unit": lambda model: jvp(model.blocks[1], (HIDDEN,), (HIDDEN,)),
    "jacrev": lambda model: jacrev(model)(X),
}
"""Transforms that differentiate through a unit. As the error says, a copy that was made inside `gathered()` serves."""
WORKS: dict[str, Callable[[Any], Any]] = {
    "vmap over values": ensemble,
    "hessian": lambda model: functional.hessian(lambda y: model(y).square().mean(), X),
}
"""What the error and contract/stage3.md name as working."""


def transformed(name: str) -> Any:
    def run(model: nn.Module, batch: Batch) -> None:
        of = model
        if name in REFUSED:
            if batch.gathered is not nullcontext:
                with pytest.raises(RuntimeError, match=r"inside a transform of torch\.func: .*deepcopy"):
                    REFUSED[name](model)
            with batch.gathered():
                of = copy.deepcopy(model)
        (loss_of(model, batch) * total((REFUSED | WORKS)[name](of))).backward()

    return run


def recomputed_in_the_old_way(model: Any, batch: Batch) -> None:
    if batch.gathered is not nullcontext:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            checkpoint(model.blocks[0], HIDDEN.clone().requires_grad_(), use_reentrant=True).sum().backward()
    one_backward(model, batch)


def in_one_tensor(model: Any) -> None:
    """Make all parameters views of one tensor, which share no element."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    pieces = flat.split([p.numel() for p in model.parameters()])
    for (name, p), piece in zip(list(model.named_parameters()), pieces, strict=True):
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, nn.Parameter(piece.view(p.shape)))


# -- units inside units: blocks with experts, layers of experts, and weights that they share ---------------------------


class Expert(nn.Module):
    """A unit inside a block, with a unit inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 3), nn.Linear(WIDTH + 3, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)))


class Mixture(Block):
    """A block with parameters before, between and after its experts. It uses the router again after them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([Expert() for _ in range(2)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        weights = self.router(self.norm(x)).softmax(1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mixed = mixed + weights[:, number, None] * expert(x)
        return super().forward(self.last(mixed)) + self.router(mixed).sum()


class EndsInside(nn.Module):
    """A block whose output is that of a unit inside it, which a backward therefore reaches before the block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert = nn.Linear(WIDTH, WIDTH), Expert()

    def forward(self, x: Tensor) -> Any:
        return self.expert(torch.tanh(self.first(x)))


class Recomputed(Mixture):
    """A block that a checkpoint computes anew, with its experts."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def nested(module: nn.Module) -> bool:
    """Choose blocks, and the experts in them."""
    return isinstance(module, (Block, Expert))


def ends_inside(module: nn.Module) -> bool:
    return isinstance(module, (EndsInside, Expert))


def deeply_nested(module: nn.Module) -> bool:
    """Choose blocks, the experts in them, and a layer in each of these."""
    return nested(module) or (isinstance(module, nn.Linear) and module.out_features == WIDTH + 3)


def tie_inside(model: Any) -> None:
    """Share weights of experts with the other expert, with their block, with another block, and with the root."""
    first, second, third = model.blocks
    first.experts[1].up.weight = first.experts[0].up.weight
    second.experts[0].down.bias = second.last.bias
    third.experts[1].down.weight = second.experts[1].down.weight
    third.experts[0].down.bias = model.norm.bias
    third.experts[0].up = third.experts[1].up


def held_twice(model: Any) -> None:
    """Let two blocks hold the same expert."""
    model.blocks[2].experts[0] = model.blocks[0].experts[0]


EXPERTS_KEPT = {"prefetch_depth": 0, "reshard_after_forward": lambda module: not isinstance(module, Expert)}
BLOCKS_KEPT = {"prefetch_depth": 3, "reshard_after_forward": lambda module: not isinstance(module, Block)}
MIXTURE = Case(net_of(Mixture), units=nested)
CASES: dict[str, Case] = {
    "gradients of a part": Case(run=gradients_of_a_part),
    "a gradient of gradients": Case(run=a_gradient_of_gradients),
    "backwards for two parts": Case(run=backwards_for_two_parts),
    "hooks of all gradients": Case(run=hooked),
    **{name: Case(run=transformed(name)) for name in (*REFUSED, *WORKS)},
    "a reentrant checkpoint": Case(run=recomputed_in_the_old_way),
    "views of one tensor": Case(prepared=in_one_tensor),
    "experts in blocks": MIXTURE,
    "ties among experts": replace(MIXTURE, prepared=tie_inside, arguments=EXPERTS_KEPT),
    "blocks end inside": Case(net_of(EndsInside), units=ends_inside),
    "experts recomputed": Case(net_of(Recomputed), units=deeply_nested, arguments=BLOCKS_KEPT),
    "parameters inside gathered()": Case(run=parameters_inside_gathered),
    "inside gathered()": Case(run=inside_gathered),
    "interrupt in a forward": Case(net_of(Fails), failing("forward")),
    "interrupt in a backward": Case(net_of(Fails), failing("backward")),
    "forward hooks from before": Case(prepared=hook_forward),
    "backward hooks from after": Case(built=hook_backward),
    "checkpoint around the model": Case(run=lambda m, b: checkpoint(m, b.x, use_reentrant=False).sum().backward()),
    "composable checkpoints from before": Case(net_of(Fails), failing("forward", OSError), prepared=every_unit_again),
    "a unit that holds another": Case(units(around_another, others=()), prepared=acquaint),
    "units side by side": Case(body(side_by_side)),
    "weight norm inside": Case(prepared=lambda model: weight_norm(model.blocks[1].inner)),
    "units that give out a derivative": Case(units(forces)),
    "a Function that holds a weight": Case(units(holds_weight)),
    "a view kept with its graph": Case(units(keeps_view, kept=None), lends=True, steps=3),
    **{f"outputs are {name}": Case(packing(name)) for name in PACKS},
    "a loss beside the outputs": Case(units(passes_through), what_is_aside),
    "outputs edited in place": Case(body(edited)),
}
WORLDS = ("one", "several", "common")
ALONE = {*REFUSED, *WORKS}
"""Those of one rank: torch keeps the levels of a transform by process, and several ranks whose backward fails have each
added something else."""
ROWS = [(name, world) for name, world in product(CASES, WORLDS) if world == "one" or name not in ALONE]
FIRST = [
    ("inside gathered()", "several"),
    ("interrupt in a forward", "one"),
    ("outputs are a dict", "several"),
    ("experts in blocks", "one"),
    ("ties among experts", "common"),
    ("experts recomputed", "several"),
]
FURTHER = [row for row in zip(CASES, cycle(WORLDS)) if row in ROWS and row not in FIRST]
"""The other rows are in CI."""
