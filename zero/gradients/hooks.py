"""Translate autograd's hooks into events: a backward begins, a gradient is ready, a backward ends.

Knows: autograd's hooks, graph tasks (one per backward call), and the placeholder that replaces a gradient which this
rank does not hold. Does not know: buckets, ranks, stages.

    backward()    AccumulateGrad of p       p.grad is None: autograd assigns the new gradient
                                            p.grad is a placeholder: its add_ captures the new gradient
                  post-accumulate hook      takes the gradient and leaves the placeholder (or None) in p.grad
                  callback of the task      ends the backward; an exception skips it, so a later event must check

A placeholder has a shape, strides and a dtype, but no memory. Every operation that would read it raises. A rank that
does not hold a gradient must not expose a part of it, nor None: a clip would take None for "no gradient".
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from collectives.torch_internals import (
    TracingContext,
    aten_amp_unscale_,
    aten_foreach_zero_,
    current_graph_task_id,
    engine_run_backward,
    make_wrapper_subclass,
    queue_callback,
)

from ..runtime.bucket import Bucket

_NO_TASK = -1


class Listener(Protocol):
    """The receiver of a `GradientHooks` object's events."""

    def backward_began(self) -> None: ...

    def gradient_ready(self, bucket: Bucket, slot: int, gradient: Tensor) -> None: ...

    def backward_ended(self) -> None: ...

    def gradient_zeroed(self, bucket: Bucket, slot: int) -> None: ...

    def unscale(self, found: Tensor, inverse: Tensor) -> None:
        """A `GradScaler` asks to multiply all gradients by ``inverse``, and to set ``found`` to 1 if any is not finite.

        ``found`` and ``inverse`` are tensors of one element.
        """

    def backward_is_near(self) -> None:
        """A graph task is about to reach a parameter, or has changed the gradient of one parameter and of no other."""

    def outside_backward(self) -> None:
        """A graph task ended that accumulated no parameter's gradient (`torch.autograd.grad`)."""


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
    listener: weakref.ref[Listener]
    reported_dtype: torch.dtype

    @staticmethod
    def __new__(cls, bucket: Bucket, slot: int, listener: weakref.ref[Listener]) -> ShardedGradient:
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

    def __init__(self, bucket: Bucket, slot: int, listener: weakref.ref[Listener]) -> None:
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
        aten = torch.ops.aten
        first = args[0] if args else None
        if func is aten.detach.default:
            return first
        if func in (aten.add_.Tensor, aten.add.Tensor) and isinstance(first, cls):
            if current_graph_task_id() != _NO_TASK and not kwargs:
                first.capture = args[1]
                return first
        elif func is aten.zero_.default and isinstance(first, cls):
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
        remedy = "use optimizer.clip_grad_norm_(max_norm) to clip and optimizer.full_grad(p) to read"
        if current_graph_task_id() != _NO_TASK:
            remedy = (
                "something else asks for it inside the backward: if a hook does, do it when backward() has returned; "
                "if the model is inside DistributedDataParallel, take that away, since two systems would add up the "
                "gradients"
            )
        elif "to_copy" in action:
            remedy += ", and cast or move the model before the optimizer is built"
        raise RuntimeError(
            f"{action}: this rank does not hold the gradient of {self.owner!r}, which is sharded or not reduced yet; "
            f"{remedy}"
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


class _Arrival:
    """The post-accumulate hook of one parameter, called once in every backward. It holds its owner weakly."""

    __slots__ = ("_bucket", "_slot", "owner")

    def __init__(self, owner: GradientHooks, bucket: Bucket, slot: int) -> None:
        self.owner, self._bucket, self._slot = weakref.ref(owner), weakref.ref(bucket), slot

    def __call__(self, parameter: Tensor) -> None:
        owner, bucket = self.owner(), self._bucket()
        listener = None if owner is None else owner.listener()
        if owner is None or listener is None or bucket is None:
            return
        with owner.lock:
            if not parameter.requires_grad:  # frozen since its forward: autograd has discarded the gradient
                return
            gradient = parameter.grad
            if isinstance(gradient, ShardedGradient):
                placeholder, gradient = gradient, gradient.capture
                placeholder.capture = None
            assert gradient is not None
            if current_graph_task_id() != owner.task:
                owner.begin(listener, bucket.spec.slots[self._slot].parameter, parameter)
            listener.gradient_ready(bucket, self._slot, gradient.detach() if gradient.requires_grad else gradient)


class GradientHooks:
    """The hooks on the parameters of one optimizer, until `remove`. They hold the listener weakly.

    Autograd has a thread for each device of the parameters. Of the hooks of one owner, one runs at a time.

    A parameter has one owner. The next object that watches it takes it over; the previous owner becomes ``superseded``
    and loses all its hooks. Thus a notebook cell that builds an optimizer can be run again.
    """

    def __init__(self, listener: Listener, *, exclusive: bool = False, ahead: bool = False) -> None:
        """Create an object that watches no parameter yet.

        Args:
            listener: receives the events; held weakly.
            exclusive: the parameters cannot be taken over: `check_free` raises for them.
            ahead: keep a pre-accumulation hook on every parameter, so that ``backward_is_near`` always comes before
                the first accumulation. It costs about a microsecond per parameter in every backward. Without it, only
                the parameters that ever came first in a backward keep that hook. If a task begins with another one,
                ``backward_is_near`` comes after its first gradient.
        """
        self.superseded, self.exclusive, self._ahead = False, exclusive, ahead
        self.listener = weakref.ref(listener)
        self.lock = threading.RLock()
        self._handles: list[Any] = []
        self._before: dict[int, Any] = {}  # parameter -> hook that runs before its gradient is accumulated
        self._leaders: set[int] = set()  # parameters that ever came first in a backward
        self.task = _NO_TASK  # the graph task of the backward that began and has not ended
        self._seen = _NO_TASK  # the last graph task in which a pre-accumulation hook ran

    @property
    def inside_backward(self) -> bool:
        """True inside a backward that has reached a watched parameter."""
        return self.task != _NO_TASK and current_graph_task_id() == self.task

    @property
    def interrupted(self) -> bool:
        """True if a backward began and an exception ended it before its final callback was done."""
        return self.task != _NO_TASK and not self.inside_backward

    def forget(self) -> None:
        """Mark the interrupted backward as handled."""
        self.task = _NO_TASK

    def watch(self, bucket: Bucket, slot: int) -> None:
        """Register the hooks of a slot's parameter, also if it is frozen: it may be unfrozen later."""
        parameter = bucket.parameters[slot]
        self.take_over(parameter)
        trainable = parameter.requires_grad
        parameter.requires_grad_(True)
        try:
            self._handles.append(_untyped(parameter).register_post_accumulate_grad_hook(_Arrival(self, bucket, slot)))
            self._watch_ahead(parameter, bucket.spec.slots[slot].parameter)
        finally:
            parameter.requires_grad_(trainable)

    def _watch_ahead(self, parameter: Tensor, index: int) -> None:
        reference = weakref.ref(self)

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

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in (*self._handles, *self._before.values()):
            handle.remove()
        self._handles, self._before = [], {}

    def take_over(self, parameter: Tensor) -> None:
        """Supersede any other owner of ``parameter``: remove all its hooks."""
        for hook in list((_untyped(parameter)._post_accumulate_grad_hooks or {}).values()):
            owner = hook.owner() if isinstance(hook, _Arrival) else None
            if owner is not None and owner is not self:
                owner.superseded = True
                owner.remove()
        if isinstance(parameter.grad, ShardedGradient):
            parameter.grad = None

    def begin(self, listener: Listener, index: int, parameter: Tensor) -> None:
        """Begin the backward of the current graph task, whose first gradient (of ``parameter``) has just been taken.

        Raises `RuntimeError` if this backward runs inside another one.
        """
        captured = isinstance(parameter.grad, ShardedGradient)
        if not captured:
            # Autograd has added its gradient to the one that the user had assigned, as in a plain loop.
            parameter.grad = None
        if _reentrant(parameter.device):
            raise RuntimeError(
                "a backward inside a backward reached a parameter of this optimizer, as with "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=True): use use_reentrant=False"
            )
        task = current_graph_task_id()
        if task != self._seen:
            listener.backward_is_near()
        listener.backward_began()
        self.task = task
        _at_end(self._ended)
        self._leaders.add(index)
        if index not in self._before:
            self._watch_ahead(parameter, index)

    def _about(self, device: torch.device) -> None:
        task = current_graph_task_id()
        listener = self.listener()
        if task != self._seen and listener is not None:
            self._seen = task
            if _reentrant(device):  # only `autograd.grad` may do this; `begin` raises for a backward
                return
            listener.backward_is_near()
            _at_end(self._left)

    def _ended(self) -> None:
        listener = self.listener()
        if listener is not None:
            listener.backward_ended()
        self.task = _NO_TASK  # last: an exception above leaves the backward marked as interrupted
        if not self._ahead:
            for index in self._before.keys() - self._leaders:
                self._before.pop(index).remove()

    def _left(self) -> None:
        listener = self.listener()
        if listener is not None and self.task == _NO_TASK:
            listener.outside_backward()


def check_free(parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise `ValueError` if a parameter has an exclusive owner; the error names the parameter."""
    for name, parameter in parameters:
        for hook in (_untyped(parameter)._post_accumulate_grad_hooks or {}).values():
            owner = hook.owner() if isinstance(hook, _Arrival) else None
            if owner is not None and owner.exclusive:
                raise ValueError(f"{name!r} belongs to another stage-3 optimizer: close() that one first")


def _untyped(parameter: Tensor) -> Any:
    """Return ``parameter`` as `Any`: torch's methods that register hooks have no annotations."""
    return parameter


def _at_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the current graph task is over."""
    queue_callback(callback)


def _reentrant(device: torch.device) -> bool:
    """Return True in a backward that runs inside another one. It ends first, and torch reports no end of the outer one.

    ``device`` is that of the parameter whose hook runs. Autograd runs hooks of CPU parameters in the thread that called
    the backward, which has one frame of the engine's `run_backward`. It runs hooks of an accelerator's parameters in
    its own threads, where only a nested backward has such a frame.
    """
    in_caller = device.type == "cpu" or not torch.autograd.is_multithreading_enabled()
    depth, run_backward = 0, engine_run_backward.__code__
    current: FrameType | None = sys._getframe()
    while current is not None:
        depth += current.f_code is run_backward
        current = current.f_back  # None at the end: a frame that stays referenced keeps all locals of its callers
    return depth > in_caller
