"""Dicts of older versions of torch are loaded as their class loads them; states are edited in place as plain ones."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ...state.training import TOGETHER
from ...support.errors import error_of
from ...support.loops import seeded
from ...support.plain import assert_same_bits, assert_same_model, assert_same_states, assert_same_value
from ...support.sides import AsPlain, OnRank, Side, same_as_plain, train

pytestmark = pytest.mark.filterwarnings("ignore:Adafactor is not element-wise")


def stack(width: int = 4) -> Any:
    return seeded(0, lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(3))))


def loss_of(model: Any, scale: float) -> Tensor:
    width = model[0].weight.shape[0]
    found: Tensor = model(torch.linspace(-1, 1, 2 * width).view(2, width) * scale).square().mean()
    return found


def scales(step: int) -> list[float]:
    return [1.0 + number / 8 + step for number in range(TOGETHER)]


run = partial(train, batches_of=scales, loss_of=loss_of)


ADAPTING = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls.__setstate__ is not torch.optim.Optimizer.__setstate__
}


def older(cls: type[torch.optim.Optimizer], saved: dict[str, Any]) -> dict[str, Any]:
    """Return a dict as an older version of the class has saved it: the class adds by itself what it lacks."""
    found = copy.deepcopy(saved)
    for key in saved["param_groups"][0]:
        without = copy.deepcopy(saved)
        del without["param_groups"][0][key]
        plain = cls(stack().parameters())
        if key != "params":
            plain.load_state_dict(without)
            if key in plain.param_groups[0]:
                del found["param_groups"][0][key]
    assert found["param_groups"] != saved["param_groups"]
    for state in found["state"].values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                state[name] = int(value) if name == "step" else float(value)
    return found


@pytest.mark.parametrize(("stage", "name"), [(number % 4, name) for number, name in enumerate(ADAPTING)])
def test_an_older_dict_is_loaded_as_its_class_loads_it(stage: int, name: str) -> None:
    cls, arguments = ADAPTING[name], {"momentum": 0.9} if name == "SGD" else {}

    def plainly(model: nn.Module) -> AsPlain:
        return AsPlain(model, lambda _: cls(model.named_parameters(), **arguments), divisor=TOGETHER)

    begun = plainly(stack())
    run(begun, range(2))
    saved = older(cls, begun.optimizer.state_dict())
    plain = plainly(copy.deepcopy(begun.model))
    plain.optimizer.load_state_dict(copy.deepcopy(saved))
    run(plain, range(2, 4))

    def program(transport: Transport) -> None:
        model, before = copy.deepcopy(begun.model), repr(saved)
        options: dict[str, Any] = {"stage": stage, "process_group": transport, "divisor": TOGETHER, **arguments}
        optimizer = ZeroOptimizer(model, cls, **options)
        optimizer.load_state_dict(saved)
        assert repr(saved) == before
        run(OnRank(model, optimizer), range(2, 4))
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        optimizer.close()
        assert_same_model(model, plain.model)
        assert_same_states(states, plain.optimizer.state_dict())
        assert states["param_groups"] == plain.optimizer.state_dict()["param_groups"]

    on_threads(2, program)


class MakesAnew(torch.optim.SGD):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for of_parameter in self.state.values():
            of_parameter["momentum_buffer"] = of_parameter["momentum_buffer"] * 2


OTHERS: list[tuple[Any, Any, dict[str, Any], str]] = [  # saver, loader, the saver's arguments
    (torch.optim.NAdam, torch.optim.Adam, {}, "has no 'amsgrad', but 'momentum_decay', which Adam does not"),
    (torch.optim.Adamax, torch.optim.Adam, {}, "state 'exp_inf' of '0.weight' belongs to another optimizer class"),
    (torch.optim.SGD, torch.optim.Adam, {"momentum": 0.9}, "has no 'amsgrad': it belongs to another class"),
    (torch.optim.SGD, MakesAnew, {"momentum": 0.9}, "MakesAnew makes the state 'momentum_buffer' of '0.weight'"),
]


def test_a_dict_that_no_version_of_the_class_has_saved_changes_nothing() -> None:
    for saver, loader, arguments, words in OTHERS:
        saving, model = AsPlain(stack(), lambda updated, s=saver, a=arguments: s(updated, **a)), stack()
        optimizer = ZeroOptimizer(model, loader, lr=0.5, **(arguments if loader is MakesAnew else {}))
        for side in (saving, OnRank(model, optimizer)):
            run(side, range(1))
        before, foreign = copy.deepcopy(optimizer.state_dict()), saving.optimizer.state_dict()
        assert words in error_of(optimizer.load_state_dict, foreign)
        assert_same_value(optimizer.state_dict(), before, "the optimizer")
        assert_same_states(foreign, saving.optimizer.state_dict())


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
        (6, 3, 4, "element"),  # some ranks have no part of a parameter's states
    ],
)
def test_edits_in_place_are_those_of_the_plain_loop(
    world_size: int, stage: int, width: int, partition: str, tmp_path: Path
) -> None:
    """Also after a load. Copies are plain dicts; other writes are errors (`dials.loops`)."""

    def loop(side: Side) -> None:
        run(side, range(2))
        edit(side.optimizer, side.model)
        run(side, range(2, 4))
        if isinstance(side.optimizer, ZeroOptimizer):
            for state in side.optimizer.state.values():
                for copied in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), {**state}):
                    assert type(copied) is dict
                    assert_same_bits(copied["exp_avg"], state["exp_avg"])
                    copied["exp_avg"] = torch.zeros(1)
            zero.save(tmp_path / "saved", side.optimizer)
            side.optimizer.reset_states()
            assert not side.optimizer.state
            assert side.optimizer.describe().bytes["optimizer"] == 0
            zero.load(tmp_path / "saved", side.optimizer, rng=False)
        edit(side.optimizer, side.model)
        run(side, range(4, 6))

    settings, adam = {"stage": stage, "partition": partition}, torch.optim.Adam
    same_as_plain(loop, partial(stack, width), adam, world_size, settings=settings, divisor=TOGETHER, lr=0.01)
