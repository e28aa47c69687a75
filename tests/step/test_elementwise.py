"""A class that updates pieces differently from whole parameters is refused at construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import solo
from zero import ZeroOptimizer

from ..support.errors import errors_on
from ..support.plain import assert_same_bits
from ..support.rows import ALL
from .refused import ALONE, OPTIONS, TOGETHER, Coupled, DecayMatricesOnly, Projected, coupled, net

pytestmark = pytest.mark.usefixtures("every_trial_runs")


class FusesDecayInSomeLengths(torch.optim.SGD):
    """Rounds once what another length has rounded twice, as a compiler does in one of two loops of a kernel."""

    most = 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            decay, rate = group["weight_decay"], group["lr"]
            if rate > self.most:
                raise ValueError("too high a rate")
            for p in group["params"]:
                with torch.no_grad():
                    once = (p.grad.double() + p.double() * decay).float()
                    p.sub_(p.grad + p * decay if p.numel() % 4 else once, alpha=rate)


class FusesDecayAtLowRates(FusesDecayInSomeLengths):
    most = 0.2


def halves(name: str, option: str) -> type[Coupled]:
    """Return a class that halves matrices where an option is low."""

    def couple(_: Any, p: Tensor, group: dict[str, Any]) -> None:
        if group[option] < 0.1 and p.ndim > 1:
            p.mul_(0.5)

    return coupled(name, couple)


def refuses(name: str, refused: Callable[[Tensor, dict[str, Any]], bool], base: Any = Coupled) -> type[Coupled]:
    """Return a class that refuses some options or parameters in a step."""

    def couple(self: Any, p: Tensor, group: dict[str, Any]) -> None:
        if refused(p, group):
            raise ValueError("no, please")
        base.couple(self, p, group)

    return coupled(name, couple, base)


def spare_single_elements(_: Any, p: Tensor, group: dict[str, Any]) -> None:
    if p.numel() > 1:
        p.mul_(0.9)


NoHighDecays = refuses("NoHighDecays", lambda p, group: group["weight_decay"] >= 0.2, DecayMatricesOnly)
NoHighRates = refuses("NoHighRates", lambda p, group: group["lr"] > 0.1)
NoKernels = refuses("NoKernels", lambda p, group: p.ndim == 4)
SparesSingleElements = coupled("SparesSingleElements", spare_single_elements)
Low = halves("HalvesMatricesAtLowRates", "lr")


def two_groups(first: float, second: float) -> list[dict[str, Any]]:
    model = net()
    return [
        {"params": list(model.matrix.parameters()), "weight_decay": first},
        {"params": list(model.kernels.parameters()), "weight_decay": second},
    ]


ROWS: list[tuple[Any, Any, dict[str, Any]]] = [  # class, parameters (None: of the net), options
    *[(cls, None, OPTIONS) for cls in (*ALONE.values(), *TOGETHER.values())],
    # it begins to after some steps
    *[(ALONE[name], None, {**OPTIONS, "begin": 9}) for name in ("DecayMatricesOnly", "Projected", "Centralized")],
    # a rate so low that nothing shows hides nothing: a scheduler raises it later
    *[(DecayMatricesOnly, None, {"lr": rate, "weight_decay": 0.01}) for rate in (0.0, 1e-9, torch.tensor(1e-9))],
    *[
        (DecayMatricesOnly, lambda dtype=dtype: net().to(dtype), {"lr": 1e-9, "weight_decay": 0.01})
        for dtype in (torch.bfloat16, torch.float64)
    ],
    # nor does a decay so low that it hardly shows
    *[(FusesDecayInSomeLengths, None, {"lr": 0.5, "weight_decay": decay}) for decay in (0.1, 1e-7)],
    # it is raised alone if the class refuses a higher rate; it may be refused
    (FusesDecayAtLowRates, None, {"lr": 0.1, "weight_decay": 1e-7}),
    (NoHighDecays, None, {"lr": 1e-9, "weight_decay": 0.01}),
    # the rate and the decay of the groups are tried for all steps as they are
    (halves("HalvesMatricesAtLowDecays", "weight_decay"), None, {"lr": 0.5, "weight_decay": 0.01, "begin": 5}),
    (DecayMatricesOnly, None, {"lr": 1e4, "weight_decay": 1e-6, "begin": 5}),
    (Low, None, {"lr": 1e-3}),
    (Low, None, {"lr": 1e-6}),
    # a vector of one element is tried where there is one
    (SparesSingleElements, lambda: [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(1))], {}),
    # kernels are tried also where nothing has three dimensions
    (ALONE["DecayKernelsOnly"], lambda: net().kernels, OPTIONS),
    # the options of every group count, in whatever order
    (DecayMatricesOnly, lambda: two_groups(0.0, 0.1), {"lr": 0.05}),
    (DecayMatricesOnly, lambda: two_groups(0.1, 0.0), {"lr": 0.05}),
]
FURTHER = ("DecayMatricesOnly", "FusesDecayInSomeLengths", "Projected", "Centralized")


def refused(cls: type[torch.optim.Optimizer], params: Any = None, **options: Any) -> str:
    with pytest.raises(ValueError, match=f"{cls.__name__} is not element-wise") as error:
        ZeroOptimizer(net() if params is None else params, cls, process_group=solo(), partition="element", **options)
    return str(error.value)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if ALL or row[0].__name__ not in FURTHER], ids=lambda row: row[0].__name__
)
def test_a_class_that_looks_beyond_an_element_is_refused(row: Any) -> None:
    cls, params, options = row
    refused(cls, None if params is None else params(), **options)


def test_the_reason_says_what_was_stepped_and_every_rank_is_told() -> None:
    options: dict[str, Any] = {**OPTIONS, "begin": 2, "partition": "element"}
    messages = errors_on(2, lambda group: ZeroOptimizer(net(), DecayMatricesOnly, process_group=group, **options))
    found = "stepping shards of a parameter of shape (131, 137) gave different bits than stepping it whole (within 3 of"
    assert all(found in message for message in messages), messages
    assert "closure" in refused(torch.optim.LBFGS)
    assert "dense" in refused(torch.optim.SparseAdam)


def test_groups_that_are_added_or_loaded_are_tried_too() -> None:
    model = net()
    arguments: dict[str, Any] = {"process_group": solo(), "partition": "element", "lr": 0.05}
    optimizer = ZeroOptimizer([model.matrix.weight], DecayMatricesOnly, **arguments)
    with pytest.raises(ValueError, match="DecayMatricesOnly is not element-wise"):
        optimizer.add_param_group({"params": [model.kernels.weight], "weight_decay": 0.1})
    saved = optimizer.state_dict()
    saved["param_groups"][0]["weight_decay"] = 0.1
    with pytest.raises(ValueError, match="DecayMatricesOnly is not element-wise"):
        optimizer.load_state_dict(saved)
    optimizer.load_state_dict(optimizer.state_dict())
    ZeroOptimizer(two_groups(0.0, 0.0), DecayMatricesOnly, process_group=solo(), lr=0.05).close()


def test_what_the_class_refuses_is_left_out_unless_the_groups_have_it() -> None:
    ZeroOptimizer(net().matrix, NoKernels, process_group=solo(), begin=3).close()
    with pytest.raises(ValueError, match=r"NoKernels refuses 'kernels.weight', of shape .*: no, please. Pass"):
        ZeroOptimizer(net(), NoKernels, process_group=solo(), begin=3)


class RateByAnotherName(torch.optim.SGD):
    def __init__(self, params: Any, rate: float = 1e-6) -> None:
        super().__init__(params, lr=rate)


@pytest.mark.parametrize("cls", [NoHighRates, RateByAnotherName])
def test_a_class_that_takes_no_other_rate_trains_as_ever(cls: Any) -> None:
    model, plain = net(), net()
    options = {"lr": 1e-6} if cls is NoHighRates else {}
    optimizer, expected = ZeroOptimizer(model, cls, process_group=solo(), **options), cls(plain.parameters(), **options)
    for trained, stepped in ((model, optimizer), (plain, expected)):
        trained.scale.square().sum().backward()
        stepped.step()
    assert_same_bits(model.scale.detach(), plain.scale.detach())


# -- a trial has no side effects ---------------------------------------------------------------------------------------


def test_neither_the_random_generator_nor_what_the_user_gave_changes() -> None:
    rate, model = torch.tensor(1e-3), net()
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    ZeroOptimizer(model, process_group=solo(), lr=rate).close()
    refused(coupled("Noisy", lambda _, p, group: p.add_(torch.randn_like(p))))
    assert torch.equal(torch.get_rng_state(), state)
    assert rate == 1e-3
    for p, value in zip(model.parameters(), before, strict=True):
        assert_same_bits(p, value)
        assert p.grad is None
    model.kernels.to(torch.bfloat16)  # groups of several dtypes are tried together
    groups = [{"params": list(model.matrix.parameters()), "lr": 0.1}, {"params": list(model.kernels.parameters())}]
    refused(Projected, groups)
    ZeroOptimizer(groups, torch.optim.Adagrad, process_group=solo()).close()
