"""A class that updates pieces otherwise than whole parameters, or a parameter by others, is refused by name."""

from __future__ import annotations

import re
import warnings
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

from ..support.blockwise import Blockwise
from ..support.errors import assert_in_order, error_of, errors_on
from ..support.models import seeded
from ..support.narrowed import BF16, FP32
from ..support.parts import parts_of
from ..support.plain import assert_same_bits
from ..support.rows import ALL, rows
from ..support.shampoo import Shampoo
from ..support.sides import Side, same_as_plain
from ..support.updates import Updates
from ..support.warned import own
from .optimizers import (
    ALONE,
    OPTIONS,
    TOGETHER,
    Centralized,
    Coupled,
    DecayMatricesOnly,
    Draws,
    OwnCounter,
    coupled,
    net,
)
from .whole import made

pytestmark = [pytest.mark.usefixtures("every_trial_runs"), pytest.mark.filterwarnings("ignore:.* is not element-wise")]
OPT = torch.optim


class FusesDecayInSomeLengths(Updates, OPT.SGD):
    """Rounds once what another length has rounded twice, as a compiler does in one of two loops of a kernel."""

    most = 1.0

    def update(self, p: Any, group: dict[str, Any]) -> None:
        decay, rate = group["weight_decay"], group["lr"]
        if rate > self.most:
            raise ValueError("too high a rate")
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


BEYOND: list[tuple[Any, Any, dict[str, Any]]] = [  # class, parameters (None: of the net), options
    *[(cls, None, OPTIONS) for cls in (*ALONE.values(), *TOGETHER.values())],
    # it begins to after some steps
    *[(ALONE[name], None, {**OPTIONS, "begin": 9}) for name in ("DecayMatricesOnly", "Centralized")],
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
    # states in blocks are as large as the parameter
    *[
        (Blockwise, lambda shape=shape: [nn.Parameter(torch.zeros(shape))], {})
        for shape in ((64, 64), 4096, (100, 300))
    ],
]
FURTHER = ("DecayMatricesOnly", "FusesDecayInSomeLengths")


def by_element(params: Any, cls: Any, **options: Any) -> ZeroOptimizer:
    return ZeroOptimizer(params, cls, process_group=solo(), partition="element", **options)


def refused(cls: Any, params: Any = None, **options: Any) -> str:
    """Assert that a class is refused if asked to be cut between elements. Return the error."""
    error = error_of(by_element, net() if params is None else params, cls, **options)
    assert f"{cls.__name__} is not element-wise" in error
    return error


@pytest.mark.parametrize(
    "row", [row for row in BEYOND if ALL or row[0].__name__ not in FURTHER], ids=lambda row: row[0].__name__
)
def test_a_class_that_looks_beyond_an_element_is_refused(row: Any) -> None:
    cls, params, options = row
    refused(cls, None if params is None else params(), **options)


def test_the_reason_says_what_was_stepped_and_every_rank_is_told() -> None:
    options: dict[str, Any] = {**OPTIONS, "begin": 2, "partition": "element"}
    messages = errors_on(2, lambda group: ZeroOptimizer(net(), DecayMatricesOnly, process_group=group, **options))
    found = "stepping shards of a parameter of shape (131, 137) gave different bits than stepping it whole (within 3 of"
    assert all(found in message for message in messages), messages
    assert_in_order("its state 'momentum' is a Blocks … or use \"parameter\"", refused(Blockwise, nn.Linear(64, 64)))


def test_groups_that_are_added_or_loaded_are_tried_too() -> None:
    model = net()
    optimizer = by_element([model.matrix.weight], DecayMatricesOnly, lr=0.05)
    words, group = "DecayMatricesOnly is not element-wise", {"params": [model.kernels.weight], "weight_decay": 0.1}
    assert words in error_of(optimizer.add_param_group, group)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["weight_decay"] = 0.1
    assert words in error_of(optimizer.load_state_dict, saved)
    optimizer.load_state_dict(optimizer.state_dict())
    ZeroOptimizer(two_groups(0.0, 0.0), DecayMatricesOnly, process_group=solo(), lr=0.05).close()


def test_what_the_class_refuses_is_left_out_unless_the_groups_have_it() -> None:
    ZeroOptimizer(net().matrix, NoKernels, process_group=solo(), begin=3).close()
    words = "NoKernels refuses 'kernels.weight', of shape … : no, please. Pass"
    assert_in_order(words, error_of(ZeroOptimizer, net(), NoKernels, process_group=solo(), begin=3))


class RateByAnotherName(OPT.SGD):
    def __init__(self, params: Any, rate: float = 1e-6) -> None:
        super().__init__(params, lr=rate)


def test_a_class_that_takes_no_other_rate_trains_as_ever() -> None:
    for cls, options in ((NoHighRates, {"lr": 1e-6}), (RateByAnotherName, {})):
        model, plain = net(), net()
        ours, theirs = ZeroOptimizer(model, cls, process_group=solo(), **options), cls(plain.parameters(), **options)
        for trained, optimizer in ((model, ours), (plain, theirs)):
            trained.scale.square().sum().backward()
            optimizer.step()
        assert_same_bits(model.scale.detach(), plain.scale.detach())


def test_a_trial_changes_neither_the_random_generator_nor_what_the_user_gave() -> None:
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
    refused(Centralized, groups)
    ZeroOptimizer(groups, OPT.Adagrad, process_group=solo()).close()


def test_a_class_is_partitioned_by_parameter_where_it_must_be() -> None:
    def whole(optimizer: ZeroOptimizer) -> set[bool]:
        return {spec.grain.unit == "parameter" for spec in parts_of(optimizer).storage.layout.parameters}

    with pytest.warns(UserWarning, match=r'Adafactor is not element-wise .*\(partition="parameter"\)') as said:
        optimizer = ZeroOptimizer(made(), OPT.Adafactor, process_group=solo())
    assert [warning.filename for warning in own(said)] == [__file__]
    assert whole(optimizer) == {True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for asked in (None, "element"):
            assert whole(ZeroOptimizer(made(), OPT.AdamW, process_group=solo(), partition=asked)) == {False}
    for partition in ("rows", 1, ""):
        of_group: Any = [{"params": list(made().parameters()), "partition": partition}]
        for params, arguments in ((made(), {"partition": partition}), (of_group, {})):
            error = error_of(ZeroOptimizer, params, OPT.AdamW, process_group=solo(), **arguments)
            assert_in_order('"element" … or "parameter" … param group 0', error)


def steps(name: str, step: Callable[[list[Any], dict[str, Any], Any], object]) -> type[OPT.SGD]:
    """Return a class that calls ``step(parameters, group, states)`` for each group."""

    @torch.no_grad()
    def run(self: OPT.SGD, closure: Any = None) -> None:
        for group in self.param_groups:
            step(group["params"], group, self.state)

    return type(name, (OPT.SGD,), {"step": run})


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
    (OPT.SparseAdam, net, {}, r"SparseAdam cannot be sharded: .*dense"),
    (OPT.Muon, net, {}, r"Muon refuses 'scale', of shape \(\): .*2D"),
    (steps("Stacks", as_one_of_its_shape), lambda: nn.Linear(3, 5, bias=False), {}, "Stacks cannot be sharded"),
    (steps("Looks", after_a_look_at_the_first), lambda: nn.Linear(3, 5), {}, "a step over no parameter failed"),
    (Draws, net, {}, r"Draws cannot be sharded: .*; it draws random numbers\).*: name another class"),
    (OwnCounter, net, {}, "OwnCounter cannot be sharded: .* owns none, and its state has the key 'steps', which is no"),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0].__name__)
def test_a_class_that_looks_at_other_parameters_is_an_error(row: Any) -> None:
    cls, build, options, words = row
    for partition in (None, "parameter") if cls in TOGETHER.values() else ("parameter",):
        assert re.search(
            words, error_of(ZeroOptimizer, build(), cls, process_group=solo(), partition=partition, **options)
        )


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
    (OPT.AdamW, "cpu", {}, LOOPS + ", or fused=True$"),
    (OPT.RMSprop, "cpu", {}, LOOPS + "$"),
    (OPT.AdamW, "cpu", {"foreach": False}, "^other bits$"),
    (OPT.AdamW, "cuda:1", {}, "^other bits$"),
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
    return [{"params": [p for p in model.parameters() if p.dtype is dtype]} for dtype in (BF16, FP32)]


def eps_of_the_first(parameters: list[Any], group: dict[str, Any], _: Any) -> None:
    """Take a lower bound from the dtype of the first parameter for all, as Adafactor does."""
    for p in parameters:
        if p.grad is not None:
            p.sub_(group["lr"] * p.grad / p.grad.abs().clamp(min=torch.finfo(parameters[0].dtype).eps))


@pytest.mark.parametrize("cls", [OPT.Adafactor, steps("KeepsEps", eps_of_the_first)])
def test_a_class_that_keeps_something_of_one_dtype_for_others_is_refused_if_a_group_has_several(cls: Any) -> None:
    words = f"{cls.__name__} steps '.*', in torch.float32, in another way if its param group has other dtypes, too"
    for message in errors_on(2, lambda t: ZeroOptimizer(TwoDtypes(), cls, lr=0.1, process_group=t)):
        assert re.search(words, message)
    optimizer = ZeroOptimizer(nn.Linear(5, 33), cls, lr=0.1, process_group=solo())
    assert re.search(words, error_of(optimizer.add_param_group, {"params": list(TwoDtypes().parameters())}))
    assert len(optimizer.param_groups) == 1
    optimizer.close()


BY_DTYPE, BY_EPS = (by_dtype, {}), (None, {"eps": (1e-7, 1e-3)})


@pytest.mark.parametrize(("stage", "given"), rows([(1, BY_EPS), (3, BY_DTYPE)], [(0, BY_DTYPE), (2, BY_EPS)]))
def test_with_a_group_for_each_dtype_or_its_eps_adafactor_has_the_plain_bits(stage: int, given: Any) -> None:
    groups, options = given

    def loop(side: Side) -> None:
        for _ in range(3):
            side.train(lambda model, rank: model(rank))
            side.step()
            side.clear()

    named = {"settings": {"stage": stage}, "groups": groups, "lr": 0.1, **options}
    same_as_plain(loop, lambda: seeded(0, TwoDtypes), OPT.Adafactor, 1 + stage % 3, **named)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_kernel_that_leaves_elements_out_is_refused_by_name(dtype: torch.dtype) -> None:
    """Torch's fused SGD in 16 bits: it reads momentum beyond the end of a tensor, so no rank could have its bits."""
    model, given = nn.Linear(40, 3).to(dtype), {"lr": 0.1, "fused": True, "process_group": solo()}
    for options in ({"momentum": 0.9}, {}):
        words = r"SGD steps \d+ of 33 elements of a tensor in .* as 'weight' is: .*fused="
        assert re.search(words, error_of(ZeroOptimizer, model, OPT.SGD, **given, **options))
    ZeroOptimizer(model, OPT.AdamW, **given).close()
    mixed = MixedPrecision(dtype)
    ZeroOptimizer(nn.Linear(40, 3), OPT.SGD, mixed_precision=mixed, momentum=0.9, **given).close()
