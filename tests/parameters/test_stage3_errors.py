"""Stage 3 built or extended wrongly is one clear error on every rank, and all objects stay usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer

from ..support.errors import error_of, is_plain
from ..support.plain import assert_same_bits, assert_same_model
from ..support.rows import rows
from .stage3 import INPUTS, Net, loss_of, on_ranks, plain, train, zero

pytestmark = pytest.mark.law("errors")


def linears(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


FP32 = MixedPrecision(torch.float32)
NEEDS_A_MODULE = "ValueError: stage 3 without a module: it needs the modules that hold the parameters: pass the"
DIFFERENT = "the ranks built different models or optimizers"
STRANGER = "ValueError: 'stranger' is not a parameter of the module that the optimizer was built"
BUILDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], dict[str, Any]], str]] = {
    "no module": (Net, lambda model, _: {"params": list(model.parameters()), "module": None}, NEEDS_A_MODULE),
    "a stranger": (
        Net,
        lambda model, _: {"params": [*model.named_parameters(), ("stranger", nn.Parameter(torch.ones(3)))]},
        STRANGER,
    ),
    "no unit": (Net, lambda *_: {"units": lambda m: False}, "units: the predicate matches no module"),
    "a list as a unit": (
        lambda: nn.Sequential(nn.ModuleList([nn.Linear(3, 3)])),
        lambda *_: {"units": lambda m: isinstance(m, nn.ModuleList)},
        "is never called: match its",
    ),
    "no bool for a unit": (
        Net,
        lambda *_: {"units": linears, "reshard_after_forward": lambda m: 2},
        "must return True or False for 'first', not 2; a number of ranks is for all units",
    ),
    "other units are kept on one rank": (
        Net,
        lambda _, rank: {"reshard_after_forward": lambda module: bool(rank)},
        DIFFERENT,
    ),
    "another depth on one rank": (Net, lambda _, rank: {"prefetch_depth": rank}, DIFFERENT),
    "no unit on one rank": (
        Net,
        lambda _, rank: {"units": lambda module: rank == 0 and linears(module)},
        "the predicate matches no module",
    ),
    "a function that raises on one rank": (
        Net,
        lambda _, rank: {"reshard_after_forward": lambda module: bool([1][rank])},
        "reshard_after_forward: the function failed for 'blocks.0' (IndexError: ",
    ),
    "a precision that raises on one rank": (
        Net,
        lambda _, rank: {"mixed_precision": lambda name, _: ([FP32] * (2 - rank))[name != ""]},
        "mixed_precision: the function failed for 'first' (IndexError: ",
    ),
    "another predicate on one rank": (Net, lambda _, rank: {"units": linears if rank else None}, DIFFERENT),
}


@pytest.mark.law("agreement at construction")
@pytest.mark.parametrize("name", BUILDS)
def test_what_cannot_be_built_is_told_to_every_rank_and_stays_plain(name: str) -> None:
    build, arguments, text = BUILDS[name]

    def program(transport: Transport) -> tuple[str, bool, nn.Module]:
        model = build()
        given = {"params": model, "module": model, **arguments(model, transport.rank)}
        message, left = error_of(zero, given.pop("params"), transport, **given), is_plain(model)
        good = model if type(model) is Net and transport.rank == 0 else Net()
        optimizer = zero(good, transport)
        train(good, optimizer)
        optimizer.close()
        return message, left, good

    for message, left, model in on_threads(2, program, timeout=20):
        assert text in message
        assert left
        assert_same_model(model, plain(1))


@pytest.mark.parametrize(("stage", "listed"), rows([(1, False), (3, True)], [(0, True), (3, False)]))
def test_what_the_first_optimizer_holds_is_taken_by_no_second_one(stage: int, listed: bool) -> None:
    """Of the same model or one around it, inside `gathered`, or of another that shares a parameter, listed or not."""

    def act(model: Net, first: ZeroOptimizer) -> tuple[list[str], bool]:
        other = Net()
        other.first.weight = model.first.weight
        chosen = [(name, p) for name, p in other.named_parameters() if listed or name != "first.weight"]
        around = nn.ModuleList([model, nn.Linear(3, 3)])
        with first.gathered():
            messages = [error_of(zero, list(model.named_parameters()), solo(), stage, module=model)]
            messages.append(error_of(zero, list(around[1].parameters()), solo(), stage, module=around))
        return [*messages, error_of(zero, chosen, solo(), stage, module=other)], is_plain(other.blocks)

    for (messages, left), model in on_ranks("travel", act):
        for message in messages:
            assert message.startswith("ValueError: ")
            assert "belongs to another stage-3 optimizer" in message
            assert "give one optimizer param groups, each with its own optimizer_class" in messages[0]
            assert "build one optimizer per submodule, or leave parts out of the first one by ignored=" in messages[0]
        assert left
        assert_same_model(model, plain(1))


def blocks_first(then: Callable[[Net, ZeroOptimizer], Any]) -> list[tuple[Any, nn.Module]]:
    """Run a step in which the first layer is not listed, call ``then``, and run a step in which it is."""

    def program(transport: Transport) -> tuple[Any, nn.Module]:
        model = Net()
        optimizer = zero(list(model.blocks.parameters()), transport, module=model)
        train(model, optimizer)
        found = then(model, optimizer)
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model.first.parameters())})
        train(model, optimizer)
        optimizer.check_replicas()
        optimizer.close()
        return found, model

    return on_threads(2, program, timeout=20)


def adding(parameters: Callable[[Net, int], list[nn.Parameter]]) -> Callable[[Net, ZeroOptimizer], str]:
    return lambda model, optimizer: error_of(optimizer.add_param_group, {"params": parameters(model, optimizer.rank)})


def add_in_forward(model: Net, optimizer: ZeroOptimizer) -> str:
    found = []
    with model.blocks[1].register_forward_pre_hook(
        lambda *_: found.append(error_of(optimizer.add_param_group, {"params": list(model.first.parameters())}))
    ):
        model(INPUTS)
    return found[0]


NOT_THERE = "is not a parameter of the module that the optimizer was built with"
ADDITIONS: dict[str, tuple[Callable[[Net, ZeroOptimizer], str], str]] = {
    "a stranger": (adding(lambda *_: [nn.Parameter(torch.ones(3))]), f"'parameter 6' {NOT_THERE}"),
    "a listed one": (
        adding(lambda model, _: list(model.blocks[0].parameters())),
        "'blocks.0.weight' is in a param group already",
    ),
    "others on one rank": (
        adding(lambda model, rank: [model.first.weight, *([] if rank else [nn.Parameter(torch.ones(3))])]),
        "'parameter 7' is not a parameter of the module",
    ),
    "inside a forward": (add_in_forward, "inside gathered() or inside a forward"),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_a_group_that_cannot_be_added_changes_nothing(name: str) -> None:
    add, text = ADDITIONS[name]
    expected = Net()
    train(expected, torch.optim.SGD(expected.blocks.parameters(), lr=0.5))
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.5))
    for message, model in blocks_first(add):
        assert text in message
        assert_same_model(model, expected)


def test_after_a_group_was_added_nothing_shows_or_uses_an_old_value() -> None:
    def then(model: Net, optimizer: ZeroOptimizer) -> tuple[Tensor, list[str]]:
        before = loss_of(model, INPUTS.clone().requires_grad_())  # so that its graph needs every weight
        optimizer.add_param_group({"params": list(model.first.parameters())})
        said = [error_of(torch.autograd.backward, before)]
        optimizer.zero_grad()
        loss = loss_of(model, INPUTS)
        with optimizer.gathered():
            view = model.block(1).weight.detach()
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, INPUTS))
        optimizer.step()
        seen = view.clone()
        optimizer.zero_grad()
        return seen, [*said, error_of(torch.autograd.backward, loss)]

    for (seen, messages), _ in blocks_first(then):
        assert bool(seen.isnan().all())
        assert "was laid out anew" in messages[0]
        assert "which this backward needs, was changed by a step" in messages[1]


def test_a_graph_from_before_the_optimizer_raises_or_has_the_plain_gradients() -> None:
    expected = torch.autograd.grad(loss_of(model := Net(), INPUTS), list(model.parameters()))

    def program(transport: Transport, collective: str) -> tuple[str, list[Tensor | None]]:
        model = Net()
        loss = loss_of(model, INPUTS)
        optimizer = zero(model, transport, collective=collective)
        message = error_of(torch.autograd.backward, loss)
        return message, [optimizer.full_grad(p) for p in model.parameters()] if message == "nothing" else []

    for message, _ in on_threads(2, lambda transport: program(transport, "pairwise")):
        assert "modified by an inplace operation" in message, "what is left of a released parameter is NaN"
    for one, other in zip(program(solo(), "auto")[1], expected, strict=True):
        assert one is not None
        assert_same_bits(one, other)
