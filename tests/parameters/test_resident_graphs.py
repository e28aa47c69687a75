"""Graphs of units that do not travel: they hold parameters themselves, and autograd's own versions guard these.

Each program runs on two ranks with common memory and on one, and is compared with the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.plain import assert_same_model
from ..support.sockets import on_sockets
from .test_stage3_errors import error_of

LIMIT = 8.0
LR = 0.1
X = torch.linspace(-1, 1, 8).view(2, 4)
CHANGED = "modified by an inplace operation"
RELEASED = "is released: at stage 3"
BY_RANKS = pytest.mark.parametrize(("ranks", "world_size"), [(on_sockets, 2), (on_threads, 1)])
Ranks = Callable[..., list[Any]]


class Product(torch.autograd.Function):
    """A product whose backward is in Python: it uses what it saved like any caller of a parameter."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ weight.t(), inputs.t() @ gradient


def product(inputs: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = Product.apply(inputs, weight)  # type: ignore[no-untyped-call]
    return result


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 0.5 + 0.1)

    def forward(self, inputs: Tensor) -> Any:
        return inputs @ self.weight


class Custom(Plain):
    def forward(self, inputs: Tensor) -> Any:
        return product(inputs, self.weight)


class Twice(Custom):
    def forward(self, inputs: Tensor) -> Any:
        return product(product(inputs, self.weight), self.weight)


class Viewed(Plain):
    """A unit whose output is a view of what its weight has made."""

    def forward(self, inputs: Tensor) -> Any:
        return product(inputs.reshape(-1, 4), self.weight).view(inputs.shape)


class Box:
    """An object that hides a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Opaque(Custom):
    def forward(self, inputs: Tensor) -> Any:
        return Box(product(inputs, self.weight))


class Sometimes(Custom):
    """A unit that hides its output if it is told to."""

    hides = True

    def forward(self, inputs: Tensor) -> Any:
        output = product(inputs, self.weight)
        return Box(output) if self.hides else output


class ViaData(Plain):
    def forward(self, inputs: Tensor) -> Any:
        return product(inputs, self.weight.data)


class ViaDetach(Plain):
    def forward(self, inputs: Tensor) -> Any:
        return product(inputs, self.weight.detach())


class ViaAutocast(Plain):
    def forward(self, inputs: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return linear(inputs, self.weight).float()


class Derived(Plain):
    """A unit that differentiates inside its forward."""

    def forward(self, inputs: Tensor) -> Any:
        inner = torch.func.grad(lambda y: (y @ self.weight.detach()).square().sum())(inputs)
        return inputs @ self.weight + inner


class Chain(nn.Module):
    """Units that run one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, inputs: Tensor) -> Any:
        for block in self.blocks:
            inputs = block(inputs)
            if isinstance(inputs, Box):
                inputs = inputs.tensor
        return inputs

    def weight(self, number: int) -> nn.Parameter:
        found = self.blocks[number].weight
        assert isinstance(found, nn.Parameter)
        return found


class OpaqueChain(Chain):
    def forward(self, inputs: Tensor) -> Any:
        return Box(super().forward(inputs))


class EditsInPlace(Chain):
    """The caller of its units edits what they return."""

    def forward(self, inputs: Tensor) -> Any:
        for block in self.blocks:
            output = block(inputs)
            output += inputs
            output[:, 0] = 0
            inputs = output
        return inputs


class Branches(Chain):
    """Units that run side by side, so that their nodes are reached in turns."""

    def forward(self, inputs: Tensor) -> Any:
        outputs = [block(inputs) for block in self.blocks]
        return sum(outputs) + outputs[0] * outputs[1]


class Checkpointed(Chain):
    def forward(self, inputs: Tensor) -> Any:
        for block in self.blocks:
            inputs = checkpoint(block, inputs, use_reentrant=False)
        return inputs


class Aside(Plain):
    """A unit that stores a tensor, whose backward is in Python, in an attribute."""

    aside: Tensor

    def forward(self, inputs: Tensor) -> Any:
        self.aside = product(inputs, self.weight).mean()
        return inputs @ self.weight


class Losses(Chain):
    """A model of which only what its units keep beside their outputs counts."""

    def forward(self, inputs: Tensor) -> Any:
        for block in self.blocks:
            block(inputs)
        return sum(block.aside for block in self.blocks)


class Outer(Custom):
    """A unit whose forward runs another unit's, between two uses of its own weight."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]

    def forward(self, inputs: Tensor) -> Any:
        return product(self.inner[0](product(inputs, self.weight)), self.weight)


class OuterCheckpoint(Outer):
    """A unit that computes its first product anew, in a backward that has gone through another unit since."""

    def forward(self, inputs: Tensor) -> Any:
        first = checkpoint(product, inputs, self.weight * 1.0, use_reentrant=False)
        again = checkpoint(lambda y: product(y, self.weight), first, use_reentrant=False)
        return product(self.inner[0](again), self.weight)


class OuterHook(Outer):
    """A unit whose gradient hook uses its weight, in a backward that has gone through another unit since."""

    def forward(self, inputs: Tensor) -> Any:
        first = product(inputs, self.weight) * 1.0  # whose node has not saved the weight
        first.register_hook(lambda gradient: gradient * self.weight.detach().mean())
        return product(self.inner[0](first), self.weight)


class Nested(Chain):
    def __init__(self, outer: type[Outer] = Outer) -> None:
        inner = Custom()
        super().__init__(outer(inner), inner, Custom())

    def forward(self, inputs: Tensor) -> Any:
        return self.blocks[2](self.blocks[0](inputs))


def loss_of(model: nn.Module, inputs: Tensor = X) -> Any:
    output = model(inputs)
    return (output.tensor if isinstance(output, Box) else output).square().sum()


def zero(model: nn.Module, transport: Transport) -> ZeroOptimizer:
    return ZeroOptimizer(model, torch.optim.SGD, stage=3, process_group=transport, lr=LR)


def plain(build: Callable[[], nn.Module], world_size: int, steps: int) -> nn.Module:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(steps):
        for _ in range(world_size):
            loss_of(model).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= world_size
        optimizer.step()
        optimizer.zero_grad()
    return model


# -- what trains ------------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], nn.Module]] = {
    "a backward in Python": lambda: Chain(Custom(), Custom(), Custom()),
    "nodes of units in turns": lambda: Branches(Twice(), Twice(), Twice()),
    "outputs that hide tensors": lambda: Chain(Opaque(), Opaque(), Custom()),
    "the model's output hides tensors": lambda: OpaqueChain(Opaque(), Opaque()),
    "a unit that runs another": Nested,
    "a unit that runs another after a checkpoint": lambda: Nested(OuterCheckpoint),
    "a unit that runs another before its hook": lambda: Nested(OuterHook),
    "views that are edited in place": lambda: EditsInPlace(Viewed(), Viewed(), Viewed()),
    "losses beside the outputs": lambda: Losses(Aside(), Aside(), Aside()),
    "checkpoints": lambda: Checkpointed(Custom(), Plain()),
    "torch.func.grad inside a unit": lambda: Chain(Derived(), Derived()),
}


@BY_RANKS
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.by_default
def test_units_train_as_in_the_plain_loop(ranks: Ranks, world_size: int, name: str) -> None:
    def program(transport: Transport) -> nn.Module:
        model = MODELS[name]()
        optimizer = zero(model, transport)
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                assert RELEASED in error_of(parameter.sum)
        optimizer.close()
        return model

    for model in ranks(world_size, program, timeout=LIMIT):
        assert_same_model(model, plain(MODELS[name], world_size, 3))


@BY_RANKS
def test_two_graphs_of_units_whose_outputs_hide_tensors_and_one_graph_twice(ranks: Ranks, world_size: int) -> None:
    def build() -> nn.Module:
        return Chain(Opaque(), Opaque(), Plain())

    def program(transport: Transport) -> nn.Module:
        model = build()
        optimizer = zero(model, transport)
        with optimizer.no_sync():
            losses = [loss_of(model) for _ in range(2)]
            losses[0].backward(retain_graph=True)
            losses[0].backward()
        losses[1].backward()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        optimizer.close()
        return model

    for model in ranks(world_size, program, timeout=LIMIT):
        assert_same_model(model, plain(build, world_size, 1))


@BY_RANKS
def test_a_unit_that_hid_a_tensor_once_is_released_again_after_a_step(ranks: Ranks, world_size: int) -> None:
    def program(transport: Transport) -> tuple[str, str]:
        first = Sometimes()
        model = Chain(first, Plain())
        optimizer = zero(model, transport)
        messages = []
        for hides in (True, False):
            first.hides = hides
            loss = loss_of(model)
            messages.append(error_of(model.weight(0).sum))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return messages[0], messages[1]

    for hidden, plainly in ranks(world_size, program, timeout=LIMIT):
        assert hidden == "nothing"
        assert RELEASED in plainly


@BY_RANKS
def test_a_gradient_of_a_gradient(ranks: Ranks, world_size: int) -> None:
    def gradients(model: nn.Module) -> None:
        inputs = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        gradient.square().sum().backward()

    def program(transport: Transport) -> nn.Module:
        model = Chain(Custom(), Plain(), Plain())
        optimizer = zero(model, transport)
        gradients(model)
        optimizer.step()
        optimizer.close()
        return model

    expected = Chain(Custom(), Plain(), Plain())
    gradients(expected)
    torch.optim.SGD(expected.parameters(), lr=LR).step()
    for model in ranks(world_size, program, timeout=LIMIT):
        assert_same_model(model, expected)


# -- a graph that is kept ---------------------------------------------------------------------------------------------

KEPT: dict[str, tuple[Sequence[Callable[[], nn.Module]], str]] = {
    "weights": ((Plain, Plain), CHANGED),
    "weights of a backward in Python": ((Custom, Custom), CHANGED),
    "weights beside their data": ((Plain, ViaData, Plain), CHANGED),
    "data alone": ((Plain, ViaData), "nothing"),  # it follows the parameter, as in a plain loop
    "detached weights that are not trained": ((ViaDetach, ViaDetach, Plain), "nothing"),
    "narrow copies": ((ViaAutocast,), "nothing"),
}


@BY_RANKS
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.by_default
def test_a_graph_that_is_kept_over_a_step_raises_as_in_the_plain_loop(ranks: Ranks, world_size: int, name: str) -> None:
    kinds, expected = KEPT[name]

    def program(transport: Transport) -> str:
        model = Chain(*(kind() for kind in kinds))
        optimizer = zero(model, transport)
        kept = loss_of(model)
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        return error_of(kept.backward)

    model = Chain(*(kind() for kind in kinds))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    kept = loss_of(model)
    loss_of(model).backward()
    optimizer.step()
    assert expected in error_of(kept.backward), "the plain loop"
    for message in ranks(world_size, program, timeout=LIMIT):
        assert expected in message


@BY_RANKS
def test_a_step_counts_the_changes_of_all_ranks_on_every_rank(ranks: Ranks, world_size: int) -> None:
    """A rank that has used only other weights, and owns no element of these, raises as well."""

    def program(transport: Transport) -> str:
        model = Chain(Plain(), Plain())
        optimizer = zero(model, transport)
        inputs = X.clone().requires_grad_()  # else its graph needs no weight
        kept = [model.blocks[number](inputs).square().sum() for number in range(2)]
        model.blocks[transport.rank](X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return " ".join(error_of(graph.backward) for graph in kept)

    for message in ranks(world_size, program, timeout=LIMIT):
        assert message.count(CHANGED) == world_size


@BY_RANKS
def test_a_graph_of_weights_that_no_rank_used_in_a_step_is_right(ranks: Ranks, world_size: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model = Chain(Plain(), Plain())
        optimizer = zero(model, transport)
        kept = model.blocks[1](X).square().sum()
        model.blocks[0](X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.backward()
        optimizer.step()
        optimizer.close()
        return model

    expected = Chain(Plain(), Plain())
    for block in expected.blocks:
        block(X).square().sum().backward()
    torch.optim.SGD(expected.parameters(), lr=LR).step()
    for model in ranks(world_size, program, timeout=LIMIT):
        assert_same_model(model, expected)


@BY_RANKS
def test_a_graph_that_is_kept_over_an_edit_raises(ranks: Ranks, world_size: int) -> None:
    def program(transport: Transport) -> str:
        model = Chain(Plain(), Plain())
        optimizer = zero(model, transport)
        kept = loss_of(model)
        with optimizer.gathered(write=True):
            model.weight(0).data.mul_(2)
        return error_of(kept.backward)

    for message in ranks(world_size, program, timeout=LIMIT):
        assert CHANGED in message


@BY_RANKS
def test_changes_are_counted_before_the_first_write(ranks: Ranks, world_size: int) -> None:
    """So an interrupt between the two leaves no graph that takes new weights for old ones."""

    def program(transport: Transport) -> tuple[str, list[str]]:
        model = Chain(Plain(), Plain())
        optimizer = zero(model, transport)
        kept = loss_of(model)
        loss_of(model).backward()
        seen: list[str] = []
        step = optimizer._user_optimizers.step

        def writing(*arguments: Any) -> Any:
            seen.append(error_of(lambda: torch.autograd.grad(kept, model.weight(0), retain_graph=True)))
            return step(*arguments)

        optimizer._user_optimizers.step = writing  # type: ignore[method-assign]
        optimizer.step()
        optimizer.zero_grad()
        return error_of(kept.backward), seen

    for message, seen in ranks(world_size, program, timeout=LIMIT):
        assert CHANGED in message
        assert CHANGED in seen[0]


@BY_RANKS
def test_a_graph_that_is_kept_over_close_is_right(ranks: Ranks, world_size: int) -> None:
    def program(transport: Transport) -> list[Tensor | None]:
        model = Chain(Custom(), Plain())
        optimizer = zero(model, transport)
        kept = loss_of(model)
        optimizer.close()
        kept.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = Chain(Custom(), Plain())
    loss_of(expected).backward()
    for gradients in ranks(world_size, program, timeout=LIMIT):
        for gradient, parameter in zip(gradients, expected.parameters(), strict=True):
            assert gradient is not None
            assert parameter.grad is not None
            assert torch.equal(gradient, parameter.grad)


# -- what is released when --------------------------------------------------------------------------------------------


@BY_RANKS
def test_inside_a_backward_a_unit_is_released_when_the_next_is_reached(ranks: Ranks, world_size: int) -> None:
    def program(transport: Transport) -> list[str]:
        model = Chain(Plain(), Plain(), Plain())
        zero_optimizer = zero(model, transport)
        seen: list[str] = []

        def look(*_: Any) -> None:
            seen.extend(error_of(model.weight(number).sum) for number in range(3))

        model.blocks[1].register_full_backward_pre_hook(look)
        loss_of(model, X.clone().requires_grad_()).backward()
        look()
        zero_optimizer.zero_grad()
        return seen

    for seen in ranks(world_size, program, timeout=LIMIT):
        assert [RELEASED in message for message in seen] == [True, False, True, True, True, True]


@BY_RANKS
def test_a_unit_whose_output_hides_tensors_stays_until_the_backward_or_the_step_ends(
    ranks: Ranks, world_size: int
) -> None:
    def program(transport: Transport) -> list[bool]:
        model = Chain(Opaque(), Plain())
        optimizer = zero(model, transport)
        seen = []

        def look() -> None:
            seen.extend(RELEASED in error_of(model.weight(number).sum) for number in range(2))

        with torch.no_grad():
            model(X)
        look()
        loss = loss_of(model)
        look()
        loss.backward()
        look()
        optimizer.zero_grad()
        model(X)
        optimizer.step()
        look()
        return seen

    for seen in ranks(world_size, program, timeout=LIMIT):
        assert seen == [True, True, False, True, True, True, True, True]


@BY_RANKS
def test_a_backward_that_raises_leaves_units_until_the_next_event(ranks: Ranks, world_size: int) -> None:
    def program(transport: Transport) -> list[str]:
        model = Chain(Plain(), Plain())
        optimizer = zero(model, transport)
        loss = loss_of(model)
        hidden = model.blocks[0](X)
        hidden.register_hook(lambda _: 1 / 0)
        seen = [error_of(model.blocks[1](hidden).sum().backward), error_of(model.weight(1).sum)]
        del loss
        optimizer.zero_grad()
        optimizer.step()
        return [*seen, error_of(model.weight(1).sum)]

    for raised, during, after in ranks(world_size, program, timeout=LIMIT):
        assert raised.startswith("ZeroDivisionError")
        assert during == "nothing"
        assert RELEASED in after


@pytest.mark.parametrize(("ranks", "world_size"), [(on_sockets, 2), (on_threads, 1), (on_threads, 2)])
def test_a_backward_in_python_that_no_output_leads_to_finds_its_unit(ranks: Ranks, world_size: int) -> None:
    def program(transport: Transport) -> tuple[str, str]:
        model = Chain(Aside(), Plain())
        optimizer = zero(model, transport)
        model(X)
        said = error_of(model.blocks[0].aside.backward)
        after = error_of(model.weight(0).sum)
        optimizer.zero_grad()
        return said, after

    for said, after in ranks(world_size, program, timeout=LIMIT):
        assert said == "nothing"
        assert RELEASED in after


CHUNKS: dict[str, Callable[[nn.Parameter], Callable[[Tensor], Tensor]]] = {
    "a weight as an argument": lambda weight: lambda rows: checkpoint(torch.matmul, rows, weight, use_reentrant=False),
    "a weight of the function": lambda weight: (
        lambda rows: checkpoint(lambda y: product(y, weight), rows, use_reentrant=False)
    ),
}


@pytest.mark.parametrize(("ranks", "world_size"), [(on_sockets, 2), (on_threads, 1), (on_threads, 2)])
@pytest.mark.parametrize("how", CHUNKS)
@pytest.mark.by_default
def test_a_chunk_of_a_gathered_block_is_computed_anew_after_it_as_in_the_plain_loop(
    ranks: Ranks, world_size: int, how: str
) -> None:
    """Where units travel and where they do not: the backward is outside of the block in which the chunk was run."""

    class Chunked(Chain):
        def forward(self, inputs: Tensor) -> Any:
            hidden = self.blocks[1](self.blocks[0](inputs))
            return torch.cat([CHUNKS[how](self.weight(2))(rows) for rows in hidden.split(1)])

    def build() -> Chunked:
        return Chunked(Custom(), Plain(), Plain())

    def program(transport: Transport) -> nn.Module:
        model = build()
        optimizer = zero(model, transport)
        for _ in range(3):
            with optimizer.gathered([model.weight(2)]):
                loss = loss_of(model)
            assert RELEASED in error_of(model.weight(2).sum)
            loss.backward()
            assert RELEASED in error_of(model.weight(2).sum)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return model

    for model in ranks(world_size, program, timeout=LIMIT):
        assert_same_model(model, plain(build, world_size, 3))


@BY_RANKS
def test_a_hook_in_a_backward_finds_no_unit(ranks: Ranks, world_size: int) -> None:
    """A parameter is read for the node whose backward runs and has saved it, and in what a checkpoint computes anew."""

    def program(transport: Transport) -> list[str]:
        model = Chain(Plain(), Plain())
        optimizer = zero(model, transport)
        inputs, seen = X.clone().requires_grad_(), list[str]()
        inputs.register_hook(lambda _: seen.append(error_of(model.weight(1).sum)))
        loss_of(model, inputs).backward()
        optimizer.zero_grad()
        return seen

    for seen in ranks(world_size, program, timeout=LIMIT):
        assert [RELEASED in message for message in seen] == [True]
