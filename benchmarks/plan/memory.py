"""The memory of a rank in a published run, by the rules of the run's own system.

    states      zero3: 16P/F     zero2: 2P + 14P/F, and buckets     zero1: weights and gradients P, the rest /F
    gathered    two units and the root's rest in the dtype of a gather; gradients of two units in that of a reduction
    kept        the input of every block, and what it saved unless that is recomputed
    peak        at the loss, or in the backward of the last block, whichever is more

Sources: "ZeRO" (Rajbhandari et al. 2020), section 3.1; DDP's copy of the gradients in buckets: torch's
DistributedDataParallel, `gradient_as_bucket_view`.

Knows: bytes of a rank. Does not know: seconds. What the allocator and NCCL need is the margin of `fits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero.planning.model import UnitWork

from .setting import COUNTED_LOGITS, RowSetting

USABLE = 0.985
"""The share of a GPU's nominal memory in which a published run fits: between those that ran, at most 0.975 by these
formulas, and those that did not, at least 1.0. The rest is the context, NCCL and fragmentation."""

KEPT_BY_OPERATIONS = 0.4
"""The share of a block's saved bytes that stays if cheap operations are recomputed: every second product, and attention
(torchtitan, `_apply_op_sac`)."""

EAGER_COPIES = 12.0
"""Bytes of a token and feature that a gated block keeps besides if its norms compute in 32 bits and its rotation copies
queries and keys, which a compiler and a recompute of cheap operations avoid."""

_ZERO2_BUCKETS = 2 * 5e8 * 2  # DeepSpeed, "reduce_bucket_size" and "allgather_bucket_size": 5e8 elements each


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a rank: model states, buffers of collectives, activations until their backward, and the peak above."""

    states: float
    buffers: float
    kept: float
    peak: float

    @property
    def total(self) -> float:
        return self.states + self.buffers + self.kept + self.peak


def row_bytes(setting: RowSetting, works: Sequence[UnitWork], elements: Sequence[int]) -> RowBytes:
    """Return the bytes of a rank. ``works`` and ``elements``: of each unit, the root's rest first."""
    root, blocks = works[0], works[1:]
    tokens = setting.micro * setting.sequence
    shares = [_kept_share(setting.recompute, number) for number in range(len(blocks))]
    kept = sum(block.input_bytes + share * block.saved_bytes for block, share in zip(blocks, shares, strict=True))
    loss = root.peak_bytes + (setting.logit_bytes - COUNTED_LOGITS) * tokens * setting.model.vocabulary
    if setting.model.gated and not setting.is_compiled:
        kept += EAGER_COPIES * tokens * setting.model.hidden * shares.count(1.0)
    backward = blocks[-1].peak_bytes - shares[-1] * blocks[-1].saved_bytes
    return RowBytes(_states(setting, sum(elements)), _buffers(setting, elements), kept, max(loss, backward, 0.0))


def _kept_share(recompute: str, number: int) -> float:
    """Return the share of its saved bytes that a block keeps for its backward."""
    if recompute == "half":
        return float(number % 2)
    return {"none": 1.0, "op": KEPT_BY_OPERATIONS, "full": 0.0}[recompute]


def _states(setting: RowSetting, elements: int) -> float:
    """Return the bytes of weights, gradients, masters and states."""
    whole, factor = setting.precision.states, setting.factor
    weights = setting.precision.dtypes.itemsize("param_dtype")
    owned = 12.0 if setting.precision.dtypes.has_master else 8.0
    if setting.sharding == "single":
        return (whole if setting.precision.has_masters else 8.0) * elements
    if setting.sharding == "ddp":
        copies = 4.0 if "DDP" in setting.framework else 0.0
        return (whole + copies) * elements
    if setting.sharding == "zero1":
        return (whole - owned + owned / factor) * elements
    if setting.sharding == "zero2":
        return (weights + (whole - weights) / factor) * elements
    return whole * elements / factor


def _buffers(setting: RowSetting, elements: Sequence[int]) -> float:
    """Return the bytes of gathered units, and of gradients on their way."""
    if setting.sharding == "zero2":
        return _ZERO2_BUCKETS
    if setting.sharding not in ("zero3", "hsdp") or setting.factor == 1:
        return 0.0
    narrow, travel = (setting.precision.dtypes.itemsize(name) for name in ("param_dtype", "reduce_dtype"))
    root, largest = elements[0], max(elements[1:])
    shown = 2 * largest + root if setting.reshard else sum(elements)
    return narrow * shown + travel * (largest + max(largest, root))
