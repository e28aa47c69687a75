"""Habits from other libraries that cannot work here: one error, in this library's words, with place and remedy."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer

from .parameters.stage3 import error_of, zero
from .support.plain import assert_same_bits, assert_same_model
from .support.pool import GlooPool
from .support.shampoo import Shampoo
from .test_close import BATCH, build, train

pytestmark = pytest.mark.contract

ALL = pytest.mark.parametrize("stage", [0, 1, 2, 3])
BELOW = pytest.mark.parametrize("stage", [0, 1, 2])


# -- DistributedDataParallel -------------------------------------------------------------------------------------------


def given(model: nn.Module, group: dist.ProcessGroup, stage: int) -> str:
    return error_of(zero, DistributedDataParallel(model, process_group=group), group, stage)


def given_beside(model: nn.Module, group: dist.ProcessGroup, stage: int) -> str:
    wrapped = nn.ModuleDict({"inner": DistributedDataParallel(model, process_group=group)})
    return error_of(zero, list(model.parameters()), group, stage, module=wrapped)


def what_it_wraps(model: nn.Module, group: dist.ProcessGroup, stage: int) -> str:
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = zero(model, group, stage)
    return error_of(train, wrapped, optimizer)


def later(model: nn.Module, group: dist.ProcessGroup, stage: int) -> str:
    optimizer = zero(model, group, stage)

    def wrap() -> None:
        train(DistributedDataParallel(model, process_group=group), optimizer)

    return error_of(wrap)


def wrapped_models(group: dist.ProcessGroup, rank: int) -> dict[tuple[str, int], str]:
    wraps = (given, given_beside, what_it_wraps, later)
    return {(wrap.__name__, stage): wrap(build(), group, stage) for wrap in wraps for stage in (0, 1, 2, 3)}


def test_a_model_inside_distributed_data_parallel_is_named_at_construction_or_at_the_first_backward(
    gloo: GlooPool,
) -> None:
    for found in gloo.run(wrapped_models, ranks=(0, 1)):
        for (wrap, stage), message in found.items():
            if wrap.startswith("given"):
                name = "the module" if wrap == "given" else "inner"
                assert message.startswith(f"ValueError: '{name}' is a DistributedDataParallel, which"), message
            elif (wrap, stage) == ("later", 3):
                assert "'0.weight' is released" in message
                assert message.endswith(
                    "do not wrap the model in DistributedDataParallel, which would reduce the gradients a second time"
                )
            else:
                assert "this rank does not hold the gradient of '2.bias'" in message
                assert "inside DistributedDataParallel, take that away" in message
                assert "full_grad" not in message


# -- arguments ---------------------------------------------------------------------------------------------------------

MODEL = nn.Linear(3, 3)
WEIGHT, BIAS = MODEL.weight, MODEL.bias
ODD: list[tuple[Any, str]] = [
    ([WEIGHT, BIAS, 42], "params[2] is 42 (int), neither a parameter nor a (name, parameter) pair"),
    ([42, WEIGHT], "params[0] is 42 (int)"),
    ([("weight", WEIGHT), ("bias", 3)], "params[1] is ('bias', 3) (tuple)"),
    ([("weight", WEIGHT, 1)], "params[0] is ('weight', "),
    ([WEIGHT, None], "params[1] is None (NoneType)"),
    ([MODEL], "params[0] is Linear("),
    ({"weight": WEIGHT}, "params[0] is 'weight' (str)"),
    ([WEIGHT, torch.ones(3).numpy()], "params[1] is a ndarray, neither"),
    ([{"params": [WEIGHT]}, {"params": [BIAS, "x"]}], "params[1]['params'][1] is 'x' (str)"),
    ([{"params": [WEIGHT]}, {"params": 7}], "params[1]['params'] is 7 (int), and must be parameters"),
    ([{"params": [WEIGHT]}, BIAS], "params[1] is a Parameter, not a param group with 'params'"),
    ([WEIGHT, {"params": [BIAS]}], "params[0] is a Parameter, not a param group with 'params'"),
    ([{"lr": 0.5}], "params[0] is {'lr': 0.5} (dict), not a param group with 'params'"),
    ([{"params": {WEIGHT}}], "params[0]['params'] must be in an order that all ranks share; a set has none"),
    (None, "params is None (NoneType), and must be parameters, param groups or a module"),
]


@pytest.mark.parametrize(("params", "text"), ODD)
def test_what_is_no_parameter_is_a_type_error_that_says_what_is_where(params: Any, text: str) -> None:
    for stage in (0, 3):
        message = error_of(zero, params, solo(), stage, module=MODEL)
        assert message.startswith(f"TypeError: {text}")


def test_so_it_is_in_a_group_that_is_added() -> None:
    model = build()
    optimizer = zero(model, solo(), 1)
    for params, text in (([nn.Parameter(torch.ones(2)), 42], "[1] is 42 (int)"), (7, " is 7 (int)")):
        message = error_of(optimizer.add_param_group, {"params": params})
        assert message.startswith(f"TypeError: param_group['params']{text}")
    assert len(optimizer.param_groups) == 1


ADAMW = "give the class torch.optim.AdamW, and its arguments here"
CLASSES: list[tuple[Any, str]] = [
    (torch.optim.AdamW([WEIGHT]), f"not an instance of AdamW: {ADAMW}"),
    ("adamw", f"not 'adamw': {ADAMW}"),
    (partial(torch.optim.AdamW, lr=0.1), f"not a partial of AdamW: {ADAMW}"),
    (
        Shampoo([WEIGHT]),
        "not an instance of Shampoo: give the class tests.support.shampoo.Shampoo, and its arguments here",
    ),
    ("adan", "not 'adan': give a class, such as torch.optim.AdamW, and its arguments here"),
    (nn.Linear, "not <class 'torch"),
]


@pytest.mark.parametrize(("given", "text"), CLASSES)
def test_what_is_no_class_of_optimizers_is_an_error_that_says_what_to_give(given: Any, text: str) -> None:
    message = error_of(ZeroOptimizer, build(), given, process_group=solo())
    assert message.startswith(f"TypeError: optimizer_class must be a class of optimizers, {text}")
    group = {"params": build().parameters(), "optimizer_class": given}
    message = error_of(ZeroOptimizer, [group], process_group=solo())
    assert message.startswith(f"TypeError: param group 0: optimizer_class must be a class of optimizers, {text}")


# -- a model that is cast after construction ---------------------------------------------------------------------------

CASTS: dict[str, Callable[[nn.Module], object]] = {
    "torch.float64": lambda model: model.double(),
    "torch.bfloat16": lambda model: model.bfloat16(),
}


@BELOW
@pytest.mark.parametrize("dtype", CASTS)
@pytest.mark.parametrize(
    ("then", "after"),
    [
        *itertools.product(["backward", "step", "clip"], ["construction", "a step"]),
        *itertools.product(["step", "clip"], ["a backward"]),
        ("nothing", "a backward without synchronisation"),
    ],
)
@pytest.mark.by_default(
    "backward-construction-torch.float64-1", "step-a step-torch.bfloat16-0", "clip-a backward-torch.float64-1"
)
def test_a_model_that_was_cast_is_told_in_our_words(stage: int, dtype: str, after: str, then: str) -> None:
    def program(transport: Transport) -> list[str]:
        model = build()
        optimizer = zero(model, transport, stage)
        if after == "a step":
            train(model, optimizer)
        elif after == "a backward":
            model(BATCH).sum().backward()
            if stage > 0:
                return [error_of(CASTS[dtype], model)] * 2
        elif after.startswith("a backward"):
            with optimizer.no_sync():
                model(BATCH).sum().backward()
            return [error_of(CASTS[dtype], model)] * 2
        CASTS[dtype](model)

        def backward() -> None:
            model(BATCH.to(next(model.parameters()).dtype)).sum().backward()

        calls = {"backward": backward, "step": optimizer.step, "clip": lambda: optimizer.clip_grad_norm_(1.0)}
        return [error_of(calls[then]), error_of(optimizer.step)]

    for messages in on_threads(2, program, timeout=5):
        for message in messages:
            if "_to_copy" in message:  # a placeholder raised after the cast of the first parameter
                assert "does not hold the gradient of '0.weight'" in message
                assert message.endswith("cast or move the model before the optimizer is built")
                continue
            assert message.startswith("RuntimeError: rank ")
            assert f"'2.bias' is now {dtype} on cpu, but was torch.float32 on cpu when the optimizer was" in message
            assert message.endswith("move and cast the model before that")


@BELOW
@pytest.mark.parametrize("casts_inputs", [True, False])
def test_a_model_in_mixed_precision_that_was_cast_is_told_in_the_next_forward_or_backward(
    stage: int, casts_inputs: bool
) -> None:
    model = build()
    precision = MixedPrecision(torch.bfloat16, cast_forward_inputs=casts_inputs)
    optimizer = zero(model, solo(), stage, mixed_precision=precision)
    model.float()
    for call in (lambda: model(BATCH).sum().backward(), optimizer.step):
        assert "is now torch.float32 on cpu, but was torch.bfloat16 on cpu when the optimizer was" in error_of(call)


@BELOW
def test_a_model_that_one_rank_cast_is_told_on_every_rank_and_waits_for_nothing(stage: int) -> None:
    def program(transport: Transport) -> tuple[str, str]:
        model = build()
        optimizer = zero(model, transport, stage)
        if transport.rank == 1:
            model.double()
        dtype = next(model.parameters()).dtype
        return error_of(lambda: model(BATCH.to(dtype)).sum().backward()), error_of(optimizer.step)

    first, second = on_threads(2, program, timeout=5)
    assert first[0] == "nothing"
    assert "rank 1: '2.bias' is now torch.float64" in second[0]
    assert all("rank 1: '2.bias' is now torch.float64" in messages[1] for messages in (first, second))


@pytest.mark.parametrize("dtype", CASTS)
def test_at_stage_3_a_cast_is_refused_or_undone_and_told(dtype: str) -> None:
    def program(transport: Transport) -> tuple[str, str, nn.Module]:
        model = build()
        optimizer = zero(model, transport)
        refused = error_of(CASTS[dtype], model)
        with optimizer.gathered():
            CASTS[dtype](model)
        undone = error_of(optimizer.step)
        optimizer.zero_grad()
        train(model, optimizer)
        optimizer.close()
        return refused, undone, model

    plain = build()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    for world_size in (1, 2):
        for refused, undone, model in on_threads(world_size, program, timeout=5):
            assert "'0.weight' is released" in refused
            assert refused.endswith("move and cast the model before the optimizer is built, or after its close()")
            assert f"was cast to {dtype} while its unit was gathered, which was undone: cast the model before" in undone
            assert_same_model(model, plain)


@ALL
def test_gradients_in_a_dtype_of_their_own_are_refused_and_named(stage: int) -> None:
    model = build().bfloat16()
    for parameter in model.parameters():
        if not hasattr(parameter, "grad_dtype"):
            pytest.skip("torch before 2.10")
        parameter.grad_dtype = torch.float32
    message = error_of(train, model, zero(model, solo(), stage))
    assert message.startswith("RuntimeError: rank 0: the gradient of '2.bias': ")
    assert "grad_dtype" in message


# -- whole models at stage 3 -------------------------------------------------------------------------------------------

SAVE = (
    "to save, all ranks call zero.save(path, optimizer), or all enter 'with optimizer.gathered():', where "
    "model.state_dict() is whole and rank 0 saves it"
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
@pytest.mark.by_default
def test_what_saves_loads_or_copies_a_model_at_stage_3_is_told_first_how_to_do_that(call: str) -> None:
    use, remedy = WHOLE[call]
    model = build()
    optimizer = zero(model, solo())
    message = error_of(use, model)
    assert f"{call}: {remedy}. '0.weight' is released: at stage 3 a parameter has values only inside" in message
    assert message.startswith(f"RuntimeError: {call}: ") or call == "model.load_state_dict()"
    with optimizer.gathered(write=True):
        use(model)


# -- calls inside a backward -------------------------------------------------------------------------------------------


@ALL
def test_a_step_in_a_hook_of_a_parameter_is_told_to_wait_for_the_end_of_the_backward(stage: int) -> None:
    def program(transport: Transport) -> tuple[list[str], nn.Module]:
        model = build()
        optimizer = zero(model, transport, stage)
        plain_optimizer = torch.optim.SGD([model[2].bias], lr=0.5)
        calls = (
            optimizer.step,
            optimizer.zero_grad,
            lambda: optimizer.clip_grad_norm_(1.0),
            lambda: optimizer.full_grad(model[2].bias),
            plain_optimizer.step,
        )
        told = []
        for call in calls:
            handle = model[2].bias.register_post_accumulate_grad_hook(lambda _, call=call: call())
            told.append(error_of(lambda: model(BATCH).sum().backward()))
            handle.remove()
            optimizer.zero_grad()
        train(model, optimizer)
        optimizer.close()
        return told, model

    plain = build()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    for told, model in on_threads(2, program, timeout=5):
        for name, message in zip(
            ("step()", "zero_grad()", "clip_grad_norm_()", "full_grad of '2.bias'"), told, strict=False
        ):
            text = f"RuntimeError: {name} inside a backward, as in a hook of a parameter: call it when backward() has"
            assert message.startswith(text)
            assert ("stages 2 and 3 shard gradients while the backward runs" in message) is (name == "step()")
        assert "of '2.bias', which is sharded or not reduced yet; something else asks for it inside the" in told[-1]
        assert "if a hook does, do it when backward() has returned" in told[-1]
        assert_same_model(model, plain)


# -- ranks with different numbers of batches ---------------------------------------------------------------------------


@ALL
def test_ranks_whose_loaders_have_different_lengths_are_told_of_join(stage: int) -> None:
    def program(transport: Transport) -> str:
        model = build()
        optimizer = zero(model, transport, stage)

        def run() -> None:
            for _ in range(1 + transport.rank):
                train(model, optimizer)
            optimizer.consolidate_state_dict()

        return error_of(run)

    for message in on_threads(2, program, timeout=5):
        assert "Ranks with different numbers of batches train inside optimizer.join()" in message


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "sharding_factor"), [(0, None), *((stage, factor) for stage in (1, 2, 3) for factor in (None, 1, 2))]
)
@pytest.mark.by_default("1-2", "3-2")
def test_states_are_this_ranks_piece_or_say_who_has_them(stage: int, sharding_factor: int | None) -> None:
    """Flat, in the order of memory; the pieces of all ranks together are the whole state."""

    def program(transport: Transport) -> tuple[dict[str, Any], list[str]]:
        model = build()
        optimizer = ZeroOptimizer(
            model, torch.optim.AdamW, stage=stage, process_group=transport, sharding_factor=sharding_factor, lr=0.5
        )
        train(model, optimizer)
        names = {parameter: name for name, parameter in model.named_parameters()}
        assert {names[parameter] for parameter in optimizer.state} <= set(names.values())
        found: dict[str, Any] = {name: optimizer.state[parameter] for parameter, name in names.items()}
        told = [error_of(lambda state=state: state["exp_avg"]) for state in found.values() if not state]
        assert all(error_of(lambda state=state: state["momentum"]).startswith("KeyError") for state in found.values())
        return found, told

    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.5)
    train(plain, optimizer)
    ranks = on_threads(4, program, timeout=5)
    replica = 4 if sharding_factor is None else sharding_factor
    whole = stage == 0 or replica == 1
    for name, parameter in plain.named_parameters():
        expected = optimizer.state[parameter]["exp_avg"]
        if whole:
            assert all(torch.equal(found[name]["exp_avg"], expected) for found, _ in ranks)
            continue
        for first in range(0, 4, replica):
            parts: list[Tensor] = [
                found[name]["exp_avg"].reshape(-1) for found, _ in ranks[first : first + replica] if found[name]
            ]
            assert_same_bits(torch.cat(parts), expected.reshape(-1))
    told = list(itertools.chain(*(messages for _, messages in ranks)))
    assert bool(told) is not whole
    for number, (found, messages) in enumerate(ranks):
        missing = [name for name, state in found.items() if not state]
        for name, message in zip(missing, messages, strict=True):
            begin = number - number % replica
            owners = [rank for rank in range(begin, begin + replica) if ranks[rank][0][name]]
            assert f"'exp_avg': this rank holds no part of the states of '{name}', which are on rank " in message
            assert f"on rank {', '.join(map(str, owners))}: optimizer.consolidate_state_dict" in message


# -- limits that CONTRACT.md names -------------------------------------------------------------------------------------


@ALL
def test_lazy_modules_run_a_forward_first(stage: int) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    assert "'0.weight' is not initialised yet: run a forward of its lazy module first" in error_of(
        zero, model, solo(), stage
    )
    model(BATCH)
    train(model, zero(model, solo(), stage))
