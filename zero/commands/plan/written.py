"""The files of a plan, plan.json with every number and trace.json, and how a planned setting is started.

Knows: their form, flags of `zero train`, arguments of `zero.ZeroOptimizer`. Does not know: why a setting was chosen.
The same plan gives the same bytes: no file has a date or a time that was measured.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from typing import Any

import torch

from ...core.layout import MIB
from ...planning.choose import Findings, enough_bytes, frontier, name_of
from ...planning.hardware import Cluster
from ...planning.plan import RESERVED, USABLE_SHARE, PlannedSetting, Planner, Training, usable_bytes
from ...planning.seconds.program import chrome_trace
from ...planning.setting import PlanSetting
from ...precision import MixedPrecision, Patterns
from .settings import PlanConfig

_CLASSES = {"adamw": "AdamW", "adam": "Adam", "momentum": "SGD", "sgd": "SGD", "adagrad": "Adagrad", "muon": "AdamW"}
_TRAINED = ("adamw", "adam", "sgd", "adagrad", "muon")  # by zero train
_FUSED = ("adamw", "adam", "momentum", "sgd")  # in torch; Adagrad is on CPUs alone
ASSUMPTIONS = (
    "states are exact; gathered and buckets are upper bounds, and the sum of all kinds is one, too",
    f"usable memory of a GPU: {USABLE_SHARE} of its capacity, less {RESERVED} bytes",
    "seconds are those of the library's schedule with constants that are fitted to runs of other systems",
    "activations are those of torch without a compiler, with fused attention and RMSNorm",
    "all ranks are equally fast but for a share of jitter by hosts",
)


def write(config: PlanConfig, found: Findings, planner: Planner) -> list[str]:
    """Write plan.json, and trace.json if it is asked for. Return the names of the files."""
    training, cluster, best = found.training, found.cluster, found.best
    micro_batches = training.micro_batches(cluster.ranks)
    written = {
        "format": 1,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "config": config.to_json(),
        "assumptions": ASSUMPTIONS,
        "model": {
            "name": training.model.name,
            "parameters": training.model.numel,
            "units": len(training.model.units),
            "activations": "counted" if training.counts_activations else "not counted",
        },
        "cluster": {**asdict(cluster), "gpu": cluster.gpu.name, "usable_bytes": usable_bytes(cluster)},
        "micro_batches": micro_batches,
        "choices": [_choice(choice, found) for choice in found.choices],
        "frontier": [name_of(choice.setting) for choice in frontier(found.choices)],
        "recommended": None
        if best is None
        else {
            "name": name_of(best.setting),
            "start": start_of(config, best.setting, cluster, micro_batches, training),
            "other_bucket_cap_mb": dict(found.other_caps),
            "enough_bucket_bytes": enough_bytes(cluster, best.setting.factor),
        },
        "smallest": [
            {
                "recompute": recompute,
                "hosts": smallest.cluster.hosts,
                "per_host": smallest.cluster.per_host,
                "name": name_of(smallest.setting),
                "bytes": asdict(smallest.peak),
                "offloaded_bytes": smallest.offloaded,
            }
            for recompute, smallest in found.smallest.items()
        ],
        "scale": [asdict(curve) for curve in found.curves],
    }
    (config.out / "plan.json").write_text(json.dumps(written) + "\n")
    files = ["plan.json"]
    if config.trace and best is not None:
        events = planner.step(best.setting, cluster, trace=True).events
        (config.out / "trace.json").write_text(json.dumps({"traceEvents": chrome_trace(events)}) + "\n")
        files.append("trace.json")
    return files


def _choice(choice: PlannedSetting, found: Findings) -> dict[str, Any]:
    step, setting = choice.step, choice.setting
    band = found.bands.get(setting)
    return {
        "name": name_of(setting),
        "setting": {
            "stage": setting.stage,
            "world_size": setting.world_size,
            "sharding_factor": setting.sharding_factor,
            "reshard": setting.reshard_after_forward,
            "prefetch_depth": setting.prefetch_depth,
            "offload": setting.states_on,
            **({"parameters_on": "host"} if setting.offloads_parameters else {}),
            "bucket_bytes": setting.bucket_bytes,
            "precision": found.training.precision,
            **({"fp32_modules": list(found.training.fp32_modules)} if found.training.fp32_modules else {}),
            "optimizer": setting.optimizer,
            "fused": setting.fused,
            "device": setting.device,
            "ranks_per_host": setting.ranks_per_host,
            "threads": setting.threads,
            "first_bucket_bytes": setting.first_bucket_bytes,
        },
        "bytes": asdict(choice.peak),
        "total_bytes": choice.peak.total,
        "offloaded_bytes": choice.offloaded,
        "fits": choice.fits,
        "step": None if step is None else {k: v for k, v in asdict(step).items() if k != "events"},
        "seconds_by_fabric": band,
    }


def cap_argument(setting: PlanSetting, training: Training) -> str:
    """Return ``bucket_cap_mb`` as text; empty if buckets have the default size."""
    if setting.bucket_sizes == training.bucket_sizes(setting, None):
        return ""
    return (
        "auto" if setting.bucket_sizes == training.bucket_sizes(setting, "auto") else str(setting.bucket_bytes // MIB)
    )


def start_of(config: PlanConfig, setting: PlanSetting, cluster: Cluster, micro_batches: int, training: Training) -> str:
    """Return the command of a preset, or the arguments. ``micro_batches``: of each rank in a step."""
    cap = cap_argument(setting, training)
    on_cpu = cluster.gpu.family == "cpu"  # as zero train is
    if config.preset is None or not on_cpu or config.optimizer not in _TRAINED or config.fp32_modules:
        return _arguments(config, setting, cluster, f'"{cap}"' if cap == "auto" else cap)
    if cluster.hosts == 1:
        flags = [f"zero train --ranks {cluster.ranks}"]
    else:
        launcher = f"torchrun --nnodes {cluster.hosts} --nproc-per-node {cluster.per_host}"
        flags = [f"{launcher} --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m zero.train"]
    flags.append(f"--preset {config.preset}")
    flags += [f"--{name.replace('_', '-')} {str(value).lower()}" for name, value in _sharding(setting).items()]
    if cap:
        flags.append(f"--bucket-cap-mb {cap}")
    if setting.offload:
        flags.append(f"--offload {setting.offload.states}")
    flags.append(f"--batch {config.micro} --sequence {config.sequence}")
    flags.append(f"--micro-batches {micro_batches * cluster.ranks}")
    flags.append(f"--precision {config.precision} --optimizer {config.optimizer}")
    flags += ["--fused"] * (config.optimizer != "muon")
    return " ".join(flags)


def _sharding(setting: PlanSetting) -> dict[str, object]:
    """Return the arguments that say who owns what, without defaults."""
    found: dict[str, object] = {"stage": setting.stage}
    if setting.sharding_factor is not None:
        found["sharding_factor"] = setting.factor
    if setting.reshard_after_forward is not True:
        found["reshard_after_forward"] = setting.reshard_after_forward
    if setting.prefetch_depth != 1:
        found["prefetch_depth"] = setting.prefetch_depth
    return found


def _precision(rule: MixedPrecision | Patterns) -> str:
    if isinstance(rule, Patterns):
        return "{" + ", ".join(f'"{pattern}": {_precision(each)}' for pattern, each in rule.pairs) + "}"
    output = "" if rule.output_dtype is None else f", output_dtype={rule.output_dtype}"
    return f"MixedPrecision({rule.param_dtype}{output})"


def _arguments(config: PlanConfig, setting: PlanSetting, cluster: Cluster, cap: str) -> str:
    arguments = [f"torch.optim.{_CLASSES[config.optimizer]}"]
    params = "model"
    if config.optimizer == "muon":
        muon = '{"params": matrices, "optimizer_class": torch.optim.Muon, "partition": "parameter"}'
        params = f'[{muon}, {{"params": rest}}]'
        arguments.append("module=model")
    arguments += [f"{name}={value}" for name, value in _sharding(setting).items()]
    if setting.offload:
        parameters = ', parameters="cpu"' if setting.offload.parameters else ""
        arguments.append(f'offload=Offload("{setting.offload.states}"{parameters})')
    if cap:
        arguments.append(f"bucket_cap_mb={cap}")
    if setting.rule is not None:
        arguments.append(f"mixed_precision={_precision(setting.rule)}")
    if config.optimizer in _FUSED or (config.optimizer == "adagrad" and cluster.gpu.family == "cpu"):
        arguments.append("fused=True")
    if config.optimizer == "momentum":
        arguments.append("momentum=0.9")
    return f"ZeroOptimizer({params}, {', '.join(arguments)})"
