"""One clip of several optimizers: their gradients have one norm, and get one factor.

    agree        on the arguments, and that each further optimizer is given by all its ranks    all ranks of the first
    finalize     each further optimizer's sums become means                                     the ranks of its group
    norm         each rank's exact sum, over its shards in all of them; one exchange            all ranks of the first
    scale        one factor                                                                     each rank alone

The sum has every element once, because the group of each further optimizer lies inside the first one's: its number, on
which its ranks agree, is sent by as many ranks as it has. All ranks enter the further optimizers in the order of these
numbers, so ranks that were given them in other orders do not wait for each other.

Knows: the parts of each optimizer of one rank. Does not know: why there are several.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from collectives import Kind, Tag

from .core.norm import PowerSum
from .parts import Parts

_CALL = "clip_grad_norm_()"
_TOGETHER = "clip_grad_norm_(also=...)"


def clip_together(
    first: Parts,
    others: Sequence[Parts],
    problem: str | None,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clip the mean gradients of all these optimizers by their common norm; return it, 0-dim, on the host. Collective.

    All ranks of ``first`` call this, each with ``others`` of its own, in any order. ``problem``: an error that this
    rank has found. Raises an error on every rank if an optimizer cannot be clipped now, if arguments or divisors
    differ, or if a rank of one of ``others`` is not in the group of ``first``, or was not given it. Where a gradient of
    any of them is infinite or NaN, a `GradScaler` that has unscaled skips the steps of all.
    """
    others = sorted(others, key=_number)
    _agree(first, others, problem, [max_norm, norm_type, error_if_nonfinite])
    total, failed = first.update.norm_sum(norm_type), None
    for other in others:
        try:
            other.reducer.finalize_grads(_CALL, _problem(other))
            total = total.merge(other.update.norm_sum(norm_type))
        except Exception as error:  # the ranks of the other groups wait for this one
            failed = failed or error
    any_fp64 = any(parts.reducer.means.any_is_fp64() for parts in (first, *others))
    head = {"error": None if failed is None else str(failed), "fp64": any_fp64}
    message = json.dumps(head).encode() + b"\0" + total.to_bytes()
    told = [data.partition(b"\0") for data in first.transport.exchange(message, Tag(Kind.EXCHANGE, "gradient norm"))]
    if failed is not None:
        raise failed
    facts = [json.loads(head) for head, _, _ in told]
    for rank, theirs in enumerate(facts):
        if theirs["error"] is not None:
            raise RuntimeError(f"{_TOGETHER}, on rank {rank}: {theirs['error']}")
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


def _number(parts: Parts) -> int:
    """Return a number of an optimizer, which its ranks have in common: chosen at random as its channel was opened."""
    return parts.transport.links.number


def _agree(first: Parts, others: Sequence[Parts], problem: str | None, arguments: list[float]) -> None:
    """Agree to the clip with all ranks of the first optimizer, and turn its sums into means. Collective."""
    problem = problem or next(filter(None, (_refused(first, parts) for parts in (first, *others))), None)
    among = [parts for parts in others if parts.transport.world_size > 1]
    given = [[_number(parts), parts.transport.world_size, parts.transport.rank, _names(parts)] for parts in among]
    message = json.dumps({"arguments": arguments, "given": given}).encode()
    records = first.reducer.check_consistency(_TOGETHER, problem or _problem(first), message=message)
    _check([json.loads(record.attachment) for record in records])
    first.reducer.finalize_agreed(_TOGETHER, records)


def _names(parts: Parts) -> str:
    names = [spec.name for spec in parts.storage.layout.parameters]
    return f"that of {names[0]!r}" + (f" and {len(names) - 1} more parameters" if names[1:] else "")


def _check(facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ValueError` if arguments differ, or if a rank of a further optimizer has not given it."""
    for rank, theirs in enumerate(facts):
        if theirs["arguments"] != facts[0]["arguments"]:
            raise ValueError(
                f"{_TOGETHER}: max_norm, norm_type and error_if_nonfinite are {facts[0]['arguments']} on rank 0, and "
                f"{theirs['arguments']} on rank {rank}"
            )
    known: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for rank, theirs in enumerate(facts):
        for number, size, place, names in theirs["given"]:
            known.setdefault((number, size), []).append((rank, place, names))
    for (_, size), given in known.items():
        missing = set(range(size)) - {place for _, place, _ in given}
        if missing:
            rank, _, names = given[0]
            raise ValueError(
                f"{_TOGETHER}: rank {rank} has given a further optimizer of {size} ranks, {names}, but its rank "
                f"{min(missing)} has not, so the norm would lack gradients: clip by the optimizer whose group has all "
                "ranks, and give each further one on all of its ranks"
            )


def _refused(first: Parts, parts: Parts) -> str | None:
    """Return why an optimizer cannot be clipped together with the first one now, else None. Local."""
    try:
        parts.reducer.check_synchronised(_CALL)
    except RuntimeError as error:
        return str(error)
    if parts.joining.active:
        return (
            f"{_TOGETHER} inside join(): a rank that has run out of batches follows one optimizer alone; clip "
            "each by itself, or give all ranks as many batches"
        )
    own, theirs = first.reducer.schedule.divisor, parts.reducer.schedule.divisor
    if own != theirs:
        return (
            f"{_TOGETHER}: this optimizer divides by {own}, and a further one by {theirs}, so their gradients "
            f"are not means over the same micro-batches: build the further one with divisor={own}"
        )
    return None


def _problem(parts: Parts) -> str | None:
    """Return an error that this rank finds in an optimizer, else None."""
    storage = parts.storage
    return storage.diagnose(waits=False) or storage.diagnose_unfrozen() or parts.user_optimizers.changed()
