"""Each param group has a class of its own, with the bits of a plain loop that has an optimizer of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from collectives import Transport, solo
from zero import ZeroOptimizer

from ..support.loops import Several
from ..support.plain import assert_same_model, assert_same_states
from ..support.rows import rows
from ..support.shampoo import Shampoo
from .refused import Gathers, Shares, TakesModel, Wraps
from .whole import Mixed, Named, batches, groups_of, made, on_ranks, shared, train, train_plainly

pytestmark = pytest.mark.filterwarnings("ignore:Muon is not element-wise")
MUON, ADAMW = (f"{cls.__module__}.{cls.__qualname__}" for cls in (torch.optim.Muon, torch.optim.AdamW))


def test_groups_have_the_defaults_of_their_class_and_schedulers_move_all() -> None:
    model = made(Mixed)
    optimizer = ZeroOptimizer(groups_of(model), module=model, process_group=solo())
    muon, adamw = torch.optim.Muon([torch.zeros(2, 2)]).defaults, torch.optim.AdamW([torch.zeros(1)]).defaults
    given = {"params", "param_names", "optimizer_class"}
    assert [group.keys() - given for group in optimizer.param_groups] == [muon.keys(), adamw.keys(), adamw.keys()]
    assert [group["optimizer_class"] for group in optimizer.param_groups] == [MUON, ADAMW, ADAMW]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, range(1))
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.005, 0.0025]
    assert "Muon and AdamW" in repr(optimizer) or "AdamW and Muon" in repr(optimizer)
    saved = optimizer.state_dict()
    wrong: list[tuple[Any, str]] = [
        (saved[ADAMW], f"one dict for each class, by its name: {MUON}, {ADAMW}; it has 'state', 'param_groups'"),
        ({MUON: saved[MUON]}, "one dict for each class"),
        ({MUON: saved[MUON], ADAMW: {**saved[ADAMW], "param_groups": []}}, f"has 0 param groups of {ADAMW}"),
        ({MUON: saved[ADAMW], ADAMW: saved[MUON]}, f"has 2 param groups of {MUON}, this optimizer 1"),
    ]
    for dicts, said in wrong:
        with pytest.raises(ValueError, match=said):
            optimizer.load_state_dict(dicts)
    optimizer.load_state_dict(saved)
    for group, name in ((1, None), (0, ADAMW), (1, "SGD")):  # the class of a live group cannot be edited
        kept = dict(optimizer.param_groups[group])
        optimizer.param_groups[group]["optimizer_class"] = name
        model(batches(0)[0]).sum().backward()
        with pytest.raises(RuntimeError, match=f"param group {group} is stepped by torch.optim"):
            optimizer.step()
        optimizer.param_groups[group].update(kept)
        optimizer.zero_grad()
    train(model, optimizer, range(1))


# -- arguments of the constructor alone --------------------------------------------------------------------------------


class Scaled(torch.optim.SGD):
    """Its updates are scaled by what its constructor was given, which no param group holds."""

    def __init__(self, params: Any, lr: float = 0.05, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(params, lr, **kwargs)
        self.scale = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.scale * group["lr"] * parameter.grad)


class Popping(Scaled):
    def __init__(self, params: Any, lr: float, **kwargs: Any) -> None:
        super().__init__(params, lr, scale=kwargs.pop("factor", 1.0))


@pytest.mark.parametrize(
    ("stage", "cls", "given"),
    rows(
        [pytest.param(3, Popping, {"lr": 0.1, "factor": 0.5}, id="3-Popping-given1")],
        [pytest.param(1, torch.optim.Adagrad, {"initial_accumulator_value": 0.5}, id="1-Adagrad-given0")],
    ),
)
def test_what_a_group_gives_its_class_reaches_the_constructor(stage: int, cls: Any, given: Any, tmp_path: Path) -> None:
    """Its param groups and its dict are those of the class that is built with these arguments.

    A group without a class has the main one, and one that is added may have another.
    """
    plain = made(Mixed)
    matrices, rest = shared(plain)
    sgd, shampoo = torch.optim.SGD([p for _, p in rest], momentum=0.9), Shampoo([p for _, p in matrices[2:]])
    stepped = cls(matrices[:2], **given)
    train_plainly(plain, Several(sgd, stepped, shampoo), range(3))
    name = f"{cls.__module__}.{cls.__qualname__}"

    def run(model: nn.Module, transport: Transport) -> Any:
        matrices, rest = shared(model)
        groups = [{"params": rest}, {"params": matrices[:2], "optimizer_class": cls, "layer": "block", **given}]
        arguments: dict[str, Any] = {"momentum": 0.9, "module": model, "stage": stage, "process_group": transport}
        optimizer = ZeroOptimizer(groups, torch.optim.SGD, **arguments)
        optimizer.add_param_group({"params": matrices[2:], "optimizer_class": Shampoo, "partition": "parameter"})
        assert "optimizer_class" not in optimizer.param_groups[0]
        assert optimizer.param_groups[0]["momentum"] == 0.9
        assert optimizer.param_groups[2]["lr"] == shampoo.defaults["lr"]
        assert "nesterov" not in optimizer.param_groups[2]
        train(model, optimizer, range(2))
        zero.save(tmp_path / "saved", optimizer)
        zero.load(tmp_path / "saved", optimizer, rng=False)
        train(model, optimizer, range(2, 3))
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()[name]
        optimizer.close()
        return model, states

    for model, states in on_ranks(3, run):
        assert_same_model(model, plain)
        assert_same_states(states, stepped.state_dict())
        (group,) = states["param_groups"]
        assert group.keys() == {*stepped.state_dict()["param_groups"][0], "optimizer_class", "param_names", "layer"}


# -- options without which a class takes no parameters -----------------------------------------------------------------


class Flagged(torch.optim.Optimizer):
    """Wants a flag in each group, as classes of Muon's kind do: for matrices, which it normalizes, or the rest."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        for group in params:
            if "matrices" not in group:
                raise ValueError("'matrices' must be set")
            if unknown := group.keys() - {"params", "matrices", "lr"}:
                raise ValueError(f"{unknown} are no options")
            group["lr"] = group.get("lr", lr if group["matrices"] else lr / 2)
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if group["matrices"]:
                        rows, columns = p.shape
                        p.grad.div_(p.grad.norm() * columns / rows + 1e-6)
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.sub_(momentum.mul_(0.9).add_(p.grad) * group["lr"])


@pytest.mark.first(2)
@pytest.mark.filterwarnings("ignore:Flagged is not element-wise")
@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 4), (2, 3), (3, 3)])
def test_a_class_that_wants_an_option_in_each_group_is_sharded(stage: int, ranks: int) -> None:
    """As the class of all groups, and as that of one."""

    def given(model: nn.Module, named: dict[str, Any]) -> list[dict[str, Any]]:
        matrices, rest = shared(model)
        rest_of = {"params": rest} if named else {"params": rest, "matrices": False, "lr": 0.01}
        return [{"params": matrices, "matrices": True, **named}, rest_of]

    for named, main in (({}, Flagged), ({"optimizer_class": Flagged}, torch.optim.Adagrad)):
        plain = made(Mixed)
        first, last = ([p for _, p in params] for params in shared(plain))
        both = [{"params": first, "matrices": True}, {"params": last, "matrices": False, "lr": 0.01}]
        stepped: Any = Several(Flagged(both[:1]), torch.optim.Adagrad(last, lr=0.03)) if named else Flagged(both, 0.03)
        train_plainly(plain, stepped, range(3))

        def run(model: nn.Module, transport: Transport, named: Any = named, main: Any = main) -> nn.Module:
            arguments: dict[str, Any] = {"module": model, "stage": stage, "process_group": transport, "lr": 0.03}
            optimizer = ZeroOptimizer(given(model, named), main, **arguments)
            train(model, optimizer)
            optimizer.close()
            return model

        for model in on_ranks(ranks, run):
            assert_same_model(model, plain)


@pytest.mark.filterwarnings("ignore:Flagged is not element-wise")
def test_options_that_a_scheduler_adds_are_no_arguments_of_a_class_that_knows_its_options(tmp_path: Path) -> None:
    """A checkpoint and a dict of a training with a scheduler are loaded without one."""

    def begun() -> tuple[nn.Module, ZeroOptimizer]:
        model = made(Mixed)
        groups = [{"params": params, "matrices": not n} for n, params in enumerate(shared(model))]
        return model, ZeroOptimizer(groups, Flagged, module=model, stage=2, process_group=solo())

    model, optimizer = begun()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, range(1))
    scheduler.step()
    zero.save(tmp_path / "saved", optimizer)
    state_dict, weights = optimizer.state_dict(), {name: p.clone() for name, p in model.state_dict().items()}
    train(model, optimizer, range(1, 2))
    for from_dict in (False, True):
        other, again = begun()
        if from_dict:
            other.load_state_dict(weights)
            again.load_state_dict(state_dict)
        else:
            zero.load(tmp_path / "saved", again, rng=False)
        assert [group["lr"] for group in again.param_groups] == [0.025, 0.0125]
        train(other, again, range(1, 2))
        assert_same_model(other, model)


# -- arguments with the names of ours ----------------------------------------------------------------------------------


class Ours(torch.optim.SGD):
    """Its arguments, options of param groups but for the last, have names of the library's own."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.05,
        stage: float = 0,
        partition: float = 1,
        divisor: float = 1,
        units: float = 1,
    ) -> None:
        super().__init__(params, lr, momentum=0.9)
        for key, value in {"stage": stage, "partition": partition, "divisor": divisor}.items():
            self.defaults[key] = value
            for group in self.param_groups:
                group.setdefault(key, value)
        self.units = units

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    scale = (group["stage"] - group["partition"]) / group["divisor"] * self.units
                    parameter.sub_(scale * group["lr"] * parameter.grad)


OURS: dict[str, Any] = {"stage": 3.5, "partition": 0.25, "divisor": 1.5, "units": 0.75}


@pytest.mark.parametrize(("stage", "ranks"), rows([(3, 3)], [(0, 2), (1, 5), (2, 6), (3, 1)]))
def test_arguments_that_have_names_of_ours_reach_the_class(stage: int, ranks: int, tmp_path: Path) -> None:
    """The library's partition of a group is beside the class's option of that name. Checkpoints hold the option."""

    def groups(model: nn.Module, **ours: Any) -> list[dict[str, Any]]:
        matrices, rest = shared(model)
        return [{"params": matrices, "stage": 2.5, **ours}, {"params": rest}]

    plain = made(Mixed)
    stepped = Ours(groups(plain), **OURS)
    train_plainly(plain, stepped, range(3))

    def run(model: nn.Module, transport: Transport) -> Any:
        listed = groups(model, partition="parameter")
        arguments: dict[str, Any] = {"module": model, "stage": stage, "process_group": transport}
        optimizer = ZeroOptimizer(listed, Ours, **arguments, lr=0.05, optimizer_kwargs=OURS)
        assert [group["partition"] for group in optimizer.param_groups] == [0.25, 0.25]
        train(model, optimizer, range(2))
        zero.save(tmp_path / "saved", optimizer)
        zero.load(tmp_path / "saved", optimizer, rng=False)
        train(model, optimizer, range(2, 3))
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        optimizer.close()
        return model, states

    for model, states in on_ranks(ranks, run):
        assert_same_model(model, plain)
        for mine, theirs in zip(states["param_groups"], stepped.state_dict()["param_groups"], strict=True):
            assert {key: mine[key] for key in theirs} == theirs


# -- errors ------------------------------------------------------------------------------------------------------------


def another_sgd(rate: float) -> type[torch.optim.Optimizer]:
    class Opt(torch.optim.SGD):
        factor = rate

    return Opt


MATRICES, REST = shared(made(Mixed))
OPT = torch.optim


def of(cls: Any, params: Named = MATRICES, **options: Any) -> dict[str, Any]:
    return {"params": params, "optimizer_class": cls, **options}


ERRORS: list[tuple[list[dict[str, Any]], Any, type[Exception], str]] = [  # groups, main class
    (
        [{"params": REST}, of(OPT.Optimizer)],
        OPT.AdamW,
        TypeError,
        "1: optimizer_class is Optimizer, which is abstract",
    ),
    ([{"params": REST}, of(OPT.LBFGS)], OPT.AdamW, ValueError, "LBFGS cannot be sharded: .*closure"),
    ([{"params": REST}, of(OPT.Muon, fused=True)], None, ValueError, "param group 1: Muon has no option 'fused'"),
    ([{"params": REST + MATRICES[:1]}, of(OPT.Muon)], None, ValueError, r"'blocks.0.0.weight' is listed twice"),
    ([of(OPT.Muon, MATRICES + REST[1:2])], None, ValueError, r"Muon refuses 'first.bias', of shape"),
    ([{"params": REST}, of(another_sgd(1.0))], another_sgd(2.0), ValueError, r"two classes have .*Opt.*rename one"),
    ([of(Flagged)], None, ValueError, "param group 0: Flagged cannot be built with its options"),
    ([{"params": REST, "matrices": False}, {"params": MATRICES}], Flagged, ValueError, "'matrices' must be set"),
    ([{"params": REST}], Wraps, TypeError, "Wraps takes another optimizer in the place of parameters: name the class"),
    ([of(Shares)], None, TypeError, "0: optimizer_class is Shares, whose param groups are those of another optimizer"),
    ([{"params": REST}], TakesModel, TypeError, "TakesModel takes a model, so ranks cannot step shards"),
    (
        [of(Gathers)],
        None,
        TypeError,
        r"0: optimizer_class is Gathers, whose step\(\) calls all_gather of torch.distrib",
    ),
    ([of(Popping)], None, ValueError, "param group 0: Popping cannot be built with its options .*'lr'"),
    *[
        (
            [of(Scaled, MATRICES[:2], scale=0.5), of(Scaled, MATRICES[2:], **other)],
            None,
            ValueError,
            "1: scale of Scaled",
        )
        for other in ({"scale": 2.0}, {})
    ],
]


class Takes(Scaled):
    """A class with an option that the library has for its own."""

    def __init__(self, params: Any, optimizer_class: str = "") -> None:
        super().__init__(params)
        self.defaults["optimizer_class"] = optimizer_class


KWARGS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [  # class, arguments
    (OPT.SGD, {"lr": 0.1, "optimizer_kwargs": {"lr": 0.1}}, TypeError, "'lr' is given twice, in optimizer_kwargs and"),
    (OPT.SGD, {"optimizer_kwargs": [("lr", 0.1)]}, TypeError, "optimizer_kwargs must be a dict of arguments by name"),
    (OPT.SGD, {"optimizer_kwargs": {"stage": 1}}, TypeError, "stage"),
    (Takes, {"optimizer_kwargs": {"optimizer_class": "x"}}, ValueError, "Takes has an option 'optimizer_class'"),
]


def test_arguments_of_the_class_are_given_once_and_are_its_own() -> None:
    for cls, arguments, error, said in KWARGS:
        with pytest.raises(error, match=said):
            ZeroOptimizer(made(Mixed), cls, process_group=solo(), **arguments)


def test_what_cannot_be_is_an_error_that_names_the_group() -> None:
    for groups, main, error, said in ERRORS:
        with pytest.raises(error, match=said):
            ZeroOptimizer(groups, *([main] if main else []), process_group=solo())
