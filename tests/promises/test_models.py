"""A model that was changed, cast, wrapped or copied under an optimizer is an error that says what to do instead."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer

from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.plain import assert_same_bits, assert_same_model
from ..support.pool import GlooPool
from ..support.rows import rows
from .layers import assign, backward, build, narrow, on_ranks, plain, replace, train, widen, zero

pytestmark = pytest.mark.law("errors")

# -- models that cannot be trained -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", rows([3], [0, 1, 2]))
def test_tensors_made_in_inference_mode_are_refused_and_a_clone_is_the_remedy(stage: int) -> None:
    def made(model: nn.Sequential, name: str) -> nn.Sequential:
        with torch.inference_mode():
            if name == "1.bias":
                model[1].bias = nn.Parameter(torch.ones(4))
            else:
                model.register_buffer(name, torch.ones(3))
        return model

    def program(transport: Transport) -> None:
        for name in ("1.bias", "seen"):
            model = build() if transport.rank else made(build(), name)
            said = error_of(zero, model, transport, stage)
            assert f"{name!r} was made under torch.inference_mode()" in said
        model = made(made(build(), "1.bias"), "seen")
        model[1].bias, model.seen = nn.Parameter(model[1].bias.detach().clone()), model.seen.clone()
        train(model, zero(model, transport, stage))

    on_threads(2, program, timeout=BOUND)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_script_modules_cannot_do_is_refused_by_name() -> None:
    model = build()
    model[1] = cast(nn.Module, torch.jit.script(nn.Sequential(model[1])))
    fp32 = MixedPrecision(torch.float32)
    said = error_of(zero, model, solo(), 0, mixed_precision={"*": MixedPrecision(torch.bfloat16), "1.0": fp32})
    assert "'1.0' has another precision than the ScriptModule around it" in said
    with torch.device("meta"):
        scripted = cast(nn.Module, torch.jit.script(nn.Linear(3, 3)))
    values = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
    assert "a ScriptModule's never can" in error_of(zero, scripted, solo(), 0, init_state_dict=values)
    plainly = build()
    optimizer = zero(plainly, solo(), 3)
    assert "script it before the optimizer is built, or after its close()" in error_of(torch.jit.script, plainly)
    optimizer.close()
    assert isinstance(torch.jit.script(plainly), torch.jit.ScriptModule)


# -- parameters that are no longer those of the optimizer --------------------------------------------------------------


DTYPES = {widen: "torch.float64", narrow: "torch.bfloat16"}
CAST = "is now {} on cpu, but was {} on cpu when the optimizer was built: move and cast the model"


def delete(model: nn.Sequential) -> None:
    model[1].bias = None


def restore(model: nn.Module) -> None:
    """Undo what mixed precision did."""
    model.float()


CHANGES: dict[Callable[[Any], None], str] = {
    replace: "the module's '1.weight' was replaced",
    assign: "the memory of '1.weight' was replaced",
    delete: "the module's '1.bias' was replaced",
    **{cast: CAST.format(dtype, "torch.float32") for cast, dtype in DTYPES.items()},
    restore: CAST.format("torch.float32", "torch.bfloat16"),
}


@pytest.mark.parametrize(
    ("stage", "change", "then"),
    rows(
        [
            (0, replace, "step"),
            (0, narrow, "clip"),
            (2, assign, "step"),
            (2, widen, "backward"),
            (0, restore, "backward"),
        ],
        [
            (1, widen, "step"),
            (1, delete, "clip"),
            (2, restore, "step"),
            (3, replace, "step"),
        ],
    ),
)
def test_a_parameter_that_one_rank_replaced_moved_or_cast_is_named_on_every_rank(
    stage: int, change: Callable[[Any], None], then: str
) -> None:
    def program(transport: Transport) -> tuple[str, str]:
        model = build()
        precision = MixedPrecision(torch.bfloat16) if change is restore else None
        optimizer = zero(model, transport, stage, mixed_precision=precision)
        train(model, optimizer)
        if transport.rank:
            change(model)
        calls: dict[str, Callable[[], object]] = {
            "backward": lambda: backward(model),
            "step": optimizer.step,
            "clip": lambda: optimizer.clip_grad_norm_(1.0),
        }
        return error_of(calls[then]), error_of(optimizer.step)

    (first, of_0), (second, of_1) = on_threads(2, program, timeout=BOUND)
    for message in (second, of_0, of_1, *([] if then == "backward" else [first])):
        assert CHANGES[change] in message
    assert all("rank 1: " in message for message in (of_0, of_1))


def test_what_was_replaced_is_named_also_after_further_parameters_came() -> None:
    model, further = build(), nn.Parameter(torch.ones(3))
    optimizer = zero(model.parameters(), solo(), 2)
    assign(model)
    optimizer.add_param_group({"params": [further]})
    assert "the memory of 'parameter 2' was replaced" in error_of(optimizer.step)


@pytest.mark.parametrize("stage", [0, 1, 2])
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


@pytest.mark.parametrize(("cast", "world_size"), [(widen, 1), (narrow, 2)])
def test_at_stage_3_a_cast_is_refused_or_undone(cast: Callable[[nn.Module], None], world_size: int) -> None:
    def program(model: Any, optimizer: ZeroOptimizer) -> tuple[str, str, nn.Module]:
        refused = error_of(cast, model)
        with optimizer.gathered():
            cast(model)
        undone = error_of(optimizer.step)
        optimizer.zero_grad()
        train(model, optimizer)
        optimizer.close()
        return refused, undone, model

    undoing = f"was cast to {DTYPES[cast]} while its unit was gathered, which was undone: cast the model before"
    for refused, undone, model in on_ranks(program, 3, world_size):
        assert "'0.weight' is released" in refused
        assert refused.endswith("move and cast the model before the optimizer is built, or after its close()")
        assert undoing in undone
        assert_same_model(model, plain())


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


# -- whole models and states -------------------------------------------------------------------------------------------

SAVE = (
    "to save, all ranks call optimizer.full_state_dict(to=0), which returns the whole one on rank 0, or "
    "zero.save(path, optimizer), or all enter 'with optimizer.gathered():', where model.state_dict() is whole"
)
LOAD = "load inside 'with optimizer.gathered(write=True):', which all ranks enter, or before the optimizer is built"
WHOLE: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "model.state_dict()": (lambda model: torch.save(model.state_dict(), io.BytesIO()), SAVE),
    "torch.save()": (lambda model: torch.save(model, io.BytesIO()), SAVE),
    "pickle": (pickle.dumps, SAVE),
    "copy.deepcopy()": (copy.deepcopy, "copy inside 'with optimizer.gathered():', which all ranks enter"),
    "model.load_state_dict()": (lambda model: model.load_state_dict(build().state_dict()), LOAD),
}


@pytest.mark.parametrize("call", WHOLE)
def test_what_needs_a_whole_model_at_stage_3_names_the_block_that_gathers_it(call: str) -> None:
    use, remedy = WHOLE[call]
    model = build()
    optimizer = zero(model, solo())
    message = error_of(use, model)
    assert f"{call}: {remedy}. '0.weight' is released: at stage 3 a parameter has values only inside" in message
    assert message.startswith(f"RuntimeError: {call}: ") or call == "model.load_state_dict()"
    with optimizer.gathered(write=True):
        use(model)


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


def test_a_state_dict_of_another_model_changes_nothing() -> None:
    def trained(model: nn.Module, cls: type[torch.optim.Optimizer] = torch.optim.Adam) -> dict[str, Any]:
        optimizer = cls(model.named_parameters(), lr=0.5)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer.state_dict()

    renamed = nn.Module()
    renamed.weight, renamed.offset = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3))
    lacking = trained(nn.Linear(3, 3))
    del lacking["param_groups"][0]["betas"]
    wrong = {
        "has shape (4, 3) in the state dict, but the parameter has (3, 3)": trained(nn.Linear(3, 4)),
        "the state dict has 1 parameters, this optimizer 2": trained(nn.Linear(3, 3, bias=False)),
        "the state dict has 'offset', this optimizer 'bias'": trained(renamed),
        "the state dict has no 'amsgrad'": trained(nn.Linear(3, 3), torch.optim.SGD),
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
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for index, key in itertools.product(before["state"], before["state"][0]):
            assert torch.equal(before["state"][index][key], after["state"][index][key])
