"""The pictures of a plan: plan.png, memory against time, and plan-scale.png, more and more ranks.

Knows: what is drawn. Does not know: how (`zero.commands.plots`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...core.layout import DEFAULT_CAP_MB, MIB
from ...planning.choose import frontier, name_of
from ...planning.plan import usable_bytes
from ...planning.setting import PlanSetting
from ..plots import Curve, Dot, draw_curves, draw_sweep
from .findings import Findings

__all__ = ["draw_choices", "draw_scale"]

FARTHEST = 3.0  # times the fastest: slower settings would squeeze the others


def draw_choices(folder: Path, found: Findings) -> str:
    """Draw the settings that were simulated, in seconds and GB. Return the name of the file."""
    shown, cluster = frontier(found.choices), found.asked.cluster
    if found.best is not None and found.best not in shown:
        shown.append(found.best)
    cap = shown[0].setting.bucket_bytes
    slowest = FARTHEST * min(choice.seconds for choice in found.choices)
    dots = [
        Dot(
            name_of(_without(choice.setting, cap)),
            f"zero {choice.setting.stage}",
            True,
            choice.seconds,
            round(choice.peak.total / 1e3),  # so that the axis counts 10**9 bytes
            hollow=bool(choice.setting.offload),
            best=choice in shown,
        )
        for choice in found.choices
        if choice.seconds <= slowest or choice in shown
    ]
    title = f"{found.asked.training.model.name} on {cluster.ranks:,} {cluster.gpu.name}, planned"
    seconds = f"step, s (up to {FARTHEST:g} times the fastest); names: buckets of {cap // MIB} MiB unless said"
    elsewhere = "states on a disk" if cluster.gpu.family == "cpu" else "states on the host"
    labels = (seconds, "GB of a rank (10⁹ bytes)", elsewhere)
    draw_sweep(folder / "plan.png", title, dots, labels, usable_bytes(cluster) / 1e9)
    return "plan.png"


def _without(setting: PlanSetting, cap: int) -> PlanSetting:
    """Return a setting whose name does not say that its buckets have ``cap`` bytes."""
    return replace(setting, bucket_bytes=DEFAULT_CAP_MB * MIB) if setting.bucket_bytes == cap else setting


def draw_scale(folder: Path, found: Findings) -> str:
    """Draw tokens a second of a rank over the number of ranks. Return the name of the file."""
    curves = [
        Curve(curve.name, [(p.ranks, p.tokens_per_second_of_rank, p.low, p.high, p.fits) for p in curve.points])
        for curve in found.curves
    ]
    training, gpu = found.asked.training, found.asked.cluster.gpu.name
    ranks = "ranks, each with the same batch (bands: fabrics; hollow: does not fit)"
    title = f"{training.model.name} on {gpu}, planned"
    draw_curves(folder / "plan-scale.png", title, curves, (ranks, "tokens/s of a rank"))
    return "plan-scale.png"
