"""Takes gradients out of p.grad, where autograd has put them, and leaves placeholders there.

Knows: p.grad of one bucket. Does not know: when a gradient is there, other buckets, what becomes of it.

    CPU            each gradient by itself, in its parameter's hook
    accelerators   the hook leaves the gradient in p.grad, until the last one of its bucket is there, or the backward
                   ends: then all are taken in one loop. Until then p.grad is the user's, as in a plain loop: an edit
                   by a hook is an edit of the gradient, and None is none

A gradient that autograd adds to a placeholder is taken in its hook on all devices, since the next one would replace it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.parameter_specs import as_plain, changed
from ..runtime.bucket import Bucket, MakePlaceholder


class GradientTaking:
    """Takes the gradients of one optimizer on one rank. ``rank``: as errors name it."""

    def __init__(self, rank: int, make_placeholder: MakePlaceholder) -> None:
        self._rank, self._make_placeholder = rank, make_placeholder

    def take(self, bucket: Bucket, slot: int, gradient: Tensor) -> None:
        """Give a bucket the gradient of a slot, and put a placeholder into p.grad.

        Raises `RuntimeError`, and leaves None there, if the gradient is sparse, or if torch refuses the placeholder.
        """
        if gradient.layout is not torch.strided:
            bucket.parameters[slot].grad = None
            raise RuntimeError(
                f"rank {self._rank}: the gradient of {bucket.specs[slot].name!r} is {gradient.layout}: "
                "sparse gradients are not supported; build the Embedding with sparse=False"
            )
        try:
            bucket.take_gradient(slot, self._make_placeholder)
        except RuntimeError as refused:
            bucket.publish(slot, None)
            problem = changed(bucket.parameters[slot], bucket.specs[slot])
            raise RuntimeError(
                f"rank {self._rank}: {problem or f'the gradient of {bucket.specs[slot].name!r}: {refused}'}"
            ) from refused
        bucket.grad.add(slot, gradient)

    def take_left(self, bucket: Bucket) -> None:
        """Take the gradients that hooks have left in p.grad. Where the user has put None since, there is none."""
        with as_plain():  # a released parameter would be asked in Python
            while bucket.left:  # an error drops the gradient that caused it, and no other
                slot = bucket.left.pop()
                gradient = bucket.parameters[slot].grad
                if gradient is None:
                    bucket.clear_slot(slot)
                else:
                    self.take(bucket, slot, gradient.detach() if gradient.requires_grad else gradient)
