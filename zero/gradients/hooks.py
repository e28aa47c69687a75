"""Translate autograd's hooks into events: a backward begins, a gradient is ready, a backward ends.

Knows: the hooks of parameters, who owns a parameter, which graph task accumulates gradients. Does not know: buckets,
ranks, stages, or when a graph task ends (`runtime/backward_tracker`).

    backward()    AccumulateGrad of p       p.grad is None: autograd assigns the new gradient
                                            p.grad is a placeholder: its add_ captures the new gradient
                  post-accumulate hook      leaves the gradient in p.grad; where it is the bucket's last one, takes
                                            all of the bucket, and puts placeholders (or None) there
                  end of the task           ends the backward; an exception skips it, so a later event must check
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from collectives.torch_internals import current_graph_task_id

from ..core.parameter_specs import HELD_ELSEWHERE
from ..runtime.backward_tracker import NO_TASK, BackwardTracker, reentrant
from ..runtime.bucket import Bucket
from ..runtime.compiled_calls import untraced, untraced_methods
from ..runtime.streams import Streams
from .grad_publisher import PlaceholderListener, ShardedGradient


class GradientListener(PlaceholderListener, Protocol):
    """The receiver of a `GradientHooks` object's events."""

    def backward_began(self) -> None: ...

    def gradient_ready(self, bucket: Bucket, slot: int, gradient: Tensor) -> None: ...

    def backward_ended(self) -> None:
        """A graph task ended that was near, also if it accumulated no parameter's gradient (`torch.autograd.grad`)."""

    def take_left(self) -> object:
        """Take the gradients that hooks have left in p.grad."""

    def backward_is_near(self) -> None:
        """A graph task is about to reach a parameter, or has changed the gradient of one parameter and of no other."""


class _PostAccumulateHook:
    """The post-accumulate hook of one parameter, called once in every backward. It holds its owner weakly.

    It leaves the gradient in p.grad (`GradientTaking`), unless more is due: for the first gradient of a backward, for
    the last one of a bucket, for one that a placeholder has captured, which may be edited in place later, and where the
    current stream has changed. To leave it takes no lock: a bucket is on one device, for which a graph task has one
    thread.
    """

    __slots__ = ("_bucket", "_slot", "owner")

    def __init__(self, owner: GradientHooks, bucket: Bucket, slot: int) -> None:
        self.owner, self._bucket, self._slot = weakref.ref(owner), weakref.ref(bucket), slot

    @untraced
    def __call__(self, parameter: Tensor) -> None:
        owner, bucket, slot = self.owner(), self._bucket(), self._slot
        if owner is None or bucket is None:
            return
        if (
            bucket.published[slot] is None
            and bucket.grad.missing > 1
            and current_graph_task_id() == owner.task
            and not (owner.streams.exist and owner.streams.changed())
        ):
            if parameter.requires_grad:  # else frozen since its forward: autograd has discarded the gradient
                bucket.leave(slot)
            return
        listener = owner.listener()
        if listener is None:
            return
        with owner.lock:
            if not parameter.requires_grad:
                return
            gradient = parameter.grad
            if isinstance(gradient, ShardedGradient):
                placeholder, gradient = gradient, gradient.capture
                placeholder.capture = None
            assert gradient is not None
            if current_graph_task_id() != owner.task:
                owner.begin(listener, bucket.spec.slots[slot].parameter, parameter)
            listener.gradient_ready(bucket, slot, gradient.detach() if gradient.requires_grad else gradient)


@untraced_methods
class GradientHooks:
    """The hooks on the parameters of one optimizer, until `remove`. They hold the listener weakly.

    Autograd has a thread for each device of the parameters. Of the hooks of one owner, one runs at a time.

    A parameter has one owner. The next object that watches it takes it over; the previous owner becomes ``superseded``
    and loses all its hooks. Thus a notebook cell that builds an optimizer can be run again.
    """

    def __init__(
        self,
        listener: GradientListener,
        backwards: BackwardTracker,
        streams: Streams,
        *,
        exclusive: bool = False,
        ahead: bool = False,
    ) -> None:
        """Create an object that watches no parameter yet.

        Args:
            listener: receives the events; held weakly.
            backwards: reports when a graph task ends.
            streams: on which gradients come.
            exclusive: the parameters cannot be taken over: `check_free` raises for them.
            ahead: keep a pre-accumulation hook on every parameter, so that ``backward_is_near`` always comes before
                the first accumulation. It costs about a microsecond per parameter in every backward. Without it, only
                the parameters that ever came first in a backward keep that hook. If a task begins with another one,
                ``backward_is_near`` comes after its first gradient.
        """
        self.superseded, self.exclusive, self._ahead = False, exclusive, ahead
        self.listener = weakref.ref(listener)
        self.lock, self.streams = threading.RLock(), streams
        self._backwards = backwards
        backwards.watch_gradients(self._ended)
        self._handles: list[Any] = []
        self._before: dict[int, Any] = {}  # parameter -> hook that runs before its gradient is accumulated
        self._leaders: set[int] = set()  # parameters that ever came first in a backward
        self.task = NO_TASK  # the graph task that accumulated gradients and whose reductions are not over
        self._near = NO_TASK  # the last graph task of which `backward_is_near` was reported

    @property
    def inside_backward(self) -> bool:
        """True inside a backward that has reached a watched parameter."""
        return self.task != NO_TASK and current_graph_task_id() == self.task

    @property
    def interrupted(self) -> bool:
        """True if a backward began and an exception ended it before its final callback was done."""
        return self.task != NO_TASK and not self.inside_backward

    def forget(self) -> None:
        """Mark the interrupted backward as handled."""
        self.task = NO_TASK

    def watch(self, bucket: Bucket, slot: int) -> None:
        """Register the hooks of a slot's parameter, also if it is frozen: it may be unfrozen later."""
        parameter = bucket.parameters[slot]
        self.take_over(parameter)
        trainable = parameter.requires_grad
        parameter.requires_grad_(True)
        try:
            hook = _PostAccumulateHook(self, bucket, slot)
            self._handles.append(_untyped(parameter).register_post_accumulate_grad_hook(hook))
            self._watch_ahead(parameter, bucket.spec.slots[slot].parameter)
        finally:
            parameter.requires_grad_(trainable)

    def _watch_ahead(self, parameter: Tensor, index: int) -> None:
        reference = weakref.ref(self)

        @untraced
        def about(gradient: Tensor) -> None:
            hooks = reference()
            if hooks is not None:
                with hooks.lock:
                    hooks._about(gradient.device)

        self._before[index] = _untyped(parameter).register_hook(about)

    def stay_ahead(self, buckets: Sequence[Bucket]) -> None:
        """Keep a pre-accumulation hook on every parameter of ``buckets``, all that are watched: with several devices
        autograd would else add to gradients in one thread while ``backward_is_near`` runs in another."""
        self._ahead = True
        for bucket in buckets:
            for slot, parameter in zip(bucket.spec.slots, bucket.parameters, strict=True):
                if slot.parameter not in self._before:
                    trainable = parameter.requires_grad
                    self._watch_ahead(parameter.requires_grad_(), slot.parameter)
                    parameter.requires_grad_(trainable)

    def remove_also(self, handles: Sequence[Any]) -> None:
        """Let `remove` remove further hooks, too, given by their handles."""
        self._handles += handles

    def remove(self) -> None:
        """Remove all hooks. No gradient stays left in p.grad."""
        listener = self.listener()
        if listener is not None:
            listener.take_left()
        for handle in (*self._handles, *self._before.values()):
            handle.remove()
        self._handles, self._before = [], {}

    def take_over(self, parameter: Tensor) -> None:
        """Supersede any other owner of ``parameter``: remove all its hooks."""
        for owner in owners_of(parameter):
            if owner is not self:
                owner.superseded = True
                owner.remove()
        if isinstance(parameter.grad, ShardedGradient):
            parameter.grad = None

    def begin(self, listener: GradientListener, index: int, parameter: Tensor) -> None:
        """Begin the backward of the current graph task, whose first gradient (of ``parameter``) has just been taken.

        Raises `RuntimeError` if this backward runs inside another one.
        """
        captured = isinstance(parameter.grad, ShardedGradient)
        if not captured:
            # Autograd has added its gradient to the one that the user had assigned, as in a plain loop.
            parameter.grad = None
        if reentrant(parameter.device):
            raise RuntimeError(
                "a backward inside a backward reached a parameter of this optimizer, as with "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=True): use use_reentrant=False"
            )
        self._about(parameter.device)
        listener.backward_began()
        self.task = current_graph_task_id()
        self._leaders.add(index)
        if index not in self._before:
            self._watch_ahead(parameter, index)

    def _about(self, device: torch.device) -> None:
        """Report, once in a graph task, that it is near."""
        task, listener = current_graph_task_id(), self.listener()
        # inside another backward only `autograd.grad` comes here; `begin` raises for a backward
        if task == self._near or listener is None or reentrant(device):
            return
        self._near = task
        self._backwards.reach()
        listener.backward_is_near()

    def _ended(self, task: int) -> None:
        """Report the end of a graph task that accumulated gradients, or was near."""
        listener = self.listener()
        accumulated_nothing = task == self._near and self.task == NO_TASK
        if listener is None or not (accumulated_nothing or task == self.task):
            return
        listener.backward_ended()
        self.task = NO_TASK  # last: an exception above leaves the backward marked as interrupted
        if self._leaders and not self._ahead:
            for index in self._before.keys() - self._leaders:
                self._before.pop(index).remove()


def owners_of(parameter: Tensor) -> list[GradientHooks]:
    """Return the objects that watch a parameter."""
    found = (_untyped(parameter)._post_accumulate_grad_hooks or {}).values()
    owners = (hook.owner() for hook in found if isinstance(hook, _PostAccumulateHook))
    return [owner for owner in owners if owner is not None]


def _untyped(parameter: Tensor) -> Any:
    """Return ``parameter`` as `Any`: torch's methods that register hooks have no annotations."""
    return parameter


def check_free(parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise `ValueError` if a parameter has an exclusive owner; the error names the parameter."""
    for name, parameter in parameters:
        if any(owner.exclusive for owner in owners_of(parameter)):
            raise ValueError(HELD_ELSEWHERE.format(what=repr(name)))


def check_no_gradients(parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise `ValueError` if a parameter of a further group has a gradient; the error names the parameter."""
    for name, parameter in parameters:
        if parameter.grad is not None and not isinstance(parameter.grad, ShardedGradient):
            raise ValueError(
                f"add_param_group: {name!r} has a gradient already, of a backward that the optimizer has not seen: set "
                "p.grad = None, or add the group before that backward"
            )
