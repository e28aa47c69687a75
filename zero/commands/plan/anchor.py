"""`zero plan --anchor run.json`: how much longer a pass takes on this machine than planned, from a run of `zero train`.

The plan of the run's own setting becomes what was measured by one factor on all seconds of forwards and backwards;
messages and updates stay as they were planned.

Knows: what a run.json says of its training. Does not know: equations.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ...planning.choose import MOST_RANKS
from ...planning.hardware import Cluster
from ...planning.plan import Planner, Training
from ...planning.setting import PlanSetting
from ..train.settings import TrainConfig
from .inputs import Asked, training_of
from .settings import PlanConfig

__all__ = ["anchored"]

PACE = "pace"  # the constant that is fitted
LOW, HIGH = 1e-3, 1e3
LONGEST = 1e9  # milliseconds of a step
HALVINGS = 60  # of the range between these: more than a float can tell apart


def anchored(path: Path, asked: Asked) -> tuple[Asked, str]:
    """Return the inputs of a plan at the pace of a run, and a line that says so.

    Raises:
        ValueError: the file is no run.json, the plan is not for processors, or no pace gives what was measured.
    """
    config, ranks, measured = _run(path)
    if config.precision != asked.training.precision:
        raise ValueError(
            f"--anchor {path}: it computed in {config.precision}, and the plan is for {asked.training.precision}: give "
            f"--precision {config.precision}"
        )
    if asked.cluster.gpu.family != "cpu":
        raise ValueError(
            f"--anchor {path}: a run of zero train is on processors, and the plan is for {asked.cluster.gpu.name}: "
            f"leave --anchor out, or plan --cluster cpu:{ranks}"
        )
    try:
        training = _training(config)
        planner, setting = Planner(training), _setting(config, ranks, training)
        training.micro_batches(ranks)
    except ValueError as error:
        raise ValueError(f"--anchor {path}: {error}") from None
    cluster = asked.hardware.cluster(f"cpu:{ranks}")

    def seconds(pace: float) -> float:
        return planner.step(setting, _paced(cluster, pace)).seconds

    low, high = LOW, HIGH
    if measured < seconds(low):
        raise ValueError(
            f"--anchor {path}: its step took {measured:.3g} s, and by the plan all but forwards and backwards takes "
            f"{seconds(low):.3g} s: measure the machine first (--measure), and give --hardware"
        )
    if measured > seconds(high):
        raise ValueError(f"--anchor {path}: its step took {measured:.3g} s, over {HIGH:g} times what is planned for it")
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) < measured else (low, middle)
    line = (
        f"anchored to {path}: its step took {measured:.3g} s and was planned with {seconds(1.0):.3g} s, so forwards "
        f"and backwards take {low:.2f} times what is planned without it"
    )
    return replace(asked, cluster=_paced(asked.cluster, low)), line


def _paced(cluster: Cluster, pace: float) -> Cluster:
    return replace(cluster, gpu=replace(cluster.gpu, constants={**cluster.gpu.constants, PACE: pace}))


def _run(path: Path) -> tuple[TrainConfig, int, float]:
    """Return the settings of a run, its number of ranks, and the median seconds of its steps."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        config, ranks, median = TrainConfig.from_json(run["config"]), run["world_size"], run["step_ms_median"]
    except OSError as error:
        raise ValueError(f"--anchor {path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"--anchor {path}: is no run.json of zero train: {type(error).__name__}: {error}") from None
    if isinstance(median, bool) or not isinstance(median, (int, float)) or not 0 < median < LONGEST:
        raise ValueError(f"--anchor {path}: has no step that was timed: anchor to a run that took steps")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"--anchor {path}: world_size is {ranks!r}: it must be the number of ranks of a zero train")
    if config.threads != 1:
        raise ValueError(
            f"--anchor {path}: its ranks computed with {config.threads} threads, and plans are for one: anchor to "
            "a run with --threads 1"
        )
    return config, ranks, median / 1e3


def _training(config: TrainConfig) -> Training:
    return training_of(
        PlanConfig(
            preset=config.preset,
            micro=config.batch,
            sequence=config.sequence,
            global_batch=config.batch * config.micro_batches,
            precision=config.precision,
            optimizer=config.optimizer,
        )
    )


def _setting(config: TrainConfig, ranks: int, training: Training) -> PlanSetting:
    """Return the setting of a run as the planner has it."""
    found = PlanSetting(
        stage=config.stage,
        world_size=ranks,
        sharding_factor=config.sharding_factor,
        reshard=config.reshard,
        offload="" if config.offload is None else "disk",
        precision=config.precision,
        optimizer=config.optimizer,
        fused=config.fused,
    )
    sizes = training.bucket_sizes(found, config.bucket_cap)
    return replace(found, bucket_bytes=sizes.most, first_bucket_bytes=sizes.first)
