"""What is planned is what ranks hold and send, to the byte, and what the paper of ZeRO states.

Each model runs each of its units once, in order of registration, and a backward reaches every unit, as the formulas
assume; those of `support` do not.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Loopback, Transport
from zero import MixedPrecision, Offload, StochasticRounding, ZeroOptimizer
from zero.planning.memory import MemoryPlan
from zero.planning.model import Model, ParameterShape
from zero.planning.models.shapes import model_of
from zero.planning.setting import PlanSetting
from zero.runtime.offload import Staging

from ..support.pairs import pair_rows
from ..support.rows import placed

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-3}),
    "muon": (torch.optim.AdamW, {"lr": 1e-3}),  # and Muon for matrices
}


class Block(nn.Linear):
    """A unit with a matrix, a vector, a scalar, and parameters that no forward uses."""

    def __init__(self, unused: int) -> None:
        super().__init__(32, 32)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(unused))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)) * self.scale


class Odd(nn.Module):
    """A model whose head is its embedding, with empty, scalar, one-element and unused parameters in the root's rest."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.ones(32, 24))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1))
        self.blocks = nn.Sequential(nn.Linear(24, 32), Block(5), Block(1500), nn.Linear(32, 24))
        self.unused = nn.Parameter(torch.ones(1400))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(24, 32, bias=False)
        self.head.weight = self.embedding
        for part in (self.blocks[2], self.empty, self.scale) if frozen else ():
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(self.blocks(x @ self.embedding * self.one + self.empty.sum()))


def made(name: str) -> nn.Module:
    """Return a model; "aligned" leaves no padding, so that runs cross its parameters."""
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))) if name == "aligned" else Odd(frozen=name == "frozen")


BF16, KEPT = MixedPrecision(torch.bfloat16), MixedPrecision(torch.float32, output_dtype=torch.bfloat16)
BY_MODULE: tuple[dict[str, MixedPrecision], ...] = (
    {"*": BF16, "blocks.1": KEPT, "blocks.2": MixedPrecision(torch.float16, output_dtype=torch.bfloat16)},
    {"*": BF16, "1": KEPT},
)
"""Patterns for `Odd`, and for a sequence."""
CAPS = {"frozen": 0.003, "tied": 0.006, "aligned": 25.0}
"""Models by name, with the MiB of their buckets."""

SETTINGS: dict[str, tuple[Any, ...]] = {
    "model": tuple(CAPS),
    "stage": (0, 1, 2, 3),
    "world_size": (1, 3, 8),
    "sharding_factor": (None, 1, 2, 4),
    "reshard_after_forward": (True, False, 2, 4),
    "prefetch_depth": (1, 0, 2),
    "offload": (None, Offload(".")),
    "mixed_precision": (None, MixedPrecision(torch.bfloat16), "by module"),
    "optimizer": tuple(CLASSES),
    "rounding": (None, StochasticRounding(0)),
}


def described(name: str) -> Model:
    """Return the description of a model."""
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


def setting_of(row: dict[str, Any]) -> PlanSetting:
    """Return the setting of a row, which has a model and arguments of `PlanSetting`."""
    given = {name: value for name, value in row.items() if name != "model"}
    if given["mixed_precision"] == "by module":
        given["mixed_precision"] = BY_MODULE[row["model"] == "aligned"]
    return PlanSetting(**given, bucket_cap_mb=CAPS[row["model"]], threads=True)


def there_is(row: dict[str, Any]) -> bool:
    """Return whether the library takes the setting of a row. At stage 0 nothing is offloaded."""
    try:
        setting_of(row)
    except ValueError:
        return False
    rounds = row["rounding"] is None or row["mixed_precision"] == BF16  # of patterns some ask for fp16
    return rounds and (bool(row["stage"]) or not row["offload"])


@pytest.mark.parametrize("row", placed("row", pair_rows(SETTINGS, there_is), 0, 6, 8, 11))
def test_a_rank_holds_and_sends_what_is_planned(row: dict[str, Any], tmp_path: Path) -> None:
    setting, plan = compare_with_plan(row, tmp_path)
    largest, ranks = plan.of_largest(setting), [plan.of_rank(setting, rank) for rank in range(setting.world_size)]
    for kind in ("parameters", "gradients", "states", "masters") if setting.optimizer != "muon" else ():
        assert max(getattr(rank, kind) for rank in ranks) <= getattr(largest, kind), (row, kind)


GATHERED = {"stage": 3, "mixed_precision": MixedPrecision(torch.bfloat16), "sharding_factor": None, "offload": None}
ON_ACCELERATORS = [
    {**GATHERED, "model": model, "world_size": ranks, "reshard_after_forward": near, "optimizer": optimizer}
    for model, ranks, near, optimizer in (
        ("frozen", 3, True, "adamw"),
        ("tied", 8, 2, "adamw"),
        ("aligned", 3, False, "adamw"),
        ("aligned", 4, True, "muon"),
    )
]


@pytest.mark.parametrize("row", placed("row", ON_ACCELERATORS, 0, 1))
@pytest.mark.usefixtures("accelerated")
def test_on_an_accelerator_stage_3_keeps_no_16_bit_parameters_of_what_is_trained(
    row: dict[str, Any], tmp_path: Path
) -> None:
    setting, plan = compare_with_plan(row, tmp_path)
    assert (plan.of_rank(setting, 0).parameters > 0) is (row["model"] == "frozen")


ON_HOST = {**GATHERED, "offload": Offload("cpu", parameters="cpu"), "optimizer": "adamw"}
STEPPED_THERE = Offload("cpu", parameters="cpu", step="cpu")
ON_THE_HOST = [
    {**ON_HOST, "model": model, "world_size": ranks, "reshard_after_forward": near, **others}
    for model, ranks, near, others in (
        ("frozen", 1, True, {}),
        ("frozen", 3, True, {}),
        ("tied", 6, 2, {"optimizer": "momentum"}),
        ("aligned", 1, False, {"mixed_precision": None}),
        ("aligned", 4, True, {"optimizer": "muon"}),
        ("tied", 4, False, {"sharding_factor": 2, "optimizer": "adagrad"}),
        ("aligned", 2, True, {"sharding_factor": 1, "prefetch_depth": 2}),
        ("tied", 2, True, {"offload": STEPPED_THERE, "optimizer": "adamw"}),
        ("frozen", 3, False, {"offload": STEPPED_THERE, "optimizer": "adagrad", "mixed_precision": None}),
        ("aligned", 4, True, {"offload": STEPPED_THERE, "sharding_factor": 2, "optimizer": "momentum"}),
    )
]


@pytest.mark.parametrize("row", placed("row", ON_THE_HOST, 0, 2, 3, 7))
@pytest.mark.usefixtures("accelerated", "copied_from_the_host")
def test_parameters_in_the_hosts_memory_are_counted_there_and_not_on_the_device(
    row: dict[str, Any], tmp_path: Path
) -> None:
    setting, plan = compare_with_plan(row, tmp_path)
    for rank in range(setting.world_size):
        here = plan.of_rank(setting, rank)
        assert here.resident == (0 if setting.steps_on_host else here.scalars)
        assert (here.staged_peak == 0) is setting.steps_on_host
        assert here.offloaded >= here.parameters + here.gradients + here.states + here.masters


@pytest.mark.usefixtures("accelerated", "copied_from_the_host")
def test_a_step_has_copies_of_three_buckets_and_one_gradient_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    live: dict[Staging, int] = {}
    peak = 0
    fetch, free = Staging.fetch, Staging.let_go

    def fetched(self: Staging, kept: Any) -> None:
        nonlocal peak
        fetch(self, kept)
        live[self] = sum(tensor.nbytes for tensor in self.tensors.values())
        peak = max(peak, sum(live.values()))

    def freed(self: Staging) -> None:
        free(self)
        live.pop(self, None)

    monkeypatch.setattr(Staging, "fetch", fetched)
    monkeypatch.setattr(Staging, "let_go", freed)
    module = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(5)))
    setting = PlanSetting(stage=3, offload=ON_HOST["offload"], mixed_precision=BF16, bucket_cap_mb=0.002)
    optimizer = ZeroOptimizer(module, torch.optim.AdamW, lr=1e-3, **setting.arguments())
    for _ in range(2):
        module(torch.ones(2, 32)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found, numel = MemoryPlan(model_of(module, "equal")).of_rank(setting, 0), 32 * 32
    assert peak + 4 * numel == found.staged_peak
    assert found.gathered_peak == 2 * (2 + 2) * numel + 4 * numel, "two units, their shards, and one before its cast"
    optimizer.close()


def compare_with_plan(row: dict[str, Any], tmp_path: Path) -> tuple[PlanSetting, MemoryPlan]:
    """Train a step at a setting on threads, and compare what each rank holds and sends with the plan."""
    setting, model = setting_of(row), described(row["model"])
    first, plan = made(row["model"]), MemoryPlan(model)
    modules = [copy.deepcopy(first) for _ in range(setting.world_size)]
    cls, arguments = CLASSES[setting.optimizer]

    def program(transport: Transport) -> Any:
        module = modules[transport.rank]
        optimizer = ZeroOptimizer(
            param_groups(module, model, of_muon=setting.optimizer == "muon"),
            cls,
            module=module,
            process_group=transport,
            **replace(setting, offload=_placed(setting.offload, tmp_path)).arguments(),
            **arguments,
        )
        before = optimizer.traffic
        module(torch.ones(2, 32)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.describe(), (optimizer.traffic - before).payload_sent

    results: list[Any] = Loopback(setting.world_size).run(program)
    for rank, (found, _) in enumerate(results):
        here = plan.of_rank(setting, rank)
        kinds = {"parameters": here.parameters, "gradients": here.gradients, "optimizer": here.optimizer}
        for reported in (found.bytes, found.formula_bytes):
            assert kinds == {kind: reported[kind] for kind in kinds}, (row, rank)
        assert here.offloaded == found.offloaded_bytes, (row, rank)
        for kind, bound in (("gathered_peak", here.gathered_peak), ("scratch_peak", here.scratch_peak)):
            formula = found.formula_bytes[kind] if kind == "scratch_peak" or setting.gathers_units else 0
            assert found.bytes[kind] <= bound == formula, (row, rank)
    assert sum(spent for _, spent in results) == plan.sent(setting), row
    return setting, plan


def _placed(offload: Offload | None, folder: Path) -> Offload | None:
    return offload if offload is None or offload.on_host else Offload(folder)


TABLE_1 = """
    1     120  120  120    2048 2048 2048    16000 16000 16000
    4     52.5 41.3 30     896  704  512     7000  5500  4000
    16    35.6 21.6 7.5    608  368  128     4750  2875  1000
    64    31.4 16.6 1.88   536  284  32      4187  2218  250
    256   30.4 15.4 0.47   518  263  8       4046  2054  62.5
    1024  30.1 15.1 0.12   513  257  2       4011  2013  15.6
"""
"""Ranks, and GB of a rank of 7.5, 128 and 1,000 billion parameters, each with P_os, P_os+g and P_os+g+p: Rajbhandari
et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054), Table 1. K = 12,
16-bit gradients."""


def states(model: Model, ranks: int, stage: int) -> int:
    """Return the model states of the last rank with bf16 and Adam, without step counts."""
    precision = MixedPrecision(torch.bfloat16, accumulate_dtype=torch.bfloat16)
    found = MemoryPlan(model).of_largest(PlanSetting(stage=stage, world_size=ranks, mixed_precision=precision))
    return found.parameters + found.gradients + found.states + found.masters


def as_printed(nbytes: int) -> float:
    """Return GB as Table 1 prints them: from 100 on without decimals, cut off; else three digits, at most two of them
    decimals, half rounded up."""
    gigabytes = nbytes / 1e9
    if gigabytes >= 100:
        return math.floor(gigabytes)
    decimals = 1 if gigabytes >= 10 else 2
    return math.floor(gigabytes * 10**decimals + 0.5) / 10.0**decimals


def test_all_54_cells_of_table_1_of_the_zero_paper() -> None:
    cells = 0
    for ranks, *row in map(str.split, TABLE_1.split("\n")[1:-1]):
        for column, printed in enumerate(row):
            numel, stage = (7.5e9, 128e9, 1e12)[column // 3], column % 3 + 1
            model = Model("one matrix", (ParameterShape(("weight",), (int(numel),)),))
            found = states(model, int(ranks), stage)
            assert as_printed(found) == float(printed), "padding is below the last digit"
            cells += 1
    assert cells == 54
