"""`python -m benchmarks.plan_here`: `zero plan` scored on this machine, after `zero plan --measure`.

    --hardware   the file of --measure
    --sweep      sweep.json of `zero sweep`: seconds and memory of every setting
    --steps      steps.json of `benchmarks.steps`: seconds of our stages on its models

Errors are shares of what was measured. No constant is fitted to these runs.

Knows: both files, and how a run's setting is planned. Does not know: equations.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from zero.commands.plan.inputs import training_of
from zero.commands.plan.settings import PlanConfig
from zero.commands.sweep.command import Point
from zero.commands.sweep.rank import RunSpec
from zero.core.layout import MIB
from zero.planning.hardware import Hardware, read_hardware
from zero.planning.models.shapes import model_of
from zero.planning.models.works import count_module
from zero.planning.plan import Planner, Training
from zero.planning.setting import PlanSetting

from .models import trainable
from .report import Report
from .step_job import CAP_MB, MODELS


@dataclass(frozen=True)
class Scored:
    """A run and its plan. Seconds of a step; ``memory``: bytes of a rank, measured and planned, if known."""

    name: str
    measured: float
    planned: float
    memory: tuple[int, int] | None = None

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.memory is None else self.memory[1] / self.memory[0] - 1


def of_sweep(path: Path, hardware: Hardware) -> Iterator[Scored]:
    """Yield the settings of a sweep."""
    swept = json.loads(path.read_text())
    config = swept["config"]
    cluster = hardware.cluster(f"cpu:{config['ranks']}")
    planner = Planner(
        training_of(
            PlanConfig(preset=config["preset"], micro=config["batch"], sequence=config["sequence"], precision="fp32")
        )
    )
    for each in swept["points"]:
        point = Point(**each | {"job": RunSpec(**each["job"])})
        if point.job.peer is None:
            setting = setting_of(point.job, cluster.ranks)
            memory = None if point.peak is None else (point.peak, planner.peak(setting).total)
            yield Scored(point.name, point.step_ms / 1e3, planner.step(setting, cluster).seconds, memory)


def setting_of(job: RunSpec, ranks: int) -> PlanSetting:
    """Return the setting of a run of `zero sweep`."""
    return PlanSetting(
        stage=job.stage,
        world_size=ranks,
        sharding_factor=job.sharding_factor,
        reshard=job.reshard,
        offload="disk" if job.offload else "",
        bucket_bytes=int(job.bucket_cap_mb * MIB),
        fused=True,
    )


def of_steps(path: Path, hardware: Hardware) -> Iterator[Scored]:
    """Yield our stages on the models of `benchmarks.steps`, each in the median of its rounds."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for run in Report.read(path).parts:
        if run["system"] in {f"zero {stage}" for stage in range(4)}:
            found.setdefault((run["model"], run["system"], run["ranks"]), []).append(run["seconds"])
    planners = {model: Planner(training_of_model(model)) for model, _, _ in found}
    for (model, system, ranks), seconds in found.items():
        cluster = hardware.cluster(f"cpu:{ranks}")
        setting = PlanSetting(int(system[-1]), ranks, bucket_bytes=int(CAP_MB * MIB), fused=True)
        planned = planners[model].step(setting, cluster).seconds
        yield Scored(f"{model}, {system}", statistics.median(seconds), planned)


def training_of_model(name: str) -> Training:
    """Return the training of a model of `benchmarks.steps`."""
    model, how = MODELS[name], trainable(name)
    module = how.build().to("meta")
    tokens = torch.empty(model.batch, model.sequence, dtype=torch.int64, device="meta")
    works = count_module(module, lambda gpt: how.loss(gpt(tokens), tokens))
    return Training(model_of(module, name), works, model.batch, model.sequence, precision="fp32")


def correlation(scored: list[Scored]) -> float:
    """Return Spearman's rank correlation of planned and measured seconds."""
    measured, planned = ([_rank(each, values) for each in values] for values in _columns(scored))
    return statistics.correlation(measured, planned)


def _columns(scored: list[Scored]) -> tuple[list[float], list[float]]:
    return [each.measured for each in scored], [each.planned for each in scored]


def _rank(value: float, among: list[float]) -> float:
    return sum(other < value for other in among) + (sum(other == value for other in among) - 1) / 2


def show(title: str, scored: list[Scored]) -> None:
    """Print each run, and the scores of all."""
    print(f"{title:44}  measured   planned             MB of a rank, measured and planned")
    for each in scored:
        line = f"{each.name:44}  {each.measured * 1e3:5.0f} ms  {each.planned * 1e3:5.0f} ms  {each.error:+5.0%}"
        if each.memory is not None:
            line += f"      {each.memory[0] / 1e6:6.1f}  {each.memory[1] / 1e6:6.1f}  {each.memory_error:+5.0%}"
        print(line)
    errors = [abs(each.error) for each in scored]
    print(f"error of a step's seconds: mean {statistics.mean(errors):.1%}, median {statistics.median(errors):.1%}")
    print(f"rank correlation: {correlation(scored):.2f}")
    held = [abs(each.memory_error) for each in scored if each.memory_error is not None]
    if held:
        print(f"error of a rank's memory: mean {statistics.mean(held):.1%}, median {statistics.median(held):.1%}")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hardware", type=Path, required=True, help="hardware.json of zero plan --measure")
    parser.add_argument("--sweep", type=Path, help="sweep.json of zero sweep")
    parser.add_argument("--steps", type=Path, help="steps.json of benchmarks.steps")
    args = parser.parse_args()
    if args.sweep is None and args.steps is None:
        parser.error("give --sweep, --steps, or both: there is nothing to score")
    hardware = read_hardware(args.hardware)
    print(f"hardware: {hardware.measured}\n")
    if args.sweep is not None:
        show("setting of zero sweep", list(of_sweep(args.sweep, hardware)))
    if args.steps is not None:
        show("benchmarks.steps", list(of_steps(args.steps, hardware)))


if __name__ == "__main__":
    main()
