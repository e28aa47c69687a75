"""Everything that a plan has found, before it is printed, written and drawn.

Knows: which questions follow from the choices. Does not know: output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...core.layout import MIB
from ...planning.choose import ScaleCurve, frontier, recommended, scale_curves, smallest_cluster
from ...planning.plan import PlannedSetting, Planner
from ...planning.setting import PlanSetting
from .inputs import Asked

__all__ = ["Findings", "findings_of"]


@dataclass(frozen=True)
class Findings:
    """What a plan has found.

    Attributes:
        asked: what it is made for.
        choices: every setting.
        best: the recommended one; None if nothing fits.
        bands: least and most seconds over all fabrics, of the settings that no other one beats.
        other_caps: sizes of buckets in MiB, and the share of a step that each costs more than the recommended one.
        smallest: what fits on the smallest cluster, by how blocks are recomputed.
        curves: of more hosts.
        spread: how parameters that have one owner each are spread over the ranks; empty if there are none.
    """

    asked: Asked
    choices: Sequence[PlannedSetting]
    best: PlannedSetting | None
    bands: Mapping[PlanSetting, tuple[float, float]]
    other_caps: Sequence[tuple[int, float]]
    smallest: Mapping[str, PlannedSetting]
    curves: Sequence[ScaleCurve]
    spread: str


def findings_of(asked: Asked, planner: Planner, choices: Sequence[PlannedSetting]) -> Findings:
    """Answer all questions that follow from the choices."""
    best = recommended(choices)
    return Findings(
        asked,
        choices,
        best,
        {choice.setting: _band(choice, asked, planner) for choice in frontier(choices)},
        [] if best is None else _other_caps(best, choices),
        _smallest(asked, planner),
        [] if best is None else scale_curves(planner, asked.cluster, best.setting, asked.hardware.fabrics),
        "" if best is None else planner.spread(best.setting),
    )


def _band(choice: PlannedSetting, asked: Asked, planner: Planner) -> tuple[float, float]:
    steps = planner.over_fabrics(choice.setting, choice.cluster, asked.hardware.fabrics)
    return min(step.seconds for step in steps), max(step.seconds for step in steps)


def _other_caps(best: PlannedSetting, choices: Sequence[PlannedSetting]) -> list[tuple[int, float]]:
    sizes = best.setting.bucket_sizes
    others = [each for each in choices if each.setting.bucket_sizes != sizes and each.step]
    return [
        (each.setting.bucket_bytes // MIB, each.seconds / best.seconds - 1)
        for each in others
        if replace(each.setting, bucket_bytes=sizes.most, first_bucket_bytes=sizes.first) == best.setting
    ]


def _smallest(asked: Asked, planner: Planner) -> dict[str, PlannedSetting]:
    found: dict[str, PlannedSetting] = {}
    for checkpoint in (asked.training.checkpoint, *(["full"] if asked.training.counts_activations else [])):
        smallest = smallest_cluster(planner.recomputing(checkpoint), asked.cluster)
        if smallest is not None and smallest.cluster not in [each.cluster for each in found.values()]:
            found[checkpoint] = smallest
    return found
