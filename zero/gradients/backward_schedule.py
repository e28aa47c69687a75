"""When gradients are reduced, and what may happen to them next.

A *round* is one reduction of every active bucket, in layout order, entered by every rank. A backward is a round, or
under `no_sync` adds to this rank's contribution.

    OPEN -------- finalize_grads (clip, unscale, step) ------> DIVIDED --- step ---> STEPPED
      ^  backwards add                                            |                     |
      +----------------- every gradient was cleared <-------------+---------------------+

A backward that is not OPEN is no error, since gradients may be cleared before their next use: a generator's backward
passes through a discriminator that was stepped. Its gradients are dropped, and until all are cleared they are
``unusable``.

In a round a bucket passes the stages of one pipeline:

    reduce (1 or 2 at a time)  >  pass on, between replicas
    reduce                     >  gather the mean, at stage 0 on accelerators

Means are gathered there for `p.grad` that is the mean after each round, where a gather runs beside the backward. The
divisor is that of the round's beginning. At its end the ranks compare what they have gathered, and with another divisor
gather again.

Knows: the buckets that a backward may reach, which gradients are ready, which buckets are being reduced or gathered,
and the phase of the gradients since they were cleared. Does not know: p.grad, what ranks agree on.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum

import torch

from collectives import Collective, Pipeline, PipelineStage, Transport, Work, folds, pass_on

from ..core.bits import either, is_launched
from ..core.stage import GATHERS_IN_FLIGHT, Stage, buckets_in_flight, sums_under_way
from ..runtime.accumulator import GradAccumulator
from ..runtime.bucket import Bucket
from ..runtime.joining import Joining


class EarlyMeans:
    """The means that one rank gathers in a round before its end."""

    def __init__(self, collective: Collective, buckets: Sequence[Bucket]) -> None:
        self._collective, self._buckets = collective, buckets
        self._divisor: float | None = None  # of the round; None: it gathers none
        self._round = 0
        self._gathered: dict[GradAccumulator, Work] = {}
        self._are_right = True

    def begin(self, divisor: float | None, round_: int) -> None:
        """Begin a round. ``divisor``: None if means are not gathered before its end."""
        self._divisor = divisor if self._collective.transport.world_size > 1 else None
        self._gathered, self._are_right, self._round = {}, True, round_

    def gather(self, index: int) -> Work | None:
        """Launch the gather of a bucket that is summed, if it is gathered now. All ranks call it in the same order."""
        if self._divisor is None:
            return None
        gradients = self._buckets[index].grad
        work = self._gathered.get(gradients)
        if work is None and is_launched(torch.device(gradients.bucket.device)):
            work = self._gathered[gradients] = gradients.gather_means(self._collective, self._round, self._divisor)
        return work

    def forget(self) -> None:
        """Give up the means, since a sum is about to be changed, perhaps inside a backward."""
        self._are_right = False

    @property
    def divisor(self) -> float | None:
        """The divisor of the means that were gathered; None if none were, or if a sum may have changed since."""
        return self._divisor if self._gathered and self._are_right else None

    def __contains__(self, gradients: GradAccumulator) -> bool:
        return gradients in self._gathered


class Phase(Enum):
    """The phase of gradients, which decides what may happen to them next."""

    OPEN = "backwards add to them"
    DIVIDED = "they are means, perhaps clipped"
    STEPPED = "a step has used them"


def inside_backward(purpose: str) -> RuntimeError:
    """Return the error of a call that was made inside a backward."""
    memory = "; if that is to save memory, stages 2 and 3 shard gradients while the backward runs"
    return RuntimeError(
        f"{purpose} inside a backward, as in a hook of a parameter: call it when backward() has returned"
        f"{memory if purpose == 'step()' else ''}"
    )


class BackwardSchedule:
    """The rounds and the phase of one optimizer on one rank. All flags are in its buckets."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        stage: Stage,
        transport: Transport,
        collective: Collective,
        replicas: int,
        joining: Joining,
    ) -> None:
        """``buckets``: the list itself, which may grow; ``replicas``: groups of ranks that hold one copy each."""
        self.buckets, self.early = buckets, EarlyMeans(collective, buckets)
        self._transport, self._collective, self._joining = transport, collective, joining
        self.number = 0  # rounds that this rank entered
        self._rounds_since_clear = 0  # part of a label, so that a rank that skips a step alone has another tag
        self.has_new_gradients = False  # since the last step, or since gradients were cleared
        self._in_round = self._shows_means = False  # the backward under way is a round, and p.grad is then the mean
        self._entered = False  # the round has been entered
        self._active: list[Bucket] = []
        self.phase = Phase.OPEN
        self.divisor: float = transport.world_size  # of the next `finalize_grads`
        self.means_divisor: float | None = None  # of the means that all ranks hold; None: no means, or out of date
        self._stale = 0  # gradients that must be cleared before the phase is OPEN again
        self.unusable: str | None = None  # why no call may use the gradients, until all stale ones are cleared
        self.drops = False  # the backward under way brings gradients that no call may use
        self.finalized_by = ""
        weak_self = weakref.ref(self)  # a strong one would be a cycle, and buffers would wait for garbage collection

        def launch(bucket: int) -> Work:
            schedule = weak_self()
            assert schedule is not None
            return schedule._launch(bucket)

        in_flight = buckets_in_flight(stage, folds=folds(collective.name))
        stages = [PipelineStage(in_flight, launch)]
        if replicas > 1:
            stages = [PipelineStage(in_flight, launch, pass_on), PipelineStage(sums_under_way(replicas))]
        self._before_means = len(stages)
        if stage.grads_replicated:
            stages.append(PipelineStage(GATHERS_IN_FLIGHT, self.early.gather))
        self._pipeline = Pipeline(*stages)

    # -- rounds -------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> tuple[int, ...]:
        """The buckets for which this rank has a contribution that was not reduced."""
        return tuple(bucket.spec.index for bucket in self.buckets if bucket.grad.pending)

    def begin(self, *, is_round: bool, shows_means: bool, also: Sequence[int] = ()) -> None:
        """Begin a backward. Its buckets are those with a parameter that is trainable now, those that were active since
        their last reduction, and those in ``also``. ``shows_means``: after a round, p.grad is the mean."""
        self._in_round, self._shows_means, self._entered, self.drops = is_round, shows_means, False, False
        self.has_new_gradients = True
        self._activate(also)
        if is_round and not self._joining.gathers_are_broadcast:
            self._enter()

    def begin_dropping(self) -> None:
        """Begin a backward whose gradients are dropped, since those that it would add to were divided already."""
        stale = [
            (slot.parameter, spec.name)
            for bucket in self.buckets
            for slot, spec, is_stale in zip(bucket.spec.slots, bucket.specs, bucket.stale, strict=True)
            if is_stale
        ]
        self._in_round, self.drops = False, True
        for bucket in self.buckets:
            bucket.begin_dropping()
        self.refuse_use(
            f"backward() after {self.finalized_by} without zero_grad(): the gradient of {min(stale)[1]!r} was already "
            "divided; call optimizer.zero_grad() before that backward"
        )

    def refuse_use(self, reason: str) -> None:
        """Let no call use the gradients, until all that there may be on any rank are cleared."""
        self.unusable = self.unusable or reason
        for bucket in self.buckets:
            bucket.refuse_use()
        self._stale = sum(bucket.stale.count(1) for bucket in self.buckets)

    def _enter(self) -> None:
        self._entered = True
        self.number += 1
        self._rounds_since_clear += 1
        self.early.begin(self.divisor if self._shows_means else None, self.number)
        self._pipeline.begin_round([bucket.spec.index for bucket in self._active])

    def _activate(self, also: Sequence[int]) -> None:
        self._active = [bucket for bucket in self.buckets if bucket.begin_backward(pending=bucket.spec.index in also)]

    def arrived(self, bucket: Bucket) -> None:
        """Note that the last gradient of a bucket has arrived. In a round the bucket is ready; under `no_sync` it is
        flushed."""
        if self._entered:
            self._pipeline.ready(bucket.spec.index)
        elif not self._in_round:
            bucket.grad.flush(final=False)

    def _launch(self, index: int) -> Work:
        bucket = self.buckets[index]
        beside = ""
        if 0 in bucket.trainable:  # first in the label, of which peers read 76 bytes
            named = zip(bucket.specs, bucket.trainable, strict=True)
            beside = f" (frozen: {', '.join(repr(spec.name) for spec, trained in named if not trained)})"
        label = f"backward {self._rounds_since_clear}{beside} since zero_grad(), {bucket.grad.label}"
        return bucket.grad.launch(self._collective, label, self.number, bucket.trainable)

    def complete(self) -> bool:
        """Finish the backward under way, if there is one. Under `no_sync`: flush. In a round: launch the rest, wait and
        return True; the round is over when `end_round` is called. After an interrupt, call this again."""
        if not self._in_round:
            for bucket in self._active:
                bucket.grad.flush(final=False)
            self._active = []
            return False
        if not self._entered:
            self._enter()
        self._pipeline.finish()
        self.means_divisor = None  # the sums have changed
        return True

    def forget_means(self) -> None:
        """Give up the means that are gathered in this round, since a sum is about to be changed, perhaps inside a
        backward. Gathers write where a contribution lies, so this waits for those under way."""
        self._pipeline.drain(self._before_means)
        self.early.forget()

    def end_round(self) -> None:
        """End the round under way, when all that follows from its sums is done."""
        self._in_round, self._active = False, []

    def frozen_here(self) -> str:
        """Return, for an error's text, which parameters are frozen on this rank."""
        named = [pair for b in self.buckets for pair in zip(b.specs, b.parameters, strict=True)]
        # a layout is about the reverse of the order of registration
        frozen = [spec.name for spec, parameter in named[::-1] if not parameter.requires_grad]
        return f"frozen on rank {self._transport.rank}: {', '.join(map(repr, frozen)) or 'none'}"

    def abandon(self) -> None:
        """Abandon the reductions under way: the transport is broken."""
        self._pipeline.abandon()
        self.early.begin(None, self.number)
        self.end_round()

    def clear(self) -> None:
        """Reset all parameters to "no gradient"."""
        self._rounds_since_clear, self.has_new_gradients = 0, False
        for bucket in self.buckets:
            bucket.clear()

    def close(self) -> None:
        """Let go of all buckets."""
        self._active = []

    # -- phases -------------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if backwards may add gradients."""
        return self.phase is Phase.OPEN

    def used(self) -> bytes:
        """Return the flags "used" of all buckets, one after the other."""
        return b"".join([bucket.used for bucket in self.buckets])

    def trainable(self) -> bytes:
        """Return the flags "trainable" of all buckets, one after the other."""
        return b"".join([bucket.trainable for bucket in self.buckets])

    def set_divisor(self, value: float) -> None:
        """Set the divisor of the next `finalize_grads`. Raises `RuntimeError` if the gradients were divided."""
        if self.phase is Phase.DIVIDED:
            raise RuntimeError(
                f"the divisor was set after {self.finalized_by}, which has already divided by {self.divisor:g}: set it "
                "before the first clip, unscale or step of a step"
            )
        self.divisor = value

    def means_gathered(self) -> None:
        """Note that all ranks hold the means, divided by the divisor."""
        self.means_divisor = self.divisor

    def agree_used(self, by_rank: Sequence[bytes]) -> None:
        """Set "used" to the parameters that any rank used. ``by_rank``: the result of `used` on every rank."""
        merged, begin = bytearray(by_rank[0]), 0
        for flags in by_rank[1:]:
            merged = either(merged, flags)
        for bucket in self.buckets:
            end = begin + len(bucket.used)
            bucket.set_used(merged[begin:end])
            begin = end

    def finalized(self, purpose: str) -> None:
        """Note that the sums have become means, in the call ``purpose``."""
        for bucket in self.buckets:
            bucket.finalize()
        self._stale = self.used().count(1)
        self.phase, self.finalized_by = Phase.DIVIDED if self._stale else Phase.OPEN, purpose

    def replaced(self, bucket: Bucket, slot: int, purpose: str) -> None:
        """Note that the mean of a gradient was replaced, in the call ``purpose``, after `finalized`."""
        self._stale += bucket.replace(slot)
        self.has_new_gradients = True
        if self.is_open:
            self.phase, self.finalized_by = Phase.DIVIDED, purpose

    def stepped(self) -> None:
        """Note that a step has used the means."""
        self.has_new_gradients = False
        self.phase, self.finalized_by = Phase.STEPPED if self._stale else Phase.OPEN, "step()"

    def renewed(self, bucket: Bucket, slot: int) -> None:
        """Note that this gradient was cleared."""
        self._stale -= bucket.renew(slot)
        if not self._stale:
            self.phase, self.unusable = Phase.OPEN, None

    def all_renewed(self) -> None:
        """Note that every gradient was cleared."""
        self.has_new_gradients = False
        for bucket in self.buckets:
            bucket.renew_all()
        self._stale, self.phase, self.unusable = 0, Phase.OPEN, None
