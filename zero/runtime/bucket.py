"""A bucket on one rank at run time. Its geometry is a `BucketSpec`.

Knows: what belongs to one bucket. Does not know: other buckets, other ranks, or when anything happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from torch import Tensor

from ..core.bits import either, where, without
from ..core.layout import BucketSpec, ParameterSpec
from ..core.stage import Placement, Stage
from .accumulator import GradAccumulator
from .flat_buffer import FlatBuffer, Move
from .flat_states import BucketStates

MakePlaceholder = Callable[["Bucket", int], Tensor]
_REQUIRES_GRAD = attrgetter("requires_grad")


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

    def apply(self, move: Move) -> None:
        """Replace each tensor that is kept here, but for gradients, by what ``move`` returns for it."""
        self.weights.apply(move)

    def offloaded(self) -> list[Tensor]:
        """Return the tensors that are offloaded."""
        return self.weights.kept() if self.spec.offloaded else []

    def widest(self) -> FlatBuffer:
        """Return the values of what this rank holds in the widest dtype in which they are known, to be read."""
        return self.weights.values()

    def write(self, whole: Tensor) -> None:
        """Overwrite the parameters by those of the whole bucket, 1-D."""
        narrow = FlatBuffer(whole.to(self.spec.dtypes.param_dtype), Placement.WHOLE)
        if self.weights.placement is Placement.WHOLE:
            for parameter, slot, spec in zip(self.parameters, self.spec.slots, self.specs, strict=True):
                parameter.detach().copy_(narrow.slot(slot, spec))  # a graph that was kept finds it
        else:
            self.weights.data.copy_(narrow.interval(self.weights.begin, self.weights.end))

    def views(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with its view of the weights, all of which must be here."""
        for parameter, slot, spec in zip(self.parameters, self.spec.slots, self.specs, strict=True):
            yield parameter, self.weights.slot(slot, spec)

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
        stale: its gradient must be cleared before a backward may add to it, or, if unusable, before it may be used.
        published: the tensor that was put into p.grad; None if none was.
        hidden: it is the placeholder. The user may have replaced it since, as `detect_changes` finds out.
        placeholders: what is put there for a gradient that this rank does not hold whole; None until it is needed.

    ``left``: slots whose gradient of the backward under way, or of an interrupted one, is in p.grad, until
    `gradients.taking` takes them out of here.
    ``means``: what is put into p.grad for a mean, by slot: a view of the mean that nothing else uses; empty until there
    are means. ``addresses``: of their memory.

    Only the methods here change these.
    """

    def __init__(self, stored: StoredBucket, grad: GradAccumulator, states: BucketStates) -> None:
        super().__init__(stored.spec, stored.specs, stored.parameters, stored.weights)
        self.grad, self.states = grad, states
        slots = len(stored.spec.slots)
        self.used, self.trainable, self.seen, self.stale, self.hidden = (bytearray(slots) for _ in range(5))
        self.published: list[Tensor | None] = [None] * slots
        self.placeholders: list[Tensor | None] = [None] * slots
        self.left: list[int] = []
        self.means: list[Tensor] = []
        self.addresses: list[int] = []

    def apply(self, move: Move) -> None:
        super().apply(move)
        self.states.apply(move)

    def offloaded(self) -> list[Tensor]:
        found = [*super().offloaded(), *self.states.kept()]
        if self.spec.offloaded:
            found += [*self.states.master.kept(), *self.grad.tensors()]
        if self.spec.stepped_on_host:
            found += self.states.tensors()  # also step counts
        return found

    def widest(self) -> FlatBuffer:
        return self.states.synced_weights() if self.spec.dtypes.has_master else super().widest()

    # -- gradients ------------------------------------------------------------------------------------------------

    def read_trainable(self) -> None:
        """Read which parameters require a gradient now."""
        self.trainable = bytearray(map(_REQUIRES_GRAD, self.parameters))

    def begin_backward(self, *, pending: bool) -> bool:
        """Prepare for a backward. Return whether it includes this bucket: a parameter is trainable now, or the bucket
        was included since its last reduction, or gradients are ``pending`` on some rank."""
        trainable = self.trainable.count(1)
        if not (trainable or self.grad.touched or pending):
            return False
        self.seen = either(self.seen, self.trainable)
        self.grad.begin_backward(trainable)
        return True

    def begin_dropping(self) -> None:
        """Prepare for a backward whose gradients are dropped."""
        self.seen = either(self.seen, self.trainable)
        self.grad.missing = 0

    def drop_gradient(self, slot: int, make: MakePlaceholder) -> None:
        """Note that the backward under way has a gradient that is dropped, and put a placeholder into p.grad."""
        self.used[slot] = 1  # if it is zeroed, there is one
        self.hide(slot, make)

    def take_gradient(self, slot: int, gradient: Tensor, make: MakePlaceholder) -> None:
        """Hold a gradient of the backward under way, and put a placeholder into p.grad. Raises `RuntimeError` if torch
        refuses that, as `publish` says."""
        self.used[slot] = 1
        placeholder = self.placeholders[slot]  # without a call, where there is one
        if placeholder is None:
            placeholder = self.placeholder(slot, make)
        self.parameters[slot].grad = self.published[slot] = placeholder
        self.hidden[slot] = 1
        self.grad.add(slot, gradient)

    def leave(self, slot: int) -> None:
        """Note that the backward under way has a gradient, which stays in p.grad until it is taken."""
        self.left.append(slot)
        self.grad.missing -= 1

    def set_used(self, used: bytearray) -> None:
        """Set which parameters any rank has used."""
        self.used = used

    def finalize(self) -> None:
        """Note that sums have become means: gradients must be cleared before a backward may add to them."""
        self.stale = bytearray(self.used)

    def refuse_use(self) -> None:
        """Note that every gradient that there may be on any rank must be cleared before it is used."""
        self.stale = either(self.stale, either(self.used, self.seen))

    def replace(self, slot: int) -> int:
        """Note that a parameter was given a mean gradient. Return whether it had none that must be cleared, 0 or 1."""
        before, self.used[slot], self.stale[slot] = self.stale[slot], 1, 1
        return 1 - before

    def take_zeros(self, slot: int) -> None:
        """Set the sum of a gradient to its mean in p.grad, which is nothing but zeros, of either sign."""
        total, means = self.grad.running_sum(), self.grad.final_grad()
        assert total is not None
        assert means is not None
        for piece in self.grad.pieces:
            if piece.slot == slot:
                total.piece(piece).copy_(means.piece(piece))

    def renew(self, slot: int) -> int:
        """Note that a gradient was cleared. Return whether it had to be, 0 or 1."""
        stale, self.stale[slot] = self.stale[slot], 0
        return stale

    def renew_all(self) -> None:
        """Note that every gradient was cleared."""
        self.stale = bytearray(len(self.stale))

    def clear(self) -> None:
        """Reset all parameters to "no gradient"."""
        self.used, self.seen = bytearray(len(self.used)), bytearray(len(self.seen))
        self.grad.clear()
        if not self.grad.tensors():
            self.means, self.addresses = [], []

    def clear_slot(self, slot: int) -> None:
        """Reset a parameter, whose p.grad the user has set to None, to "no gradient"."""
        self.grad.clear_slot(slot)
        self.published[slot] = None
        self.used[slot] = self.seen[slot] = self.hidden[slot] = 0

    # -- p.grad ---------------------------------------------------------------------------------------------------

    def publish(self, slot: int, gradient: Tensor | None) -> None:
        """Put a mean or None into p.grad; None if torch refuses it, since the parameter was cast or moved."""
        self.hidden[slot] = 0
        try:
            self.parameters[slot].grad = self.published[slot] = gradient
        except RuntimeError:
            self.parameters[slot].grad = self.published[slot] = None

    def hide(self, slot: int, make: MakePlaceholder) -> None:
        """Put the placeholder into p.grad; None if torch refuses it."""
        placeholder = self.placeholder(slot, make)
        self.publish(slot, placeholder)
        self.hidden[slot] = self.published[slot] is placeholder

    def to_hide(self) -> list[int]:
        """Return the slots that have a gradient, or may have one, and whose placeholder was not put into p.grad."""
        return where(without(either(self.used, self.seen), self.hidden)) if 0 in self.hidden else []

    def placeholder(self, slot: int, make: MakePlaceholder) -> Tensor:
        """Return the placeholder of a slot, which ``make`` makes once."""
        placeholder = self.placeholders[slot]
        if placeholder is None:
            placeholder = self.placeholders[slot] = make(self, slot)
        return placeholder

    def publish_none(self) -> None:
        """Put None into p.grad of all parameters."""
        for parameter in self.parameters:
            parameter.grad = None
        self.published, self.hidden = [None] * len(self.published), bytearray(len(self.hidden))

    def current_means(self) -> list[Tensor]:
        """Return what is put into p.grad for a mean, by slot."""
        if not self.means:
            self.means = [*map(Tensor.detach, self.grad.mean_views())]
            self.addresses = [*map(Tensor.data_ptr, self.means)]
            return self.means
        for slot in self.moved_means():
            if self.parameters[slot].grad is not self.means[slot]:  # it was cleared, or assigned
                self.means[slot] = self.grad.mean_view(slot).detach()
        return self.means

    def moved_means(self) -> list[int]:
        """Return the slots whose tensor for a mean, in p.grad or not, is not where the mean is."""
        found = [*map(Tensor.data_ptr, self.means)]
        if found == self.addresses:
            return []
        self.addresses = [view.data_ptr() for view in self.grad.mean_views()]  # share_memory_() moves all of them
        return [slot for slot, pair in enumerate(zip(found, self.addresses, strict=False)) if pair[0] != pair[1]]


def slots_of(buckets: Iterable[Bucket]) -> dict[int, tuple[Bucket, int]]:
    """Return, for each parameter of the layout by its index, its bucket and the number of its slot there."""
    return {slot.parameter: (bucket, number) for bucket in buckets for number, slot in enumerate(bucket.spec.slots)}
