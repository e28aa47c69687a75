"""One clip of several optimizers: their gradients have one norm, and get one factor.

    agree        the ranks of the first optimizer agree to the clip                        all its ranks
    finalize     each other optimizer's sums become means; who is in its group?            the ranks of its group
    norm         each rank's exact sum, over its shards in all of them; one exchange       all ranks of the first
    scale        one factor                                                                each rank alone

The sum has every element once, because the group of each further optimizer lies inside the first one's: the ranks of a
group tell each other a random number, and all of these must be among the first one's.

Knows: the parts of each optimizer of one rank. Does not know: why there are several.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from collectives import Kind, Tag

from .core.norm import PowerSum
from .parts import Parts

_CALL = "clip_grad_norm_()"


def clip_together(
    first: Parts,
    others: Sequence[Parts],
    problem: str | None,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clip the mean gradients of all these optimizers by their common norm; return it, 0-dim, on the host. Collective.

    All ranks of ``first`` call this, each with as many ``others`` of its own. ``problem``: an error that this rank has
    found in one of these. Raises an error on every rank if an optimizer cannot be clipped now, if arguments or divisors
    differ, or if one of ``others`` has ranks that are not in the group of ``first``. Where a gradient of any of them is
    infinite or NaN, a `GradScaler` that has unscaled skips the steps of all.
    """
    transport, arguments = first.transport, [max_norm, norm_type, error_if_nonfinite]
    problem = problem or next(filter(None, (_refused(first, parts) for parts in (first, *others))), None)
    # in the call's name, so that ranks that give other numbers are in another call
    first.reducer.finalize_grads(f"clip_grad_norm_(also={len(others)} optimizers)", problem or _problem(first))
    total, failed = first.update.norm_sum(norm_type), None
    token, members = os.urandom(8).hex(), set[str]()
    for other in others:
        try:
            other.reducer.finalize_grads(_CALL, _problem(other))
            found = other.transport.exchange(token.encode(), Tag(Kind.EXCHANGE, "ranks of a further optimizer"))
            members |= {data.decode() for data in found}
            total = total.merge(other.update.norm_sum(norm_type))
        except Exception as error:  # the ranks of the other groups wait for this one
            failed = failed or error
    any_fp64 = any(parts.reducer.means.any_is_fp64() for parts in (first, *others))
    mine = {"error": failed and str(failed), "fp64": any_fp64, "token": token, "members": sorted(members)}
    message = json.dumps({**mine, "arguments": arguments}).encode() + b"\0" + total.to_bytes()
    told = [data.partition(b"\0") for data in transport.exchange(message, Tag(Kind.EXCHANGE, "gradient norm"))]
    if failed is not None:
        raise failed
    facts = [json.loads(head) for head, _, _ in told]
    _check(facts)
    total = PowerSum.of([], norm_type)
    for _, _, part in told:
        total = total.merge(PowerSum.from_bytes(part))
    any_fp64 = any(theirs["fp64"] for theirs in facts)
    norm = total.norm(torch.float64 if any_fp64 else torch.float32)
    for parts in (first, *others):
        parts.reducer.note_elsewhere(is_finite=not (total.has_inf or total.has_nan))
    for parts in (first, *others):
        parts.update.scale(norm, max_norm, norm_type, error_if_nonfinite)
    return norm


def _check(facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error that a rank has told, or that of a further optimizer with other ranks than the first one's."""
    for rank, theirs in enumerate(facts):
        if theirs["error"] is not None:
            raise RuntimeError(f"{_CALL} with also=, on rank {rank}: {theirs['error']}")
    tokens = {theirs["token"] for theirs in facts}
    for rank, theirs in enumerate(facts):
        if theirs["arguments"] != facts[0]["arguments"]:
            raise ValueError(
                f"{_CALL} with also=: max_norm, norm_type and error_if_nonfinite are {facts[0]['arguments']} on rank "
                f"0, and {theirs['arguments']} on rank {rank}"
            )
        if not tokens.issuperset(theirs["members"]):
            raise ValueError(
                f"{_CALL} with also=: a further optimizer of rank {rank} has ranks outside of this one's group, so the "
                "norm would lack their gradients: clip by the optimizer whose group has all ranks"
            )


def _refused(first: Parts, parts: Parts) -> str | None:
    """Return why an optimizer cannot be clipped together with the first one now, else None. Local."""
    try:
        parts.reducer.check_synchronised(_CALL)
    except RuntimeError as error:
        return str(error)
    if parts.joining.active:
        return (
            f"{_CALL} with also= inside join(): a rank that has run out of batches follows one optimizer alone; clip "
            "each by itself, or give all ranks as many batches"
        )
    own, theirs = first.reducer.schedule.divisor, parts.reducer.schedule.divisor
    if own != theirs:
        return (
            f"{_CALL} with also=: this optimizer divides by {own}, and a further one by {theirs}, so their gradients "
            f"are not means over the same micro-batches: build the further one with divisor={own}"
        )
    return None


def _problem(parts: Parts) -> str | None:
    """Return an error that this rank finds in an optimizer, else None."""
    storage = parts.storage
    return storage.diagnose(waits=False) or storage.diagnose_unfrozen() or parts.user_optimizers.changed()
