"""Inside `gathered()` each parameter has a storage of its own; nothing else of a training can tell."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport
from zero import ZeroOptimizer

from ..support.errors import error_of
from ..support.plain import assert_same_bits, assert_same_model
from .stage3 import INPUTS, Net, loss_of, on_ranks, plain, train, zero
from .worlds import EVERY_WORLD, on

STAGES = pytest.mark.parametrize(("world", "stage"), [("one", 3), ("travel", 3), ("common", 3), ("travel", 2)])


class Odd(Net):
    """With a tie, a matrix in another order of dimensions, an empty parameter and a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        self.block(2).weight = self.block(0).weight
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.narrow = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))


def storages(model: nn.Module) -> dict[tuple[int, int], set[int]]:
    """Return the parameters by the place of their storage."""
    found: dict[tuple[int, int], set[int]] = {}
    for parameter in model.state_dict().values():
        storage = parameter.untyped_storage()
        found.setdefault((storage.data_ptr(), storage.nbytes()), set()).add(parameter.numel() * parameter.itemsize)
    return found


@STAGES
def test_each_parameter_has_a_storage_of_its_own_and_ties_have_one(world: str, stage: int) -> None:
    def act(model: Odd, optimizer: ZeroOptimizer) -> None:
        before = {name: parameter._version for name, parameter in model.named_parameters()}
        with optimizer.gathered():
            with optimizer.gathered(model.turned):
                pass
            found = storages(model)
            assert len(found) == len(list(model.parameters()))
            assert all({nbytes} == sizes for (_, nbytes), sizes in found.items())
            assert before == {name: parameter._version for name, parameter in model.named_parameters()}
            assert_same_model(model, Odd())
            file = io.BytesIO()
            torch.save(model.first.weight, file)
            assert len(file.getvalue()) < 2000
            for parameter in model.parameters():
                unpickled = pickle.loads(pickle.dumps(parameter))
                assert unpickled.untyped_storage().nbytes() == parameter.nbytes
        if stage < 3:
            assert len(storages(model)) < 4, "views of buckets, which share_memory_() moves as a whole"
            unpickled = pickle.loads(pickle.dumps(copy.deepcopy(model)))
            assert sum(nbytes for _, nbytes in storages(unpickled)) == sum(p.nbytes for p in Odd().parameters())

    for _, model in on_ranks(world, act, Odd, stage=stage):
        assert_same_bits(model.turned, Odd().turned)


@STAGES
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_training_goes_on_from_the_block_that_had_a_graph_and_an_edit(
    world: str, stage: int, mode: Callable[[], Any]
) -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> None:
        with optimizer.gathered():
            loss = loss_of(model, INPUTS)
            with mode(), optimizer.gathered():
                model(INPUTS)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.gathered(write=True), torch.no_grad():
            model.block(1).weight.mul_(2)
            model.state_dict()["blocks.1.weight"].mul_(0.5)

    for _, model in on_ranks(world, act, stage=stage):
        assert_same_model(model, plain(2))


@STAGES
def test_what_is_moved_inside_the_block_is_a_copy_and_edits_of_it_count(world: str, stage: int) -> None:
    def act(model: Net, optimizer: ZeroOptimizer) -> Tensor:
        with optimizer.gathered(write=True), torch.no_grad():
            sent = model.block(1).weight.detach()
            sent.share_memory_()  # type: ignore[no-untyped-call]
            model.block(1).weight.mul_(2)
        train(model, optimizer)
        return sent

    for sent, model in on_ranks(world, act, stage=stage):
        assert_same_bits(sent, Net().block(1).weight.detach() * 2)
        assert_same_model(model, plain(2, doubled=True))


@EVERY_WORLD
def test_a_kept_view_never_shows_another_parameters_values(world: str) -> None:
    """Where units travel, its memory is filled with NaN once the parameter has changed."""

    def act(model: Net, optimizer: ZeroOptimizer) -> tuple[Tensor, Tensor]:
        with optimizer.gathered():
            kept = model.block(1).weight.detach().t()
            assert pickle.loads(pickle.dumps(kept)).untyped_storage().nbytes() == kept.nbytes
        train(model, optimizer)
        with optimizer.gathered():
            return kept.t().clone(), model.block(1).weight.detach().clone()

    for (kept, now), _ in on_ranks(world, act):
        assert_same_bits(kept, now)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_replacement_inside_the_block_is_told(stage: int) -> None:
    def program(transport: Transport) -> str:
        model = Net()
        optimizer = zero(model, transport, stage)
        with optimizer.gathered():
            model.block(1).weight.data = torch.zeros(3, 3)
        return error_of(optimizer.step)

    for message in on("travel", program):
        assert "'blocks.1.weight' was" in message


@STAGES
def test_close_inside_the_block_leaves_plain_parameters(world: str, stage: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model = Odd()
        optimizer = zero(model, transport, stage)
        with optimizer.gathered():
            optimizer.close()
        return model

    for model in on(world, program):
        assert_same_model(model, Odd())
        assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in model.parameters())
