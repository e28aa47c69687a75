"""The bytes that a step sends: of all ranks, as `optimizer.traffic` counts them, and between hosts.

Knows: formulas of traffic, the algorithm that the places of the ranks give, plans between hosts. Does not know:
seconds, headers, what NCCL sends.

Slices between hosts count as equally long. Hosts are equal, and each has neighbouring ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from collectives.algorithms.plans import equal_hosts

from ..core.formulas import formula_traffic, unit_bytes
from ..core.layout import BucketSpec, Layout
from .memory import MemoryPlan
from .setting import PlanSetting


@dataclass(frozen=True)
class Crossing:
    """The bytes between hosts in a step, summed over the hosts that send.

    Attributes:
        reductions: contributions and sums, among the ranks that share a copy.
        replicas: sums, from copy to copy and back.
        gathers: parameters, and means at stage 0.
    """

    reductions: int
    replicas: int
    gathers: int

    @property
    def total(self) -> int:
        """All bytes between hosts."""
        return self.reductions + self.replicas + self.gathers


def sent(plan: MemoryPlan, setting: PlanSetting, backwards: int = 1, synchronised: int = 1) -> int:
    """Return the payload of a step, summed over the ranks, if each of them sends what an owner needs to that owner.

    That is so for ranks that share a host, for threads, and for hosts of one rank each; `crossing` is right for all
    others. If no parameter of the first units is trained, a backward does not gather these units, and less is sent.

    Args:
        plan: of the model.
        setting: the optimizer's arguments.
        backwards: the backwards of each rank in the step, each after one forward.
        synchronised: how many of them are outside ``no_sync``.
    """
    layout = plan.laid_out(setting).layout
    whole = formula_traffic(
        layout,
        setting.row,
        backwards,
        synchronised,
        units_need_gather=setting.gathers_units,
        means_are_shown=setting.shows_means,
        replicas=setting.replicas,
        reshard_group_size=setting.near,
    )
    unused = sum(_param_bytes(bucket) for bucket in _trained(plan, layout) if not _is_used(plan, bucket))
    return whole - int(setting.row.parameters_are_gathered) * unused * (setting.factor - 1) * setting.replicas


def crossing(plan: MemoryPlan, setting: PlanSetting, backwards: int = 1, synchronised: int = 1) -> Crossing:
    """Return the bytes that cross between hosts in a step. The arguments are those of `sent`."""
    layout, row, dtypes = plan.laid_out(setting).layout, setting.row, setting.dtypes
    trained = _trained(plan, layout)
    elements = sum(bucket.numel for bucket in trained)
    passes = row.passes(synchronised, means_are_shown=setting.shows_means)

    travel, accumulate = dtypes.itemsize("reduce_dtype"), dtypes.itemsize("accumulate_dtype")
    reductions = Fraction(0)
    for replica in range(setting.replicas):
        first = _reduced(setting, replica > 0, travel, accumulate)
        later = _reduced(setting, True, travel, accumulate)
        reductions += elements * (first + (synchronised - 1) * later)

    onward = sum(
        rank // setting.per_host != (rank + setting.factor) // setting.per_host
        for rank in range(setting.world_size - setting.factor)
    )
    replicas = 2 * synchronised * elements * accumulate * Fraction(onward, setting.factor)

    gathered = passes["accumulate_dtype"] * elements * accumulate
    if row.parameters_are_gathered:
        gathered += sum(_param_bytes(bucket) for bucket in trained if _is_used(plan, bucket))
    gathers = Fraction(gathered * _other_hosts(setting, setting.factor) * setting.replicas)
    if setting.gathers_units:
        units = unit_bytes(layout)
        still_here = sum(units[unit] for unit in {0, max(units)} & set(units))
        forwards = row.gathers(backwards) // 2
        copies = setting.factor // setting.near * setting.replicas
        gathers += forwards * sum(units.values()) * _other_hosts(setting, setting.factor) * setting.replicas
        gathers += forwards * (sum(units.values()) - still_here) * _other_hosts(setting, setting.near) * copies
    return Crossing(round(reductions), round(replicas), round(gathers))


def _reduced(setting: PlanSetting, started: bool, travel: int, accumulate: int) -> Fraction:
    """Return the bytes between hosts of one reduced element, among the ranks that share a copy. ``started``: there is
    a sum so far."""
    hosts, ranks = _spread(setting, setting.factor)
    if hosts == 1:
        return Fraction(0)
    if ranks == 1 and setting.replicas == 1:  # a direct exchange
        return Fraction((hosts - 1) * travel)
    return Fraction(equal_hosts(hosts, ranks, started, travel, accumulate), hosts * ranks)


def _other_hosts(setting: PlanSetting, group: int) -> int:
    """Return the number of hosts that a slice of a group of neighbouring ranks is gathered to."""
    return _spread(setting, group)[0] - 1


def _spread(setting: PlanSetting, group: int) -> tuple[int, int]:
    """Return the hosts of a group of neighbouring ranks, and its ranks on each.

    Raises:
        ValueError: the group is on hosts with different numbers of its ranks.
    """
    if setting.per_host % group == 0:
        return 1, group
    if group % setting.per_host == 0:
        return group // setting.per_host, setting.per_host
    raise ValueError(
        f"groups of {group} ranks lie across hosts of {setting.per_host} ranks: take a number of ranks that divides "
        "those of a host, or a multiple of them"
    )


def _trained(plan: MemoryPlan, layout: Layout) -> list[BucketSpec]:
    return [bucket for bucket in layout.buckets if plan.members(bucket)[0].trainable]


def _is_used(plan: MemoryPlan, bucket: BucketSpec) -> bool:
    return any(member.used for member in plan.members(bucket))


def _param_bytes(bucket: BucketSpec) -> int:
    return bucket.numel * bucket.dtypes.param_dtype.itemsize
