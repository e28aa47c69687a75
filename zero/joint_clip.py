"""One clip of several optimizers: their gradients have one norm, and get one factor.

    agree        the ranks of the first optimizer agree to the clip                        all its ranks
    finalize     each other optimizer's sums become means                                  the ranks of its group
    norm         each rank's exact sum, over its shards in all of them; one exchange       all ranks of the first
    scale        one factor                                                                each rank alone

The sum has every element once if the group of each further optimizer lies inside the first one's.

Knows: engines of one rank. Does not know: why there are several.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from collectives import Kind, Tag

from .core.norm import PowerSum
from .engine import Engine
from .step.clip import check_finite, clip_factor

_CALL = "clip_grad_norm_()"


def further_engines(first: Engine, also: Iterable[Any]) -> list[Engine]:
    """Return the engines of further optimizers. Raises `TypeError` if one is none, the first one, or there twice."""
    found: list[Engine] = []
    for number, other in enumerate(also):
        engine = getattr(other, "_engine", None)
        if not isinstance(engine, Engine) or engine is first or engine in found:
            raise TypeError(f"also[{number}] must be a further ZeroOptimizer, each once, not {type(other).__name__}")
        found.append(engine)
    return found


def clip_together(
    first: Engine, others: Sequence[Engine], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """Clip the mean gradients of all these optimizers by their common norm; return it, 0-dim, on the host. Collective.

    All ranks of ``first`` call this, each with as many ``others`` of its own. Raises the same error on every rank if an
    optimizer cannot be clipped now.
    """
    for engine in (first, *others):
        engine.check()
        engine.averages.refuse_applied(_CALL)
        engine.parts.reducer.check_synchronised(_CALL)
        if engine.parts.joining.active:
            raise RuntimeError(
                f"{_CALL} with also= inside join(): a rank that has run out of batches follows one optimizer alone; "
                "clip each by itself, or give all ranks as many batches"
            )
    reducer, transport = first.parts.reducer, first.parts.transport
    # in the call's name, so that ranks that give other numbers are in another call
    reducer.finalize_grads(f"clip_grad_norm_(also={len(others)} optimizers)", _problem(first))
    total, failed = first.parts.update.norm_sum(norm_type), None
    try:
        for other in others:
            other.parts.reducer.finalize_grads(_CALL, _problem(other))
            total = total.merge(other.parts.update.norm_sum(norm_type))
    except Exception as error:  # the ranks of other groups wait for this one
        failed = error
    any_fp64 = any(engine.parts.reducer.means.any_is_fp64() for engine in (first, *others))
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
    if error_if_nonfinite:
        check_finite(norm, norm_type)
    factor = clip_factor(norm, max_norm)
    for engine in (first, *others):
        engine.parts.update.scale(factor)
    return norm


def _problem(engine: Engine) -> str | None:
    """Return an error that this rank finds in an optimizer, else None."""
    storage = engine.parts.storage
    return storage.diagnose(waits=False) or storage.diagnose_unfrozen() or engine.parts.user_optimizers.changed()
