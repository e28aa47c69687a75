"""Turns autograd's events into "a backward began", "gradient i is there", "the backward is over".

Knows: autograd's hooks, graph tasks, and the placeholder that stands in for a gradient that this rank does not hold.
Does not know: buckets, ranks, stages.

    backward()    AccumulateGrad of p       p.grad was None: takes the new gradient as it is
                                            p.grad is a placeholder: calls its add_, which keeps the new gradient
                  post-accumulate hook      takes it, and puts the placeholder (or None) in its place
                  callback of the task      "the backward is over"; an exception skips it, so a later event must ask

A placeholder has shape, strides and dtype, and no memory. Everything that would read it raises: a rank that does not
hold a gradient must neither show a part of it nor None, which would look like "nothing to clip".
"""

from __future__ import annotations

import sys
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

from ..core.layout import ParameterSpec

_NO_TASK = -1


class Listener(Protocol):
    """Who is told."""

    def backward_began(self) -> None: ...

    def gradient_ready(self, index: int, gradient: Tensor) -> None: ...

    def backward_ended(self) -> None: ...

    def gradient_zeroed(self, index: int) -> None: ...

    def unscale(self, found: Tensor, inverse: Tensor) -> None:
        """A `GradScaler` multiplies all gradients by ``inverse``, and sets ``found`` to 1 where one is not finite."""

    def backward_is_near(self) -> None:
        """A gradient task is about to reach a parameter, or has taken the gradient of one: no other has changed yet."""

    def outside_backward(self) -> None:
        """A gradient task ended in which no parameter's gradient arrived (`torch.autograd.grad`)."""


class ShardedGradient(torch.Tensor):
    """What ``p.grad`` is while no rank holds the whole gradient: it can be added to by autograd, zeroed, unscaled, and
    dropped.

    ``capture`` holds what autograd added last, until the parameter's hook takes it. ``says``: the dtype that it answers
    with: for fp16 it is fp32, because a `GradScaler` refuses fp16 gradients.
    """

    __torch_function__ = torch.nn.Parameter.__torch_function__  # disabled: `__torch_dispatch__` answers
    owner: str
    number: int
    capture: Tensor | None
    listener: weakref.ref[Listener]
    says: torch.dtype

    @staticmethod
    def __new__(cls, like: ParameterSpec, index: int, listener: weakref.ref[Listener]) -> ShardedGradient:
        made: ShardedGradient = make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride,
            dtype=like.dtypes.param_dtype,
            device=torch.device(like.device),
            requires_grad=False,
        )
        made.owner, made.number, made.capture, made.listener = like.name, index, None, listener
        made.says = torch.float32 if like.dtypes.param_dtype is torch.float16 else like.dtypes.param_dtype
        return made

    def __init__(self, like: ParameterSpec, index: int, listener: weakref.ref[Listener]) -> None:
        super().__init__()

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.says

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
        listener = self.listener()
        if listener is not None:
            listener.gradient_zeroed(self.number)

    def _refuse(self, action: str) -> NoReturn:
        remedy = "use optimizer.clip_grad_norm_(max_norm) to clip and optimizer.full_grad(p) to read"
        if current_graph_task_id() != _NO_TASK:
            remedy = (
                "something else asks for it inside the backward: if the model is inside DistributedDataParallel, take "
                "that away, since two systems would add up the gradients"
            )
        elif "to_copy" in action:
            remedy += ", and cast or move the model before the optimizer is built"
        raise RuntimeError(
            f"{action}: this rank does not hold the gradient of {self.owner!r}, which is sharded or not reduced yet; "
            f"{remedy}"
        )

    def untyped_storage(self) -> torch.UntypedStorage:
        """Refused, but to a compiler, which looks at the gradients of what it traces and reads nothing."""
        if TracingContext.try_get() is None:
            self._refuse("untyped_storage()")
        return super().untyped_storage()

    def taken(self) -> Tensor | None:
        """What autograd added, once."""
        captured, self.capture = self.capture, None
        return captured


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: ShardedGradient, *_: Any, **__: Any) -> NoReturn:
        self._refuse(f"{name}()")

    return refuse


for _name in (
    "numpy",
    "tolist",
    "data_ptr",
    "storage",
    "__array__",
    "__dlpack__",
    "__dlpack_device__",
    "__reduce_ex__",
    "__deepcopy__",
):
    setattr(ShardedGradient, _name, _refusal(_name))


def _flat(args: Any) -> list[Any]:
    if isinstance(args, (list, tuple)):
        return [a for arg in args for a in _flat(arg)]
    return [args]


class _Arrival:
    """The hook on one parameter, which runs once for each in every backward. It holds its owner weakly."""

    __slots__ = ("_index", "owner")

    def __init__(self, owner: GradientHooks, index: int) -> None:
        self.owner, self._index = weakref.ref(owner), index

    def __call__(self, parameter: Tensor) -> None:
        owner = self.owner()
        listener = None if owner is None else owner.listener()
        if owner is None or listener is None:
            return
        if not parameter.requires_grad:  # frozen since its forward: autograd has dropped the gradient
            return
        gradient = parameter.grad
        if type(gradient) is ShardedGradient:
            gradient = gradient.taken()
        assert gradient is not None
        if current_graph_task_id() != owner.task:
            owner.begin(listener, self._index, parameter)
        listener.gradient_ready(self._index, gradient.detach() if gradient.requires_grad else gradient)


class GradientHooks:
    """Hooks on parameters, until `remove`. They hold the listener weakly.

    A parameter has one owner: who watches it next takes it over, and the owner before is ``superseded`` and watches
    nothing any more. So a notebook's cell that builds an optimizer can be run again.
    """

    def __init__(self, listener: Listener, *, exclusive: bool = False, ahead: bool = False) -> None:
        """``exclusive``: these parameters cannot be taken over. ``ahead``: the listener is always told of a task before
        it has added anything, which takes another hook on each parameter, microseconds in every backward. Without it,
        those keep theirs that ever came first; a task that begins with another is told of after its first gradient."""
        self.superseded, self.exclusive, self._ahead = False, exclusive, ahead
        self.listener = weakref.ref(listener)
        self._handles: list[Any] = []
        self._before: dict[int, Any] = {}  # the hooks that run before a gradient is added, by parameter
        self._leaders: set[int] = set()  # parameters that ever came first in a backward
        self.task = _NO_TASK  # of the backward that began and is not over
        self._seen = _NO_TASK  # of the last task that a pre-hook saw

    @property
    def inside_backward(self) -> bool:
        """True inside a backward that this object was told of."""
        return self.task != _NO_TASK and current_graph_task_id() == self.task

    @property
    def interrupted(self) -> bool:
        """True when a backward began and never ended: an exception left it."""
        return self.task != _NO_TASK and not self.inside_backward

    def forget(self) -> None:
        """Take note that an interrupted backward was dealt with."""
        self.task = _NO_TASK

    def watch(self, parameter: Tensor, index: int) -> None:
        """Hook ``parameter``. A frozen parameter is hooked too: it may be unfrozen later."""
        self.take_over(parameter)
        trainable = parameter.requires_grad
        parameter.requires_grad_(True)
        try:
            self._handles.append(_untyped(parameter).register_post_accumulate_grad_hook(_Arrival(self, index)))
            self._watch_ahead(parameter, index)
        finally:
            parameter.requires_grad_(trainable)

    def _watch_ahead(self, parameter: Tensor, index: int) -> None:
        reference = weakref.ref(self)

        def about(gradient: Tensor) -> None:
            hooks = reference()
            if hooks is not None:
                hooks._about(gradient.device)

        self._before[index] = _untyped(parameter).register_hook(about)

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in (*self._handles, *self._before.values()):
            handle.remove()
        self._handles, self._before = [], {}

    def take_over(self, parameter: Tensor) -> None:
        """Make another owner of ``parameter`` superseded."""
        for hook in list((_untyped(parameter)._post_accumulate_grad_hooks or {}).values()):
            owner = hook.owner() if isinstance(hook, _Arrival) else None
            if owner is not None and owner is not self:
                owner.superseded = True
                owner.remove()
        if isinstance(parameter.grad, ShardedGradient):
            parameter.grad = None

    def begin(self, listener: Listener, index: int, parameter: Tensor) -> None:
        """A task has added the first gradient, of ``parameter``, which was taken."""
        captured = isinstance(parameter.grad, ShardedGradient)
        if not captured:
            # As before; what a user had put there is part of this gradient, as in a plain loop.
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
            if _reentrant(device):  # only `autograd.grad` may come here; see `_arrived`
                return
            listener.backward_is_near()
            _at_end(self._left)

    def _ended(self) -> None:
        listener = self.listener()
        if listener is not None:
            listener.backward_ended()
        self.task = _NO_TASK  # an exception before leaves the backward interrupted
        if not self._ahead:
            for index in self._before.keys() - self._leaders:
                self._before.pop(index).remove()

    def _left(self) -> None:
        listener = self.listener()
        if listener is not None and self.task == _NO_TASK:
            listener.outside_backward()


def check_free(parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise `ValueError` naming a parameter that another owner will not leave."""
    for name, parameter in parameters:
        for hook in (_untyped(parameter)._post_accumulate_grad_hooks or {}).values():
            owner = hook.owner() if isinstance(hook, _Arrival) else None
            if owner is not None and owner.exclusive:
                raise ValueError(f"{name!r} belongs to another stage-3 optimizer: close() that one first")


def _untyped(parameter: Tensor) -> Any:
    """torch leaves the methods that register hooks without annotations."""
    return parameter


def _at_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the current graph task is over."""
    queue_callback(callback)


def _reentrant(device: torch.device) -> bool:
    """True in a backward inside a backward: it ends before the outer one, and nothing tells when that is over.

    ``device``: of the parameter that was reached. Those of the CPU are reached in the thread that called the backward,
    whose frame is below this one; those of a device in a thread of autograd's own, where only an inner call has frames.
    """
    in_caller = device.type == "cpu" or not torch.autograd.is_multithreading_enabled()
    depth, run_backward = 0, engine_run_backward.__code__
    current: FrameType | None = sys._getframe()
    while current is not None:
        depth += current.f_code is run_backward
        current = current.f_back  # ends as None: a frame that is kept would keep all that its callers hold
    return depth > in_caller
