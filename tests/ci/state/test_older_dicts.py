"""A dict of an older version of torch is loaded as its class loads it, and one of another class changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ...support.loops import seeded
from ...support.plain import assert_same_model, assert_same_states

pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore:Adafactor is not element-wise")]

ADAPTING = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls.__setstate__ is not torch.optim.Optimizer.__setstate__
}


def small(seed: int = 0) -> Any:
    return seeded(seed, lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))


def step_small(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: range, divisor: int = 1) -> None:
    for rank in ranks:
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
    for p in model.parameters() if divisor != 1 else ():
        assert p.grad is not None
        p.grad.div_(divisor)
    optimizer.step()
    optimizer.zero_grad()


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
    begun = small()
    first = cls(begun.named_parameters(), **arguments)
    for step in range(2):
        step_small(begun, first, step, range(2), 2)
    saved, plain = older(cls, first.state_dict()), copy.deepcopy(begun)
    stepped = cls(plain.named_parameters(), **arguments)
    stepped.load_state_dict(copy.deepcopy(saved))
    for step in (2, 3):
        step_small(plain, stepped, step, range(2), 2)

    def program(transport: Transport) -> None:
        model, before = copy.deepcopy(begun), repr(saved)
        optimizer = ZeroOptimizer(model, cls, stage=stage, process_group=transport, **arguments)
        optimizer.load_state_dict(saved)
        assert repr(saved) == before
        for step in (2, 3):
            step_small(model, optimizer, step, range(transport.rank, transport.rank + 1))
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        optimizer.close()
        assert_same_model(model, plain)
        assert_same_states(states, stepped.state_dict())
        assert states["param_groups"] == stepped.state_dict()["param_groups"]

    on_threads(2, program)


class MakesAnew(torch.optim.SGD):
    """Makes its large state anew when it loads a dict."""

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


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: f"{row[0].__name__}-{row[1].__name__}")
def test_a_dict_that_no_version_of_the_class_has_saved_changes_nothing(row: Any) -> None:
    saver, loader, arguments, words = row
    plain, model = small(), small()
    saving = saver(plain.parameters(), **arguments)
    step_small(plain, saving, 0, range(1))
    optimizer = ZeroOptimizer(model, loader, lr=0.5, **(arguments if loader is MakesAnew else {}))
    step_small(model, optimizer, 0, range(1))
    before, foreign = copy.deepcopy(optimizer.state_dict()), saving.state_dict()
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(foreign)
    assert_same_states(optimizer.state_dict(), before)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert_same_states(foreign, saving.state_dict())
