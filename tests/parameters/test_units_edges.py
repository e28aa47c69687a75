"""Combinations at stage 3: graphs made inside `gathered()`, failing entries, several optimizers, edits of live
graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Loopback, Transport, on_threads
from zero import ZeroOptimizer

from ..support.cases import (
    Block,
    Case,
    Net,
    assert_nothing_is_here,
    assert_plain,
    batches_of,
    check,
    loss_of,
    manager_of,
    net_of,
    one_backward,
    sharded,
    train,
)
from ..support.plain import assert_same_bits, assert_same_model
from ..support.sockets import on_sockets

SIZES = [1, 2, 3]


def backward(loss: Tensor) -> None:
    torch.autograd.backward(loss)


def squares(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def plain_step(model: nn.Module, loss: Tensor, count: int) -> nn.Module:
    """Run the plain loop's step for a loss whose gradient ``count`` ranks add up, all alike."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(count):
        torch.autograd.backward(loss, retain_graph=True)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(count)
    optimizer.step()
    return model


def zero(model: nn.Module, transport: Transport, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.5, process_group=transport, **arguments)


def build() -> Net:
    model = Case().make()
    assert isinstance(model, Net)
    return model


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("inside", [True, False])
def test_a_loss_that_was_made_inside_gathered_has_its_gradient_anywhere(world_size: int, inside: bool) -> None:
    def program(transport: Transport) -> nn.Module:
        model = build()
        optimizer = zero(model, transport)
        with optimizer.gathered():
            loss = squares(model)
            if inside:
                backward(loss)
        if not inside:
            backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        assert_nothing_is_here(model, optimizer)
        optimizer.close()
        return model

    expected = build()
    plain_step(expected, squares(expected), world_size)
    for model in on_threads(world_size, program, timeout=20):
        assert_same_model(model, expected)


def differentiated(model: nn.Module, x: Tensor) -> None:
    torch.func.grad(lambda inputs: model(inputs).sum())(x)


def without_saved_tensor_hooks(model: nn.Module, x: Tensor) -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        model(x)


@pytest.mark.parametrize(
    ("enter", "world_size"), [(differentiated, 1), (differentiated, 2), (without_saved_tensor_hooks, 2)]
)
def test_a_forward_that_torch_refuses_leaves_nothing_behind(enter: Any, world_size: int) -> None:
    case = Case()

    def program(transport: Transport) -> nn.Module:
        model, optimizer = sharded(case, transport)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"copy of the model, made by|not here"):
                enter(model, batches_of(0, 1)[0].x)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert_nothing_is_here(model, optimizer)
        train(case, model, optimizer, 0)
        optimizer.step()
        optimizer.close()
        return model

    check(case, world_size)
    first, *others = on_threads(world_size, program, timeout=20)
    for other in others:
        assert_same_model(other, first)


@pytest.mark.parametrize(("ranks", "world_size"), [(on_sockets, 2), (on_threads, 1)])
def test_units_that_do_not_travel_need_no_saved_tensor_hooks(ranks: Any, world_size: int) -> None:
    def program(transport: Transport, refused: bool = True) -> nn.Module:
        model, optimizer = sharded(Case(), transport)
        if refused:
            without_saved_tensor_hooks(model, batches_of(0, 1)[0].x)
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"), optimizer.gathered():
                loss_of(model, batches_of(0, 1)[0])
        assert_nothing_is_here(model, optimizer)
        train(Case(), model, optimizer, 0)
        optimizer.step()
        optimizer.close()
        return model

    first, *_ = on_threads(world_size, lambda transport: program(transport, False), timeout=20)
    for model in ranks(world_size, program, timeout=20):
        assert_same_model(model, first)


@pytest.mark.parametrize("world_size", SIZES)
def test_an_edit_between_a_graph_of_gradients_and_its_backward_is_an_error_on_every_rank(world_size: int) -> None:
    def program(transport: Transport) -> None:
        model = build()
        optimizer = zero(model, transport)
        x = batches_of(0, 1)[0].x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with optimizer.gathered(write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed by a step or an edit"):
            backward(gradient.square().sum())
        del gradient, x
        optimizer.zero_grad()
        backward(loss_of(model, batches_of(0, 1)[0]))
        optimizer.step()
        optimizer.zero_grad()
        assert_nothing_is_here(model, optimizer)

    on_threads(world_size, program, timeout=20)


@pytest.mark.parametrize("world_size", SIZES)
def test_an_edit_of_one_parameter_leaves_graphs_that_need_the_others(world_size: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model = build()
        optimizer = zero(model, transport)
        loss = loss_of(model, batches_of(0, 1)[0])
        with optimizer.gathered([model.head.bias], write=True), torch.no_grad():
            model.head.bias.mul_(2)
        backward(loss)
        optimizer.step()
        optimizer.close()
        return model

    expected = build()
    loss = loss_of(expected, batches_of(0, 1)[0])
    with torch.no_grad():
        expected.head.bias.mul_(2)
    plain_step(expected, loss, world_size)
    for model in on_threads(world_size, program, timeout=20):
        assert_same_model(model, expected)


@pytest.mark.parametrize("write", [[0], [1]])
def test_gathered_writes_the_chosen_parameters_and_tells_of_others(write: list[int]) -> None:
    def program(transport: Transport) -> str:
        model = build()
        optimizer = zero(model, transport)
        pair = [model.head.bias, model.head.weight]
        with optimizer.gathered([pair[i] for i in write], write=True), torch.no_grad():
            model.head.bias.fill_(transport.rank + 2)
        try:
            optimizer.check_replicas()
        except RuntimeError as error:
            return str(error)
        with optimizer.gathered():
            assert_same_bits(model.head.bias, torch.full_like(model.head.bias, 2))
        return "kept"

    for said in on_threads(2, program, timeout=20):
        assert said == "kept" if write == [0] else "'head.bias' was edited while its unit was gathered" in said


def test_a_view_of_a_parameter_that_is_edited_outside_is_told_on_several_ranks_and_right_on_one() -> None:
    def program(transport: Transport) -> str:
        model = build()
        optimizer = zero(model, transport)
        with optimizer.gathered():
            view = model.head.weight.detach()
        view.mul_(0.5)
        backward(loss_of(model, batches_of(0, 1)[0]))
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        optimizer.close()
        expected = build()
        with torch.no_grad():
            expected.head.weight.mul_(0.5)
        assert_same_model(model, plain_step(expected, loss_of(expected, batches_of(0, 1)[0]), 1))
        return "right"

    assert on_threads(1, program, timeout=20) == ["right"]
    for said in on_threads(2, program, timeout=20):
        assert "'head.weight' was edited while it was released" in said


class Guided(nn.Module):
    """A unit that uses a weight of another model, inside its own forward."""

    def __init__(self, guide: nn.Linear) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.guide = [guide]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.guide[0](x)
        return x


@pytest.mark.parametrize("world_size", SIZES)
def test_two_optimizers_whose_units_run_inside_each_other_keep_their_places_apart(world_size: int) -> None:
    def pair() -> tuple[nn.Sequential, Guided]:
        guides = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        guided = Guided(guides[3])  # type: ignore[arg-type]
        for number, parameter in enumerate([*guides.parameters(), *guided.parameters()]):
            nn.init.constant_(parameter, 0.1 + 0.07 * number)
        return guides, guided

    def program(transport: Transport) -> tuple[nn.Module, nn.Module]:
        guides, guided = pair()
        optimizers = [zero(guides, transport), zero(guided, transport)]
        backward(guided(torch.ones(2, 3)).sum())
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.close()
        return guides, guided

    expected = pair()
    loss = expected[1](torch.ones(2, 3)).sum()
    plain_step(nn.ModuleList(expected), loss, world_size)
    for models in on_threads(world_size, program, timeout=20):
        for ours, theirs in zip(models, expected, strict=True):
            assert_same_model(ours, theirs)


def test_units_whose_long_names_begin_alike_are_told_apart() -> None:
    """Each rank enters another unit; a message has room only for the beginning of a name."""
    name = "a_module_with_a_name_that_is_longer_than_the_label_of_any_message_can_be_"

    def program(transport: Transport) -> str:
        model = nn.ModuleDict({name + letter: nn.Linear(3, 3) for letter in "ab"})
        optimizer = zero(model, transport, units=lambda module: isinstance(module, nn.Linear))
        try:
            with torch.no_grad():
                model[name + "ab"[transport.rank]](torch.ones(1, 3))
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        return "nothing"

    for said in on_threads(2, program, timeout=5):
        assert "gather of unit 'a_module_with" in said


def test_a_graph_of_parameters_that_were_laid_out_anew_says_so() -> None:
    def program(transport: Transport) -> None:
        model = build()
        chosen = list(model.blocks[0].parameters())
        optimizer = ZeroOptimizer(chosen, torch.optim.SGD, stage=3, lr=0.5, module=model, process_group=transport)
        loss = loss_of(model, batches_of(0, 1)[0])
        optimizer.add_param_group({"params": list(model.blocks[1].parameters())})
        with pytest.raises(RuntimeError, match="was laid out anew"):
            backward(loss)
        optimizer.zero_grad()
        backward(loss_of(model, batches_of(0, 1)[0]))
        optimizer.step()
        optimizer.close()

    on_threads(2, program, timeout=20)


class Complex(Block):
    """A unit that uses its weight as complex numbers, another dtype on the same memory."""

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.inner.weight.view(8, 3, 2)) * torch.complex(x[0, :3], x[1, :3])
        found: Tensor = super().forward(x) + turned.abs().sum()
        return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_weight_that_is_seen_as_another_dtype_is_restored_as_that(world_size: int) -> None:
    check(Case(net_of(Complex)), world_size)


def test_a_users_backward_hook_comes_and_goes_and_leaves_nothing() -> None:
    def program(transport: Transport) -> None:
        model, optimizer = sharded(Case(Net), transport)
        seen: list[bool] = []
        handle = model.blocks[1].register_full_backward_pre_hook(
            lambda part, _: seen.append(bool(part.inner.weight.isfinite().all()))
        )
        one_backward(model, batches_of(0, 1)[0])
        assert seen == [True]
        assert len(model.blocks[1]._backward_pre_hooks) == 2
        handle.remove()
        one_backward(model, batches_of(0, 1)[0])
        assert seen == [True]
        assert len(model.blocks[1]._backward_pre_hooks) == 0
        optimizer.step()
        optimizer.close()
        assert_plain(model)

    on_threads(2, program, timeout=5)


def test_a_stranger_has_no_name_among_units() -> None:
    _, optimizer = sharded(Case(Net), Loopback[None](1).transports[0])
    assert manager_of(optimizer).spec_of(torch.zeros(3)) is None
