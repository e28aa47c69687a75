"""What stands in p.grad, and what the user's changes there mean for the sums.

    mean           if the stage gives every rank whole means, and these contain all gradients that were added
    placeholder    if there is a gradient that this rank does not hold whole
    None           if no rank used the parameter, or it was cleared

If another tensor is there than was published, the user has put it there.

The placeholder in ``p.grad`` of a gradient that this rank does not hold whole.

It has a shape, strides and a dtype, but no memory. Every operation that would read it raises. A rank that does not hold
a gradient must not expose a part of it, nor None: a clip would take None for "no gradient".

Knows: torch's dispatch of operations; when means are up to date, so that they may be published; that a gradient was
cleared, zeroed, replaced or edited in p.grad. Does not know: when a round is due, other ranks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from collectives.torch_internals import (
    TracingContext,
    aten_amp_unscale_,
    aten_foreach_zero_,
    current_graph_task_id,
    make_wrapper_subclass,
)

from ..core.bits import all_zero, either, host_readable, read_scalars, where
from ..core.parameter_specs import as_plain
from ..core.stage import Stage
from ..runtime.backward_tracker import NO_TASK
from ..runtime.bucket import Bucket
from ..runtime.compiled_calls import untraced_methods
from ..runtime.joining import Joining
from .backward_schedule import BackwardSchedule

_DETACH = torch.ops.aten.detach.default
_ADDITIONS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
_READ = "optimizer.full_grad(p) to read"


class PlaceholderListener(Protocol):
    """The receiver of what a user does to placeholders."""

    def gradient_zeroed(self, bucket: Bucket, slot: int) -> None: ...

    def unscale(self, found: Tensor, inverse: Tensor) -> None:
        """A `GradScaler` asks to multiply all gradients by ``inverse``, and to set ``found`` to 1 if any is not finite.

        ``found`` and ``inverse`` are tensors of one element.
        """


@untraced_methods
class ShardedGradient(torch.Tensor):
    """The placeholder in ``p.grad`` of a gradient that this rank does not hold whole.

    Autograd can add to it; the user can zero it, unscale it with a `GradScaler` and delete it. Everything else raises
    `RuntimeError`.

    Attributes:
        owner: the parameter's name.
        bucket: the parameter's bucket.
        slot: the number of its slot there.
        capture: the gradient that autograd added last, until the parameter's hook takes it.
        listener: receives zeroing and unscaling.
        reported_dtype: the dtype of the placeholder: fp32 for fp16, because a `GradScaler` refuses fp16 gradients.
    """

    __torch_function__ = torch.nn.Parameter.__torch_function__  # disabled: `__torch_dispatch__` answers
    owner: str
    bucket: weakref.ref[Bucket]
    slot: int
    capture: Tensor | None
    listener: weakref.ref[PlaceholderListener]
    reported_dtype: torch.dtype

    @staticmethod
    def __new__(cls, bucket: Bucket, slot: int, listener: weakref.ref[PlaceholderListener]) -> ShardedGradient:
        like = bucket.specs[slot]
        made: ShardedGradient = make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride,
            dtype=like.dtypes.param_dtype,
            device=torch.device(like.device),
            requires_grad=False,
        )
        made.bucket, made.slot = weakref.ref(bucket), slot
        made.owner, made.capture, made.listener = like.name, None, listener
        made.reported_dtype = torch.float32 if like.dtypes.param_dtype is torch.float16 else like.dtypes.param_dtype
        return made

    def __init__(self, bucket: Bucket, slot: int, listener: weakref.ref[PlaceholderListener]) -> None:
        super().__init__()

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.reported_dtype

    @property
    def data(self) -> Tensor:
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # `Module.to` assigns what it did not have to change
            self._refuse("an assignment to .data")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<gradient of {self.owner!r}, {tuple(self.shape)}, not held by this rank; see optimizer.full_grad(p)>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if func is _DETACH:
            return first
        if func in _ADDITIONS and isinstance(first, cls):
            if current_graph_task_id() != NO_TASK and not kwargs:
                first.capture = args[1]
                return first
        elif func is torch.ops.aten.zero_.default and isinstance(first, cls):
            first._zero()
            return first
        elif func is aten_foreach_zero_:
            for gradient in args[0]:
                gradient._zero() if isinstance(gradient, cls) else gradient.zero_()
            return None
        elif func is aten_amp_unscale_:
            gradients, found, inverse = args
            real = [gradient for gradient in gradients if not isinstance(gradient, cls)]
            if real:
                func(real, found, inverse)
            for listener in dict.fromkeys(g.listener() for g in gradients if isinstance(g, cls)):
                if listener is not None:
                    listener.unscale(found, inverse)
            return None
        return next(a for a in _flat(args) if isinstance(a, cls))._refuse(str(func))

    def _zero(self) -> None:
        listener, bucket = self.listener(), self.bucket()
        if listener is not None and bucket is not None:
            listener.gradient_zeroed(bucket, self.slot)

    def _refuse(self, action: str) -> NoReturn:
        remedy = f"use optimizer.clip_grad_norm_(max_norm) to clip and {_READ}"
        remedy += "; if it is of a backward after a clip or a step, call optimizer.zero_grad() before that backward"
        if current_graph_task_id() != NO_TASK:
            remedy = (
                "something else asks for it inside the backward. If a hook of register_post_accumulate_grad_hook does, "
                "register it by p.register_hook, which is given this rank's own gradient, or read it when backward() "
                "has returned. Do not wrap the model in DistributedDataParallel, which would reduce gradients twice"
            )
        elif action.startswith("an assignment"):
            remedy = "set optimizer.divisor or use optimizer.clip_grad_norm_(max_norm) to change it, and " + _READ
        elif "to_copy" in action:
            remedy += ", and cast or move the model before the optimizer is built"
        raise RuntimeError(
            f"{action}: this rank does not hold the gradient of {self.owner!r}, which is sharded, not reduced yet, or "
            f"divided by another number than optimizer.divisor is now (set it before the backward); {remedy}"
        )

    def untyped_storage(self) -> torch.UntypedStorage:
        """Raise `RuntimeError`, except for a compiler, which inspects gradients without reading them."""
        if TracingContext.try_get() is None:
            self._refuse("untyped_storage()")
        return super().untyped_storage()


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: ShardedGradient, *_: Any, **__: Any) -> NoReturn:
        self._refuse(f"{name}()")

    return refuse


for _name in (
    *("numpy", "tolist", "data_ptr", "storage", "__array__", "__dlpack__", "__dlpack_device__"),
    *("__reduce_ex__", "__deepcopy__"),
):
    setattr(ShardedGradient, _name, _refusal(_name))


def _flat(args: Any) -> list[Any]:
    if isinstance(args, (list, tuple)):
        return [a for arg in args for a in _flat(arg)]
    return [args]


SlotRef = tuple[Bucket, int]  # a bucket, and the number of a slot
_GRAD = attrgetter("grad")


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
        usable = self._stage.grads_replicated and not known.pending and known.unusable is None
        return usable and known.means_divisor == known.divisor

    # -- publishing ---------------------------------------------------------------------------------------------------

    def make_placeholder(self, bucket: Bucket, slot: int) -> Tensor:
        """Make the placeholder of a slot."""
        return ShardedGradient(bucket, slot, self._listener)

    def publish(self) -> None:
        """Put the mean, a placeholder or None into every p.grad, as the state of the gradients is now."""
        means = self.means_are_shown and self.means_are_true
        for bucket in self._schedule.buckets:
            if means and bucket.grad.has_sum:
                self._publish_means(bucket)
                continue
            for slot in bucket.to_hide():
                bucket.hide(slot, self.make_placeholder)

    def _publish_means(self, bucket: Bucket) -> None:
        means: Sequence[Tensor | None] = bucket.current_means()
        if 0 in bucket.used:
            means = [mean if used else None for mean, used in zip(means, bucket.used, strict=True)]
        if all(map(is_, means, bucket.published)) and all(map(is_, means, map(_GRAD, bucket.parameters))):
            return
        for slot, mean in enumerate(means):
            if bucket.published[slot] is not mean or bucket.parameters[slot].grad is not mean:
                bucket.publish(slot, mean)

    def withdraw(self) -> None:
        """Put placeholders in the place of means, so that autograd does not add to these."""
        for bucket in self._schedule.buckets:
            for slot, published in enumerate(bucket.published):
                if published is not None:
                    bucket.hide(slot, self.make_placeholder)

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
                gradients = [*map(_GRAD, bucket.parameters)]
                if not all(map(is_, gradients, bucket.published)):
                    pairs = enumerate(zip(gradients, bucket.published, strict=True))
                    found += [(bucket, slot, there) for slot, (there, published) in pairs if there is not published]
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
                bucket.hidden[slot] = 0
        self.forget(cleared)
        moved = None
        if self.means_are_shown and self._schedule.unusable is None:  # real tensors, perhaps zeroed, or in other memory
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
            bucket.take_zeros(slot)  # the user's, or its own: a later gradient is added to them in both cases
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
        known = self._schedule
        return known.unusable is None and ((self.means_are_shown and not known.pending) or not known.is_open)

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
