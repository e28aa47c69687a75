"""The bytes that a step sends: of all ranks, as `optimizer.traffic` counts them.

Knows: formulas of traffic. Does not know: seconds, headers, what NCCL sends, which bytes cross between hosts
(`seconds.wires`).
"""

from __future__ import annotations

from ..core.formulas import formula_traffic
from .memory import MemoryPlan
from .setting import PlanSetting


def sent(plan: MemoryPlan, setting: PlanSetting, backwards: int = 1, synchronised: int = 1) -> int:
    """Return the payload of a step, summed over the ranks, if each of them sends what an owner needs to that owner.

    That is so for ranks that share a host, for threads, and for hosts of one rank each. If no parameter of the first
    units is trained, a backward does not gather these units, and less is sent.

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
    unused = 0
    for bucket in layout.buckets:
        members = plan.members(bucket)
        if members[0].trainable and not any(member.used for member in members):
            unused += bucket.numel * bucket.dtypes.param_dtype.itemsize
    return whole - int(setting.row.parameters_are_gathered) * unused * (setting.factor - 1) * setting.replicas
