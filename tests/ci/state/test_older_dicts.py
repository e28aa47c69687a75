"""A dict of an older version of torch is loaded as its class loads it, and one of another class changes nothing."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ...state.training import TOGETHER
from ...support.errors import error_of
from ...support.loops import seeded
from ...support.plain import assert_same_model, assert_same_states, assert_same_value
from ...support.sides import AsPlain, OnRank, train

pytestmark = pytest.mark.filterwarnings("ignore:Adafactor is not element-wise")

ADAPTING = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls.__setstate__ is not torch.optim.Optimizer.__setstate__
}


def small() -> Any:
    return seeded(0, lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))


def batches(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(3, 5, generator=generator) for _ in range(TOGETHER)]


run = partial(train, batches_of=batches, loss_of=lambda model, x: model(x).square().mean())


def older(cls: type[torch.optim.Optimizer], saved: dict[str, Any]) -> dict[str, Any]:
    """Return a dict as an older version of the class has saved it: the class adds by itself what it lacks."""
    found = copy.deepcopy(saved)
    for key in saved["param_groups"][0]:
        without = copy.deepcopy(saved)
        del without["param_groups"][0][key]
        plain = cls(small().parameters())
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

    begun = plainly(small())
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
        saving, model = AsPlain(small(), lambda updated, s=saver, a=arguments: s(updated, **a)), small()
        optimizer = ZeroOptimizer(model, loader, lr=0.5, **(arguments if loader is MakesAnew else {}))
        for side in (saving, OnRank(model, optimizer)):
            run(side, range(1))
        before, foreign = copy.deepcopy(optimizer.state_dict()), saving.optimizer.state_dict()
        assert words in error_of(optimizer.load_state_dict, foreign)
        assert_same_value(optimizer.state_dict(), before, "the optimizer")
        assert_same_states(foreign, saving.optimizer.state_dict())
