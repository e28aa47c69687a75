"""The use of finalized gradients: clip them, update this rank's intervals, gather the updated parameters.

Knows: the order of these. Does not know: the user's calls, and what the ranks agree on before.

    clip:    norm of all slices, one factor                          all ranks
    update:  the inner optimizer on this rank's intervals            each rank alone
    gather:  the slices of all owners, if the stage keeps them whole all ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from collectives import BucketQueue, Collective, Kind, Tag, Transport, Work

from ..core.layout import Layout
from ..core.norm import PowerSum
from ..core.stage import Stage
from ..events import Event, Waited
from .clip import check_finite, clip_factor
from .flat_states import Options
from .inner import InnerOptimizer

GATHERS_IN_FLIGHT = 2  # after a step; for each, a copy of the rank's slice may be kept for its peers to read


class _Gradient(Protocol):
    """The finalized gradient of one bucket, as in a `GradAccumulator`."""

    def final_grad(self) -> Tensor | None:
        """Return the mean over the interval that this rank updates, 1-D; None if no rank has a gradient."""


class _Means(Protocol):
    """The mean gradients of the slices that this rank owns, as in `OwnedMeans`."""

    def slices(self) -> list[Tensor]: ...

    def any_is_double(self) -> bool: ...


class _Gradients(Protocol):
    """The gradients of all parameters, as in a `Reducer`."""

    @property
    def means(self) -> _Means: ...

    @property
    def stores(self) -> Sequence[_Gradient]:
        """The gradients of each bucket."""

    @property
    def used(self) -> Sequence[bool]:
        """True for each parameter that some rank used, in the layout's order."""


class _Parameters(Protocol):
    """The parameters of the model, as in a `ParameterStorage`."""

    @property
    def layout(self) -> Layout: ...

    @property
    def flats(self) -> Sequence[Tensor]:
        """The elements of each bucket that this rank holds, 1-D."""

    def evict(self, bucket: int) -> None:
        """Note that a bucket was updated."""

    def stepping(self, used: Sequence[bool]) -> None:
        """Note that buckets will be updated; ``used``: that of the gradients."""

    def stepped(self) -> None:
        """Note that all buckets were updated."""


class Update:
    """The clip and the step of one optimizer on one rank. All ranks must call each, after `Reducer.finalize_grads`."""

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        shards: Transport,
        collective: Collective,
        storage: _Parameters,
        reducer: _Gradients,
        inner: InnerOptimizer,
    ) -> None:
        self._stage, self._transport, self._collective = stage, transport, collective
        self._storage, self._reducer, self._inner = storage, reducer, inner
        self._updating: list[Event] = []  # of each bucket, like the next two
        self._gathering: list[Event] = []
        self._waiting: list[Event] = []
        self._is_first_copy = transport.rank < shards.world_size  # among the ranks that hold the same slices

    def extend(self) -> None:
        """Register the buckets that were added to the layout."""
        rank = self._transport.rank_label
        for bucket in self._storage.layout.buckets[len(self._updating) :]:
            self._updating.append(Event(f"update bucket {bucket.index}", rank))
            self._gathering.append(Event(f"all_gather bucket {bucket.index}", rank))
            self._waiting.append(Event(f"wait_for_all_gather bucket {bucket.index}", rank))

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Scale the means by one factor; return the norm before, 0-dim, fp32 (fp64 if any gradient is). Collective.

        Raises `RuntimeError` on every rank, before any scaling, if ``error_if_nonfinite`` and the norm is inf or NaN.
        """
        pieces = self._reducer.means.slices() if self._is_first_copy else []
        mine = PowerSum.of(pieces, norm_type)  # host synchronisation: exact integers, which devices do not have
        total = PowerSum.of([], norm_type)
        for data in self._transport.exchange(mine.to_bytes(), Tag(Kind.EXCHANGE, "gradient norm")):
            total = total.merge(PowerSum.from_bytes(data))
        norm = total.norm(torch.float64 if self._reducer.means.any_is_double() else torch.float32)
        if error_if_nonfinite:
            check_finite(norm, norm_type)
        factor = clip_factor(norm, max_norm)
        if not bool(factor == 1.0):
            for store in self._reducer.stores:
                gradient = store.final_grad()
                if gradient is not None:
                    gradient.mul_(factor)  # a factor on the host, as in a plain loop: no copy, and one rounding
        return norm

    def step(self, groups: Sequence[Options]) -> dict[int, Options]:
        """Update every parameter that some rank used. Collective.

        Returns the options that the user's class changed, by the param group's number.
        """
        used = self._reducer.used
        buckets = self._storage.layout.buckets
        gradients = [store.final_grad() for store in self._reducer.stores]
        present = [
            tuple(used[bucket.slots[piece.slot].parameter] for piece in states.pieces)
            for bucket, states in zip(buckets, self._inner.states, strict=True)
        ]
        queue = BucketQueue(self._gather, GATHERS_IN_FLIGHT)
        if self._stage.parameters_are_gathered:
            queue.begin([bucket.index for bucket in buckets if any(used[slot.parameter] for slot in bucket.slots)])

        def stepped(bucket: int) -> None:
            self._storage.evict(bucket)
            queue.ready(bucket)

        self._storage.stepping(used)
        changed = self._inner.step(gradients, present, groups, stepped, lambda bucket: self._updating[bucket]())
        queue.finish()
        self._storage.stepped()
        return changed

    def _gather(self, index: int) -> Work:
        cuts = self._storage.layout.buckets[index].cuts
        tag = Tag(Kind.ALL_GATHER, f"parameters of bucket {index}", index=index)
        with self._gathering[index]():
            work = self._collective.all_gather(self._storage.flats[index], cuts, tag=tag)
            return Waited(work, self._waiting[index])
