"""Memory of units that do not travel: what reads past a released class, and what writes there.

Each program runs on two ranks with common memory and on one.
"""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads

from ..support.plain import assert_same_bits, assert_same_model
from ..support.sockets import on_sockets
from .test_resident_graphs import BY_RANKS, LIMIT, RELEASED, Chain, Plain, Ranks, X, loss_of, plain, zero
from .test_stage3_errors import error_of

TOLD = "'blocks.0.weight' was edited while its unit was gathered"


def build() -> Chain:
    return Chain(Plain(), Plain())


@BY_RANKS
def test_a_view_shows_the_new_values_of_all_ranks_as_soon_as_step_returns(ranks: Ranks, world_size: int) -> None:
    """Rank 1 writes late."""

    def program(transport: Transport) -> Any:
        model = build()
        optimizer = zero(model, transport)
        with optimizer.gathered():
            view = model.weight(0).detach().numpy()
        loss_of(model).backward()
        step = optimizer._user_optimizers.step

        def late(*arguments: Any) -> Any:
            time.sleep(0.3 * transport.rank)
            return step(*arguments)

        optimizer._user_optimizers.step = late  # type: ignore[method-assign]
        optimizer.step()
        return view.copy()

    for shown in ranks(world_size, program, timeout=LIMIT):
        assert_same_bits(torch.from_numpy(shown), next(iter(plain(build, world_size, 1).parameters())))


def test_nobody_writes_while_another_rank_reads() -> None:
    """Rank 1 is slow in its forward, while rank 0 is inside a block that writes, where nothing is gathered."""

    def program(transport: Transport) -> tuple[Tensor, nn.Module]:
        model = build()
        optimizer = zero(model, transport)
        if transport.rank == 1:
            model.blocks[0].register_forward_hook(lambda *_: time.sleep(0.3))
        with torch.no_grad():
            output = model(X)
        with optimizer.gathered(model.weight(1), write=True):
            model.weight(1).data.mul_(2)
        optimizer.close()
        return output, model

    edited = build()
    edited.weight(1).data.mul_(2)
    for output, model in on_sockets(2, program, timeout=LIMIT):
        assert_same_bits(output, build()(X))
        assert_same_model(model, edited)


def test_an_interrupt_of_the_wait_for_the_others_is_made_up_for() -> None:
    """The wait is interrupted on rank 0 while rank 1 writes; the next forward waits instead."""

    def program(transport: Transport) -> tuple[str, Tensor, nn.Module]:
        model = build()
        optimizer = zero(model, transport)
        loss_of(model).backward()
        step, resident = optimizer._user_optimizers.step, optimizer._storage.manager.resident  # type: ignore[attr-defined]
        wait = resident.wait_for_writes

        def late(*arguments: Any) -> Any:
            time.sleep(0.3 * transport.rank)
            return step(*arguments)

        def interrupted() -> None:
            if transport.rank == 0 and resident._writing is not None:
                resident.wait_for_writes = wait
                raise KeyboardInterrupt
            wait()

        optimizer._user_optimizers.step, resident.wait_for_writes = late, interrupted  # type: ignore[method-assign]
        try:
            optimizer.step()
            said = "nothing"
        except KeyboardInterrupt:
            said = "interrupted"
        optimizer._user_optimizers.step = step  # type: ignore[method-assign]
        with torch.no_grad():
            output = model(X)
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        optimizer.close()
        return said, output, model

    expected = plain(build, 2, 1)
    results = on_sockets(2, program, timeout=LIMIT)
    assert [said for said, _, _ in results] == ["interrupted", "nothing"]
    for _, output, model in results:
        assert_same_bits(output, expected(X))
        assert_same_model(model, plain(build, 2, 2))


@BY_RANKS
def test_a_write_into_an_array_is_seen_by_the_forward_and_told_by_the_step(ranks: Ranks, world_size: int) -> None:
    """With one rank it is an edit like any other."""

    def program(transport: Transport) -> tuple[list[bool], list[str]]:
        model = build()
        optimizer = zero(model, transport)
        with optimizer.gathered():
            array = model.weight(0).detach().numpy()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        array[0, 0] = 77
        large, said = [], []
        for _ in range(2):
            loss = loss_of(model)
            large.append(bool(loss > 1000))
            loss.backward()
            said.append(error_of(optimizer.step))
            optimizer.zero_grad()
        return large, said

    for large, said in ranks(world_size, program, timeout=LIMIT):
        if world_size == 1:
            assert large[0]
            assert said == ["nothing", "nothing"]
        else:
            assert large == [True, False]
            assert TOLD in said[0]
            assert said[1] == "nothing"


def edit_in_a_backward(model: Chain) -> None:
    """A hook of the output edits its unit's weight, which the backward of this very unit has installed."""

    def hook(module: nn.Module, _: Any) -> None:
        model.weight(0).data.mul_(2)

    with model.blocks[0].register_full_backward_pre_hook(hook):
        loss_of(model, X.clone().requires_grad_()).backward()


@BY_RANKS
def test_an_edit_in_a_backward_is_told_or_kept(ranks: Ranks, world_size: int) -> None:
    def program(transport: Transport) -> tuple[str, nn.Module]:
        model = build()
        optimizer = zero(model, transport)
        edit_in_a_backward(model)
        said = error_of(optimizer.step)
        optimizer.zero_grad()
        if world_size > 1:
            loss_of(model).backward()
            optimizer.step()
        optimizer.close()
        return said, model

    edited = build()
    optimizer = torch.optim.SGD(edited.parameters(), lr=0.1)
    edit_in_a_backward(edited)
    optimizer.step()
    for said, model in ranks(world_size, program, timeout=LIMIT):
        assert said == "nothing" if world_size == 1 else TOLD in said
        assert_same_model(model, edited if world_size == 1 else plain(build, 2, 1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(4, 4, max_norm=0.1), Plain()])
        nn.init.constant_(self.blocks[0].weight, 0.5)  # type: ignore[arg-type]

    def forward(self, _: Tensor) -> Any:
        return self.blocks[1](self.blocks[0](torch.tensor([0, 1, 2])))


@BY_RANKS
def test_an_embedding_that_renormalises_is_told_or_kept(ranks: Ranks, world_size: int) -> None:
    def program(transport: Transport) -> tuple[str, nn.Module]:
        model = Words()
        optimizer = zero(model, transport)
        loss_of(model).backward()
        said = error_of(optimizer.step)
        optimizer.close()
        return said, model

    for said, model in ranks(world_size, program, timeout=LIMIT):
        assert said == "nothing" if world_size == 1 else TOLD in said
        assert_same_model(model, plain(Words, 1, 1) if world_size == 1 else Words())


@BY_RANKS
def test_copies_made_inside_gathered_are_plain_and_do_not_follow(ranks: Ranks, world_size: int) -> None:
    def program(transport: Transport) -> list[str]:
        model = build()
        optimizer = zero(model, transport)
        with optimizer.gathered():
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        said = [error_of(copy.deepcopy, model), error_of(pickle.dumps, model)]
        loss_of(model).backward()
        optimizer.step()
        for made in copies:
            assert_same_model(made, build())
            loss_of(made).backward()
        return said

    for messages in ranks(world_size, program, timeout=LIMIT):
        for message in messages:
            assert RELEASED in message


def test_common_memory_that_runs_out_leaves_the_units_of_before_resident() -> None:
    """A unit may then have buffers of both kinds; each goes its way, and training has the same bits."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            for number, parameter in enumerate(self.parameters()):
                nn.init.constant_(parameter, 0.1 + 0.1 * number)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden: Tensor = torch.tanh(self.first(inputs))
            return self.second(hidden)

    def pairs() -> nn.Module:
        return nn.Sequential(Pair(), Pair())

    def listed(model: nn.Module) -> list[list[nn.Parameter]]:
        firsts = [parameter for name, parameter in model.named_parameters() if "first" in name]
        return [firsts, [parameter for name, parameter in model.named_parameters() if "second" in name]]

    def program(transport: Transport) -> tuple[list[tuple[int, int]], str, nn.Module]:
        from zero import ZeroOptimizer

        model = pairs()
        begin, further = listed(model)
        optimizer = ZeroOptimizer(begin, torch.optim.SGD, stage=3, process_group=transport, module=model, lr=0.1)
        storage: Any = optimizer._storage
        storage._shard_group.common = lambda sizes: None
        optimizer.add_param_group({"params": further})
        kinds = [(len(unit.resident), len(unit.gathered.buffers)) for unit in storage.manager.units[1:]]
        for _ in range(2):
            model(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = model(X).square().sum()
        model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        said = error_of(kept.backward)
        optimizer.zero_grad()
        optimizer.close()
        return kinds, said, model

    expected = pairs()
    plain_optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        expected(X).square().sum().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for kinds, said, model in on_sockets(2, program, timeout=LIMIT):
        assert kinds == [(1, 1), (1, 1)]
        assert "modified by an inplace operation" in said or "was changed by a step or an edit" in said
        assert_same_model(model, expected)


@pytest.mark.parametrize("write", [False, True])
def test_a_released_parameter_is_the_same_tensor_at_one_address_for_good(write: bool) -> None:
    def program(transport: Transport) -> None:
        model = build()
        optimizer = zero(model, transport)
        with optimizer.gathered():
            before = [parameter.data_ptr() for parameter in model.parameters()]
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.gathered(write=write):
            assert [parameter.data_ptr() for parameter in model.parameters()] == before

    on_sockets(2, program, timeout=LIMIT)
    on_threads(1, program, timeout=LIMIT)
