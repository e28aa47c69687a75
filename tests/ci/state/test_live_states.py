"""``optimizer.state`` is edited in place, other writes are errors, and `reset_states` forgets states."""

from __future__ import annotations

import copy
import pickle
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads
from zero import Offload, ZeroOptimizer

from ...state.training import TOGETHER
from ...support.errors import error_of
from ...support.loops import seeded
from ...support.narrowed import PRECISIONS
from ...support.plain import assert_same_bits
from ...support.programs import Program, Round, Step, check
from ...support.sides import OnRank, Side, same_as_plain, train

SOME = ("first.weight", "turned", "layers.1.0.bias", "scale", "empty", "frozen", "unused")
STEPS = (
    Step(),
    Step((Round(), Round(sync=False)), clips=((0.1, 2.0),), reset=SOME),
    Step(reset=("first.weight", "last.bias"), step=False),
    Step((Round(),)),
    Step(reset=None),
    Step(),
)
ROWS = {
    "0": Program(2, 0, "adamw", 25.0, steps=STEPS),
    "1 in bf16": Program(3, 1, "adagrad", precision=PRECISIONS["bf16"], steps=STEPS),
    "2 copies": Program(4, 2, "adamw fused", sharding_factor=2, steps=STEPS),
    "3": Program(3, 3, "adagrad", steps=STEPS),
    "on disk": Program(
        2, 2, "adagrad", precision=PRECISIONS["bf16"], steps=STEPS, offload=Offload(tempfile.gettempdir())
    ),
    "3 whole": Program(2, 3, "shampoo", precision=PRECISIONS["bf16"], steps=STEPS),
}


@pytest.mark.parametrize("row", ROWS)
def test_states_that_are_reset_begin_anew_as_in_the_plain_loop(row: str) -> None:
    check(ROWS[row])


def stack(width: int) -> Any:
    return seeded(0, lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(3))))


def loss_of(model: Any, scale: float) -> Tensor:
    width = model[0].weight.shape[0]
    found: Tensor = model(torch.linspace(-1, 1, 2 * width).view(2, width) * scale).square().mean()
    return found


def scales(step: int) -> list[float]:
    return [1.0 + number / 8 + step for number in range(TOGETHER)]


run = partial(train, batches_of=scales, loss_of=loss_of)


def trained(transport: Transport, stage: int) -> tuple[Any, ZeroOptimizer]:
    model = stack(4)
    optimizer = ZeroOptimizer(model, torch.optim.Adam, stage=stage, process_group=transport)
    run(OnRank(model, optimizer), range(2))
    return model, optimizer


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


@pytest.mark.parametrize(
    ("world_size", "stage", "width", "partition"),
    [
        (2, 0, 4, "parameter"),
        (3, 1, 300, "element"),  # 300 * 300 elements are more than those of a run
        (2, 2, 4, "element"),
        (3, 3, 4, "element"),
    ],
)
def test_edits_in_place_are_those_of_the_plain_loop(
    world_size: int, stage: int, width: int, partition: str, tmp_path: Path
) -> None:
    """Also after a load."""

    def loop(side: Side) -> None:
        run(side, range(2))
        edit(side.optimizer, side.model)
        run(side, range(2, 4))
        if isinstance(side.optimizer, ZeroOptimizer):
            zero.save(tmp_path / "saved", side.optimizer)
            side.optimizer.reset_states()
            zero.load(tmp_path / "saved", side.optimizer, rng=False)
        edit(side.optimizer, side.model)
        run(side, range(4, 6))

    settings, adam = {"stage": stage, "partition": partition}, torch.optim.Adam
    same_as_plain(loop, partial(stack, width), adam, world_size, settings=settings, divisor=TOGETHER, lr=0.01)


WRITES: list[Callable[[Any, Tensor], object]] = [
    lambda optimizer, p: setattr(optimizer, "state", {}),
    lambda optimizer, p: optimizer.__setstate__({"state": {}, "param_groups": []}),
    lambda optimizer, p: optimizer.state.__setitem__(p, {}),
    lambda optimizer, p: optimizer.state.__delitem__(p),
    lambda optimizer, p: optimizer.state.pop(p),
    lambda optimizer, p: optimizer.state.update({p: {}}),
    lambda optimizer, p: optimizer.state.__ior__({p: {}}),
    lambda optimizer, p: optimizer.state[p].__setitem__("exp_avg", torch.zeros(16)),
    lambda optimizer, p: optimizer.state[p].__delitem__("exp_avg"),
    lambda optimizer, p: optimizer.state[p].pop("exp_avg"),
    lambda optimizer, p: optimizer.state[p].update(exp_avg=torch.zeros(16)),
    lambda optimizer, p: optimizer.state[p].__ior__({"mine": 0}),
]


@pytest.mark.parametrize("stage", [0, 3])
def test_every_write_but_an_edit_in_place_is_an_error(stage: int) -> None:
    """Also on a rank that has no part of the parameter's states."""

    def run(transport: Transport) -> None:
        model, optimizer = trained(transport, stage)
        before = copy.deepcopy([dict(state) for state in optimizer.state.values()])
        for write in WRITES:
            for p in (model[0].weight, model[2].bias):
                words = r"edits of its tensors in place.*optimizer\.reset_states\(params\)"
                with pytest.raises(TypeError, match=words):
                    write(optimizer, p)
        for now, then in zip(optimizer.state.values(), before, strict=True):
            assert now.keys() == then.keys()
            for name, value in then.items():
                assert_same_bits(now[name], value, name)
        for state in optimizer.state.values():  # what is read can be copied and pickled as plain dicts
            for copied in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), {**state}):
                assert type(copied) is dict
                assert_same_bits(copied["exp_avg"], state["exp_avg"])
                copied["exp_avg"] = torch.zeros(1)
        assert type(copy.copy(optimizer.state)) is dict

    on_threads(6, run, timeout=10)


DIFFERENT = [
    "rank 0 and rank 1 chose different parameters, of which the first is '1.weight'",
    r"rank 0: reset_states\(\): a tensor of shape \(3,\) is not one of this optimizer's",
    "chose different parameters, of which the first is '[012].bias'",
    r"reset_states\(\) inside gathered\(\) or inside a forwa",
    r"reset_states\(\) inside a backward or inside join\(\):",
    "this optimizer is closed: the model is plain again",
]


def test_states_are_not_reset_where_ranks_differ() -> None:
    def run(transport: Transport) -> list[str]:
        model, optimizer = trained(transport, 3)
        weights, rank = [block.weight for block in model], transport.rank
        others: list[Any] = [weights[: 1 + rank], weights[0] if rank else torch.zeros(3), None if rank else weights]
        errors = [error_of(optimizer.reset_states, given) for given in others]
        assert len(optimizer.state) > 0
        for block in (optimizer.gathered(), optimizer.join()):
            with block:
                errors.append(error_of(optimizer.reset_states))
        optimizer.reset_states()
        assert not optimizer.state
        assert optimizer.describe().bytes["optimizer"] == 0
        optimizer.close()
        return [*errors, error_of(optimizer.reset_states)]

    first, second = on_threads(2, run, timeout=10)
    assert first[:3] == second[:3]
    for error, words in zip(first, DIFFERENT, strict=True):
        assert re.search(words, error), error
