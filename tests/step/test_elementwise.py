"""A class that updates flat pieces differently from whole parameters is refused at construction. Others are
accepted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer

from ..support.plain import assert_same_bits
from ..support.programs import CLASSES, FOR_LOOP

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("every_trial_runs")]

OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "begin": 0}


class Coupled(torch.optim.Optimizer):
    """SGD, with further work of a subclass in `couple` after ``begin`` steps."""

    def __init__(self, params: Any, lr: float | Tensor = 0.1, weight_decay: float = 0.0, begin: int = 0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "begin": begin})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    if state["step"] > group["begin"]:
                        self.couple(p, group)
                    p.sub_(p.grad * group["lr"])

    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        pass


class DecayMatricesOnly(Coupled):
    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.ndim > 1:
            p.mul_(1 - group["lr"] * group["weight_decay"])


class DecayKernelsOnly(Coupled):
    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.ndim == 4:
            p.mul_(1 - group["lr"] * group["weight_decay"])


class DecaySignalsOnly(Coupled):
    """Decays only the weights of 1-D convolutions, which have three dimensions."""

    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.ndim == 3:
            p.mul_(1 - group["lr"] * group["weight_decay"])


class DecayScalarsToo(Coupled):
    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.ndim != 1:
            p.mul_(1 - group["lr"] * group["weight_decay"])


class Centralized(Coupled):
    """Subtracts from a gradient the mean of each row."""

    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.ndim > 1 and p.grad is not None:
            p.grad.sub_(p.grad.mean(tuple(range(1, p.ndim)), keepdim=True))


class LargeMatricesApart(Coupled):
    """Treats large matrices differently, as classes that factorize or quantize only where it pays."""

    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.ndim == 2 and min(p.shape) >= 128 and p.grad is not None:
            p.grad.div_(p.grad.square().mean().sqrt())


class Projected(Coupled):
    """Like AdamP: if a matrix's gradient is nearly orthogonal to it, removes the update's part along the matrix."""

    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.ndim > 1 and p.grad is not None:
            rows, gradients = p.view(len(p), -1), p.grad.view(len(p), -1)
            cosine = torch.cosine_similarity(rows, gradients, dim=1).abs().max()
            if cosine < 0.1 / rows.shape[1] ** 0.5:
                p.grad.mul_(0.5)


class ClippedTogether(Coupled):
    """Uses the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_div_(gradients, torch.stack(torch._foreach_norm(gradients)).norm())
        super().step()


class RateByPlace(Coupled):
    """Uses a lower rate for parameters further back in their group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] / (1 + place))


class OwnBuffers(Coupled):
    """Creates momentum for the parameters with which it is built, outside `state`."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.momentum = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [(p, group) for group in self.param_groups for p in group["params"]]
        for (p, group), momentum in zip(parameters, self.momentum, strict=False):
            if p.grad is not None:
                momentum.copy_(momentum * 0.9 + p.grad)
                p.sub_(momentum * group["lr"])


class History(Coupled):
    """Keeps the last two gradients in a list."""

    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.grad is not None:
            kept = self.state[p].setdefault("kept", [])
            kept[:] = [*kept, p.grad.clone()][-2:]
            p.sub_(sum(kept) * group["lr"])


class EstimatesTogether(Coupled):
    """Like D-adaptation: adds up over all parameters, and raises the rate when the sum is large enough."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            seen = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
            group["seen"] = group.get("seen", 0.0) + seen
        super().step()


class KeepsMeans(Coupled):
    """Like SWATS: keeps a mean over each parameter."""

    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.grad is not None:
            self.state[p]["mean"] = p.grad.mean()


class Rebinds(Coupled):
    """Gives a parameter new memory, while a rank's slice keeps the old memory."""

    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        p.data = p.data.clone()


class Keeper:
    def __init__(self) -> None:
        self.sums: list[Tensor] = []


class OwnObjects(Coupled):
    """Keeps an object of an unknown class in its state."""

    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        self.state[p].setdefault("keeper", Keeper())


class Net(nn.Module):
    """A model with parameters of no, one, two, three and four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.matrix = nn.Linear(13, 17)
        self.signals = nn.Conv1d(1, 3, 2)
        self.kernels = nn.Conv2d(1, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.matrix(x) * self.scale
        return hidden + self.signals(hidden[:, None]).mean() + self.kernels(hidden[None, None]).mean()


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


REFUSED: dict[str, type[Coupled]] = {
    cls.__name__: cls
    for cls in (
        *(DecayMatricesOnly, DecayKernelsOnly, DecaySignalsOnly, DecayScalarsToo, Centralized, LargeMatricesApart),
        *(Projected, ClippedTogether, RateByPlace, OwnBuffers, History),
        *(EstimatesTogether, KeepsMeans, Rebinds, OwnObjects),
    )
}  # fmt: skip


def refused(cls: type[torch.optim.Optimizer], params: Any = None, **options: Any) -> str:
    with pytest.raises(ValueError, match=f"{cls.__name__} is not element-wise") as error:
        ZeroOptimizer(net() if params is None else params, cls, process_group=solo(), partition="element", **options)
    return str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_treats_shapes_differently_or_looks_beyond_an_element_is_refused(name: str) -> None:
    refused(REFUSED[name], **OPTIONS)


@pytest.mark.parametrize("name", ["DecayMatricesOnly", "Projected", "Centralized"])
@pytest.mark.parametrize("begin", [2, 9])
def test_so_is_one_that_begins_to_after_some_steps(name: str, begin: int) -> None:
    refused(REFUSED[name], **{**OPTIONS, "begin": begin})


def test_the_reason_says_what_was_stepped_and_when_it_differed() -> None:
    message = refused(DecayMatricesOnly, **{**OPTIONS, "begin": 2})
    found = "stepping shards of a parameter of shape (131, 137) gave different bits than stepping it whole (within 3 of"
    assert found in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_rate_so_low_that_nothing_shows_hides_nothing(dtype: torch.dtype) -> None:
    """A scheduler raises it later."""
    for rate in (0.0, 1e-9, torch.tensor(1e-9)):
        refused(DecayMatricesOnly, net().to(dtype), lr=rate, weight_decay=0.01)


class FusesDecayInSomeLengths(torch.optim.SGD):
    """Rounds once what another length has rounded twice, as a compiler does in one of two loops of a kernel."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            decay, rate = group["weight_decay"], group["lr"]
            for p in group["params"]:
                with torch.no_grad():
                    once = (p.grad.double() + p.double() * decay).float()
                    p.sub_(p.grad + p * decay if p.numel() % 4 else once, alpha=rate)


@pytest.mark.parametrize("decay", [0.1, 1e-7])
def test_a_decay_so_low_that_it_hardly_shows_hides_nothing(decay: float) -> None:
    refused(FusesDecayInSomeLengths, lr=0.5, weight_decay=decay)
    ZeroOptimizer(net(), FusesDecayInSomeLengths, process_group=solo(), lr=0.5, partition="element").close()


class FusesDecayAtLowRates(FusesDecayInSomeLengths):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(group["lr"] > 0.2 for group in self.param_groups):
            raise ValueError("too high a rate")
        super().step()


def test_it_is_raised_alone_if_the_class_refuses_a_higher_rate() -> None:
    refused(FusesDecayAtLowRates, lr=0.1, weight_decay=1e-7)


class NoHighDecays(DecayMatricesOnly):
    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"] >= 0.2:
            raise ValueError("too high a decay")
        super().couple(p, group)


class DecayByAnotherName(DecayMatricesOnly):
    def __init__(self, params: Any, lr: float = 1e-3, wd: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=wd)


class HalvesMatricesAtLowDecays(Coupled):
    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"] < 0.1 and p.ndim > 1:
            p.mul_(0.5)


def test_a_raised_decay_hides_nothing_either() -> None:
    """It may be refused, or have no argument; and the decay of the groups is tried for all steps as it is."""
    refused(NoHighDecays, lr=1e-9, weight_decay=0.01)
    refused(DecayByAnotherName, lr=1e-9, wd=0.01)
    refused(HalvesMatricesAtLowDecays, lr=0.5, weight_decay=0.01, begin=5)
    refused(DecayMatricesOnly, lr=1e4, weight_decay=1e-6, begin=5)


@pytest.mark.parametrize("decay", [-0.1, torch.tensor(0.01), torch.tensor([0.01, 0.01])])
def test_a_decay_may_be_any_number_or_tensor(decay: Any) -> None:
    found = DecaysByTensor([torch.zeros(1)], decay).param_groups[0]["weight_decay"]
    assert found is decay
    ZeroOptimizer(net(), DecaysByTensor, process_group=solo(), partition="element", weight_decay=decay).close()


class DecaysByTensor(torch.optim.Optimizer):
    def __init__(self, params: Any, weight_decay: Any) -> None:
        super().__init__(params, {"weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad).mul_(1 - torch.as_tensor(group["weight_decay"]).sum())


class HalvesMatricesAtLowRates(Coupled):
    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if group["lr"] < 0.1 and p.ndim > 1:
            p.mul_(0.5)


def test_the_rate_of_the_groups_is_tried_as_it_is() -> None:
    refused(HalvesMatricesAtLowRates, lr=1e-3)
    refused(HalvesMatricesAtLowRates, lr=1e-6)


class NoHighRates(Coupled):
    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if group["lr"] > 0.1:
            raise ValueError("too high a rate")


class RateByAnotherName(torch.optim.SGD):
    def __init__(self, params: Any, rate: float = 1e-6) -> None:
        super().__init__(params, lr=rate)


@pytest.mark.parametrize("cls", [NoHighRates, RateByAnotherName])
def test_a_class_that_takes_no_other_rate_trains_as_ever(cls: type[torch.optim.Optimizer]) -> None:
    model, plain = net(), net()
    options = {"lr": 1e-6} if cls is NoHighRates else {}
    optimizer, expected = ZeroOptimizer(model, cls, process_group=solo(), **options), cls(plain.parameters(), **options)
    for trained, stepped in ((model, optimizer), (plain, expected)):
        trained.scale.square().sum().backward()
        stepped.step()
    assert_same_bits(model.scale.detach(), plain.scale.detach())


class LargeMatricesWhereAsked(Coupled):
    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"] and p.ndim == 2 and min(p.shape) > 64:
            p.sub_(p.mean())


@pytest.mark.parametrize("matrices_first", [True, False])
def test_the_order_of_the_groups_hides_nothing(matrices_first: bool) -> None:
    model = net()
    groups = [
        {"params": [model.matrix.weight], "weight_decay": 0.1},
        {"params": [model.matrix.bias], "weight_decay": 0.0},
    ]
    refused(LargeMatricesWhereAsked, groups if matrices_first else groups[::-1], lr=0.05)


class SparesSingleElements(Coupled):
    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.numel() > 1:
            p.mul_(0.9)


def test_a_vector_of_one_element_is_tried_where_there_is_one() -> None:
    refused(SparesSingleElements, [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(1))])


def test_the_options_of_every_group_count() -> None:
    model = net()
    groups = [
        {"params": list(model.matrix.parameters()), "weight_decay": 0.0},
        {"params": list(model.kernels.parameters()), "weight_decay": 0.1},
    ]
    refused(DecayMatricesOnly, groups, lr=0.05)
    groups = [{**group, "weight_decay": 0.0} for group in groups]
    ZeroOptimizer(groups, DecayMatricesOnly, process_group=solo(), lr=0.05).close()


def test_so_do_those_of_groups_that_are_added_or_loaded() -> None:
    model = net()
    optimizer = ZeroOptimizer(
        [model.matrix.weight], DecayMatricesOnly, process_group=solo(), partition="element", lr=0.05
    )
    with pytest.raises(ValueError, match="DecayMatricesOnly is not element-wise"):
        optimizer.add_param_group({"params": [model.kernels.weight], "weight_decay": 0.1})
    saved = optimizer.state_dict()
    saved["param_groups"][0]["weight_decay"] = 0.1
    with pytest.raises(ValueError, match="DecayMatricesOnly is not element-wise"):
        optimizer.load_state_dict(saved)
    optimizer.load_state_dict(optimizer.state_dict())


# -- refusals of a class itself ----------------------------------------------------------------------------------------


class NoKernels(Coupled):
    """Refuses parameters of four dimensions, when it is built."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if any(p.ndim == 4 for p in self.param_groups[-1]["params"]):
            raise ValueError("no kernels, please")


class NoScalars(Coupled):
    """Refuses parameters without dimensions, in a step."""

    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.ndim == 0:
            raise RuntimeError("no scalars, please")


@pytest.mark.parametrize("cls", [NoKernels, NoScalars])
def test_a_shape_that_the_class_refuses_and_the_groups_do_not_have_is_left_out(cls: type[Coupled]) -> None:
    ZeroOptimizer(net().matrix, cls, process_group=solo(), begin=3).close()


def test_one_that_the_groups_have_is_the_class_s_own_error() -> None:
    with pytest.raises(ValueError, match=r"NoKernels refuses 'kernels.weight', of shape .*: no kernels, please. Pass"):
        ZeroOptimizer(net(), NoKernels, process_group=solo())
    with pytest.raises(ValueError, match=r"NoScalars refuses 'scale', of shape \(\): no scalars, please. Pass"):
        ZeroOptimizer(net(), NoScalars, process_group=solo(), begin=3)


def test_every_rank_is_told() -> None:
    def program(transport: Transport) -> str:
        return refused_on(transport, DecayMatricesOnly)

    assert all("is not element-wise" in message for message in on_threads(2, program))


def refused_on(transport: Transport, cls: type[Coupled]) -> str:
    with pytest.raises(ValueError, match="element-wise") as error:
        ZeroOptimizer(net(), cls, process_group=transport, partition="element", **OPTIONS)
    return str(error.value)


@pytest.mark.parametrize(
    ("cls", "said"),
    [(torch.optim.LBFGS, "closure"), (torch.optim.SparseAdam, "dense")],
)
def test_a_class_that_cannot_be_tried_says_why(cls: type[torch.optim.Optimizer], said: str) -> None:
    assert said in refused(cls)


# -- accepted classes --------------------------------------------------------------------------------------------------

VARIANTS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    **CLASSES,
    **FOR_LOOP,
    "a rate in a tensor": (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "maximize": (torch.optim.Adam, {"maximize": True, "amsgrad": True, "foreach": True}),
    "decoupled nadam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "decoupled radam": (torch.optim.RAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "foreach": True}),
    "adagrad fused": (torch.optim.Adagrad, {"fused": True, "initial_accumulator_value": 0.1}),
    "averaged": (torch.optim.ASGD, {"t0": 3.0, "foreach": True}),
}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.float64)),
    ],
)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_element_wise_class_is_taken_in_every_path(name: str, dtype: torch.dtype) -> None:
    cls, options = VARIANTS[name]
    ZeroOptimizer(net().to(dtype), cls, process_group=solo(), **copy.deepcopy(options)).close()


class BoundedByFirstRate(Coupled):
    """Like AdaBound: keeps the rates that its groups had at construction, outside the groups."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.first = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.clamp(-1, 1) * (group["lr"] / self.first[0]))


def test_a_class_that_keeps_its_first_rate_is_taken_where_groups_have_that_of_the_arguments() -> None:
    ZeroOptimizer(net(), BoundedByFirstRate, process_group=solo(), lr=1e-3).close()
    ZeroOptimizer(net(), BoundedByFirstRate, process_group=solo(), lr=torch.tensor(1e-3)).close()
    refused(BoundedByFirstRate, [{"params": list(net().parameters()), "lr": 0.5}], lr=1e-3)


def test_groups_of_several_dtypes_are_tried_together() -> None:
    model = net()
    model.kernels.to(torch.bfloat16)
    groups = [{"params": list(model.matrix.parameters()), "lr": 0.1}, {"params": list(model.kernels.parameters())}]
    for cls in (torch.optim.AdamW, torch.optim.Adagrad):
        ZeroOptimizer(copy.deepcopy(groups), cls, process_group=solo()).close()
    refused(Projected, groups)


# -- a trial has no side effects ---------------------------------------------------------------------------------------


class Noisy(Coupled):
    def couple(self, p: Tensor, group: dict[str, Any]) -> None:
        p.add_(torch.randn_like(p))


def test_neither_the_random_generator_nor_what_the_user_gave_changes() -> None:
    rate, model = torch.tensor(1e-3), net()
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    ZeroOptimizer(model, process_group=solo(), lr=rate).close()
    refused(Noisy)
    assert torch.equal(torch.get_rng_state(), state)
    assert rate == 1e-3
    for p, value in zip(model.parameters(), before, strict=True):
        assert_same_bits(p, value)
        assert p.grad is None


def test_groups_of_equal_options_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def parameters(options: Callable[[int], dict[str, Any]]) -> int:
        """Return the most parameters with which an instance was ever built."""
        built: list[int] = []

        class Counting(torch.optim.AdamW):
            def __init__(self, params: Any, **options: Any) -> None:
                super().__init__(params, **options)
                built.append(sum(len(group["params"]) for group in self.param_groups))

        groups = [{"params": [nn.Parameter(torch.zeros(3, 3))], **options(number)} for number in range(6)]
        ZeroOptimizer(groups, Counting, process_group=solo()).close()
        return max(built)

    once = parameters(lambda _: {})
    assert parameters(lambda number: {"lr": 0.1, "betas": (0.9, 0.5)}) == once
    assert parameters(lambda number: {"weight_decay": number % 2}) == 2 * once
    assert parameters(lambda number: {"lr": torch.tensor(0.1)}) == once
    assert parameters(lambda number: {"betas": (0.9, number / 10)}) == 6 * once
