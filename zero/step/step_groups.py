"""Which buckets an optimizer's class steps in one call.

Knows: buckets, their devices and dtypes, and what follows a step. Does not know: states, tensors, ranks.

    accelerator    stages 0, 3    one group for all buckets of a class, a device and a set of dtypes
                   stages 1, 2    four, in the layout's order: the first are gathered while the next is stepped
    CPU, offload                  each bucket by itself: what is stepped stays in the caches, and states in few buffers
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ..core.bits import is_launched
from ..core.layout import BucketSpec, Layout
from ..core.stage import Stage

GROUPS_BESIDE_GATHERS = 4


def step_groups(layout: Layout, first: int, stage: Stage, *, offloads: bool) -> dict[int, Hashable]:
    """Return the group of each bucket from ``first`` on, by the bucket's index. ``offloads``: of the states.

    A bucket whose gradient is widened for the step, or its weights, is a group of its own, so that one such copy exists
    at a time.
    """
    found: dict[int, Hashable] = {}
    alike: dict[tuple[int, str, object], list[BucketSpec]] = {}
    for bucket in layout.buckets[first:]:
        dtypes = bucket.dtypes
        widened = not (dtypes.accumulate_dtype is dtypes.master_dtype is dtypes.step_dtype)
        if offloads or widened or not is_launched(torch.device(bucket.device)):
            found[bucket.index] = bucket.index
        else:
            optimizer_class = layout.members(bucket)[0].optimizer_class
            alike.setdefault((optimizer_class, bucket.device, dtypes), []).append(bucket)
    count = GROUPS_BESIDE_GATHERS if stage.parameters_are_gathered else 1
    for key, buckets in alike.items():
        total, before = sum(bucket.numel for bucket in buckets), 0
        for bucket in buckets:
            found[bucket.index] = (*key, count * before // max(1, total))
            before += bucket.numel
    return found
