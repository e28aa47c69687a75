"""A step of training under a setting, and its plan, side by side."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from collectives import Loopback, Transport
from zero import MixedPrecision, Offload, ZeroOptimizer
from zero.planning.memory import MemoryPlan
from zero.planning.setting import PlanSetting

from .models import PLANNED, Planned, described

WORLD_SIZES = (1, 2, 3, 4, 8)
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-3}),
    "muon": (torch.optim.AdamW, {"lr": 1e-3}),  # and Muon for matrices
}
OPTIMIZERS = ("adamw", "momentum", "adagrad", "muon")
PRECISIONS = {"fp32": None, "bf16": MixedPrecision(torch.bfloat16)}


@dataclass(frozen=True)
class Case:
    """A model under a setting."""

    model: str
    setting: PlanSetting

    def __str__(self) -> str:
        s = self.setting
        return (
            f"{self.model} stage{s.stage} W{s.world_size} F{s.factor} reshard{s.reshard_after_forward} "
            f"offload-{s.states_on or 'none'} "
            f"{'bf16' if s.mixed_precision else 'fp32'} {s.optimizer}"
        )

    @property
    def features(self) -> tuple[object, ...]:
        """The values of which a covering sample has every pair."""
        s = self.setting
        return self.model, s.stage, s.world_size, s.factor, s.near, s.states_on, s.mixed_precision, s.optimizer


def settings(world_size: int, planned: Planned, precision: str, optimizer: str) -> Iterator[PlanSetting]:
    """Yield every stage with every ``sharding_factor``, ``reshard_after_forward`` and ``offload``."""
    for stage in range(4):
        for factor in _divisors(world_size) if stage else [None]:
            for kept in [factor, *_divisors(factor)[:-1]] if stage == 3 and factor else [factor]:
                reshard = kept == factor or (kept is not None and kept > 1 and kept)
                for offload in (None, Offload(".")) if stage else (None,):
                    yield PlanSetting(
                        stage=stage,
                        world_size=world_size,
                        sharding_factor=factor,
                        reshard_after_forward=reshard,
                        offload=offload,
                        bucket_cap_mb=planned.bucket_cap_mb,
                        mixed_precision=PRECISIONS[precision],
                        optimizer=optimizer,
                        threads=True,
                    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def cases(world_size: int) -> list[Case]:
    """Return every case with ``world_size`` ranks."""
    return [
        Case(planned.name, setting)
        for planned in PLANNED.values()
        for precision in PRECISIONS
        for optimizer in OPTIMIZERS
        for setting in settings(world_size, planned, precision, optimizer)
    ]


def each_setting_once(model: str, world_size: int) -> list[Case]:
    """Return a case for each of `settings`, whose precision and optimizer are the next pair in turn."""
    planned = PLANNED[model]
    turns = list(itertools.product(PRECISIONS, OPTIMIZERS))
    by_turn = [list(settings(world_size, planned, *turn)) for turn in turns]
    return [Case(model, by_turn[at % len(turns)][at]) for at in range(len(by_turn[0]))]


def pairs(case: Case) -> set[tuple[object, ...]]:
    """Return the pairs of two features of a case."""
    return set(itertools.combinations(enumerate(case.features), 2))


def covering(count: int) -> list[Case]:
    """Return a sample of cases. Each further case is, of a few at random, the one with the most new pairs."""
    chooser, everything = random.Random(0), [case for world_size in WORLD_SIZES for case in cases(world_size)]
    seen: set[tuple[object, ...]] = set()
    taken = []
    for _ in range(count):
        best = max(chooser.sample(everything, 120), key=lambda case: len(pairs(case) - seen))
        seen |= pairs(best)
        taken.append(best)
    return taken


def check(case: Case, plan: MemoryPlan, folder: Path, group: Loopback[Any]) -> None:
    """Take a step under the case's setting, and compare every rank with the plan."""
    planned, setting = PLANNED[case.model], case.setting
    models = planned.built(setting.world_size)
    cls, arguments = CLASSES[setting.optimizer]

    def program(transport: Transport) -> Any:
        model = models[transport.rank]
        optimizer = ZeroOptimizer(
            planned.param_groups(model, of_muon=setting.optimizer == "muon"),
            cls,
            module=model,
            process_group=transport,
            **replace(setting, offload=setting.offload and Offload(folder)).arguments(),
            **arguments,
        )
        before = optimizer.traffic
        model(torch.ones(2, planned.features)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found, spent = optimizer.describe(), (optimizer.traffic - before).payload_sent
        return found, spent

    results = group.run(program)
    for rank, (found, _) in enumerate(results):
        here = plan.of_rank(setting, rank)
        kinds = {"parameters": here.parameters, "gradients": here.gradients, "optimizer": here.optimizer}
        assert kinds == {kind: found.bytes[kind] for kind in kinds}, (str(case), rank)
        assert kinds == {kind: found.formula_bytes[kind] for kind in kinds}, (str(case), rank)
        assert here.offloaded == found.offloaded_bytes, (str(case), rank)
        for kind, bound in (("gathered_peak", here.gathered_peak), ("scratch_peak", here.scratch_peak)):
            formula = found.formula_bytes[kind] if kind == "scratch_peak" or setting.gathers_units else 0
            assert found.bytes[kind] <= bound == formula, (str(case), rank)
    assert sum(spent for _, spent in results) == plan.sent(setting), str(case)


def plan_of(model: str) -> MemoryPlan:
    """Return the plan of a model."""
    return MemoryPlan(described(PLANNED[model]))
