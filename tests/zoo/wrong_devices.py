"""Bugs of what runs on devices, and between hosts, as functions: see `wrong_training`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from collectives.algorithms.ordered_sum import ordered_sum
from collectives.kernels import LIMBS
from collectives.launches.ledger import Verdict, count

_HERE = threading.local()  # what a rank keeps, which is a thread


def a_host_adds_its_own_first(real: Any, self: Any, low: int, high: int, *, begun: bool) -> None:
    total = self.sums[low:high]
    ordered_sum([*(part[low:high] for part in self.arrived), *([total] if begun else [])], total)


def the_total_goes_to_the_next_owner(real: Any, self: Any) -> Any:
    given = self._operands
    if self._rails.after is None:
        given.sums.copy_(given.sums.roll(given.shards[0]))
    return real(self)


def a_verdict_names_one_rank_only(real: Any, *arguments: Any) -> Verdict:
    verdict: Verdict = real(*arguments)
    return verdict._replace(text=verdict.text.partition(", but")[0])


def an_edit_is_told_for_ever(real: Any, self: Any) -> Any:
    kept = self._compared
    found = real(self)
    self._compared = kept
    return found


def limbs_of_this_rank_alone(
    real: Any, kernels: Any, device: Any, shards: Any, gradients: Any, max_norm: float, *others: Any
) -> Any:
    kernels.norm_limbs(shards, limbs := torch.zeros(LIMBS, dtype=torch.int64, device=device))
    norm, factor = kernels.clip_factor(limbs, max_norm)
    kernels.scale_(gradients, factor)
    return norm


def one_memory_for_all_rounded_copies(real: Any, self: Any, room: Any) -> None:
    def again(numel: int) -> Any:
        kept = getattr(_HERE, "memory", None)
        if kept is None or kept.numel() < numel:
            kept = _HERE.memory = room(numel)
        return kept[:numel]

    real(self, again)


def shards_are_copied_on_the_current_stream(real: Any, self: Any, buffer: Any) -> Iterator[None]:
    yield


WRONG: dict[str, Callable[..., Any]] = {
    "one-rank-alone-gathers-nothing": lambda real, self, own, buffer, bounds, *, tag: self._all_gather(
        own, buffer, bounds, tag
    ),
    "frozen-parameters-on-the-host-get-masters": lambda real, self: (self._flats(), real(self))[1],
    "a-digest-without-bounds": lambda real, digest, bounds, dtype: real(digest, [], dtype),
    "a-rank-outside-is-lost": lambda real, self, other: other.waits[0] > count(self.launches),
    "limbs-overflow-32-bits": lambda real, self, limbs, max_norm: real(self, limbs & 0xFFFFFFFF, max_norm),
    "shards-are-even-for-the-ranks-of-all-replicas": lambda real, end, spec, world_size: real(
        end, spec, 2 * world_size
    ),
}
"""The bugs that an expression makes, by name."""
