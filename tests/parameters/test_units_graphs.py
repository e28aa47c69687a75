"""Features of autograd with a model at stage 3: checkpoints, saved tensors, second derivatives, custom functions.

Each case has the plain loop's bits, and afterwards no unit is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from collectives import Transport, on_threads

from ..support.cases import (
    WIDTH,
    WORLD_SIZES,
    Apart,
    Batch,
    Block,
    Case,
    Net,
    check,
    externally_held,
    loss_of,
    manager_of,
    net_of,
)
from ..support.plain import assert_same_bits, assert_same_model
from ..support.small import blocks, with_sgd

# -- checkpointing and saved tensors ----------------------------------------------------------------------------------


class AroundUnits(Net):
    """A model that recomputes each unit by itself in the backward."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class AroundTwoUnits(Net):
    def body(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: self.blocks[1](self.blocks[0](y)), x, use_reentrant=False)
        found: Tensor = self.blocks[2](x)
        return found


def keep_products(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


class AroundUnitsSelective(Net):
    """A model that recomputes each unit, but keeps some of its results."""

    def body(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, keep_products)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


class AroundTwice(Net):
    """A checkpoint in a checkpoint."""

    def body(self, x: Tensor) -> Tensor:
        def first(y: Tensor) -> Any:
            return checkpoint(self.blocks[1], self.blocks[0](y), use_reentrant=False)

        found: Tensor = self.blocks[2](checkpoint(first, x, use_reentrant=False))
        return found


class InsideUnit(Block):
    def forward(self, x: Tensor) -> Any:
        def part(y: Tensor) -> Tensor:
            return torch.tanh(self.inner(self.norm(y)))

        return x + self.outer(checkpoint(part, x, use_reentrant=False))


def around_the_model(model: nn.Module, batch: Batch) -> None:
    checkpoint(model, batch.x, use_reentrant=False).square().mean().backward()


def to_the_end(model: nn.Module, batch: Batch) -> None:
    """Recompute a whole checkpoint, even parts that no backward needs."""
    with set_checkpoint_early_stop(False):
        out = model(batch.x)
    out.square().mean().backward()


def saved_elsewhere(model: nn.Module, batch: Batch) -> None:
    with save_on_cpu():
        loss = loss_of(model, batch)
    loss.backward()


class SavesElsewhere(Block):
    """A unit with the user's own saved-tensor hooks, which get the weights themselves and keep copies."""

    def forward(self, x: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return super().forward(x)


class SavesItself(Block):
    """A unit whose saved-tensor hooks keep the weights."""

    def forward(self, x: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return super().forward(x)


# -- autograd ---------------------------------------------------------------------------------------------------------


def gradient_penalty(model: nn.Module, batch: Batch) -> None:
    x = batch.x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (out.mean() + gradient.square().sum()).backward()


def penalty_and_a_forward(model: nn.Module, batch: Batch) -> None:
    """Keep a graph of gradients while the same units run again."""
    x = batch.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (gradient.square().sum() + loss_of(model, batch)).backward()


def penalty_twice(model: nn.Module, batch: Batch) -> Iterator[None]:
    x = batch.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward(retain_graph=True)
    yield
    gradient.abs().sum().backward()
    yield


def penalty_of_a_unit(model: Any, batch: Batch) -> None:
    hidden = model.embed(batch.x)
    out = model.blocks[0](hidden)
    (gradient,) = torch.autograd.grad(out.exp().sum(), hidden, create_graph=True)
    gradient.square().sum().backward()


class Forces(Net):
    """A model whose result is the derivative of its output."""

    def forward(self, x: Tensor) -> Any:
        x = x.clone().requires_grad_()
        (force,) = torch.autograd.grad(super().forward(x).exp().sum(), x, create_graph=True)
        return force


class ForcesInside(Block):
    def forward(self, x: Tensor) -> Any:
        x = x.clone() if x.requires_grad else x.clone().requires_grad_()
        (force,) = torch.autograd.grad(super().forward(x).exp().sum(), x, create_graph=True)
        return force


class Implicit(Block):
    """A fixed point, whose backward solves for another one: backwards inside a backward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            point = self.again(self.again(x, x), x)
        point = self.again(point, x)
        start = point.detach().requires_grad_()
        image = self.again(start, x.detach())

        def solve(gradient: Tensor) -> Tensor:
            found = gradient
            for _ in range(3):
                found = torch.autograd.grad(image, start, found, retain_graph=True)[0] + gradient
            return found

        if point.requires_grad:
            point.register_hook(solve)
        return point

    def again(self, point: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.outer(torch.tanh(self.inner(self.norm(point)))) + x) / 2


def saliency(model: nn.Module, batch: Batch) -> None:
    """Compute a gradient for the input, which adds to no parameter's gradient."""
    x = batch.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
    model(batch.x + gradient).square().mean().backward()


def saliency_between(model: nn.Module, batch: Batch) -> None:
    """Use one graph for the input's gradient, then for the parameters'."""
    x = batch.x.clone().requires_grad_()
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    (loss * gradient.abs().sum().item()).backward()


def for_some_parameters(model: Any, batch: Batch) -> None:
    loss = loss_of(model, batch)
    with batch.gathered():
        loss.backward(inputs=list(model.blocks[1].parameters()))


def of_parameters(model: Any, batch: Batch) -> None:
    """Compute this rank's own gradients for parameters, besides the backward."""
    with batch.gathered():
        found = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    (loss_of(model, batch) * sum(gradient.square().sum() for gradient in found)).backward()


class HoldsWeight(torch.autograd.Function):
    """A linear function that stores the parameter itself on its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x.detach(), weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.weight, gradient.t() @ ctx.x


class SavesWeight(torch.autograd.Function):
    """A linear function as in torch's documentation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class OwnFunction(Block):
    function: Any = HoldsWeight

    def forward(self, x: Tensor) -> Any:
        return x + self.outer(torch.tanh(self.function.apply(self.norm(x), self.inner.weight) + self.inner.bias))


class OwnSavingFunction(OwnFunction):
    function = SavesWeight


# -- references to weights --------------------------------------------------------------------------------------------


class ReadsNumpy(Block):
    def forward(self, x: Tensor) -> Any:
        array = self.inner.weight.detach().numpy()
        return super().forward(x) * float(np.abs(array).sum()) + torch.from_numpy(array).mean()


class SavesNumpy(Block):
    """A function whose graph holds the memory of a weight as a NumPy array."""

    def forward(self, x: Tensor) -> Any:
        array = self.inner.weight.detach().numpy()
        return super().forward(x) * torch.from_numpy(array).t()[:1, :WIDTH]


class KeepsView(Block):
    """A view of a weight, made once, that must follow the weight."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if self.kept is None:
            self.kept = self.inner.weight.detach().view(-1)[:WIDTH]
        return super().forward(x) * self.kept


class KeepsGraphView(Block):
    """The same with a view that autograd tracks."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if self.kept is None:
            self.kept = self.inner.weight.view(-1)
        return super().forward(x) * self.kept[:WIDTH]


CASES: dict[str, Case] = {
    "checkpoint around a unit": Case(AroundUnits),
    "checkpoint around a unit, without early stop": Case(AroundUnits, to_the_end),
    "selective checkpoint around a unit": Case(AroundUnitsSelective),
    "checkpoint around two units": Case(AroundTwoUnits),
    "checkpoint around two units, without early stop": Case(AroundTwoUnits, to_the_end),
    "checkpoint in a checkpoint": Case(AroundTwice),
    "checkpoint inside a unit": Case(net_of(InsideUnit)),
    "checkpoint around the model": Case(run=around_the_model),
    "save_on_cpu around the forward": Case(run=saved_elsewhere),
    "saved-tensor hooks in a unit that copy": Case(net_of(SavesElsewhere)),
    "saved-tensor hooks in a unit that keep": Case(net_of(SavesItself)),
    "gradient penalty": Case(run=gradient_penalty),
    "gradient penalty of units used apart": Case(Apart, gradient_penalty),
    "gradient penalty, then a forward": Case(run=penalty_and_a_forward),
    "gradient penalty, two backwards": Case(run=penalty_twice),
    "gradient penalty of a unit": Case(run=penalty_of_a_unit),
    "a model that gives out a derivative": Case(Forces),
    "units that give out a derivative": Case(net_of(ForcesInside)),
    "backwards inside a backward": Case(net_of(Implicit)),
    "gradient of the input in passing": Case(run=saliency),
    "gradient of the input from the same graph": Case(run=saliency_between),
    "backward for some parameters": Case(run=for_some_parameters),
    "gradients of parameters in passing": Case(run=of_parameters),
    "a Function that holds a weight": Case(net_of(OwnFunction)),
    "a Function that saves a weight": Case(net_of(OwnSavingFunction)),
    "a weight as numpy": Case(net_of(ReadsNumpy)),
    "a weight as numpy in the graph": Case(net_of(SavesNumpy)),
    "a view kept": Case(net_of(KeepsView), lends=True, steps=3),
    "a view kept with its graph": Case(net_of(KeepsGraphView), lends=True, steps=3),
}


@WORLD_SIZES
@pytest.mark.parametrize("name", CASES)
@pytest.mark.full
def test_training_equals_the_plain_loop_and_leaves_nothing_gathered(name: str, world_size: int) -> None:
    check(CASES[name], world_size)


def test_a_view_that_is_kept_over_a_step_shows_no_old_value() -> None:
    def program(transport: Transport) -> Tensor:
        model = blocks()
        optimizer = with_sgd(model, transport, stage=3)
        with optimizer.gathered():
            view = model[1].weight.detach()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return view.clone()

    for view in on_threads(2, program, timeout=5):
        assert bool(view.isnan().all())


def test_a_view_that_is_kept_within_a_step_follows_its_own_parameter() -> None:
    """It must not show a unit that is gathered into a free buffer of the same size meanwhile."""

    def program(transport: Transport) -> list[Tensor]:
        model = blocks()
        optimizer = with_sgd(model, transport, stage=3)
        with optimizer.gathered():
            views = [model[number].weight.detach() for number in range(3)]
        with torch.no_grad():
            model(torch.ones(1, 4))
        return [view.clone() for view in views]

    for views in on_threads(2, program, timeout=5):
        for view, layer in zip(views, blocks(), strict=True):
            assert_same_bits(view, layer.weight)  # type: ignore[arg-type]


def test_a_graph_takes_the_weights_of_its_own_unit_also_where_another_lay_there_before() -> None:
    def program(transport: Transport) -> tuple[list[int], list[str], nn.Module]:
        model = blocks()
        optimizer = with_sgd(model, transport, stage=3)
        places: list[int] = []
        for number in (0, 2):
            model[number].register_forward_pre_hook(lambda layer, _: places.append(layer.weight.data_ptr()))
        inputs = torch.ones(1, 4, requires_grad=True)  # so that autograd also saves the first unit's weight
        loss = model(inputs).sum()
        with torch.no_grad():
            model(inputs)  # reshards every unit at its end
        held = externally_held(manager_of(optimizer))
        loss.backward()
        optimizer.step()
        optimizer.close()
        return places[:2], held, model

    expected = blocks()
    expected(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    for (first, last), held, model in on_threads(2, program, timeout=5):
        assert first == last, "the last unit is gathered into the buffer of the first one"
        assert held == [], "the graph holds places, not weights"
        assert_same_model(model, expected)
