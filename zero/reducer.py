"""From the gradients of a rank's backwards to mean gradients at their owners.

Knows: rounds. A round is one reduction of every active bucket, in layout order, entered by every rank; a backward
outside `no_sync` is a round, and so is what `no_sync` left pending when somebody needs it. Does not know: how the
optimizer uses a gradient, or how bytes travel.

    OPEN ------------ settle (clip, unscale, step) ----------> SETTLED --- step ---> STEPPED
      ^  backwards add                                            |                     |
      +----------------- every gradient was cleared <-------------+---------------------+

What no bucket can tell is agreed in `settle`: how many rounds each rank entered (a rank behind catches up), which
parameters were used, what is pending, the divisor, and errors that one rank alone found.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor

from collectives import BucketQueue, Chain, Collective, Kind, MismatchError, Tag, Transport, Work

from .agreement import Record, check
from .faces import Faces
from .gradients import GradientStore
from .hooks import GradientHooks
from .layout import Layout, ParameterSpec
from .stages import Placement, Stage


class Phase(Enum):
    """What may happen to the gradients next."""

    OPEN = "backwards add to them"
    SETTLED = "they are means, perhaps clipped"
    STEPPED = "a step has used them"


class Reducer:
    """The gradients of all parameters of one optimizer on one rank. ``parameters`` are in the layout's order."""

    def __init__(
        self, parameters: Sequence[Tensor], layout: Layout, stage: Stage, transport: Transport, collective: Collective
    ) -> None:
        self.layout, self._stage, self._transport, self._collective = layout, stage, transport, collective
        self.parameters: list[Tensor] = []
        self.stores: list[GradientStore] = []
        self.used: list[bool] = []
        self.phase = Phase.OPEN
        self.divisor: float = transport.world_size
        self._faces = Faces(self)
        self._places: list[tuple[GradientStore, int]] = []
        self._round = self._meeting = 0
        self._position = 0  # of the round since gradients were last cleared: ranks that skip a step alone are found
        self._sync = True
        self._in_round = False  # the backward under way is a round
        self._means_divisor: float | None = None
        self._stale: set[int] = set()  # gradients that a settled phase waits to be cleared
        self._settled_by = ""
        self._seen: list[bool] = []  # trainable in a backward since it was cleared
        self._stranger: str | None = None  # who had a gradient of the user's before the backward under way
        self._active: list[GradientStore] = []
        self._missing: dict[int, int] = {}
        self._trainable: dict[int, list[bool]] = {}
        self.hooks = GradientHooks(self, exclusive=stage.parameters is Placement.SHARD)
        in_flight = 2 if stage.contributions_stay else 1  # at most three buckets of scratch with direct exchange
        this = weakref.ref(self)  # a strong one would be a cycle, and hooks and buffers would wait for the collector

        def launch(bucket: int) -> Work:
            reducer = this()
            assert reducer is not None
            return reducer._launch(bucket)

        self._queue = BucketQueue(launch, in_flight)
        self.extend(parameters, layout)

    def extend(self, parameters: Sequence[Tensor], layout: Layout) -> None:
        """Take up further parameters, which ``layout`` has in further buckets."""
        self.layout = layout
        new = layout.buckets[len(self.stores) :]
        self.stores += [GradientStore(bucket, layout, self._stage, self._transport) for bucket in new]
        first = len(self.parameters)
        self.parameters += parameters
        self.used += [False] * len(parameters)
        self._faces.extend(parameters, layout.parameters[first:])
        places = {slot.parameter: (self.stores[bucket.index], number) for bucket, number, slot in layout.slots()}
        self._places = [places[index] for index in range(len(self.parameters))]
        self._seen += [False] * (len(self.parameters) - first)
        for index in range(first, len(self.parameters)):
            self.hooks.watch(self.parameters[index], index)

    # -- events of autograd (the listener of `GradientHooks`) ---------------------------------------------------------

    def backward_is_near(self) -> None:
        self.finish_interrupted()
        self._look()
        self._stranger = self._faces.stranger()
        if self._stage.means_are_gathered:
            self._faces.hide()  # no mean may be where autograd would add to it

    def backward_began(self) -> None:
        self._transport.check()
        try:
            self._check_open()
            problem = self._assigned(self._stranger) or self._edited()
            if problem is not None:
                self._fail(problem)
        except RuntimeError:
            self._show()
            raise
        self._in_round = self._sync
        self._activate()
        if self._in_round:
            self._begin_round()

    def gradient_ready(self, index: int, gradient: Tensor) -> None:
        parameter = self.parameters[index]
        store, slot = self._places[index]
        if gradient.layout is not torch.strided:
            parameter.grad = None
            raise RuntimeError(
                f"rank {self._transport.rank}: the gradient of {self._name(index)} is {gradient.layout}: sparse "
                "gradients are not supported; build the Embedding with sparse=False"
            )
        if slot in store.arrived:  # pragma: no cover - autograd has never done that; if it did, a sum would be wrong
            raise RuntimeError(f"{self._name(index)} received two gradients in one backward")
        store.arrive(slot, gradient)
        self.used[index] = True
        self._faces.put_placeholder(index)
        bucket = store.bucket.index
        self._missing[bucket] = self._missing.get(bucket, 0) - 1
        if self._missing[bucket] == 0:
            if self._in_round:
                self._queue.ready(bucket)
            else:
                store.absorb()

    def backward_ended(self) -> None:
        self._complete()
        self._show()

    def outside_backward(self) -> None:
        self._show()

    def gradient_zeroed(self, index: int) -> None:
        self._zero(index, self._used_is_known())
        self._renewed(index)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _activate(self, also: Sequence[int] = ()) -> None:
        """Find the buckets in which a gradient may arrive, as the parameters stand now, and ``also`` these."""
        self._active, self._missing, self._trainable = [], {}, {}
        for store in self.stores:
            mask = [self.parameters[slot.parameter].requires_grad for slot in store.bucket.slots]
            if any(mask) or store.touched or store.bucket.index in also:
                for slot, trainable in zip(store.bucket.slots, mask, strict=True):
                    self._seen[slot.parameter] |= trainable
                self._active.append(store)
                self._trainable[store.bucket.index] = mask
                self._missing[store.bucket.index] = sum(mask)
                store.touched = True

    def _begin_round(self) -> None:
        self._round += 1
        self._position += 1
        self._queue.begin([store.bucket.index for store in self._active])

    def _launch(self, bucket: int) -> Work:
        store = self.stores[bucket]
        label = f"backward {self._position} since zero_grad(), {store.label}"
        return store.launch(self._collective, label, self._round, self._trainable[bucket])

    def _finish_round(self) -> None:
        try:
            self._queue.finish()
            if self._stage.means_are_gathered:
                self._gather_means()
        except MismatchError as error:
            frozen = [repr(spec.name) for spec, p in self._specs() if not p.requires_grad]
            text = f"{error} (frozen on rank {self._transport.rank}: {', '.join(frozen) or 'none'})"
            raise MismatchError(text) from error
        self._in_round = False

    def _complete(self) -> None:
        """Do what is left of the backward under way."""
        if self._in_round:
            self._finish_round()
        else:
            for store in self._active:
                store.absorb()

    def _gather_means(self) -> None:
        """Give every rank the means, and agree whose gradient exists at all: the hash of the plain loop sees None."""
        tag = Tag(Kind.EXCHANGE, "which parameters were used", self._round)
        records = [Record.unpack(r) for r in self._transport.exchange(self._record(None).pack(), tag)]
        self._agree_used(records)
        if any(record.divisor != self.divisor for record in records):
            self._means_divisor = None  # nobody's p.grad would be right; `settle` agrees and comes back
            return
        stores = [store for store in self.stores if store.has_sum]
        Chain(store.gather_means(self._collective, self._round, self.divisor) for store in stores).wait()
        self._means_divisor = self.divisor

    def _empty_round(self, also: Sequence[int] = ()) -> None:
        """A round of the others', to which this rank has nothing to add but what it still holds."""
        self._in_round = True
        self._activate(also)
        self._begin_round()
        self._finish_round()
        self._show()

    def finish_interrupted(self) -> None:
        """Complete the round of a backward that an exception left, so that collectives stay matched."""
        if not self.hooks.interrupted:
            return
        cleared = self._faces.cleared()  # since then, and so after what is completed here
        self.hooks.forget()
        if self._transport.broken:
            self._queue.abandon()
            return
        self._complete()
        self._forget(cleared)
        self._show()

    # -- agreement ----------------------------------------------------------------------------------------------------

    def settle(self, purpose: str, problem: str | None = None) -> None:
        """Turn the sums into means, once. Collective; ``purpose`` is what errors call it.

        ``problem``: an error that this rank alone may have found; every rank raises it, and nothing has changed.
        """
        if self.hooks.inside_backward:
            raise RuntimeError(f"{purpose} inside a backward")
        if not self._sync:
            raise RuntimeError(
                f"{purpose} inside no_sync(): leave the block first, what it left pending is reduced then"
            )
        records = self.agree(purpose, problem)
        if not self._is_open():
            self._agree_used(records)
            return
        pending = sorted({bucket for record in records for bucket in record.pending})
        if pending:
            self._empty_round(pending)
        self._agree_used(records)
        if self._stage.means_are_gathered:
            if self._means_divisor != self.divisor:
                self._gather_means()
        else:
            for store in self.stores:
                store.divide(self.divisor)
        self._stale = {index for index, used in enumerate(self.used) if used}
        self.phase, self._settled_by = Phase.SETTLED if self._stale else Phase.OPEN, purpose
        self._show()

    def _is_open(self) -> bool:
        return self.phase is Phase.OPEN

    def agree(self, purpose: str, problem: str | None = None) -> list[Record]:
        """Meet all ranks and compare what they hold. Collective; raises the same error on every rank."""
        self.finish_interrupted()
        self._look()
        if self._is_open() and self._means_divisor != self.divisor:  # the means will be gathered anew
            problem = problem or self._edited()
        problem = problem or self._assigned(self._faces.stranger())
        self._meeting += 1
        self._transport.meet(Tag(Kind.MEET, purpose, self._round, self._meeting), self._empty_round)
        tag = Tag(Kind.EXCHANGE, purpose, self._round, self._meeting)
        records = [Record.unpack(r) for r in self._transport.exchange(self._record(problem).pack(), tag)]
        check(records, purpose, self._name)
        return records

    def _record(self, problem: str | None) -> Record:
        trainable = bytes(p.requires_grad for p in self.parameters)
        pending = tuple(store.bucket.index for store in self.stores if store.pending)
        phase = self.phase.name.lower()
        return Record(self.divisor, phase, pending, problem, bytes(self.used), trainable)

    def _agree_used(self, records: Sequence[Record]) -> None:
        for index in range(len(self.used)):
            self.used[index] = any(record.used[index] for record in records)

    # -- p.grad -------------------------------------------------------------------------------------------------------

    def _name(self, index: int) -> str:
        return repr(self.layout.parameters[index].name)

    def _specs(self) -> Iterator[tuple[ParameterSpec, Tensor]]:
        return zip(self.layout.parameters, self.parameters, strict=True)

    def _means_are_true(self) -> bool:
        """True when every rank holds the means of all that was added, divided by the divisor."""
        pending = any(store.pending for store in self.stores)
        return self._stage.means_are_gathered and not pending and self._means_divisor == self.divisor

    def _show(self) -> None:
        """Put into every p.grad what is true now: the mean, a placeholder, or None."""
        means = self._means_are_true()
        for index in range(len(self.parameters)):
            store, slot = self._places[index]
            if means and store.has_sum:
                self._faces.put(index, store.mean_view(slot) if self.used[index] else None)
            elif self.used[index] or self._seen[index]:
                self._faces.put_placeholder(index)

    def _look(self) -> None:
        """Take note of what the user did to gradients since they were shown."""
        self._forget(self._faces.cleared())
        for index, gradient in self._faces.replaced():
            store, slot = self._places[index]
            store.mean_view(slot).copy_(gradient)
        if self._stage.means_are_gathered:  # real tensors, which may have been zeroed in place
            for index in sorted(self._stale):
                store, slot = self._places[index]
                if not torch.count_nonzero(store.mean_view(slot)):
                    self._zero(index, known=True)
                    self._renewed(index)

    def _forget(self, cleared: Sequence[int]) -> None:
        """The user set these gradients to None."""
        for index in cleared:
            store, slot = self._places[index]
            store.clear_slot(slot)
            self.used[index] = self._seen[index] = False
            self._renewed(index)
        if cleared and not any(True for _ in self._faces.held()):
            self._clear()

    def _clear(self) -> None:
        """No parameter has a gradient any more."""
        count = len(self.parameters)
        self.used, self._seen = [False] * count, [False] * count
        self._position = 0
        for store in self.stores:
            store.clear()

    def _renewed(self, index: int) -> None:
        self._stale.discard(index)
        if not self._stale:
            self.phase = Phase.OPEN

    def _check_open(self) -> None:
        if not self._is_open():
            name = self._name(min(self._stale))
            raise RuntimeError(
                f"rank {self._transport.rank}: backward() after {self._settled_by} without zero_grad(): the gradient "
                f"of {name} was already divided; call optimizer.zero_grad() first"
            )

    def _assigned(self, stranger: str | None) -> str | None:
        if stranger is None:
            return None
        return (
            f"the gradient of {stranger!r} was assigned from outside: only backward() can say what this rank "
            "contributes"
        )

    def _edited(self) -> str | None:
        """What is wrong where a mean was edited that will not be the last one."""
        if not self._stage.means_are_gathered or self._means_divisor is None or not self._is_open():
            return None
        for store in self.stores:
            for slot in store.edits(self._means_divisor, self.used):
                name = self._name(store.bucket.slots[slot].parameter)
                return (
                    f"the gradient of {name} was edited after a backward, and a further backward or another divisor "
                    "would lose the edit; edit gradients after the last backward of a step"
                )
        return None

    def _fail(self, problem: str) -> None:
        """Raise what this rank alone may have found where the others cannot be asked: they are told."""
        text = f"rank {self._transport.rank}: {problem}"
        if self._transport.world_size > 1:
            self._transport.abort(text)
        raise RuntimeError(text)

    # -- for the optimizer --------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """A step has used the gradients."""
        self.phase, self._settled_by = Phase.STEPPED if self._stale else Phase.OPEN, "step()"

    def set_divisor(self, value: float) -> None:
        """Set the divisor of the next settling."""
        if not self.hooks.interrupted:
            self._look()
        if self.phase is Phase.SETTLED:
            raise RuntimeError(
                f"the divisor was set after {self._settled_by}, which has already divided by {self.divisor:g}: set it "
                "before the first clip, unscale or step of a step"
            )
        self.divisor = value
        if self._stage.means_are_gathered and self._is_open():
            self._show()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear every gradient, or set those that exist to zero."""
        if self.hooks.inside_backward:
            raise RuntimeError("zero_grad() inside a backward")
        self.finish_interrupted()
        self._look()
        if set_to_none:
            for index in range(len(self.parameters)):
                self._faces.put(index, None)  # also what was there before this object
            self._clear()
        else:
            known = self._used_is_known()
            for index in range(len(self.parameters)):
                if self.used[index] or self._seen[index]:
                    self._zero(index, known)
                mean = self._faces.mean(index)
                if mean is not None:
                    mean.zero_()
        self._stale = set()
        self.phase = Phase.OPEN

    def _used_is_known(self) -> bool:
        """True when `used` says what all ranks used, rather than this one."""
        gathered = self._stage.means_are_gathered and not any(store.pending for store in self.stores)
        return gathered or self.phase is not Phase.OPEN

    def _zero(self, index: int, known: bool) -> None:
        store, slot = self._places[index]
        if not self.used[index]:
            store.clear_slot(slot)
        elif known:
            store.zero_slot(slot)
        else:
            store.contribute_zero(slot)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add to this rank's own sum, and are not rounds."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def full_gradient(self, index: int) -> Tensor | None:
        """The whole mean gradient of a parameter; None where no rank used it. Collective."""
        purpose = f"full_grad of {self._name(index)}"
        records = self.agree(purpose)
        store, slot_number = self._places[index]
        if any(record.pending for record in records):
            raise RuntimeError(f"{purpose}: what no_sync() left is not reduced yet; run a backward outside it, or clip")
        if not any(record.used[index] for record in records):
            return None
        spec, slot, bounds = self.layout.parameters[index], store.bucket.slots[slot_number], store.bucket.bounds
        whole = torch.empty(slot.numel, dtype=store.bucket.dtypes.accumulate, device=store.bucket.device)
        if self._means_are_true():
            whole.copy_(store.mean_view(slot_number).as_strided((slot.numel,), (1,)))
        else:
            cuts = [min(max(bound, slot.offset), slot.end) - slot.offset for bound in bounds]
            low, high = cuts[self._transport.rank], cuts[self._transport.rank + 1]
            total = store.running_sum()
            assert total is not None  # used by some rank, and nothing is pending
            begin = slot.offset + low - store.low
            whole[low:high].copy_(total[begin : begin + high - low])
            tag = Tag(Kind.ALL_GATHER, purpose, self._round, store.bucket.index)
            self._collective.all_gather(whole, cuts, tag=tag).wait()
            if self.phase is Phase.OPEN:
                whole.div_(self.divisor)
        return whole.as_strided(spec.shape, spec.stride)

    def close(self) -> None:
        """Take the hooks away; gradients that this rank holds whole become the user's own."""
        self.hooks.remove()
        self._faces.release()
        self.stores, self._places, self._active = [], [], []
