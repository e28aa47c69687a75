"""The files of a plan: plan.json with every number, and trace.json.

Knows: their form. The same plan gives the same bytes: no file has a date or a time that was measured.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from typing import Any

import torch

from ...planning.choose import Findings, enough_bytes, frontier, name_of
from ...planning.plan import RESERVED, USABLE_SHARE, PlannedSetting, Planner, usable_bytes
from ...planning.seconds.program import chrome_trace
from .settings import PlanConfig
from .start import start_of

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
                "checkpoint": checkpoint,
                "hosts": smallest.cluster.hosts,
                "per_host": smallest.cluster.per_host,
                "name": name_of(smallest.setting),
                "bytes": asdict(smallest.peak),
                "offloaded_bytes": smallest.offloaded,
            }
            for checkpoint, smallest in found.smallest.items()
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
            "offload": setting.states_on,
            "bucket_bytes": setting.bucket_bytes,
            "precision": found.training.precision,
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
