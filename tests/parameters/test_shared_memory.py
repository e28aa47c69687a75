"""Views train if they share no element; what shares one with a parameter that moves is refused, and gaps are told."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer
from zero.core.parameter_specs import check_memory_apart

from ..support.errors import error_of, errors_on
from ..support.limits import BOUND
from ..support.plain import assert_same_model, plain_step
from ..support.rows import only
from .unit_cases import in_one_tensor

STAGES = (0, 1, 2, 3)
SHARE = "{} and {} share memory but are different parameters or buffers: tie them by using one parameter in both places"


def zero(params: Any, group: Any, stage: int, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(params, torch.optim.SGD, lr=0.5, process_group=group, stage=stage, **arguments)


# -- what is refused ---------------------------------------------------------------------------------------------------

Share = Callable[[Any, Tensor], dict[str, Any]]


def held(place: str, value: Callable[[Tensor], Tensor], **arguments: Callable[[Any], Any]) -> Share:
    """Return a function that puts memory into the second layer, and returns arguments of the optimizer."""

    def share(model: Any, memory: Tensor) -> dict[str, Any]:
        if place == "buffer":
            model[1].register_buffer("other", value(memory), persistent=False)
        else:
            model[1].other = nn.Parameter(value(memory), requires_grad=place == "trained")
        return {name: of(model) for name, of in arguments.items()}

    return share


def trainable(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def frozen_first(model: Any) -> Any:
    """Freeze the listed one, which would not follow the other."""
    model[0].weight.requires_grad_(False)
    return model[0].parameters()


SHARES: dict[str, Share] = {
    "a buffer": held("buffer", lambda memory: memory[0]),
    "frozen": held("frozen", lambda memory: memory, params=trainable),
    "not listed": held("trained", lambda memory: memory, params=lambda model: model[0].parameters()),
    "trained elsewhere": held("trained", lambda memory: memory, params=frozen_first),
    "ignored": held("trained", lambda memory: memory[:, ::2], ignored=lambda model: [model[1]]),
    "an ignored buffer": held("buffer", lambda memory: memory[:, 1:2].expand(4, 3), ignored=lambda model: [model[1]]),
}


def shared(share: str, *, shares: bool) -> tuple[Any, dict[str, Any]]:
    """Return two layers with a further tensor, and arguments. ``shares``: the tensor has memory of the first weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    memory: Tensor = model[0].weight.data
    arguments = SHARES[share](model, memory if shares else memory.clone())
    return model, {"params": model, "module": model, **arguments}


@pytest.mark.parametrize(
    ("share", "stage"), only(product(SHARES, STAGES), *zip(SHARES, (2, 3, 0, 1, 3, 2), strict=True))
)
def test_memory_that_a_trained_parameter_shares_with_anything_else_is_refused_on_every_rank(
    share: str, stage: int
) -> None:
    def program(transport: Transport) -> None:
        _, arguments = shared(share, shares=transport.rank == transport.world_size - 1)
        zero(group=transport, stage=stage, **arguments)

    for ranks in (1, 2, 3):
        for message in errors_on(ranks, program):
            assert SHARE.format("'0.weight'", "'1.other'") in message
            assert message.endswith("places, or give one of them its own memory with .clone()")
        assert ranks == 1 or message.startswith("ValueError: '0.weight'")


@pytest.mark.parametrize(("share", "stage"), [("a buffer", 2), ("frozen", 1), ("not listed", 0)])
def test_a_further_param_group_is_refused_alike_and_training_goes_on(share: str, stage: int) -> None:
    """At stage 3 all parameters of the module lie in buckets since the construction."""

    def program(transport: Transport) -> tuple[str, Any]:
        model, _ = shared(share, shares=transport.rank == 1)
        optimizer = zero([model[0].bias], transport, stage, module=model)
        message = error_of(optimizer.add_param_group, {"params": [model[0].weight]})
        view = nn.Parameter(model[0].bias.data[1:])
        assert SHARE.format("'0.bias'", "'parameter 1'") in error_of(optimizer.add_param_group, {"params": [view]})
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return message, model[0].bias.detach()

    for message, bias in on_threads(2, program, timeout=BOUND):
        assert SHARE.format("'0.weight'", "'1.other'") in message
        assert bias.norm() > 0


def test_sharing_is_exact_for_every_shape_and_stride() -> None:
    """Elements of one may lie in the gaps of the other, and a buffer may overlap itself."""
    draw, memory, found = random.Random(3), torch.arange(400), set()

    def drawn() -> Tensor:
        sizes = [draw.randint(1, 4) for _ in range(draw.randint(0, 4))]
        return memory.as_strided(sizes, [draw.randint(0, 20) for _ in sizes], draw.randint(0, 60))

    for _ in range(400):
        one, other = drawn(), drawn()
        share = not {*one.flatten().tolist()}.isdisjoint(other.flatten().tolist())
        found.add(share)
        texts = check_memory_apart([], [("one", one)], [("other", other)])
        assert any("share memory" in text for text in texts) is share
    assert found == {True, False}


# -- what trains -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_parameter_that_shares_memory_with_what_is_not_trained_is_told_and_trains_on(stage: int) -> None:
    """With a buffer, and with another frozen one, which is not listed."""
    model: Any = nn.Linear(4, 4)
    model.kept = nn.Parameter(torch.ones(3, 4), requires_grad=False)
    model.twin = nn.Parameter(model.kept.data[1:], requires_grad=False)
    model.register_buffer("other", model.kept.data[:2])
    listed = [parameter for parameter in model.parameters() if parameter is not model.twin]
    with pytest.warns(UserWarning, match="share memory now. After this, edits of one do not reach the other") as seen:
        optimizer = zero(listed, solo(), stage, module=model)
    texts = {str(warning.message).partition(" share")[0] for warning in seen}
    assert {"'kept' and 'other'", "'kept' and 'twin'"} <= texts
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_a_view_that_had_a_gradient_or_that_a_graph_holds_is_named_on_every_rank() -> None:
    """That views train is shown by the units' cases."""

    def views() -> Any:
        model = nn.Linear(4, 4)
        in_one_tensor(model)
        return model

    def with_gradient(transport: Transport) -> None:
        model = views()
        model.weight.grad = torch.ones(4, 4)
        zero(model, transport, 3).step()

    def in_a_graph(transport: Transport) -> None:
        model = views()
        held = torch.ones(2, 4).requires_grad_() @ model.weight if transport.rank else None
        zero(model, transport, 3)
        del held

    for message in errors_on(2, with_gradient):
        assert "the gradient of 'weight' was assigned from outside" in message
    for message in errors_on(2, in_a_graph):
        assert "shares a version counter with another tensor, as views of one tensor do" in message
        assert message.endswith("first forward, or give it memory of its own: nn.Parameter(p.detach().clone())")


# -- gaps --------------------------------------------------------------------------------------------------------------


class Columns(nn.Module):
    """A trained and a frozen parameter whose elements alternate in memory, and one whose rows lie apart."""

    def __init__(self) -> None:
        super().__init__()
        columns = torch.linspace(-1, 1, 48).view(4, 12)
        self.even, self.odd = nn.Parameter(columns[:, :8:2]), nn.Parameter(columns[:, 1:8:2], requires_grad=False)
        self.rows = nn.Parameter(columns[:, 8:])

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.even) @ self.odd + self.rows.sum(0)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().sum()
    return loss


def trained(transport: Transport, model: Columns, stage: int) -> Columns:
    optimizer = zero(model, transport, stage)
    loss_of(model, torch.ones(2, 4) + transport.rank).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.close()
    return model


@pytest.mark.parametrize("stage", only(STAGES, 0, 3))
def test_gaps_are_told_and_what_was_made_dense_before_has_the_plain_loops_bits(stage: int) -> None:
    def contiguous() -> Columns:
        model = Columns()
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        return model

    with pytest.warns(UserWarning, match=r"gaps in the memory of .*, such as big\[:, ::2\] has, are closed") as seen:
        found = on_threads(2, lambda transport: trained(transport, Columns(), stage), timeout=BOUND)
    (text,) = [str(warning.message) for warning in seen]
    assert sorted(re.findall(r"'\w+'", text)) == ["'even'", "'odd'", "'rows'"]
    assert all(parameter.is_contiguous() for parameter in found[1].parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # which is then that of every rank, at once
        with pytest.raises((UserWarning, ValueError), match="gaps in the memory"):  # rank 0's, and the others'
            on_threads(2, lambda transport: trained(transport, Columns(), stage), timeout=BOUND)
        plain = contiguous()
        sgd = torch.optim.SGD(plain.parameters(), lr=0.5)
        plain_step(plain, sgd, loss_of, [torch.ones(2, 4) + rank for rank in range(3)], 3)
        for model in on_threads(3, lambda transport: trained(transport, contiguous(), stage)):
            assert_same_model(model, plain)
