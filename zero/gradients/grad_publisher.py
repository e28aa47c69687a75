"""What stands in p.grad, and what the user's changes there mean for the sums.

Knows: when means are up to date, so that they may be published; that a gradient was cleared, zeroed, replaced or edited
in p.grad. Does not know: when a round is due, other ranks.

    mean           if the stage gives every rank whole means, and these contain all gradients that were added
    placeholder    if there is a gradient that this rank does not hold whole
    None           if no rank used the parameter, or it was cleared

If another tensor is there than was published, the user has put it there.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.bits import all_zero, either, host_readable, read_scalars, where, without
from ..core.parameter_specs import as_plain
from ..core.stage import Stage
from ..runtime.bucket import Bucket
from ..runtime.joining import Joining
from .backward_schedule import BackwardSchedule
from .placeholder import PlaceholderListener, ShardedGradient

SlotRef = tuple[Bucket, int]  # a bucket, and the number of a slot


class GradPublisher:
    """The p.grad of all parameters of one optimizer on one rank."""

    def __init__(
        self,
        listener: PlaceholderListener,
        stage: Stage,
        schedule: BackwardSchedule,
        joining: Joining,
        *,
        means_may_be_shown: bool,
    ) -> None:
        """``listener``: of the placeholders; ``means_may_be_shown``: whole means, if the stage has them, have the dtype
        that p.grad must have."""
        self._listener = weakref.ref(listener)
        self._stage, self._schedule = stage, schedule
        self._means_may_be_shown = stage.grads_replicated and means_may_be_shown
        self._joining = joining

    @property
    def means_are_shown(self) -> bool:
        """True if p.grad is the mean after each round. Not inside `join`: the user's changes there would not be made on
        ranks without batches."""
        return self._means_may_be_shown and not self._joining.active

    @property
    def means_are_true(self) -> bool:
        """True if every rank holds the means of all gradients that were added, divided by the current divisor."""
        known = self._schedule
        return self._stage.grads_replicated and not known.pending and known.means_divisor == known.divisor

    # -- publishing ---------------------------------------------------------------------------------------------------

    def make_placeholder(self, bucket: Bucket, slot: int) -> Tensor:
        """Make the placeholder of a slot."""
        return ShardedGradient(bucket, slot, self._listener)

    def _put_placeholder(self, bucket: Bucket, slot: int) -> None:
        bucket.publish(slot, bucket.placeholder(slot, self.make_placeholder))

    def publish(self) -> None:
        """Put the mean, a placeholder or None into every p.grad, as the state of the gradients is now."""
        means = self.means_are_shown and self.means_are_true
        for bucket in self._schedule.buckets:
            if means and bucket.grad.has_sum:
                self._publish_means(bucket)
                continue
            for slot in where(without(either(bucket.used, bucket.seen), _holding_placeholders(bucket))):
                self._put_placeholder(bucket, slot)

    def _publish_means(self, bucket: Bucket) -> None:
        pairs = zip(bucket.current_means(), bucket.used, strict=True)
        for slot, mean in enumerate([mean if used else None for mean, used in pairs]):
            if bucket.published[slot] is not mean or bucket.parameters[slot].grad is not mean:
                bucket.publish(slot, mean)

    def withdraw(self) -> None:
        """Put placeholders in the place of means, so that autograd does not add to these."""
        for bucket in self._schedule.buckets:
            for slot, published in enumerate(bucket.published):
                if published is not None:
                    self._put_placeholder(bucket, slot)

    def hand_over(self) -> None:
        """Make p.grad the user's own: a copy of a mean, or None."""
        for bucket in self._schedule.buckets:
            for slot, published in enumerate(bucket.published):
                if published is not None and bucket.parameters[slot].grad is published:
                    bucket.parameters[slot].grad = published.clone() if _is_mean(published) else None

    # -- changes by the user ------------------------------------------------------------------------------------------

    def _read(self, *, trainable: bool) -> list[tuple[Bucket, int, Tensor | None]]:
        """Read each p.grad, and perhaps whether its parameter is ``trainable``. Return the bucket and the slot of those
        that are not as they were published, with what is there."""
        found: list[tuple[Bucket, int, Tensor | None]] = []
        with as_plain():  # a released parameter would be asked in Python
            for bucket in self._schedule.buckets:
                if trainable:
                    bucket.read_trainable()
                found += [
                    (bucket, slot, parameter.grad)
                    for slot, (parameter, published) in enumerate(zip(bucket.parameters, bucket.published, strict=True))
                    if parameter.grad is not published
                ]
        return found

    def detect_changes(self) -> str | None:
        """Apply the user's changes since gradients were published. Return the error for one that is not allowed."""
        foreign, cleared = dict[int, str](), list[SlotRef]()
        for bucket, slot, gradient in self._read(trainable=True):
            published = bucket.published[slot]
            if gradient is None:
                cleared.append((bucket, slot))
            elif published is not None and _is_mean(published):
                bucket.grad.mean_view(slot).copy_(gradient)
            else:
                foreign[bucket.spec.slots[slot].parameter] = bucket.specs[slot].name
        self.forget(cleared)
        moved = None
        if self.means_are_shown:  # real tensors, which may have been zeroed in place, or given other memory
            self._detect_zeroed()
            moved = self._moved()
        if not foreign:
            return moved
        return (
            f"the gradient of {foreign[min(foreign)]!r} was assigned from outside: only backward() can say what this "
            "rank contributes; set it to None, and run the backward again"
        )

    def _moved(self) -> str | None:
        """Return the error for a mean in p.grad that was given other memory; None if none was."""
        for bucket in self._schedule.buckets:
            for slot in bucket.moved_means() if bucket.grad.shows_means else ():
                if bucket.parameters[slot].grad is bucket.means[slot]:
                    return (
                        f"the gradient of {bucket.specs[slot].name!r} was given other memory (by assigning to .data, "
                        "or by set_()): edit p.grad in place, or assign p.grad itself"
                    )
        return None

    def _detect_zeroed(self) -> None:
        stale = list[tuple[Bucket, int, Tensor]]()
        for bucket in self._schedule.buckets:
            if 1 in bucket.stale:
                views = enumerate(bucket.grad.mean_views())
                stale += [(bucket, slot, mean) for slot, mean in views if bucket.stale[slot]]
        # host synchronisation: one for all, while finalized means are still there
        zero = all_zero([mean for _, _, mean in stale])
        for bucket, slot, _ in itertools.compress(stale, zero):
            self._zero(bucket, slot, known=True)
            self._schedule.renewed(bucket, slot)

    def cleared(self) -> list[SlotRef]:
        """Return the gradients that were set to None since they were published."""
        return [(bucket, slot) for bucket, slot, gradient in self._read(trainable=False) if gradient is None]

    def forget(self, cleared: Sequence[SlotRef]) -> None:
        """Reset the sums of gradients that the user set to None."""
        for bucket, slot in cleared:
            bucket.clear_slot(slot)
            self._schedule.renewed(bucket, slot)
        if cleared and all(published is None for b in self._schedule.buckets for published in b.published):
            self._schedule.clear()

    def remove(self, bucket: Bucket, slot: int) -> None:
        """Reset a gradient as if the user had set it to None. All ranks make the call."""
        bucket.publish(slot, None)
        self.forget([(bucket, slot)])

    def zeroed(self, bucket: Bucket, slot: int) -> None:
        """Set the sum of a gradient to zero whose placeholder the user has zeroed."""
        self._zero(bucket, slot, self._used_is_known())
        self._schedule.renewed(bucket, slot)

    def edited(self) -> str | None:
        """Return the error for a mean that was edited although the means will change once more; None if none was."""
        known = self._schedule
        if not self.means_are_shown or known.means_divisor is None or not known.is_open:
            return None
        for bucket in self._doubtful(known.means_divisor):
            for slot in bucket.grad.edits(known.means_divisor, bucket.used):
                return (
                    f"the gradient of {bucket.specs[slot].name!r} was edited after a backward, and a further backward "
                    "or another divisor would lose the edit; edit gradients after the last backward of a step"
                )
        return None

    def _doubtful(self, divisor: float) -> list[Bucket]:
        """Return the buckets whose means may have been edited since they were gathered."""
        buckets = [bucket for bucket in self._schedule.buckets if bucket.grad.shows_means]
        if not buckets or host_readable(torch.device(buckets[0].spec.device)):
            return buckets
        # host synchronisation: one for all, in a backward that is not the first since gradients were cleared
        return list(itertools.compress(buckets, read_scalars([bucket.grad.edited(divisor) for bucket in buckets])))

    # -- clearing -----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear every gradient, or set those that exist to zero."""
        if set_to_none:  # whatever the user did to them
            with as_plain():
                for bucket in self._schedule.buckets:
                    bucket.publish_none()
            self._schedule.clear()
        else:
            self.detect_changes()
            known = self._used_is_known()
            for bucket in self._schedule.buckets:
                for slot in where(either(bucket.used, bucket.seen)):
                    self._zero(bucket, slot, known)
                for mean in bucket.published:
                    if mean is not None and _is_mean(mean):
                        mean.zero_()
        self._schedule.all_renewed()

    def _used_is_known(self) -> bool:
        """Return True if "used" is agreed on by all ranks, rather than this rank's own."""
        return (self.means_are_shown and not self._schedule.pending) or not self._schedule.is_open

    def _zero(self, bucket: Bucket, slot: int, known: bool) -> None:
        if not bucket.used[slot]:
            bucket.grad.clear_slot(slot)
        elif known:
            bucket.grad.zero_slot(slot)
        else:
            bucket.grad.contribute_zero(slot)


def _is_mean(published: Tensor) -> bool:
    """Return True for a mean, which the user may edit or replace; False for a placeholder."""
    return not isinstance(published, ShardedGradient)


def _holding_placeholders(bucket: Bucket) -> bytes:
    """Return, of each slot, whether its placeholder is in p.grad, where it was put."""
    slots = zip(bucket.parameters, bucket.published, bucket.placeholders, strict=True)
    with as_plain():
        return bytes([made is not None and published is made is parameter.grad for parameter, published, made in slots])
