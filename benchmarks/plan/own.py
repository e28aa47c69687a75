"""The library's own steps on one H200 next to their plan, and the seconds of the host's calls, from stored results.

    ../results/gpu-short-b.json    one rank: the plain loop, FSDP2, stages 0 to 3
    ../results/gpu-short-c.json    the last of 8 ranks, whose peers answer at once: plain, FSDP2, stages 2 and 3

These loops read no data and look at no loss, so their plan has none of the seconds that no unit explains.

Knows: the fields of these files. Does not know: published runs, equations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero.core.buckets import DEFAULT_CAP_MB, MIB
from zero.core.layout import Dtypes
from zero.planning.hardware import Cluster, HostCalls, presets
from zero.planning.model import Transformer
from zero.planning.models.shapes import model_of
from zero.planning.models.works import count_module
from zero.planning.plan import Planner
from zero.planning.seconds.compute import Compute, Wires
from zero.planning.seconds.simulate import simulate
from zero.planning.setting import Training

from ..gpt import GPT, Shape, loss_fn
from ..gpu_short.page import medians
from ..gpu_short.peers import SEVEN_BILLION, build
from ..report import Report
from .systems import SYSTEMS, System, UnitLoad, program_of_system

Row = Mapping[str, Any]
RESULTS = Path(__file__).parents[1] / "results"
BILLION, SEQUENCE = Shape(24, 14, 1792, 50304), 512  # of gpu_short's section b
UNITS, PARAMETERS, KERNELS = 33, 291, 454  # of the narrow Llama: its parts, and the kernels of its forward
PLAIN, FSDP2 = "plain", "FSDP2"
FEWEST_TOKENS = 2048  # of a step in which the host is the limit
PLAIN_LOOP = System(host=(0.0, 0.0))


# -- the host's calls --------------------------------------------------------------------------------------------------


def rows_of(file: str, key: str, name: str) -> dict[Any, Row]:
    """Return the rows of a file that have a field ``key``, by the rank and the field ``name``."""
    parts = Report.read(RESULTS / f"{file}.json").parts
    return {(part.get("ranks", 1), part[name]): part for part in parts if key in part}


def _of_a_bucket(few: Row, many: Row, *phases: str) -> float:
    """Return the seconds that each further bucket adds to some phases."""
    return float(sum(many[phase] - few[phase] for phase in phases) / (many["buckets"] - few["buckets"]))


def todays_calls() -> HostCalls:
    """Return the calls of the library on the H200's host."""
    rows = rows_of("gpu-short-c", "us_a_parameter", "system")
    few, many, plain = rows[8, "zero 3"], rows[8, "zero 3, 25 MiB"], rows[8, PLAIN]
    whole, cut = rows[8, "zero 2"], rows[8, "zero 2, 25 MiB"]
    reduced = _of_a_bucket(whole, cut, "backward")
    update = _of_a_bucket(few, many, "clip", "step")
    gather = _of_a_bucket(whole, cut, "clip", "step") - update
    gathered = _of_a_bucket(few, many, "forward")
    bucket = _of_a_bucket_alone() - update
    return HostCalls(
        launch=plain["forward"] / KERNELS,
        unit=(few["forward"] - plain["forward"]) / UNITS - gathered,
        parameter=(whole["backward"] - plain["backward"] - reduced) / PARAMETERS,
        bucket=bucket,
        exchange=reduced - bucket,
        gather=gather,
        release=gathered - gather,
        update=update,
        step=few["clip"] + few["step"] - UNITS * update,
    )


def _of_a_bucket_alone() -> float:
    """Return the seconds that each further bucket adds to a step of one rank, where the host is the limit."""
    parts = [part for part in Report.read(RESULTS / "gpu-short-b.json").parts if part.get("tokens") == FEWEST_TOKENS]
    seconds, buckets = medians(parts), {part["system"]: part["buckets"] for part in parts}
    few, many = "zero 2", f"zero 2, {DEFAULT_CAP_MB} MiB"
    return float((seconds[many] - seconds[few]) / (buckets[many] - buckets[few]))


def fsdp2_host() -> tuple[float, float]:
    """Return the seconds of FSDP2's hooks of a unit on the H200's host, in a forward and in a backward."""
    rows = rows_of("gpu-short-c", "us_a_parameter", "system")
    forward, backward = ((rows[8, FSDP2][phase] - rows[8, PLAIN][phase]) / UNITS for phase in ("forward", "backward"))
    return forward, backward


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnRun:
    """A step: the median of what was measured, and the plan, in seconds."""

    name: str
    tokens: int
    measured: float
    planned: float

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


def own_runs() -> Iterator[OwnRun]:
    """Yield all runs: those of one rank, and those of the last of 8."""
    yield from _of_one_rank()
    yield from _of_eight()


def _planner(module: nn.Module, hidden: int, micro: int, sequence: int) -> Planner:
    def run(module: nn.Module) -> Tensor:
        tokens = torch.zeros(micro, sequence + 1, dtype=torch.int64, device="meta")
        if isinstance(module, GPT):
            return loss_fn(module(tokens[:, :-1]), tokens[:, 1:])
        loss: Tensor = module(tokens)
        return loss

    numbers = Transformer(1, hidden, 1, hidden, 1)  # of which the width alone is used
    model = replace(model_of(module, "own"), transformer=numbers)
    return Planner(model, count_module(module, run), Training(micro=micro, sequence=sequence))


def _of_system(planner: Planner, cluster: Cluster, schedule: System, dtypes: Dtypes) -> float:
    compute = Compute(cluster, "bfloat16")
    loads = [UnitLoad(*each) for each in zip(planner.passes(compute), planner.model.unit_numels(), strict=True)]
    program = program_of_system(loads, Wires(cluster), schedule, compute, dtypes, factor=cluster.ranks)
    return simulate(replace(program, fixed=0.0)).seconds


def _of_stage(planner: Planner, cluster: Cluster, stage: int, cap_mb: float | None) -> float:
    step = planner.step(planner.setting(cluster, stage, cap_mb), cluster)
    return step.seconds - step.parts["fixed"]


def _of_one_rank() -> Iterator[OwnRun]:
    parts = [part for part in Report.read(RESULTS / "gpu-short-b.json").parts if "turn" in part]
    with torch.device("meta"):
        module = GPT(BILLION, SEQUENCE).to(torch.bfloat16)
    alone = presets().cluster("h200:1")
    for tokens in dict.fromkeys(part["tokens"] for part in parts):
        measured = medians([part for part in parts if part["tokens"] == tokens])
        planner = _planner(module, BILLION.width, tokens // SEQUENCE, SEQUENCE)
        for name, schedule in ((PLAIN, PLAIN_LOOP), (FSDP2, SYSTEMS["fsdp2"])):
            planned = _of_system(planner, alone, schedule, Dtypes.all(torch.bfloat16))
            yield OwnRun(name, tokens, measured[name], planned)
        twelfth = sum(parameter.nbytes for parameter in module.parameters()) / 12 / MIB  # in a bucket of these runs
        for stage in range(4):
            yield OwnRun(f"zero {stage}", tokens, measured[f"zero {stage}"], _of_stage(planner, alone, stage, twelfth))
        name = f"zero 2, {DEFAULT_CAP_MB} MiB"
        yield OwnRun(name, tokens, measured[name], _of_stage(planner, alone, 2, DEFAULT_CAP_MB))


def _of_eight() -> Iterator[OwnRun]:
    """Collectives of peers that answer at once take no time."""
    eight = presets().cluster("h200:8")
    network = replace(eight.network, base=0.0, hop_inside=0.0, link_efficiency=1e9)
    eight = replace(eight, network=network)
    tokens = FEWEST_TOKENS
    planner = _planner(build(SEVEN_BILLION, torch.device("meta")).to(torch.bfloat16), SEVEN_BILLION.width, 1, tokens)
    measured = {row["on_device"]: row["in_a_row"] for row in rows_of("gpu-short-c", "busy", "on_device").values()}
    planned = _of_system(planner, eight, SYSTEMS["fsdp2"], planner.model.dtypes(planner.training.rule)[0])
    yield OwnRun(f"{FSDP2}, rank 7 of 8", tokens, measured[FSDP2], planned)
    yield OwnRun("zero 3, rank 7 of 8", tokens, measured["zero 3"], _of_stage(planner, eight, 3, None))
