"""A class whose step of a parameter depends on others is an error that says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from collectives import solo
from zero import ZeroOptimizer
from zero.core.layout import Dtypes, ParameterSpec
from zero.step.classes import UserOptimizers
from zero.step.equality import same
from zero.step.partition import check_classes, choose_partitions
from zero.step.trial import Trial

from ..support.shampoo import Shampoo
from .refused import OPTIONS, TOGETHER, Draws, OwnCounter, net

pytestmark = pytest.mark.usefixtures("every_trial_runs")


def steps(name: str, step: Callable[[list[Any], dict[str, Any], Any], object]) -> type[torch.optim.SGD]:
    """Return a class that calls ``step(parameters, group, states)`` for each group."""

    @torch.no_grad()
    def run(self: torch.optim.SGD, closure: Any = None) -> None:
        for group in self.param_groups:
            step(group["params"], group, self.state)

    return type(name, (torch.optim.SGD,), {"step": run})


def as_one_of_its_shape(parameters: list[Any], group: dict[str, Any], _: Any) -> None:
    """Step several parameters of one shape in another way than one alone, as classes do that stack them."""
    shapes = [p.shape for p in parameters if p.grad is not None]
    for p in parameters:
        if p.grad is not None:
            p.sub_(p.grad * group["lr"] / shapes.count(p.shape))


def after_a_look_at_the_first(parameters: list[Any], group: dict[str, Any], _: Any) -> None:
    """Ask the first parameter of each group for its device, as Prodigy does."""
    assert parameters[0].device is not None


WHY = "(with others|than for several|one parameter failed)"
REFUSED: list[tuple[Any, Callable[[], nn.Module], dict[str, Any], str]] = [
    *[(TOGETHER[name], net, OPTIONS, f"{name} cannot be sharded: .*{WHY}") for name in TOGETHER],
    *[(TOGETHER["EstimatesTogether"], net, {"lr": rate}, "EstimatesTogether cannot be") for rate in (0.0, 1e-9)],
    (torch.optim.LBFGS, net, {}, r"LBFGS cannot be sharded: .*closure"),
    (torch.optim.SparseAdam, net, {}, r"SparseAdam cannot be sharded: .*dense"),
    (torch.optim.Muon, net, {}, r"Muon refuses 'scale', of shape \(\): .*2D"),
    (steps("Stacks", as_one_of_its_shape), lambda: nn.Linear(3, 5, bias=False), {}, "Stacks cannot be sharded"),
    (
        steps("LooksAtItsFirst", after_a_look_at_the_first),
        lambda: nn.Linear(3, 5),
        {},
        "LooksAtItsFirst cannot be sharded: a step over no parameter failed",
    ),
    (Draws, net, {}, r"Draws cannot be sharded: .*; it draws random numbers\).*: name another class"),
    (OwnCounter, net, {}, "OwnCounter cannot be sharded: .* owns none, and its state has the key 'steps', which is no"),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0].__name__)
def test_a_class_that_looks_at_other_parameters_is_an_error(row: Any) -> None:
    cls, build, options, words = row
    for partition in (None, "parameter") if cls in TOGETHER.values() else ("parameter",):
        with pytest.raises(ValueError, match=words):
            ZeroOptimizer(build(), cls, process_group=solo(), partition=partition, **options)


def eight(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float8_e5m2)


EQUAL: list[tuple[Any, Any]] = [
    (torch.tensor([torch.nan, -0.0]), torch.tensor([-torch.nan, -0.0])),
    (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()),
    ([1, {"a": (None, torch.nan)}], [1, {"a": (None, torch.nan)}]),
    (object(), object()),
]
UNEQUAL: list[tuple[Any, Any]] = [
    *[(torch.tensor([one]), torch.tensor([other])) for one, other in ((0.0, -0.0), (1, 2), (True, False), (1j, -1j))],
    (eight(0.0), eight(-0.0)),
    (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
    *[(torch.zeros(0, 3), torch.zeros(0, 5)), (torch.zeros(4), torch.zeros(1, 4)), (torch.tensor(1.0), 1.0)],
    *[(1, True), (0.0, -0.0), ([1], (1,)), ([1], [1, 1]), ({"a": 1}, {"b": 1}), ({"a": 1}, {"a": 2}), (None, 0)],
]


def test_states_are_equal_if_their_bits_are_and_nan_is_nan() -> None:
    for one, other in EQUAL:
        assert same(one, other), one
    for one, other in UNEQUAL:
        assert not same(one, other), one


LOOPS = (
    "^other bits. Param group 1 is on cpu and cuda:0, where torch's default loop depends on all its parameters "
    r"together: name a loop, foreach=False \(the default there\) or foreach=True"
)
ON_DEVICES: list[tuple[Any, str, dict[str, Any], str]] = [  # class, the other device than cuda:0, options, words
    (torch.optim.AdamW, "cpu", {}, LOOPS + ", or fused=True$"),
    (torch.optim.RMSprop, "cpu", {}, LOOPS + "$"),
    (torch.optim.AdamW, "cpu", {"foreach": False}, "^other bits$"),
    (torch.optim.AdamW, "cuda:1", {}, "^other bits$"),
    (Shampoo, "cpu", {}, "^other bits$"),
]


def test_a_refused_group_on_cpu_and_gpu_shall_name_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's default depends on all parameters of a group. There is no GPU here: the trial is taken to fail."""
    monkeypatch.setattr(Trial, "run", Mock(side_effect=ValueError("other bits")))
    for cls, device, options, words in ON_DEVICES:
        user_optimizers, dtypes = UserOptimizers(cls, {}), Dtypes.all(torch.float32)
        groups = [user_optimizers.complete(given) for given in ({}, options)]
        specs = [ParameterSpec((on,), (2,), (1,), dtypes, on, True, 1, i) for i, on in enumerate((device, "cuda:0"))]
        with pytest.raises(ValueError, match=words):
            choose_partitions(user_optimizers, groups, specs, {1: None})
        with pytest.raises(ValueError, match=words):
            check_classes(user_optimizers, groups, specs)
