"""Uses that stage 3 refuses, on every rank and with the remedy. Afterwards training continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collectives import Transport, on_threads

from ..support.cases import (
    WIDTH,
    WORLD_SIZES,
    Batch,
    Block,
    Case,
    Fails,
    Net,
    assert_nothing_is_here,
    assert_parameters,
    batches_of,
    loss_of,
    net_of,
    one_backward,
    plain_loop,
    sharded,
    train,
)

Wrong = Callable[[Any, Batch], None]

# -- refusals ---------------------------------------------------------------------------------------------------------


class Misuses(Net):
    """A model that uses weights outside their unit, as ``where`` says."""

    blocks: Any
    where = ""

    def body(self, x: Tensor) -> Tensor:
        if self.where == "before":
            x = x + self.blocks[1].norm.weight
        x = self.blocks[1](self.blocks[0](x))
        if self.where == "after":
            x = x + self.blocks[1].norm.weight
        if self.where == "a part":
            x = self.blocks[1].norm(x)
        if self.where == "another's":
            self.blocks[2].norm.weight, kept = self.blocks[1].norm.weight, self.blocks[2].norm.weight
            try:
                x = self.blocks[2](x)
            finally:
                self.blocks[2].norm.weight = kept
        found: Tensor = self.blocks[2](x)
        return found


def outside(where: str) -> Wrong:
    def wrong(model: Any, batch: Batch) -> None:
        model.where = where
        try:
            one_backward(model, batch)
        finally:
            model.where = ""

    return wrong


def read(model: Any, _: Batch) -> None:
    model.blocks[1].norm.weight.sum()


def direct_forward(model: Any, batch: Batch) -> None:
    model.blocks[1].forward(model.embed(batch.x))


RELEASED = r"'blocks\.1\.norm\.weight' is released: .*gathered\(\)"


class Recomputed(Net):
    """A model with re-entrant checkpoints, if ``reentrant``."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
        return x


def reentrant(model: Any, batch: Batch) -> None:
    model.reentrant = True
    try:
        one_backward(model, batch)
    finally:
        model.reentrant = False


class TakesDerivatives(Block):
    """A model that uses torch.func, which cannot differentiate under saved-tensor hooks."""

    derive = False

    def forward(self, x: Tensor) -> Any:
        if self.derive:
            x = torch.func.grad(lambda y: torch.tanh(self.inner(y)).sum())(x)
        return super().forward(x)


def derivative(model: Any, batch: Batch) -> None:
    model.blocks[0].derive = True
    try:
        one_backward(model, batch)
    finally:
        model.blocks[0].derive = False


class GivesWeight(nn.Module):
    """A unit that returns a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self) -> Tensor:
        return self.norm.weight


class TakesWeights(Net):
    """A second list, whose units return weights."""

    taking = False

    def __init__(self) -> None:
        super().__init__()
        self.givers = nn.ModuleList([GivesWeight()])

    def body(self, x: Tensor) -> Tensor:
        return super().body(x * self.givers[0]() if self.taking else x)


def take_weight(model: Any, batch: Batch) -> None:
    model.taking = True
    try:
        one_backward(model, batch)
    finally:
        model.taking = False


def edit_what_a_unit_saved(model: Any, batch: Batch) -> None:
    hidden = model.blocks[0](model.embed(batch.x))
    out = model.blocks[1](hidden)
    hidden.add_(1)
    out.sum().backward()


def edit_the_input(model: Any, batch: Batch) -> None:
    x = batch.x.clone()
    loss = model(x).square().mean()
    x.mul_(2)
    loss.backward()


def edit_a_saved_result(model: Any, batch: Batch) -> None:
    hidden = model.blocks[0](model.embed(batch.x))
    with torch.no_grad():
        hidden.zero_()
    out = model.blocks[1](hidden)
    with torch.no_grad():
        hidden.exp_()
    out.sum().backward()


EDITED = "modified by an inplace operation"
REFUSALS: dict[str, tuple[type[Net], Wrong, str]] = {
    "a weight before its unit": (Misuses, outside("before"), RELEASED),
    "a weight after its unit": (Misuses, outside("after"), RELEASED),
    "a part of a unit": (Misuses, outside("a part"), RELEASED),
    "a weight in another unit": (Misuses, outside("another's"), RELEASED),
    "a weight outside of any forward": (Net, read, RELEASED),
    "a unit's forward() called directly": (Net, direct_forward, RELEASED),
    "a unit that gives out a weight itself": (
        TakesWeights,
        take_weight,
        r"'givers\.0\.norm\.weight' is released: .*gathered\(\)",
    ),
    "a re-entrant checkpoint": (Recomputed, reentrant, "use_reentrant=False"),
    "torch.func.grad inside a unit": (net_of(TakesDerivatives), derivative, "saved tensor hooks"),  # where units travel
    "an edit of what a unit saved": (Net, edit_what_a_unit_saved, EDITED),
    "an edit of the input": (Net, edit_the_input, EDITED),
    "an edit without gradient of what a unit saved": (Net, edit_a_saved_result, EDITED),
}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(name, world_size, id=f"{name}-{world_size}", marks=pytest.mark.slow if world_size == 2 else ())
        for world_size in (1, 2, 3)
        for name in REFUSALS
        if (name, world_size) != ("torch.func.grad inside a unit", 1)
    ],
)
@pytest.mark.by_default(
    "a weight before its unit-3",
    "a weight outside of any forward-3",
    "a part of a unit-3",
    "an edit of the input-1",
    "an edit without gradient of what a unit saved-3",
)
def test_what_cannot_be_is_one_error_on_every_rank_and_the_step_goes_on(name: str, world_size: int) -> None:
    build, wrong, message = REFUSALS[name]
    case = Case(build)
    if message == EDITED:  # torch raises this, too
        with pytest.raises(RuntimeError, match=EDITED):
            wrong(case.make(), batches_of(0, 1)[0])
    _, expected = plain_loop(case, world_size)

    def program(transport: Transport) -> None:
        model, optimizer = sharded(case, transport)
        for step in range(case.steps):
            with pytest.raises(RuntimeError, match=message):
                wrong(model, batches_of(step, 1)[0])
            optimizer.zero_grad()
            train(case, model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
            assert_nothing_is_here(model, optimizer)
            with optimizer.gathered():
                assert_parameters(model, expected[step])

    on_threads(world_size, program, timeout=5)


@WORLD_SIZES
@pytest.mark.parametrize("grad", [True, False])
def test_an_exception_in_a_forward_leaves_nothing_gathered(world_size: int, grad: bool) -> None:
    """At once, not only at the next step."""

    def program(transport: Transport) -> None:
        model, optimizer = sharded(Case(net_of(Fails)), transport)
        model.blocks[1].armed = "forward"
        for _ in range(2):
            with pytest.raises(ZeroDivisionError), torch.set_grad_enabled(grad):
                model(batches_of(0, 1)[0].x)
            assert_nothing_is_here(model, optimizer)

    on_threads(world_size, program, timeout=5)


@WORLD_SIZES
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.by_default("False-3", "True-1")
def test_a_step_between_forward_and_backward_is_an_error_as_in_torch(world_size: int, create_graph: bool) -> None:
    case = Case()

    def late(model: Any) -> Tensor:
        batch = batches_of(7, 1)[0]
        if not create_graph:
            return loss_of(model, batch)
        x = batch.x.requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model, Batch(x, 0, 0)), x, create_graph=True)
        return gradient.square().sum()

    plain = case.make()
    sgd = torch.optim.AdamW(plain.parameters())
    one_backward(plain, batches_of(0, 1)[0])
    loss = late(plain)
    sgd.step()
    with pytest.raises(RuntimeError, match=EDITED):
        loss.backward()
    _, expected = plain_loop(case, world_size)

    def program(transport: Transport) -> None:
        model, optimizer = sharded(case, transport)
        for step in range(case.steps):
            train(case, model, optimizer, step)
            loss = late(model)
            optimizer.step()
            with pytest.raises(RuntimeError, match=f"changed by a step or an edit after the forward|{EDITED}"):
                loss.backward()
            optimizer.zero_grad()
            with optimizer.gathered():
                assert_parameters(model, expected[step])
        assert_nothing_is_here(model, optimizer, lends=create_graph)

    on_threads(world_size, program, timeout=5)
