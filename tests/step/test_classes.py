"""Each param group has a class of its own: its defaults, its arguments, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from collectives import solo
from zero import ZeroOptimizer

from ..support.errors import assert_in_order, error_of
from ..support.machine.classes import name_of
from ..support.plain import assert_same_model
from ..support.sides import OnRank
from .optimizers import Flagged, Gathers, Popping, Scaled, Shares, TakesModel, Wraps
from .whole import Mixed, Named, groups_of, made, shared, train

pytestmark = pytest.mark.filterwarnings("ignore:.* is not element-wise")
OPT = torch.optim
MUON, ADAMW = name_of(OPT.Muon), name_of(OPT.AdamW)


def test_groups_have_the_defaults_of_their_class_and_schedulers_move_all() -> None:
    model = made(Mixed)
    optimizer = ZeroOptimizer(groups_of(model), module=model, process_group=solo())
    muon, adamw = OPT.Muon([torch.zeros(2, 2)]).defaults, OPT.AdamW([torch.zeros(1)]).defaults
    given = {"params", "param_names", "optimizer_class"}
    assert [group.keys() - given for group in optimizer.param_groups] == [muon.keys(), adamw.keys(), adamw.keys()]
    assert [group["optimizer_class"] for group in optimizer.param_groups] == [MUON, ADAMW, ADAMW]
    scheduler = OPT.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(OnRank(model, optimizer), range(1))
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
    for dicts, words in wrong:
        assert words in error_of(optimizer.load_state_dict, dicts)
    optimizer.load_state_dict(saved)
    for group, name in ((1, None), (0, ADAMW), (1, "SGD")):  # the class of a live group cannot be edited
        kept = dict(optimizer.param_groups[group])
        optimizer.param_groups[group]["optimizer_class"] = name
        assert f"param group {group} is stepped by torch.optim" in error_of(optimizer.step)
        optimizer.param_groups[group].update(kept)
    train(OnRank(model, optimizer), range(1))


def test_options_that_a_scheduler_adds_are_no_arguments_of_a_class_that_knows_its_options(tmp_path: Path) -> None:
    """A checkpoint and a dict of a training with a scheduler are loaded without one."""

    def begun() -> tuple[Any, ZeroOptimizer]:
        model = made(Mixed)
        groups = [{"params": params, "matrices": not n} for n, params in enumerate(shared(model))]
        return model, ZeroOptimizer(groups, Flagged, module=model, stage=2, process_group=solo())

    model, optimizer = begun()
    scheduler = OPT.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(OnRank(model, optimizer), range(1))
    scheduler.step()
    zero.save(tmp_path / "saved", optimizer)
    state_dict, weights = optimizer.state_dict(), {name: p.clone() for name, p in model.state_dict().items()}
    train(OnRank(model, optimizer), range(1, 2))
    for from_dict in (False, True):
        other, again = begun()
        if from_dict:
            other.load_state_dict(weights)
            again.load_state_dict(state_dict)
        else:
            zero.load(tmp_path / "saved", again, rng=False)
        assert [group["lr"] for group in again.param_groups] == [0.025, 0.0125]
        train(OnRank(other, again), range(1, 2))
        assert_same_model(other, model)


def another_sgd(rate: float) -> type[OPT.Optimizer]:
    class Opt(OPT.SGD):
        factor = rate

    return Opt


class Takes(Scaled):
    """A class with an option that the library has for its own."""

    def __init__(self, params: Any, optimizer_class: str = "") -> None:
        super().__init__(params)
        self.defaults["optimizer_class"] = optimizer_class


MATRICES, REST = shared(made(Mixed))
MODEL: list[dict[str, Any]] = [{"params": REST}]


def of(cls: Any, params: Named = MATRICES, **options: Any) -> dict[str, Any]:
    return {"params": params, "optimizer_class": cls, **options}


ERRORS: list[tuple[list[dict[str, Any]], Any, dict[str, Any], str]] = [  # groups, main class, its arguments, words
    ([*MODEL, of(OPT.Optimizer)], OPT.AdamW, {}, "1: optimizer_class is Optimizer, which is abstract"),
    ([*MODEL, of(OPT.LBFGS)], OPT.AdamW, {}, "LBFGS cannot be sharded: … closure"),
    ([*MODEL, of(OPT.Muon, fused=True)], OPT.AdamW, {}, "param group 1: Muon has no option 'fused'"),
    ([{"params": REST + MATRICES[:1]}, of(OPT.Muon)], OPT.AdamW, {}, "'blocks.0.0.weight' is listed twice"),
    ([of(OPT.Muon, MATRICES + REST[1:2])], OPT.AdamW, {}, "Muon refuses 'first.bias', of shape"),
    ([*MODEL, of(another_sgd(1.0))], another_sgd(2.0), {}, "two classes have … Opt … rename one"),
    ([of(Flagged)], OPT.AdamW, {}, "param group 0: Flagged cannot be built with its options"),
    ([{"params": REST, "matrices": False}, {"params": MATRICES}], Flagged, {}, "'matrices' must be set"),
    *[
        (MODEL, Wraps, given, "TypeError: Wraps takes another optimizer in the place of parameters: name the class")
        for given in ({}, {"lr": 0.1})
    ],
    ([of(Shares)], OPT.AdamW, {}, "0: optimizer_class is Shares, whose param groups are those of another optimizer"),
    (MODEL, TakesModel, {}, "TypeError: TakesModel takes a model, so ranks cannot step shards"),
    ([of(Gathers)], OPT.AdamW, {}, "0: optimizer_class is Gathers, whose step() calls all_gather of torch.distrib"),
    ([of(Popping)], OPT.AdamW, {}, "param group 0: Popping cannot be built with its options … 'lr'"),
    *[
        ([of(Scaled, MATRICES[:2], scale=0.5), of(Scaled, MATRICES[2:], **other)], OPT.AdamW, {}, "1: scale of Scaled")
        for other in ({"scale": 2.0}, {})
    ],
    (MODEL, OPT.SGD, {"lr": 0.1, "optimizer_kwargs": {"lr": 0.1}}, "'lr' is given twice, in optimizer_kwargs and"),
    (MODEL, OPT.SGD, {"optimizer_kwargs": [("lr", 0.1)]}, "optimizer_kwargs must be a dict of arguments by name"),
    (MODEL, OPT.SGD, {"optimizer_kwargs": {"stage": 1}}, "TypeError: … stage"),
    (MODEL, Takes, {"optimizer_kwargs": {"optimizer_class": "x"}}, "Takes has an option 'optimizer_class'"),
]


def test_what_cannot_be_is_an_error_that_names_the_group() -> None:
    for groups, main, arguments, words in ERRORS:
        assert_in_order(words, error_of(ZeroOptimizer, groups, main, process_group=solo(), **arguments))
