"""A model that was changed or taken over under an optimizer is named on every rank, and close() says what is lost."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer

from ..support.errors import assert_in_order, error_of, is_plain, warned
from ..support.limits import BOUND
from ..support.models import build as build_odd
from ..support.models import odd_batches, odd_loss
from ..support.plain import assert_same_bits, assert_same_model, assert_same_value
from ..support.pool import GlooPool
from ..support.rows import rows
from .layers import assign, backward, build, narrow, on_ranks, plain, replace, train, widen, zero

pytestmark = pytest.mark.law("errors")


def tie(model: nn.Sequential) -> None:
    model[2].weight = model[0].weight


def delete(model: nn.Sequential) -> None:
    model[1].bias = None


def restore(model: nn.Module) -> None:
    """Undo what mixed precision did."""
    model.float()


LOST = "; lost: the values that this optimizer gave "
CAST = "is now {} on cpu, but was {} on cpu when the optimizer was built: move and cast the model"
BEFORE = "move and cast the model before that"
CHANGES: dict[Callable[[Any], None], tuple[str, str]] = {  # the problem, and the end of the warning of close()
    tie: ("the module's '2.weight' was replaced", f"{LOST}'2.weight'"),
    replace: ("the module's '1.weight' was replaced", f"{LOST}'1.weight'"),
    delete: ("the module's '1.bias' was replaced", f"{LOST}'1.bias'"),
    assign: ("the memory of '1.weight' was replaced", f"{LOST}'1.weight'"),
    widen: (CAST.format("torch.float64", "torch.float32"), BEFORE),
    narrow: (CAST.format("torch.bfloat16", "torch.float32"), BEFORE),
    restore: (CAST.format("torch.float32", "torch.bfloat16"), BEFORE),
}
CALLS: dict[str, Callable[[Any, ZeroOptimizer], object]] = {
    "backward": lambda model, optimizer: backward(model),
    "step": lambda model, optimizer: optimizer.step(),
    "clip": lambda model, optimizer: optimizer.clip_grad_norm_(1.0),
}
BOTH = (0, 1)
FIRST = [(0, assign, BOTH, "step"), (1, widen, BOTH, "backward"), (2, delete, (1,), "clip"), (3, tie, BOTH, "step")]
FIRST += [(3, replace, (1,), "step"), (0, restore, BOTH, "backward"), (1, replace, (), "step")]
MORE = [(1, narrow, BOTH, "step"), (2, tie, BOTH, "clip"), (0, replace, (1,), "step"), (2, assign, (1,), "step")]
MORE += [(2, widen, (1,), "backward"), (0, narrow, (1,), "clip"), (2, restore, (1,), "step"), (3, replace, (), "step")]


@pytest.mark.parametrize(("stage", "change", "ranks", "call"), rows(FIRST, MORE))
def test_a_parameter_that_was_replaced_or_cast_is_named_on_every_rank_and_close_says_what_is_lost(
    stage: int, change: Callable[[nn.Module], None], ranks: tuple[int, ...], call: str
) -> None:
    problem, loss = CHANGES[change]
    precision = MixedPrecision(torch.bfloat16) if change is restore else None

    def program(transport: Transport) -> tuple[nn.Module, nn.Module | None]:
        model = build()
        first = zero(model, transport, stage, mixed_precision=precision)
        train(model, first)
        if transport.rank in ranks:
            change(model)
        alone = call == "backward" and transport.rank not in ranks  # no other rank hears of it in a backward
        assert not ranks or alone or problem in error_of(CALLS[call], model, first)
        assert not ranks or "rank 1: " in error_of(first.step) or ranks == BOTH
        first.close()
        assert is_plain(model)
        closed = copy.deepcopy(model)
        if ranks == (1,) and change not in (replace, assign):
            return closed, None  # its model is not that of rank 0
        second = zero(model, transport, stage)
        train(model, second)
        second.close()
        return closed, model

    with warned() as messages:
        found = on_threads(2, program, timeout=BOUND)
    for rank, (closed, _) in enumerate(found if precision is None else []):
        expected = plain()
        if rank in ranks:
            change(expected)
        assert_same_model(closed, expected)
    trained, _ = found[0]
    train(trained, torch.optim.SGD(trained.parameters(), lr=0.5))
    for _, model in found:
        if model is not None:
            assert_same_model(model, trained)
    assert len(messages) == 2 * bool(ranks)
    for message in messages:
        assert message.startswith(f"close(): rank {ranks[0]}: ")
        assert problem in message
        assert message.endswith(loss) or ranks != BOTH


def calls_of(optimizer: ZeroOptimizer, parameter: Tensor) -> dict[str, Callable[[], Any]]:
    """Return every public call by its name."""
    given: dict[str, tuple[Any, ...]] = dict.fromkeys(("full_grad", "full_master"), (parameter,))
    given |= {"clip_grad_norm_": (1.0,), "set_full_grad": (parameter, None), "sum_over_ranks": (1,), "exchange": (b"",)}
    given |= {"load_full_state_dict": ({},), "load_state_dict": ({"state": {}, "param_groups": []},)}
    given["add_param_group"] = ({"params": [nn.Parameter(torch.ones(2))]},)
    blocks = {name: (lambda name=name: getattr(optimizer, name)().__enter__()) for name in ("gathered", "join")}
    calls = {name: (lambda name=name: getattr(optimizer, name)(*given.get(name, ()))) for name in PUBLIC}
    return {**calls, **blocks, "divisor": lambda: setattr(optimizer, "divisor", 2.0)}


FACTS = {"rank", "world_size", "traffic", "close", "state", "train", "eval"}  # the last two: not of every class
OWN = [base for base in ZeroOptimizer.__mro__ if base not in torch.optim.Optimizer.__mro__]
PUBLIC = {name for base in OWN for name in vars(base) if not name.startswith("_")} - FACTS


@pytest.mark.parametrize(
    ("older", "newer", "which"),
    rows([(0, 2, "all"), (1, 3, "others, of the same module")], [(2, 0, "some"), (1, 1, "all")]),
)
def test_every_call_of_the_older_names_the_takeover_and_its_close_leaves_the_newer_alone(
    older: int, newer: int, which: str
) -> None:
    def parts(model: nn.Module) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        named = list(model.named_parameters())
        return {"all": (named, named), "some": (named, named[2:])}.get(which, (named[:4], named[4:]))

    def program(transport: Transport) -> nn.Module:
        model = build()
        old, new = parts(model)
        first = zero(old, transport, older, module=model)
        backward(model)
        model.zero_grad()
        optimizer = zero(new, transport, newer, module=model)
        for name, call in calls_of(first, old[0][1]).items():
            said = "RuntimeError: a newer ZeroOptimizer took over parameters of this one"
            assert error_of(call).startswith(said), name
        train(model, optimizer)
        first.close()
        train(model, optimizer)
        optimizer.close()
        assert is_plain(model)
        return model

    expected = build()
    optimizer = torch.optim.SGD([parameter for _, parameter in parts(expected)[1]], lr=0.5)
    for _ in range(2):
        train(expected, optimizer)
    with warned() as messages:
        for model in on_threads(2, program, timeout=BOUND):
            assert_same_model(model, expected)
    assert messages == ["close(): a newer ZeroOptimizer took over parameters of this one, and keeps them"] * 2


class Training:
    """Holds an optimizer whose ``units`` is a function of this object."""

    def __init__(self, stage: int) -> None:
        self.kind = nn.Linear
        self.model = build_odd()
        units = (lambda part: isinstance(part, self.kind)) if stage == 3 else None
        self.optimizer = ZeroOptimizer(self.model, stage=stage, units=units)

    def step(self) -> weakref.ref[Tensor]:
        """Take a step; return its activations."""
        hidden: Tensor = self.model.first(self.model.embed(torch.tensor([1, 2])))
        hidden.square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return weakref.ref(hidden)


@pytest.mark.law("weak hooks")
@pytest.mark.law("buffer lifetimes")
@pytest.mark.parametrize("stage", rows([3], [0, 1, 2]))
def test_nothing_waits_for_the_garbage_collector_and_a_deep_copy_is_free(stage: int) -> None:
    gc.collect()
    gc.disable()
    try:
        training = Training(stage)
        activations = [training.step() for _ in range(3)]
        assert [reference() for reference in activations] == [None] * 3
        with training.optimizer.gathered():
            copied = copy.deepcopy(training.model)
        odd_loss(copied, odd_batches(1)[0]).backward()
        assert type(copied.last.weight.grad) is Tensor
        assert training.model.last.weight.grad is None
        model, optimizer = training.model, weakref.ref(training.optimizer)
        parts = [weakref.ref(training), optimizer]
        if stage == 3:
            training.optimizer.close()
        del training
        assert [reference() for reference in parts] == [None, None]
        odd_loss(model, odd_batches(1)[0]).backward()
        assert type(model.last.weight.grad) is Tensor
    finally:
        gc.enable()


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
        assert_in_order("does not hold the gradient of '0.weight' … cast or move the model before the", message)


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
SHARDED = "this rank does not hold the gradient of '2.bias' … Do not wrap the model in DistributedDataParallel"
RELEASED = "'0.weight' is released … do not wrap the model in DistributedDataParallel"


def wrapped_models(group: dist.ProcessGroup, rank: int) -> dict[tuple[str, int], str]:
    return {(name, stage): error_of(wrap, build(), group, stage) for name, wrap in WRAPS.items() for stage in range(4)}


def test_a_model_inside_ddp_is_named_at_construction_or_at_the_first_backward(gloo: GlooPool) -> None:
    for found in gloo.run(wrapped_models, ranks=(0, 1)):
        for (wrap, stage), message in found.items():
            if wrap in ("the module", "inner"):
                assert message.startswith(f"ValueError: '{wrap}' is a DistributedDataParallel, which"), message
            else:
                assert_in_order(RELEASED if (wrap, stage) == ("later", 3) else SHARDED, message)
                assert "full_grad" not in message


@pytest.mark.parametrize(("stage", "sharding_factor"), rows([(1, 2), (3, 1)], [(0, None), (2, None)]))
def test_states_are_this_ranks_piece_or_name_the_rank_that_has_them(stage: int, sharding_factor: int | None) -> None:
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
