"""The schedule of rounds. A round is one reduction of every active bucket, in layout order, entered by every rank.

Knows: the buckets that a backward may reach, which gradients are ready, which buckets are being reduced. A backward is
a round, or under `no_sync` adds to this rank's contribution. Does not know: p.grad, phases, what ranks agree on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from collectives import BucketQueue, Collective, MismatchError, Transport, Work

from ..core.layout import Layout
from ..core.parameter_specs import as_plain
from ..core.stage import Stage
from ..runtime.accumulator import GradAccumulator
from ..runtime.bucket import Bucket


class BackwardSchedule:
    """The rounds of one optimizer on one rank. ``parameters`` are by index in the layout: none, until `extend`."""

    def __init__(
        self, layout: Layout, stage: Stage, transport: Transport, shards: Transport, collective: Collective
    ) -> None:
        """``shards``: the ranks that own the slices of buckets."""
        self._stage, self._transport, self._shards, self._collective = stage, transport, shards, collective
        self.layout = layout
        self.parameters: list[Tensor] = []
        self.stores: list[GradAccumulator] = []
        self.places: list[tuple[GradAccumulator, int]] = []  # of each parameter: its accumulator, and its slot there
        self.seen: list[bool] = []  # of each parameter: trainable in a backward since gradients were cleared
        self.number = 0  # rounds that this rank entered
        self._rounds_since_clear = 0  # part of a label, so that a rank that skips a step alone has another tag
        self.at_the_end = False  # a round is entered when its backward ends: all gathers of units come before it
        self._in_round = False  # the backward under way is a round
        self._entered = False  # the round has been entered
        self._active: list[GradAccumulator] = []
        self._missing: dict[int, int] = {}
        self._trainable: dict[int, list[bool]] = {}
        in_flight = 2 if stage.keeps_full_grads else 1  # at most three buckets of scratch with direct exchange
        weak_self = weakref.ref(self)  # a strong one would be a cycle, and buffers would wait for garbage collection

        def launch(bucket: int) -> Work:
            schedule = weak_self()
            assert schedule is not None
            return schedule._launch(bucket)

        self._queue = BucketQueue(launch, in_flight)

    def extend(self, new: Sequence[Bucket], parameters: Sequence[Tensor], layout: Layout) -> None:
        """Register further parameters, which ``layout`` has in these new buckets."""
        self.layout = layout
        for bucket in new:
            bucket.grad = GradAccumulator(bucket.spec, layout, self._stage, self._shards)
            self.stores.append(bucket.grad)
        self.parameters += parameters
        places = {slot.parameter: (self.stores[bucket.index], number) for bucket, number, slot in layout.slots()}
        self.places = [places[index] for index in range(len(self.parameters))]
        self.seen += [False] * len(parameters)

    @property
    def pending(self) -> tuple[int, ...]:
        """The buckets for which this rank has a contribution that was not reduced."""
        return tuple(store.bucket.index for store in self.stores if store.pending)

    def begin(self, *, is_round: bool, also: Sequence[int] = ()) -> None:
        """Begin a backward. Its buckets are those with a parameter that is trainable now, those that were active since
        their last reduction, and those in ``also``."""
        self._in_round, self._entered = is_round, False
        self._activate(also)
        if is_round and not self.at_the_end:
            self._enter()

    def _enter(self) -> None:
        self._entered = True
        self.number += 1
        self._rounds_since_clear += 1
        self._queue.begin([store.bucket.index for store in self._active])

    def _activate(self, also: Sequence[int]) -> None:
        self._active, self._missing, self._trainable = [], {}, {}
        with as_plain():  # a released parameter would be asked in Python
            can_train = [parameter.requires_grad for parameter in self.parameters]
        for store in self.stores:
            mask = [can_train[slot.parameter] for slot in store.bucket.slots]
            if any(mask) or store.touched or store.bucket.index in also:
                for slot, trainable in zip(store.bucket.slots, mask, strict=True):
                    self.seen[slot.parameter] |= trainable
                self._active.append(store)
                self._trainable[store.bucket.index] = mask
                self._missing[store.bucket.index] = sum(mask)
                store.touched = True

    def arrived(self, index: int, gradient: Tensor) -> None:
        """Stash the gradient of a parameter. After the last one of its bucket, the bucket is ready in a round; under
        `no_sync` it is flushed."""
        store, slot = self.places[index]
        if slot in store.arrived:  # pragma: no cover - autograd has never done that; if it did, a sum would be wrong
            raise RuntimeError(f"{self.layout.parameters[index].name!r} received two gradients in one backward")
        store.stash(slot, gradient)
        bucket = store.bucket.index
        self._missing[bucket] = self._missing.get(bucket, 0) - 1
        if self._missing[bucket] == 0:
            if self._entered:
                self._queue.ready(bucket)
            elif not self._in_round:
                store.flush(travels=False)

    def _launch(self, bucket: int) -> Work:
        store = self.stores[bucket]
        label = f"backward {self._rounds_since_clear} since zero_grad(), {store.label}"
        return store.launch(self._collective, label, self.number, self._trainable[bucket])

    def complete(self, then: Callable[[], None]) -> None:
        """Finish the backward under way. Under `no_sync`: flush. In a round: launch the rest, wait, then call ``then``.

        A round is not over before ``then`` returns. After an interrupt, call this again. A `MismatchError` names the
        parameters that are frozen on this rank.
        """
        if not self._in_round:
            for store in self._active:
                store.flush(travels=False)
            return
        try:
            if not self._entered:
                self._enter()
            self._queue.finish()
            then()
        except MismatchError as error:
            pairs = zip(self.layout.parameters, self.parameters, strict=True)
            frozen = [repr(spec.name) for spec, parameter in pairs if not parameter.requires_grad]
            text = f"{error} (frozen on rank {self._transport.rank}: {', '.join(frozen) or 'none'})"
            raise MismatchError(text) from error
        self._in_round = False

    def abandon(self) -> None:
        """Abandon the reductions under way: the transport is broken."""
        self._queue.abandon()

    def clear(self) -> None:
        """Reset all parameters to "no gradient"."""
        self.seen = [False] * len(self.parameters)
        self._rounds_since_clear = 0
        for store in self.stores:
            store.clear()

    def close(self) -> None:
        """Release all buffers."""
        self.stores.clear()
        self.places, self._active = [], []
