"""A bucket on one rank at run time. Its geometry is a `BucketSpec`.

Knows: what belongs to one bucket. Does not know: other buckets, other ranks, or when anything happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ..core.layout import BucketSpec, ParameterSpec
from ..core.stage import Stage
from .accumulator import GradAccumulator
from .flat_buffer import FlatBuffer
from .flat_states import BucketStates


class StoredBucket:
    """The parameters of one bucket and their values on this rank: all that a rank holds of one that is not updated.

    Attributes:
        spec: the geometry.
        specs: the description of each slot's parameter.
        parameters: the parameter of each slot.
        weights: the parameters' values, in the dtype with which the model computes.
    """

    def __init__(
        self, spec: BucketSpec, specs: Sequence[ParameterSpec], parameters: Sequence[Tensor], weights: FlatBuffer
    ) -> None:
        self.spec, self.specs, self.parameters, self.weights = spec, specs, parameters, weights

    def updated_weights(self, stage: Stage, rank: int) -> FlatBuffer:
        """Return the weights of the interval that this rank updates. ``rank``: its number among the owners."""
        if self.weights.placement is stage.states:
            return self.weights
        return self.weights.shard(self.spec.cuts, rank)


class Bucket(StoredBucket):
    """All that a rank holds of one bucket that is updated. What it holds of which is the stage's row.

    Attributes:
        grad: the gradients: this rank's contribution, the sum of the shard that it owns, the mean.
        states: the optimizer's states and master weights of the interval that this rank updates.

    Of each slot, one flag in a `bytearray`, or one entry:
        used: this rank has added a gradient since gradients were cleared; once ranks have agreed: any rank has.
        trainable: whether the parameter required a gradient when p.grad was last read.
        seen: it was trainable in a backward since gradients were cleared.
        stale: its gradient must be cleared before a backward may add to it.
        published: the tensor that was put into p.grad; None if none was.
        placeholders: what is put there for a gradient that this rank does not hold whole; None until it is needed.

    ``means``: what is put into p.grad for a mean, by slot: a view of the mean that nothing else uses; empty until there
    are means. ``addresses``: of their memory.

    ``missing``: how many gradients the backward under way has not brought yet.
    """

    def __init__(self, stored: StoredBucket, grad: GradAccumulator, states: BucketStates) -> None:
        super().__init__(stored.spec, stored.specs, stored.parameters, stored.weights)
        self.grad, self.states = grad, states
        slots = len(stored.spec.slots)
        self.used, self.trainable, self.seen, self.stale = (bytearray(slots) for _ in range(4))
        self.published: list[Tensor | None] = [None] * slots
        self.placeholders: list[Tensor | None] = [None] * slots
        self.means: list[Tensor] = []
        self.addresses: list[int] = []
        self.missing = 0


def slots_of(buckets: Iterable[Bucket]) -> dict[int, tuple[Bucket, int]]:
    """Return, for each parameter of the layout by its index, its bucket and the number of its slot there."""
    return {slot.parameter: (bucket, number) for bucket in buckets for number, slot in enumerate(bucket.spec.slots)}
