"""A model that was wrapped, moved or scripted is trained, or is an error that says what to do; so are states."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer

from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.plain import assert_same_bits, assert_same_model, assert_same_value
from ..support.pool import GlooPool
from ..support.rows import rows
from .layers import assign, backward, build, narrow, on_ranks, plain, train, widen, zero

pytestmark = pytest.mark.law("errors")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_script_module_is_given_no_memory_and_is_made_after_close() -> None:
    with torch.device("meta"):
        scripted = cast(nn.Module, torch.jit.script(nn.Linear(3, 3)))
    values = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
    assert "a ScriptModule's never can" in error_of(zero, scripted, solo(), 0, init_state_dict=values)
    model = build()
    zero(model, solo(), 3).close()
    assert isinstance(torch.jit.script(model), torch.jit.ScriptModule)


def test_what_was_replaced_is_named_also_after_further_parameters_came() -> None:
    model, further = build(), nn.Parameter(torch.ones(3))
    optimizer = zero(model.parameters(), solo(), 2)
    assign(model)
    optimizer.add_param_group({"params": [further]})
    assert "the memory of 'parameter 2' was replaced" in error_of(optimizer.step)


@pytest.mark.parametrize("stage", rows([2], [0, 1]))
def test_memory_that_moves_with_all_its_parameters_is_no_replacement(stage: int) -> None:
    model = build()
    optimizer = zero(model, solo(), stage)
    model.share_memory()
    for _ in range(2):
        train(model, optimizer)
    assert_same_model(model, plain(2))


@pytest.mark.parametrize(("stage", "cast", "sync"), [(2, narrow, True), (1, widen, False)])
def test_a_cast_beside_placeholders_of_gradients_raises_itself(
    stage: int, cast: Callable[[nn.Module], None], sync: bool
) -> None:
    def program(model: Any, optimizer: ZeroOptimizer) -> str:
        with nullcontext() if sync else optimizer.no_sync():
            backward(model)
        return error_of(cast, model)

    for message in on_ranks(program, stage):
        assert "does not hold the gradient of '0.weight'" in message
        assert message.endswith("cast or move the model before the optimizer is built")


# -- DistributedDataParallel -------------------------------------------------------------------------------------------


def around(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


def inner(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return nn.ModuleDict({"inner": around(model, group)})


WRAPS: dict[str, Callable[[nn.Module, dist.ProcessGroup, int], object]] = {
    "the module": lambda model, group, stage: zero(around(model, group), group, stage),
    "inner": lambda model, group, stage: zero(list(model.parameters()), group, stage, module=inner(model, group)),
    "before": lambda model, group, stage: train(around(model, group), zero(model, group, stage)),
    "later": lambda model, group, stage: train(optimizer=zero(model, group, stage), model=around(model, group)),
}


def wrapped_models(group: dist.ProcessGroup, rank: int) -> dict[tuple[str, int], str]:
    stages = (0, 1, 2, 3)
    return {(name, stage): error_of(wrap, build(), group, stage) for name, wrap in WRAPS.items() for stage in stages}


def test_a_model_inside_ddp_is_named_at_construction_or_at_the_first_backward(gloo: GlooPool) -> None:
    for found in gloo.run(wrapped_models, ranks=(0, 1)):
        for (wrap, stage), message in found.items():
            if wrap in ("the module", "inner"):
                assert message.startswith(f"ValueError: '{wrap}' is a DistributedDataParallel, which"), message
            elif (wrap, stage) == ("later", 3):
                assert "'0.weight' is released" in message
                assert "do not wrap the model in DistributedDataParallel" in message
            else:
                assert "this rank does not hold the gradient of '2.bias'" in message
                assert "Do not wrap the model in DistributedDataParallel" in message
                assert "full_grad" not in message


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "sharding_factor"), rows([(1, 2), (3, 1)], [(0, None), (2, None)]))
def test_states_are_this_ranks_piece_or_name_the_rank_that_has_them(stage: int, sharding_factor: int | None) -> None:
    """Flat, in the order of memory; the pieces of the ranks of a replica together are the whole state."""
    arguments: dict[str, Any] = {"stage": stage, "sharding_factor": sharding_factor, "lr": 0.5}

    def program(transport: Transport) -> tuple[dict[str, Any], dict[str, str]]:
        model = build()
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, process_group=transport, **arguments)
        train(model, optimizer)
        held: dict[str, Any] = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
        assert all(error_of(lambda state=state: state["momentum"]).startswith("KeyError") for state in held.values())
        return held, {name: error_of(lambda state=state: state["exp_avg"]) for name, state in held.items() if not state}

    expected = build()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.5)
    train(expected, optimizer)
    ranks = on_threads(4, program, timeout=BOUND)
    replica = 1 if stage == 0 else sharding_factor or 4
    assert any(errors for _, errors in ranks) is (replica > 1)
    for first, (name, parameter) in itertools.product(range(0, 4, replica), expected.named_parameters()):
        of_replica = range(first, first + replica)
        owners = [rank for rank in of_replica if ranks[rank][0][name]]
        parts: list[Tensor] = [ranks[rank][0][name]["exp_avg"].reshape(-1) for rank in owners]
        assert_same_bits(torch.cat(parts), optimizer.state[parameter]["exp_avg"].reshape(-1))
        for rank in {*of_replica} - {*owners}:
            message = ranks[rank][1][name]
            assert f"'exp_avg': this rank holds no part of the states of '{name}', which are on rank " in message
            assert f"on rank {', '.join(map(str, owners))}: optimizer.consolidate_state_dict" in message


def saved(model: nn.Module, cls: type[torch.optim.Optimizer] = torch.optim.Adam) -> dict[str, Any]:
    optimizer = cls(model.named_parameters(), lr=0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer.state_dict()


def test_a_state_dict_of_another_model_changes_nothing() -> None:
    renamed, lacking = nn.Linear(3, 3), saved(nn.Linear(3, 3))
    renamed.offset = renamed._parameters.pop("bias")
    del lacking["param_groups"][0]["betas"]
    wrong = {
        "has shape (4, 3) in the state dict, but the parameter has (3, 3)": saved(nn.Linear(3, 4)),
        "the state dict has 1 parameters, this optimizer 2": saved(nn.Linear(3, 3, bias=False)),
        "the state dict has 'offset', this optimizer 'bias'": saved(renamed),
        "the state dict has no 'amsgrad'": saved(nn.Linear(3, 3), torch.optim.SGD),
        "the state dict has no 'betas': it belongs to another class": lacking,
        "has 0 param groups": {"state": {}, "param_groups": []},
        "a torch.optim state dict is needed": {},
    }
    model = nn.Linear(3, 3)
    optimizer = ZeroOptimizer(model, torch.optim.Adam)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    for words, state_dict in wrong.items():
        message = error_of(optimizer.load_state_dict, state_dict)
        assert message.startswith("ValueError: ")
        assert words in message
        assert_same_value(optimizer.state_dict(), before, words)
