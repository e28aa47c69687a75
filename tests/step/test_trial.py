"""A class whose step of a parameter depends on others is an error that says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from collectives import solo
from zero import MixedPrecision, ZeroOptimizer
from zero.core.layout import Dtypes, ParameterSpec
from zero.step.arguments import same
from zero.step.classes import UserOptimizers
from zero.step.partition import check_classes, choose_partitions
from zero.step.trial import Trial

from ..support.errors import error_of, errors_on
from ..support.models import seeded
from ..support.narrowed import BF16, FP32
from ..support.rows import rows
from ..support.shampoo import Shampoo
from ..support.sides import Side, same_as_plain
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


class TwoDtypes(nn.Module):
    """Vectors and matrices in bf16 and in fp32, and a loss with small gradients."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [((33, 5), BF16), ((33,), BF16), ((33,), FP32), ((3, 33), BF16), ((2, 3), FP32)]
        self.of = nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype)) for shape, dtype in shapes])

    def forward(self, rank: int) -> Tensor:
        return 1e-5 * torch.stack([(rank + p).square().sum().float() for p in self.of]).sum()


def by_dtype(model: nn.Module) -> list[dict[str, Any]]:
    known = list(model.parameters())
    return [{"params": [p for p in known if p.dtype is dtype]} for dtype in (BF16, FP32)]


def eps_of_the_first(parameters: list[Any], group: dict[str, Any], _: Any) -> None:
    """Take a lower bound from the dtype of the first parameter for all, as Adafactor does."""
    for p in parameters:
        if p.grad is not None:
            p.sub_(group["lr"] * p.grad / p.grad.abs().clamp(min=torch.finfo(parameters[0].dtype).eps))


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, steps("KeepsEps", eps_of_the_first)])
@pytest.mark.filterwarnings("ignore:.* is not element-wise")
def test_a_class_that_keeps_something_of_one_dtype_for_others_is_refused_if_a_group_has_several(cls: Any) -> None:
    words = f"{cls.__name__} steps '.*', in torch.float32, in another way if its param group has other dtypes, too"
    for ranks in rows([2], [1, 3]):
        for message in errors_on(ranks, lambda t: ZeroOptimizer(TwoDtypes(), cls, lr=0.1, process_group=t)):
            assert re.search(words, message)
    optimizer = ZeroOptimizer(nn.Linear(5, 33), cls, lr=0.1, process_group=solo())
    assert re.search(words, error_of(optimizer.add_param_group, {"params": list(TwoDtypes().parameters())}))
    assert len(optimizer.param_groups) == 1
    optimizer.close()


BY_DTYPE, BY_EPS = (by_dtype, {}), (None, {"eps": (1e-7, 1e-3)})
FURTHER = [(0, BY_DTYPE), (0, BY_EPS), (1, BY_DTYPE), (2, BY_DTYPE), (2, BY_EPS), (3, BY_EPS)]


@pytest.mark.parametrize(("stage", "given"), rows([(1, BY_EPS), (3, BY_DTYPE)], FURTHER))
@pytest.mark.filterwarnings("ignore:.* is not element-wise")
def test_with_a_group_for_each_dtype_or_its_eps_adafactor_has_the_plain_bits(stage: int, given: Any) -> None:
    groups, options = given

    def loop(side: Side) -> None:
        for _ in range(3):
            side.train(lambda model, rank: model(rank))
            side.step()
            side.clear()

    named = {"settings": {"stage": stage}, "groups": groups, "lr": 0.1, **options}
    same_as_plain(loop, lambda: seeded(0, TwoDtypes), torch.optim.Adafactor, 1 + stage % 3, **named)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_kernel_that_leaves_elements_out_is_refused_by_name(dtype: torch.dtype) -> None:
    """Torch's fused SGD in 16 bits: it reads momentum beyond the end of a tensor, so no rank could have its bits."""
    model, given = nn.Linear(40, 3).to(dtype), {"lr": 0.1, "fused": True, "process_group": solo()}
    for options in ({"momentum": 0.9}, {}):
        with pytest.raises(
            ValueError, match=r"SGD steps \d+ of 33 elements of a tensor in .* as 'weight' is: .*fused="
        ):
            ZeroOptimizer(model, torch.optim.SGD, **given, **options)
    ZeroOptimizer(model, torch.optim.AdamW, **given).close()
    mixed = MixedPrecision(dtype)
    ZeroOptimizer(nn.Linear(40, 3), torch.optim.SGD, mixed_precision=mixed, momentum=0.9, **given).close()
