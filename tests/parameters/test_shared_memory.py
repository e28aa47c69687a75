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

from collectives import Transport, on_threads
from zero import ZeroOptimizer
from zero.core.parameter_specs import check_memory_apart

from ..support.errors import error_of, errors_on
from ..support.limits import BOUND
from ..support.plain import assert_same_bits, assert_same_model
from ..support.rows import only
from .views import Views, loss_of, plain_views, train_views
from .worlds import WORLDS, on, size_of

STAGES = (0, 1, 2, 3)
SHARE = "{} and {} share memory but are different parameters or buffers: tie them by using one parameter in both places"


def zero(params: Any, group: Any, stage: int, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(params, torch.optim.SGD, lr=0.5, process_group=group, stage=stage, **arguments)


# -- what is refused ---------------------------------------------------------------------------------------------------

Share = Callable[[Any, Tensor], dict[str, Any]]


def buffer(model: Any, memory: Tensor) -> dict[str, Any]:
    model[1].register_buffer("other", memory[0], persistent=False)
    return {}


def frozen(model: Any, memory: Tensor) -> dict[str, Any]:
    model[1].other = nn.Parameter(memory, requires_grad=False)
    return {"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}


def unlisted(model: Any, memory: Tensor) -> dict[str, Any]:
    model[1].other = nn.Parameter(memory)
    return {"params": model[0].parameters()}


def trained_elsewhere(model: Any, memory: Tensor) -> dict[str, Any]:
    """The frozen one is listed, and would not follow the other."""
    model[0].weight.requires_grad_(False)
    return unlisted(model, memory)


def ignored(model: Any, memory: Tensor) -> dict[str, Any]:
    model[1].other = nn.Parameter(memory[:, ::2])
    return {"ignored": [model[1]]}


def ignored_buffer(model: Any, memory: Tensor) -> dict[str, Any]:
    model[1].register_buffer("other", memory[:, 1:2].expand(4, 3))
    return {"ignored": [model[1]]}


SHARES = [buffer, frozen, unlisted, trained_elsewhere, ignored, ignored_buffer]


def shared(share: Share, *, shares: bool) -> tuple[Any, dict[str, Any]]:
    """Return two layers with a further tensor, and arguments. ``shares``: the tensor has memory of the first weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    memory: Tensor = model[0].weight.data
    arguments = share(model, memory if shares else memory.clone())
    return model, {"params": model, "module": model, **arguments}


@pytest.mark.parametrize(
    ("share", "stage"), only(product(SHARES, STAGES), *zip(SHARES, (2, 3, 0, 1, 3, 2), strict=True))
)
def test_memory_that_a_trained_parameter_shares_with_anything_else_is_refused_on_every_rank(
    share: Share, stage: int
) -> None:
    def program(transport: Transport) -> None:
        _, arguments = shared(share, shares=transport.rank == transport.world_size - 1)
        zero(group=transport, stage=stage, **arguments)

    for ranks in (1, 2, 3):
        for message in errors_on(ranks, program):
            assert SHARE.format("'0.weight'", "'1.other'") in message
            assert message.endswith("places, or give one of them its own memory with .clone()")
        assert ranks == 1 or message.startswith("ValueError: '0.weight'")


@pytest.mark.parametrize(
    ("share", "stage"), only(product(SHARES[:3], STAGES[:3]), (buffer, 2), (frozen, 1), (unlisted, 0))
)
def test_a_further_param_group_is_refused_alike_and_training_goes_on(share: Share, stage: int) -> None:
    """At stage 3 all parameters of the module lie in buckets since the construction."""

    def program(transport: Transport) -> tuple[str, Any]:
        model, _ = shared(share, shares=transport.rank == 1)
        optimizer = zero([model[0].bias], transport, stage, module=model)
        message = error_of(optimizer.add_param_group, {"params": [model[0].weight]})
        view = nn.Parameter(model[0].bias.data[1:])
        of_listed = error_of(optimizer.add_param_group, {"params": [view]})
        assert SHARE.format("'0.bias'", "'parameter 1'") in of_listed
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


def kept_apart(model: Any) -> dict[str, Any]:
    """A frozen parameter's memory is a buffer's and another frozen one's, too."""
    model.twin = nn.Parameter(model.layer(0).frozen.data[1:], requires_grad=False)
    model.register_buffer("other", model.layer(0).frozen.data[:2])
    return {"params": [parameter for parameter in model.parameters() if parameter is not model.twin], "module": model}


TRAINED = [("travel", 3), ("several", 3), ("common", 3), ("one", 0), ("travel", 1), ("several", 2)]


@pytest.mark.parametrize(("world", "stage"), only(product(WORLDS, STAGES), *TRAINED))
def test_parameters_and_buffers_that_are_views_of_one_tensor_train_as_in_the_plain_loop(world: str, stage: int) -> None:
    expected = plain_views(size_of(world), 3)
    for model in on(world, lambda transport: train_views(transport, 3, stage=stage)):
        assert_same_model(model, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_parameter_that_shares_memory_with_what_is_not_trained_is_told_and_trains_on(stage: int) -> None:
    model = Views()
    arguments = kept_apart(model)
    with pytest.warns(UserWarning, match="share memory now. After this, edits of one do not reach the other") as seen:
        optimizer = ZeroOptimizer(optimizer_class=torch.optim.AdamW, lr=0.1, stage=stage, **arguments)
    texts = {str(warning.message).partition(" share")[0] for warning in seen}
    assert {"'tied' and 'other'", "'tied' and 'twin'"} <= texts
    loss_of(model, torch.ones(2, 4)).backward()
    optimizer.step()


@pytest.mark.parametrize("world", ["travel", "common"])
def test_views_keep_hooks_and_attributes_and_an_edit_of_one_is_an_edit_of_no_other(world: str) -> None:
    def program(transport: Transport) -> tuple[list[Any], str]:
        model = Views()
        first, second = model.layer(0).weight, model.layer(1).weight
        first.mark, seen = "kept", []
        handle = first.register_hook(lambda gradient: gradient * 2)
        first.register_post_accumulate_grad_hook(lambda _: seen.append("post"))
        optimizer = zero(model, transport, 3)
        loss_of(model, torch.ones(2, 4)).backward()
        found = [optimizer.full_grad(first), seen, first.mark]
        optimizer.zero_grad()
        handle.remove()
        loss_of(model, torch.ones(2, 4)).backward()
        found.append(optimizer.full_grad(first))
        with optimizer.gathered(), torch.no_grad():
            second.mul_(2)
        return found, error_of(optimizer.step)

    model = Views()
    loss_of(model, torch.ones(2, 4)).backward()
    expected = model.layer(0).weight.grad
    assert expected is not None
    for (doubled, seen, mark, plain), message in on(world, program):
        assert_same_bits(doubled, expected * 2)
        assert_same_bits(plain, expected)
        assert seen == ["post", "post"]
        assert mark == "kept"
        assert "'layers.1.weight' was edited while its unit was gathered" in message


def test_a_gradient_that_a_view_had_before_is_still_told() -> None:
    def program(transport: Transport) -> None:
        model = Views()
        model.layer(0).weight.grad = torch.ones(4, 4)
        zero(model, transport, 3).step()

    for message in errors_on(2, program):
        assert "the gradient of 'layers.0.weight' was assigned from outside" in message


def test_a_view_that_a_graph_holds_at_stage_3_is_named_on_every_rank() -> None:
    def program(transport: Transport) -> None:
        model = Views()
        held = loss_of(model, torch.ones(2, 4)) if transport.rank else None
        zero(model, transport, 3)
        del held

    for message in errors_on(2, program):
        assert "'tied' shares a version counter with another tensor, as views of one tensor do" in message
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


def contiguous() -> Columns:
    model = Columns()
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    return model


@pytest.mark.parametrize("stage", only(STAGES, 0, 3))
def test_gaps_are_told_and_what_was_made_dense_before_has_the_plain_loops_bits(stage: int) -> None:
    with pytest.warns(UserWarning, match=r"gaps in the memory of .*, such as big\[:, ::2\] has, are closed") as seen:
        found = on_threads(2, lambda transport: train_views(transport, 3, Columns(), stage=stage), timeout=BOUND)
    (text,) = [str(warning.message) for warning in seen]
    assert sorted(re.findall(r"'\w+'", text)) == ["'even'", "'odd'", "'rows'"]
    assert all(parameter.is_contiguous() for parameter in found[1].parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # which is then that of every rank, at once
        with pytest.raises((UserWarning, ValueError), match="gaps in the memory"):  # rank 0's, and the others'
            on_threads(2, lambda transport: train_views(transport, 3, Columns(), stage=stage), timeout=BOUND)
        for model in on_threads(3, lambda transport: train_views(transport, 3, contiguous(), stage=stage)):
            assert_same_model(model, plain_views(3, 3, contiguous()))
