"""A step on threads, and the bytes that each rank holds and sends, beside those of the plan.

Each model runs each of its units once, in order of registration, and a backward reaches every unit, as the formulas
assume. That ranks hold what `describe()` says by formula is asked in `laws`.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from collectives import Loopback, Transport
from zero import Offload, ZeroOptimizer
from zero.planning.memory import MemoryPlan
from zero.planning.model import Model
from zero.planning.models.shapes import model_of
from zero.planning.setting import PlanSetting

from ..support.machine.trees import Part, Tree, batch_of, build

Class = type[torch.optim.Optimizer]
CLASSES: dict[str, tuple[Class, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-3}),
    "muon": (torch.optim.AdamW, {"lr": 1e-3}),  # and Muon for matrices
}


def parts(*, frozen: bool) -> tuple[Part, ...]:
    """Return units with empty, scalar, one-element and unused parameters, of which some are frozen. Two are tied, so
    that they are in the root's rest."""
    return (
        Part("matrix", frozen=frozen),
        Part("sequence", of=(Part("linear", 32), Part("scalar"), Part("unused", 5))),
        Part("sequence", of=(Part("linear", 5, frozen=frozen), Part("unused", 1500, frozen=frozen))),
        Part("sequence", of=(Part("tied"), Part("one"), Part("empty", frozen=True), Part("unused", 1600))),
    )


def made(name: str) -> nn.Module:
    """Return a model.

    "aligned" leaves no padding, so that runs cross its parameters. "in blocks" has matrices of whole blocks of
    elements, one of them too small to be cut, and parameters of none.
    """
    if name == "aligned":
        return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    if name == "in blocks":
        sizes = (32, 64, 128, 96, 64)
        layers = (nn.Linear(one, other) for one, other in itertools.pairwise(sizes))
        return nn.Sequential(*layers, nn.LayerNorm(64), nn.Linear(64, 33))
    return build(parts(frozen=name == "frozen"), 24, integer=False, seed=0)


def described(name: str) -> Model:
    model = model_of(made(name), name)
    facts = ((p, p.names[0]) for p in model.parameters)
    parameters = (replace(p, group=int(key.endswith("bias")), used="unused" not in key) for p, key in facts)
    return replace(model, parameters=tuple(parameters))


def param_groups(module: nn.Module, model: Model, *, of_muon: bool) -> list[dict[str, Any]]:
    """Return the param groups of a module. ``of_muon``: and one of Muon, for the matrices of units."""
    groups: dict[int, list[nn.Parameter]] = {}
    for parameter, shape in zip(module.parameters(), model.parameters, strict=True):
        groups.setdefault(2 if of_muon and shape.is_unit_matrix else shape.group, []).append(parameter)
    muon = {"optimizer_class": torch.optim.Muon, "partition": "parameter"}
    return [{"params": groups[key], **(muon if key == 2 else {})} for key in sorted(groups)]


def compare_with_plan(
    name: str, setting: PlanSetting, folder: Path, optimizer_class: Class | None = None
) -> MemoryPlan:
    """Train a step of a model at a setting on threads, and compare what each rank holds and sends with the plan."""
    model, first, offload = described(name), made(name), setting.offload
    plan, modules = MemoryPlan(model), [copy.deepcopy(first) for _ in range(setting.world_size)]
    cls, arguments = CLASSES.get(setting.optimizer, (optimizer_class, {"lr": 1e-3}))
    placed = offload if offload is None or offload.on_host else Offload(folder)

    def program(transport: Transport) -> Any:
        module = modules[transport.rank]
        optimizer = ZeroOptimizer(
            param_groups(module, model, of_muon=setting.optimizer == "muon"),
            cls,
            module=module,
            process_group=transport,
            **replace(setting, offload=placed).arguments(),
            **arguments,
        )
        before = optimizer.traffic
        module(batch_of(0, 0, -1) if isinstance(module, Tree) else torch.ones(2, 32)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.describe(), (optimizer.traffic - before).payload_sent

    results: list[Any] = Loopback(setting.world_size).run(program)
    for rank, (found, _) in enumerate(results):
        here = plan.of_rank(setting, rank)
        kinds = {"parameters": here.parameters, "gradients": here.gradients, "optimizer": here.optimizer}
        assert kinds == {kind: found.bytes[kind] for kind in kinds}, rank
        assert here.offloaded == found.offloaded_bytes, rank
        for kind, bound in (("gathered_peak", here.gathered_peak), ("scratch_peak", here.scratch_peak)):
            formula = found.formula_bytes[kind] if kind == "scratch_peak" or setting.gathers_units else 0
            assert found.bytes[kind] <= bound == formula, rank
    assert sum(spent for _, spent in results) == plan.sent(setting)
    return plan
