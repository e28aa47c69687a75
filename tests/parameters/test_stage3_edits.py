"""Edits inside `gathered()` count if it writes; memory that is put or moved elsewhere is told on every rank.

That any other edit is undone and told is a law: see the moments of `tests/dials/units.py`.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer
from zero.parameters import edit_detector

from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.plain import assert_same_bits, assert_same_model
from ..support.rows import rows
from .stage3 import INPUTS, Net, loss_of, on, on_ranks, plain, size_of, train, zero


@pytest.mark.usefixtures("unseen")
def test_an_edit_on_a_device_is_told_after_any_number_of_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_detector, "MOST_UNREAD", 3)

    def act(model: Net, optimizer: ZeroOptimizer) -> str:
        with optimizer.gathered():
            model.block(1).weight.data.mul_(2)
        for _ in range(3):
            with torch.inference_mode():
                model(INPUTS)
        return error_of(optimizer.step)

    for message, model in on_ranks("travel", act):
        assert "'blocks.1.weight' was edited while its unit was gathered" in message
        assert_same_model(model, plain(1))


def test_memory_that_was_moved_away_from_all_ranks_is_told_for_good() -> None:
    def program(transport: Transport) -> list[str]:
        model = Net()
        optimizer = zero(model, transport)
        if transport.rank:
            model.block(1).register_forward_pre_hook(lambda block, _: block.weight.detach().share_memory_())
        loss_of(model, INPUTS)
        messages = [error_of(optimizer.step) for _ in range(2)]
        train_again = error_of(train, model, optimizer)
        with optimizer.gathered():
            assert_same_model(model, Net())
        return [*messages, train_again]

    for messages in on("common", program):
        for message in messages:
            assert "rank 1: the memory of 'blocks.1." in message
            assert "was moved (by share_memory_()" in message


PUTS: dict[str, Callable[[Net], object]] = {
    "data": lambda model: setattr(model.block(1).weight, "data", torch.ones(3, 3)),
    "load_state_dict": lambda model: model.load_state_dict(
        {"blocks.1.weight": torch.ones(3, 3)}, strict=False, assign=True
    ),
}


@pytest.mark.parametrize("put", PUTS)
@pytest.mark.parametrize("stage", [0, 3])
def test_memory_that_is_put_in_the_place_of_a_parameters_is_told_with_what_copies_it(stage: int, put: str) -> None:
    def act(optimizer: ZeroOptimizer, model: Net) -> None:
        with optimizer.gathered(write=True):
            PUTS[put](model)
        train(model, optimizer)

    def program(transport: Transport) -> str:
        model = Net()
        return error_of(act, zero(model, transport, stage, collective="pairwise"), model)

    for message in on_threads(2, program, timeout=BOUND):
        assert "'blocks.1.weight' was replaced after the optimizer was built" in message
        assert "by p.copy_(t) under torch.no_grad()" in message
        assert ("load_state_dict(assign=True)" in message) == (put == "load_state_dict")


STAGES = pytest.mark.parametrize(("world", "stage"), [("one", 3), ("travel", 3), ("common", 3), ("travel", 2)])


class Odd(Net):
    """With a tie, a matrix in another order of dimensions, an empty parameter and a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        self.block(2).weight = self.block(0).weight
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.narrow = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))


def storages(model: nn.Module) -> list[int]:
    """Return the bytes of each storage in which parameters lie."""
    return [
        nbytes for _, nbytes in {(s.data_ptr(), s.nbytes()) for s in map(Tensor.untyped_storage, model.parameters())}
    ]


@STAGES
def test_inside_gathered_each_parameter_has_a_storage_of_its_own_and_ties_have_one(world: str, stage: int) -> None:
    """Also behind a further block, and behind `close` inside the block; versions stay, so that graphs are right."""

    def act(model: Odd, optimizer: ZeroOptimizer) -> None:
        before = {name: parameter._version for name, parameter in model.named_parameters()}
        with optimizer.gathered():
            with optimizer.gathered(model.turned):
                pass
            assert sorted(storages(model)) == sorted(parameter.nbytes for parameter in model.parameters())
            assert before == {name: parameter._version for name, parameter in model.named_parameters()}
            assert_same_model(model, Odd())
            for parameter in model.parameters():
                unpickled = pickle.loads(pickle.dumps(parameter))
                assert unpickled.untyped_storage().nbytes() == parameter.nbytes
        if stage < 3:
            assert len(storages(model)) < 4, "views of buckets, which share_memory_() moves as a whole"
            unpickled = pickle.loads(pickle.dumps(copy.deepcopy(model)))
            assert sum(storages(unpickled)) == sum(p.nbytes for p in Odd().parameters())
        with optimizer.gathered():
            optimizer.close()
        assert sorted(storages(model)) == sorted(parameter.nbytes for parameter in model.parameters())

    def program(transport: Transport) -> nn.Module:
        model = Odd()
        act(model, zero(model, transport, stage))
        return model

    for model in on(world, program):
        assert_same_model(model, Odd())


@STAGES
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_training_goes_on_from_a_block_that_had_a_graph_an_edit_and_memory_that_moved(
    world: str, stage: int, mode: Callable[[], Any]
) -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> Tensor:
        with optimizer.gathered():
            loss = loss_of(model, INPUTS)
            with mode(), optimizer.gathered():
                model(INPUTS)
        torch.autograd.backward(loss)
        optimizer.zero_grad()
        with optimizer.gathered(write=True), torch.no_grad():
            sent = model.block(1).weight.detach()
            sent.share_memory_()  # type: ignore[no-untyped-call]
            model.block(1).weight.mul_(4)
            model.state_dict()["blocks.1.weight"].mul_(0.5)
        train(model, optimizer)
        return sent

    for sent, model in on_ranks(world, act, stage=stage):
        assert_same_bits(sent, Net().block(1).weight.detach() * 2)
        assert_same_model(model, plain(2, doubled=True))


@pytest.mark.parametrize("function", [torch.autograd.grad, torch.autograd.backward])
def test_a_hook_inside_a_backward_for_parameters_never_sees_their_stand_ins(function: Any) -> None:
    def act(model: Net, _: Any) -> list[str]:
        said = list[str]()
        handle = model.first.weight.register_hook(lambda _: said.append(error_of(torch.exp, model.block(1).weight)))
        function(loss_of(model, INPUTS), inputs=[model.first.weight, model.block(1).weight])
        handle.remove()
        return said

    for (said,), _ in on_ranks("travel", act):
        assert "'blocks.1.weight' is released" in said


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("world", rows(["travel"], ["one", "common"]))
def test_script_modules_are_copied_and_saved_inside_gathered_alone(world: str) -> None:
    """The methods that do so in C++ never ask the class of a parameter."""

    def saved(model: Any) -> Any:
        stream = io.BytesIO()
        torch.jit.save(model, stream)
        stream.seek(0)
        return torch.jit.load(stream)

    def act(model: Any, optimizer: Any) -> list[nn.Module]:
        copying: list[Callable[[Any], Any]] = [saved, copy.deepcopy, lambda model: model.save_to_buffer()]
        for copied in copying:
            with pytest.raises(RuntimeError, match=r"'first\.weight' is released") as caught:
                copied(model)
            assert "gathered()" in str(caught.value)
        with optimizer.gathered():
            return [saved(model), copy.deepcopy(model)]

    made: list[Any] = [torch.jit.script(Net()) for _ in range(size_of(world))]
    expected: Any = torch.jit.script(Net())
    before = torch._C._jit_set_profiling_executor(False)  # else a later run may have other bits, on some CPUs
    try:
        train(expected, torch.optim.SGD(expected.parameters(), lr=0.5))
        for copies, model in on_ranks(world, act, made.pop):
            for each in copies:
                assert_same_model(each, Net())
            assert_same_model(model, expected)
            assert_same_model(saved(model), expected)
    finally:
        torch._C._jit_set_profiling_executor(before)
