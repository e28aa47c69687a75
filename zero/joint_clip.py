"""One clip of several optimizers: their gradients have one norm, and get one factor.

    agree        the ranks of the first optimizer agree to the clip                        all its ranks
    finalize     each other optimizer's sums become means                                  the ranks of its group
    norm         each rank's exact sum, over its shards in all of them; one exchange       all ranks of the first
    scale        one factor                                                                each rank alone

The sum has every element once if the group of each further optimizer lies inside the first one's.

Knows: the parts of each optimizer of one rank. Does not know: why there are several.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from collectives import Kind, Tag

from .core.norm import PowerSum
from .parts import Parts

_CALL = "clip_grad_norm_()"


def clip_together(
    first: Parts, others: Sequence[Parts], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """Clip the mean gradients of all these optimizers by their common norm; return it, 0-dim, on the host. Collective.

    All ranks of ``first`` call this, each with as many ``others`` of its own. Raises the same error on every rank if an
    optimizer cannot be clipped now.
    """
    for parts in (first, *others):
        parts.reducer.check_synchronised(_CALL)
        if parts.joining.active:
            raise RuntimeError(
                f"{_CALL} with also= inside join(): a rank that has run out of batches follows one optimizer alone; "
                "clip each by itself, or give all ranks as many batches"
            )
    reducer, transport = first.reducer, first.transport
    # in the call's name, so that ranks that give other numbers are in another call
    reducer.finalize_grads(f"clip_grad_norm_(also={len(others)} optimizers)", _problem(first))
    total, failed = first.update.norm_sum(norm_type), None
    try:
        for other in others:
            other.reducer.finalize_grads(_CALL, _problem(other))
            total = total.merge(other.update.norm_sum(norm_type))
    except Exception as error:  # the ranks of other groups wait for this one
        failed = error
    any_fp64 = any(parts.reducer.means.any_is_fp64() for parts in (first, *others))
    head = json.dumps({"error": None if failed is None else str(failed), "fp64": any_fp64}).encode()
    told = transport.exchange(head + b"\0" + total.to_bytes(), Tag(Kind.EXCHANGE, "gradient norm"))
    if failed is not None:
        raise failed
    total = PowerSum.of([], norm_type)
    for rank, data in enumerate(told):
        head, _, part = data.partition(b"\0")
        facts = json.loads(head)
        if facts["error"] is not None:
            raise RuntimeError(f"{_CALL} with also=, on rank {rank}: {facts['error']}")
        any_fp64 |= facts["fp64"]
        total = total.merge(PowerSum.from_bytes(part))
    norm = total.norm(torch.float64 if any_fp64 else torch.float32)
    for parts in (first, *others):
        parts.update.scale(norm, max_norm, norm_type, error_if_nonfinite)
    return norm


def _problem(parts: Parts) -> str | None:
    """Return an error that this rank finds in an optimizer, else None."""
    storage = parts.storage
    return storage.diagnose(waits=False) or storage.diagnose_unfrozen() or parts.user_optimizers.changed()
