"""``optimizer.state`` can be read and its tensors edited in place, and every other write is an error; `reset_states`
forgets states on all ranks, as deleting them does in torch."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads, solo
from zero import Offload, ZeroOptimizer

from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states, plain_step
from ..support.programs import BY_PARAMETER, CLASSES, Program, Round, Step, compare, run_rank
from ..support.small import blocks

pytestmark = pytest.mark.contract

EVERY_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SOME = ("first.weight", "turned", "layers.1.0.bias", "scale", "empty", "frozen", "unused")
STEPS = (
    Step(),
    Step((Round(), Round(sync=False)), clips=((0.1, 2.0),), reset=SOME),
    Step(reset=("first.weight", "last.bias"), step=False),
    Step((Round(),)),
    Step(reset=None),
    Step(),
)


def check(program: Program) -> None:
    results = on_threads(program.world_size, lambda transport: run_rank(program, transport), timeout=10)
    assert_same_states(results[0][3], compare(program, results).optimizer.state_dict())


def stack(width: int) -> Any:
    if width == 4:
        return blocks()
    model, generator = nn.Sequential(*(nn.Linear(width, width) for _ in range(3))), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=width**-0.5, generator=generator)
    return model


def loss_of(model: Any, scale: float) -> Tensor:
    width = model[0].weight.shape[0]
    found: Tensor = model(torch.linspace(-1, 1, 2 * width).view(2, width) * scale).square().mean()
    return found


def scales(step: int) -> list[float]:
    return [1.0 + number / 8 + step for number in range(6)]


def train(model: Any, optimizer: ZeroOptimizer, transport: Transport, steps: range) -> None:
    for step in steps:
        for scale in scales(step)[transport.rank :: transport.world_size]:
            loss_of(model, scale).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(
    transport: Transport, stage: int, width: int = 4, steps: int = 2, partition: Any = "element"
) -> tuple[Any, ZeroOptimizer]:
    model = stack(width)
    optimizer = ZeroOptimizer(
        model, torch.optim.Adam, stage=stage, process_group=transport, divisor=6, lr=0.01, partition=partition
    )
    train(model, optimizer, transport, range(steps))
    return model, optimizer


def train_plainly(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        plain_step(model, optimizer, loss_of, scales(step), 6)
        optimizer.zero_grad()


def trained_plainly(steps: int, width: int = 4) -> tuple[Any, torch.optim.Optimizer]:
    model = stack(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_plainly(model, optimizer, range(steps))
    return model, optimizer


def states_of(optimizer: ZeroOptimizer) -> list[dict[str, Tensor]]:
    return copy.deepcopy([dict(state) for state in optimizer.state.values()])


def assert_unchanged(optimizer: ZeroOptimizer, before: list[dict[str, Tensor]]) -> None:
    for now, then in zip(states_of(optimizer), before, strict=True):
        assert now.keys() == then.keys()
        for name, value in then.items():
            assert_same_bits(now[name], value, name)


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# -- reset_states ------------------------------------------------------------------------------------------------------


# torch's fused SGD takes no list of which some have momentum and others do not, in a plain loop either
@pytest.mark.parametrize("optimizer", [name for name in (*CLASSES, *BY_PARAMETER) if name != "sgd fused"])
@EVERY_STAGE
@pytest.mark.by_default("0-adamw", "1-adagrad", "2-adamw fused", "3-shampoo", "3-adagrad", "1-nadam")
def test_states_that_are_reset_begin_anew_as_in_the_plain_loop(stage: int, optimizer: str) -> None:
    for world_size, cap in ((1, 25.0), (3, 0.0005)):
        check(Program(world_size, stage, optimizer, cap, steps=STEPS))


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad", "shampoo"])
@EVERY_STAGE
@pytest.mark.by_default("1-adagrad", "3-adamw", "0-shampoo")
def test_so_they_do_in_mixed_precision_and_the_master_weights_stay(stage: int, optimizer: str) -> None:
    check(Program(3, stage, optimizer, precision=PRECISIONS["bf16"], steps=STEPS))


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
@EVERY_STAGE
@pytest.mark.by_default("1-adamw", "2-adagrad")
def test_and_where_they_are_on_disk(stage: int, optimizer: str, tmp_path: Path) -> None:
    for precision in (None, PRECISIONS["bf16"]):
        check(Program(2, stage, optimizer, precision=precision, steps=STEPS, offload=Offload(tmp_path)))


def test_and_with_several_copies() -> None:
    check(Program(4, 2, sharding_factor=2, steps=STEPS))


def test_parameters_that_differ_between_ranks_are_an_error_on_every_rank_and_so_is_a_tensor_that_is_none() -> None:
    def run(transport: Transport) -> list[str]:
        model, optimizer = trained(transport, 2)
        weights = [block.weight for block in model]
        chosen: list[Any] = [weights[: 1 + transport.rank], weights[0] if transport.rank else torch.zeros(3), None]
        chosen.append(None if transport.rank else weights)
        before = states_of(optimizer)
        errors = [error_of(lambda given=given: optimizer.reset_states(given)) for given in (*chosen[:2], chosen[3])]  # type: ignore[misc]
        assert_unchanged(optimizer, before)
        optimizer.reset_states(chosen[2])
        assert not optimizer.state
        assert optimizer.describe().bytes["optimizer"] == 0
        optimizer.close()
        return errors

    first, second = on_threads(2, run, timeout=10)
    assert first == second
    assert re.search("rank 0 and rank 1 chose different parameters, of which the first is '1.weight'", first[0])
    assert re.search(r"rank 0: reset_states\(\): a tensor of shape \(3,\) is not one of this optimizer's", first[1])
    assert re.search("chose different parameters, of which the first is '[012].bias'", first[2])


def test_states_are_not_reset_where_they_could_not_be_loaded() -> None:
    def run(transport: Transport) -> list[str]:
        model, optimizer = trained(transport, 3)
        errors = []
        with optimizer.gathered():
            errors.append(error_of(optimizer.reset_states))
        with optimizer.join():
            errors.append(error_of(optimizer.reset_states))
        handle = model[0].weight.register_hook(lambda _: errors.append(error_of(optimizer.reset_states)))
        loss_of(model, 1.0).backward()
        handle.remove()
        optimizer.zero_grad()
        optimizer.reset_states()
        optimizer.close()
        return [*errors, error_of(optimizer.reset_states)]

    for errors in on_threads(2, run, timeout=10):
        assert [re.sub("^.*?: (rank 0: )?", "", error)[:50] for error in errors] == [
            "reset_states() inside gathered() or inside a forwa",
            "reset_states() inside a backward or inside join():",
            "reset_states() inside a backward or inside join():",
            "this optimizer is closed: the model is plain again",
        ]


@EVERY_STAGE
def test_a_checkpoint_has_no_states_that_were_reset(stage: int, tmp_path: Path) -> None:
    """Also where the save before had them, and its plan is at hand."""

    def run(transport: Transport) -> nn.Module:
        model, optimizer = trained(transport, stage)
        with zero.CheckpointManager(tmp_path, optimizer) as checkpoints:
            checkpoints.save(1)
            optimizer.reset_states(model[0].parameters())
            checkpoints.save(2)
        optimizer.close()
        model, optimizer = trained(transport, 3 - stage, steps=0)
        zero.load(tmp_path / "step-00000002", optimizer, rng=False)
        train(model, optimizer, transport, range(2, 4))
        optimizer.close()
        return model

    plain, adam = trained_plainly(2)
    for p in plain[0].parameters():
        del adam.state[p]
    train_plainly(plain, adam, range(2, 4))
    for model in on_threads(2, run, timeout=10):
        assert_same_model(model, plain)
    names = {name for name, states in zero.open_checkpoint(tmp_path / "step-00000002").states().items() if states}
    assert names == {"1.weight", "1.bias", "2.weight", "2.bias"}


# -- writes ------------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any, Tensor], object]] = {
    "assign": lambda optimizer, p: setattr(optimizer, "state", {}),
    "restore": lambda optimizer, p: optimizer.__setstate__({"state": {}, "param_groups": []}),
    "set": lambda optimizer, p: optimizer.state.__setitem__(p, {}),
    "delete": lambda optimizer, p: optimizer.state.__delitem__(p),
    "clear": lambda optimizer, p: optimizer.state.clear(),
    "pop": lambda optimizer, p: optimizer.state.pop(p),
    "popitem": lambda optimizer, p: optimizer.state.popitem(),
    "update": lambda optimizer, p: optimizer.state.update({p: {}}),
    "setdefault": lambda optimizer, p: optimizer.state.setdefault(p, {}),
    "merge": lambda optimizer, p: optimizer.state.__ior__({p: {}}),
    "set a tensor": lambda optimizer, p: optimizer.state[p].__setitem__("exp_avg", torch.zeros(16)),
    "set a count": lambda optimizer, p: optimizer.state[p].__setitem__("step", 0),
    "set another": lambda optimizer, p: optimizer.state[p].__setitem__("mine", 0),
    "delete a tensor": lambda optimizer, p: optimizer.state[p].__delitem__("exp_avg"),
    "clear one": lambda optimizer, p: optimizer.state[p].clear(),
    "pop one": lambda optimizer, p: optimizer.state[p].pop("exp_avg"),
    "popitem of one": lambda optimizer, p: optimizer.state[p].popitem(),
    "update one": lambda optimizer, p: optimizer.state[p].update(exp_avg=torch.zeros(16)),
    "setdefault of one": lambda optimizer, p: optimizer.state[p].setdefault("mine", 0),
    "merge into one": lambda optimizer, p: optimizer.state[p].__ior__({"mine": 0}),
}


@EVERY_STAGE
@pytest.mark.by_default("0", "3")
def test_every_write_but_an_edit_in_place_is_an_error_that_names_the_ways_that_work(stage: int) -> None:
    """Also on a rank that has no part of the parameter's states."""

    def run(transport: Transport) -> None:
        model, optimizer = trained(transport, stage)
        before = states_of(optimizer)
        for write in WRITES.values():
            for p in (model[0].weight, model[2].bias):
                with pytest.raises(
                    TypeError, match=r"edits of its tensors in place.*optimizer\.reset_states\(params\)"
                ):
                    write(optimizer, p)
        assert_unchanged(optimizer, before)
        optimizer.close()

    on_threads(6, run, timeout=10)


def edit(optimizer: torch.optim.Optimizer, model: Any) -> None:
    """Edit states in place, as people do after a rewind: of parameters that are stepped beside others, also counts."""
    for p in (model[0].bias, model[2].weight):
        if state := optimizer.state[p]:
            state["exp_avg"] *= 0.5
            state["exp_avg_sq"].mul_(0.25)
            state["step"].zero_()
            optimizer.state[p]["step"].add_(1)
    for state in optimizer.state.values():
        state["exp_avg"].add_(0.125)


@pytest.mark.parametrize("width", [4, pytest.param(300, id="cut")])  # 300 * 300 elements are more than those of a run
@EVERY_STAGE
@pytest.mark.by_default("0-4", "1-cut", "3-4", "2-4")
def test_edits_in_place_are_those_of_the_plain_loop_also_of_one_parameters_count(stage: int, width: int) -> None:
    def run(transport: Transport) -> nn.Module:
        model, optimizer = trained(transport, stage, width)
        edit(optimizer, model)
        train(model, optimizer, transport, range(2, 4))
        edit(optimizer, model)
        train(model, optimizer, transport, range(4, 5))
        optimizer.close()
        return model

    plain, adam = trained_plainly(2, width)
    for steps in (range(2, 4), range(4, 5)):
        edit(adam, plain)
        train_plainly(plain, adam, steps)
    for world_size in (1, 2, 3):
        for model in on_threads(world_size, run, timeout=20):
            assert_same_model(model, plain)


@pytest.mark.parametrize("partition", ["element", "parameter"])
@EVERY_STAGE
@pytest.mark.by_default("1-parameter", "2-element")
def test_so_they_are_after_a_load(stage: int, partition: str, tmp_path: Path) -> None:
    def run(transport: Transport) -> nn.Module:
        model, optimizer = trained(transport, stage, partition=partition)
        zero.save(tmp_path / "saved", optimizer)
        optimizer.close()
        model, optimizer = trained(transport, stage, steps=0, partition=partition)
        zero.load(tmp_path / "saved", optimizer, rng=False)
        edit(optimizer, model)
        train(model, optimizer, transport, range(2, 4))
        optimizer.close()
        return model

    plain, adam = trained_plainly(2)
    edit(adam, plain)
    train_plainly(plain, adam, range(2, 4))
    for model in on_threads(2, run, timeout=10):
        assert_same_model(model, plain)


def test_what_is_read_from_states_can_be_copied_and_pickled_as_plain_dicts() -> None:
    model, optimizer = trained(solo(), 1)
    state = optimizer.state[model[0].weight]
    for copied in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), {**state}):
        assert type(copied) is dict
        assert_same_bits(copied["exp_avg"], state["exp_avg"])
        copied["exp_avg"] = torch.zeros(1)
    for states in (copy.copy(optimizer.state), copy.deepcopy(optimizer.state)):
        assert type(states) is dict
        assert len(states) == len(optimizer.state) == 6
    optimizer.close()
