"""The user's access to gradients: what is published in p.grad, and what the user's changes there mean for the sums.

Knows: when means are up to date, so that they may be published; that a gradient was cleared, zeroed, replaced or edited
in p.grad. Does not know: when a round is due, other ranks.

    mean           if the stage gives every rank whole means, and these contain all gradients that were added
    placeholder    if there is a gradient that this rank does not hold whole
    None           if no rank used the parameter, or it was cleared
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.bits import all_zero, host_readable, read_scalars
from ..core.layout import Layout
from ..core.stage import Stage
from ..runtime.accumulator import GradAccumulator
from .backward_schedule import BackwardSchedule
from .grad_phase import GradPhase
from .grad_slots import GradSlots
from .hooks import Listener


class GradAccess:
    """The p.grad of all parameters of one optimizer on one rank, each by its index in the layout."""

    def __init__(
        self,
        listener: Listener,
        stage: Stage,
        schedule: BackwardSchedule,
        progress: GradPhase,
        *,
        means_may_be_shown: bool,
    ) -> None:
        """``listener``: of the placeholders; ``means_may_be_shown``: whole means, if the stage has them, have the dtype
        that p.grad must have."""
        self._stage, self._schedule, self._progress = stage, schedule, progress
        self._means_may_be_shown = stage.grads_replicated and means_may_be_shown
        self._slots = GradSlots(listener)
        self.inside_join = False

    @property
    def means_are_shown(self) -> bool:
        """True if p.grad is the mean after each round. Not inside `join`: the user's changes there would not be made on
        ranks without batches."""
        return self._means_may_be_shown and not self.inside_join

    def extend(self, parameters: Sequence[Tensor], layout: Layout) -> None:
        """Register further parameters, the last ones of ``layout``."""
        self._slots.extend(parameters, layout.parameters[len(layout.parameters) - len(parameters) :])

    def put_placeholder(self, index: int) -> RuntimeError | None:
        """Put a placeholder, since the gradient was taken. Return torch's error if the parameter was cast or moved."""
        return self._slots.put_placeholder(index)

    def withdraw(self) -> None:
        """Put placeholders in the place of means, so that autograd does not add to these."""
        self._slots.withdraw()

    def release(self) -> None:
        """Make p.grad the user's own: a copy of a mean, or None."""
        self._slots.release()

    @property
    def means_are_true(self) -> bool:
        """True if every rank holds the means of all gradients that were added, divided by the current divisor."""
        known = self._progress
        return self._stage.grads_replicated and not self._schedule.pending and known.means_divisor == known.divisor

    def publish(self) -> None:
        """Put the mean, a placeholder or None into every p.grad, as the state of the gradients is now."""
        used, seen = self._progress.used, self._schedule.seen
        if not self.means_are_shown:
            self._slots.put_placeholders([one or other for one, other in zip(used, seen, strict=True)])
            return
        means = self.means_are_true
        for index, (store, slot) in enumerate(self._schedule.places):
            if means and store.has_sum:
                self._slots.put(index, store.mean_view(slot) if used[index] else None)
            elif used[index] or seen[index]:
                self._slots.put_placeholder(index)

    # -- changes by the user ------------------------------------------------------------------------------------------

    def detect_changes(self) -> str | None:
        """Apply the user's changes since gradients were published. Return the error for one that is not allowed."""
        changes = self._slots.detect_changes()
        self.forget(changes.cleared)
        for index, gradient in changes.replaced:
            store, slot = self._schedule.places[index]
            store.mean_view(slot).copy_(gradient)
        if self.means_are_shown:  # real tensors, which may have been zeroed in place
            stale = sorted(self._progress.stale)
            places = [self._schedule.places[index] for index in stale]
            # host synchronisation: one for all, while finalized means are still there
            zero = all_zero([store.mean_view(slot) for store, slot in places])
            for index in itertools.compress(stale, zero):
                self._zero(index, known=True)
                self._progress.renewed(index)
        if changes.foreign_grad is None:
            return None
        return (
            f"the gradient of {changes.foreign_grad!r} was assigned from outside: only backward() can say what this "
            "rank contributes"
        )

    def cleared(self) -> list[int]:
        """Return the gradients that were set to None since they were published. Each is reported once."""
        return self._slots.detect_changes().cleared

    def forget(self, cleared: Sequence[int]) -> None:
        """Reset the sums of gradients that the user set to None."""
        for index in cleared:
            store, slot = self._schedule.places[index]
            store.clear_slot(slot)
            self._progress.used[index] = self._schedule.seen[index] = False
            self._progress.renewed(index)
        if cleared and not any(True for _ in self._slots.held()):
            self._clear()

    def zeroed(self, index: int) -> None:
        """Set the sum of a gradient to zero whose placeholder the user has zeroed."""
        self._zero(index, self._used_is_known())
        self._progress.renewed(index)

    def edited(self) -> str | None:
        """Return the error for a mean that was edited although the means will change once more; None if none was."""
        known = self._progress
        if not self.means_are_shown or known.means_divisor is None or not known.is_open:
            return None
        for store in self._doubtful(known.means_divisor):
            for slot in store.edits(known.means_divisor, known.used):
                name = self._schedule.layout.parameters[store.bucket.slots[slot].parameter].name
                return (
                    f"the gradient of {name!r} was edited after a backward, and a further backward or another divisor "
                    "would lose the edit; edit gradients after the last backward of a step"
                )
        return None

    def _doubtful(self, divisor: float) -> list[GradAccumulator]:
        """Return the accumulators whose means may have been edited since they were gathered."""
        stores = [store for store in self._schedule.stores if store.shows_means]
        if not stores or host_readable(torch.device(stores[0].bucket.device)):
            return stores
        # host synchronisation: one for all, in a backward that is not the first since gradients were cleared
        return list(itertools.compress(stores, read_scalars([store.edited(divisor) for store in stores])))

    # -- clearing -----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear every gradient, or set those that exist to zero."""
        if set_to_none:  # whatever the user did to them
            self._slots.clear()  # also what was there before this object
            self._clear()
        else:
            self.detect_changes()
            known = self._used_is_known()
            for index, (used, seen) in enumerate(zip(self._progress.used, self._schedule.seen, strict=True)):
                if used or seen:
                    self._zero(index, known)
                mean = self._slots.mean(index)
                if mean is not None:
                    mean.zero_()
        self._progress.all_renewed()

    def _clear(self) -> None:
        """Reset all parameters to "no gradient"."""
        self._progress.used[:] = [False] * len(self._progress.used)
        self._schedule.clear()

    def _used_is_known(self) -> bool:
        """Return True if `GradPhase.used` is agreed on by all ranks, rather than this rank's own."""
        return (self.means_are_shown and not self._schedule.pending) or not self._progress.is_open

    def _zero(self, index: int, known: bool) -> None:
        store, slot = self._schedule.places[index]
        if not self._progress.used[index]:
            store.clear_slot(slot)
        elif known:
            store.zero_slot(slot)
        else:
            store.contribute_zero(slot)
