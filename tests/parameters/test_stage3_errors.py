"""Stage 3 built or called wrongly: one clear error on every rank in bounded time, and all objects stay usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer
from zero.core.parameter_specs import is_released

from ..support.plain import assert_same_bits, assert_same_model
from ..test_errors import on_ranks
from .wrong_moments import Net, loss_of

INPUTS = torch.linspace(-1, 1, 6).view(2, 3)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
Call = Callable[[nn.Module, ZeroOptimizer], Any]


def zero(model: Any, group: Any, stage: int = 3, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=group, lr=0.5, **arguments)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run a step. With equal batches, two ranks take the step of one."""
    torch.autograd.backward(loss_of(model, INPUTS))
    optimizer.step()
    model.zero_grad()


def plain(steps: int) -> Net:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        train(model, optimizer)
    return model


def is_plain(model: nn.Module) -> bool:
    """Return True if the optimizer left nothing on a model."""
    hooks: list[Any] = [h for part in model.modules() for h in (part._forward_pre_hooks, part._forward_hooks)]
    hooks += [h for p in model.parameters() for h in (p._post_accumulate_grad_hooks, p._backward_hooks)]
    ours = [hook for some in hooks for hook in (some or {}).values() if hook.__module__.startswith("zero.")]
    return not ours and not any(is_released(parameter) for parameter in model.parameters())


def error_of(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    try:
        call(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# -- construction -----------------------------------------------------------------------------------------------------


def test_parameters_without_a_module() -> None:
    for message in on_ranks(2, lambda transport: zero(list(Net().parameters()), transport)):
        assert message.startswith("ValueError: stage 3 gathers parameters for the forwards of their modules: pass the")


@pytest.mark.parametrize(
    ("predicate", "text"),
    [
        (lambda module: False, "matches no module below the root"),
        (lambda module: isinstance(module, nn.ModuleList), "'blocks' is a ModuleList, which is never called"),
        (lambda module: True, "matches '0' and '0.0' inside it: units never nest"),
    ],
)
def test_a_predicate_that_finds_no_units(predicate: Callable[[nn.Module], bool], text: str) -> None:
    def program(transport: Transport) -> None:
        nested = nn.Sequential(nn.Sequential(nn.Linear(3, 3)))
        model = nested if "'0'" in text else Net()
        try:
            zero(model, transport, units=predicate)
        finally:
            assert is_plain(model)

    for message in on_ranks(2, program):
        assert message.startswith("ValueError: units: ")
        assert text in message


def test_a_predicate_that_finds_nothing_on_one_rank_is_told_to_every_rank() -> None:
    def program(transport: Transport) -> None:
        zero(Net(), transport, units=lambda module: transport.rank == 0 and isinstance(module, nn.Linear))

    for message in on_ranks(2, program):
        assert "the predicate matches no module" in message


def test_a_predicate_that_differs_between_ranks_is_told_to_every_rank() -> None:
    def program(transport: Transport) -> None:
        zero(Net(), transport, units=(lambda module: isinstance(module, nn.Linear)) if transport.rank else None)

    for message in on_ranks(2, program):
        assert "the ranks built different models or optimizers" in message
        assert "first.weight" in message


def test_a_listed_parameter_that_is_not_in_the_module() -> None:
    def program(transport: Transport) -> tuple[str, bool, nn.Module]:
        model = Net()
        stranger = ("stranger", nn.Parameter(torch.ones(3)))
        message = error_of(zero, [*model.named_parameters(), stranger], transport, module=model)
        left = is_plain(model)
        train(model, zero(model, transport))
        return message, left, model

    for message, left, _ in on_threads(2, program, timeout=5):
        assert message.startswith(
            "ValueError: 'stranger' is not a parameter of the module that the optimizer was built"
        )
        assert left


@STAGES
@pytest.mark.parametrize("listed", [True, False])
def test_a_parameter_of_a_model_that_another_optimizer_holds(stage: int, listed: bool) -> None:
    def program(transport: Transport) -> tuple[str, bool, nn.Module]:
        model, other = Net(), Net()
        first = zero(model, transport)
        other.first.weight = model.first.weight
        chosen = [(name, p) for name, p in other.named_parameters() if listed or name != "first.weight"]
        message = error_of(zero, chosen, transport, stage, module=other)
        left = is_plain(other.blocks)
        train(model, first)
        first.close()
        return message, left, model

    for message, left, model in on_threads(2, program, timeout=5):
        assert message.startswith("ValueError: 'first.weight' belongs to another stage-3 optimizer")
        assert left
        assert_same_model(model, plain(1))


@STAGES
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_a_second_optimizer_needs_the_first_one_closed(stage: int, inside: bool, listed: bool) -> None:
    def program(transport: Transport) -> tuple[str, nn.Module]:
        model = Net()
        first = zero(model, transport)
        given: Any = list(model.named_parameters()) if listed else model
        module = model if stage == 3 else None
        if inside:
            with first.gathered():
                message = error_of(zero, given, transport, stage, module=module)
        else:
            message = error_of(zero, given, transport, stage, module=module)
        train(model, first)
        first.close()
        second = zero(model, transport, stage)
        train(model, second)
        second.close()
        return message, model

    for message, model in on_threads(2, program, timeout=5):
        assert message.startswith("ValueError: ")
        assert "belongs to another stage-3 optimizer" in message
        assert "give one optimizer param groups, each with an optimizer_class" in message
        assert "or build one optimizer over each submodule" in message
        assert_same_model(model, plain(2))


@pytest.mark.parametrize("way", ["param groups", "submodules"])
def test_both_ways_that_this_error_names_train_the_bits_of_two_plain_optimizers(way: str) -> None:
    def halves() -> nn.Sequential:
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3)))
        for number, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 0.25 + number)
        return model

    def steps(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> nn.Module:
        for _ in range(2):
            model(INPUTS).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return model

    def program(transport: Transport) -> nn.Module:
        model = halves()
        made: list[ZeroOptimizer]
        if way == "submodules":
            made = [ZeroOptimizer(model[0], torch.optim.AdamW, stage=3, process_group=transport.fork(), lr=0.1)]
            made.append(zero(model[1], transport.fork()))
        else:
            groups = [
                {"params": list(model[0].parameters()), "optimizer_class": torch.optim.AdamW, "lr": 0.1},
                {"params": list(model[1].parameters())},
            ]
            made = [zero(groups, transport, module=model)]
        steps(model, list(made))
        for optimizer in made:
            optimizer.close()
        return model

    plain = halves()
    steps(plain, [torch.optim.AdamW(plain[0].parameters(), lr=0.1), torch.optim.SGD(plain[1].parameters(), lr=0.5)])
    for model in on_threads(2, program, timeout=5):
        assert_same_model(model, plain)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stage_3_takes_over_from_an_optimizer_of_another_stage(stage: int) -> None:
    def program(transport: Transport) -> tuple[str, nn.Module]:
        model = Net()
        first = zero(model, transport, stage)
        train(model, first)
        second = zero(model, transport)
        train(model, second)
        second.close()
        return error_of(first.step), model

    for message, model in on_threads(2, program, timeout=5):
        assert "a newer ZeroOptimizer took over parameters of this one" in message
        assert_same_model(model, plain(2))


def overlapping(model: Net) -> None:
    model.first.weight = nn.Parameter(torch.zeros(1, 3).expand(3, 3))


def wider(model: Net) -> None:
    model.first = nn.Linear(3, 4, bias=False)


def counting(model: Net) -> None:
    model.first.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.int64), requires_grad=False)


def complex_valued(model: Net) -> None:
    model.first.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))


def not_there_yet(model: Net) -> None:
    model.first = nn.LazyLinear(3, bias=False)


BROKEN: dict[Callable[[Net], None], str] = {
    overlapping: "'first.weight' overlaps itself in memory",
    wider: "the ranks built different models",
    counting: "the ranks built different models",
    complex_valued: "'first.weight' is torch.complex64, and only real parameters are trained",
    not_there_yet: "'first.weight'",
}


@pytest.mark.parametrize("change", BROKEN, ids=lambda change: change.__name__)
def test_a_model_that_is_broken_on_one_rank_stays_plain_on_all(change: Callable[[Net], None]) -> None:
    def program(transport: Transport) -> tuple[str, bool, nn.Module]:
        model, good = Net(), Net()
        if transport.rank == 1:
            change(model)
        message = error_of(zero, model, transport)
        if transport.rank == 0:
            good = model
        left = is_plain(model)
        optimizer = zero(good, transport)
        train(good, optimizer)
        optimizer.close()
        return message, left, good

    for message, left, model in on_threads(2, program, timeout=5):
        assert BROKEN[change] in message
        assert left
        assert_same_model(model, plain(1))


def test_parameters_that_are_not_listed_may_be_of_any_dtype() -> None:
    def program(transport: Transport) -> tuple[Any, nn.Module]:
        model = Net()
        model.blocks[0].count = nn.Parameter(torch.full((2,), 7 + transport.rank), requires_grad=False)
        model.blocks[0].phase = nn.Parameter(torch.full((2,), 1j + transport.rank), requires_grad=False)
        optimizer = zero([p for p in model.parameters() if p.dtype is torch.float32], transport, module=model)
        train(model, optimizer)
        seen = model.blocks[0].count.tolist(), model.blocks[0].phase.tolist()
        optimizer.close()
        del model.blocks[0].count, model.blocks[0].phase
        return seen, model

    for seen, model in on_threads(2, program, timeout=5):
        assert seen == ([7, 7], [1j, 1j])
        assert_same_model(model, plain(1))


# -- further parameters -----------------------------------------------------------------------------------------------


def blocks_first(transport: Transport, then: Callable[[Net, ZeroOptimizer], Any]) -> tuple[Any, nn.Module]:
    """Run a step in which the first layer is not listed, call ``then``, and run a step in which it is."""
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


def plain_blocks_first() -> Net:
    model = Net()
    train(model, torch.optim.SGD(model.blocks.parameters(), lr=0.5))
    train(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return model


def add_stranger(model: Net, optimizer: ZeroOptimizer) -> str:
    return error_of(optimizer.add_param_group, {"params": [nn.Parameter(torch.ones(3))]})


def add_known(model: Net, optimizer: ZeroOptimizer) -> str:
    return error_of(optimizer.add_param_group, {"params": list(model.blocks[0].parameters())})


def add_differently(model: Net, optimizer: ZeroOptimizer) -> str:
    chosen = [model.first.weight] if optimizer.rank else [model.first.weight, nn.Parameter(torch.ones(3))]
    return error_of(optimizer.add_param_group, {"params": chosen})


def add_in_gathered(model: Net, optimizer: ZeroOptimizer) -> str:
    with optimizer.gathered():
        return error_of(optimizer.add_param_group, {"params": list(model.first.parameters())})


def add_in_forward(model: Net, optimizer: ZeroOptimizer) -> str:
    found = []
    with model.blocks[1].register_forward_pre_hook(
        lambda *_: found.append(error_of(optimizer.add_param_group, {"params": list(model.first.parameters())}))
    ):
        model(INPUTS)
    return found[0]


ADDITIONS: dict[Callable[[Net, ZeroOptimizer], str], str] = {
    add_stranger: "'parameter 6' is not a parameter of the module that the optimizer was built with",
    add_known: "'blocks.0.weight' is in a param group already",
    add_differently: "'parameter 7' is not a parameter of the module",
    add_in_gathered: "inside gathered() or inside a forward",
    add_in_forward: "inside gathered() or inside a forward",
}


@pytest.mark.parametrize("add", ADDITIONS, ids=lambda add: add.__name__)
def test_a_group_that_cannot_be_added_changes_nothing(add: Callable[[Net, ZeroOptimizer], str]) -> None:
    for message, model in on_threads(2, lambda transport: blocks_first(transport, add), timeout=5):
        assert ADDITIONS[add] in message
        assert_same_model(model, plain_blocks_first())


@pytest.mark.parametrize("replaced", [False, True])
def test_a_group_may_be_added_after_a_module_that_is_not_listed_went(replaced: bool) -> None:
    def program(transport: Transport) -> nn.Module:
        model = Net()
        model.spare = nn.Linear(2, 2)
        optimizer = zero(list(model.blocks.parameters()), transport, module=model)
        train(model, optimizer)
        if replaced:
            model.spare = nn.Linear(2, 2)
            told = error_of(optimizer.add_param_group, {"params": list(model.spare.parameters())})
            assert "'spare.weight' is not a parameter of the module that the optimizer was built with" in told
        del model.spare
        optimizer.add_param_group({"params": list(model.first.parameters())})
        train(model, optimizer)
        optimizer.close()
        return model

    for model in on_threads(2, program, timeout=5):
        assert_same_model(model, plain_blocks_first())


def test_after_a_group_was_added_nothing_shows_or_uses_an_old_value() -> None:
    def then(model: Net, optimizer: ZeroOptimizer) -> tuple[Tensor, str]:
        optimizer.add_param_group({"params": list(model.first.parameters())})
        loss = loss_of(model, INPUTS)
        with optimizer.gathered():
            view = model.block(1).weight.detach()
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, INPUTS))
        optimizer.step()
        seen = view.clone()
        optimizer.zero_grad()
        return seen, error_of(torch.autograd.backward, loss)

    for (seen, message), _ in on_threads(2, lambda transport: blocks_first(transport, then), timeout=5):
        assert bool(seen.isnan().all())
        assert "which this backward needs, was changed by a step" in message


class Growing(nn.Module):
    """A model to which a layer is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.extra: nn.Linear | None = None

    def grow(self) -> nn.Linear:
        self.extra = nn.Linear(3, 3, bias=False)
        nn.init.constant_(self.extra.weight, 0.5)
        return self.extra

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.net(inputs)
        return hidden if self.extra is None else self.extra(hidden)


def test_a_module_that_is_added_later_is_the_users_own() -> None:
    def program(transport: Transport) -> tuple[str, Any, nn.Module]:
        model = Growing()
        optimizer = zero(model, transport)
        extra = model.grow()
        torch.autograd.backward(loss_of(model, INPUTS))
        optimizer.step()
        message = error_of(optimizer.add_param_group, {"params": [("extra.weight", extra.weight)]})
        optimizer.close()
        return message, extra.weight.grad, model

    expected = Growing()
    sgd = torch.optim.SGD(expected.parameters(), lr=0.5)
    extra = expected.grow()
    torch.autograd.backward(loss_of(expected, INPUTS))
    sgd.step()
    for message, gradient, model in on_threads(2, program, timeout=5):
        assert "'extra.weight' is not a parameter of the module that the optimizer was built with" in message
        assert_same_bits(gradient, extra.weight.grad)  # type: ignore[arg-type]
        assert_same_model(model, expected)
