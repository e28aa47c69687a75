"""The placeholder in ``p.grad`` of a gradient that this rank does not hold whole.

It has a shape, strides and a dtype, but no memory. Every operation that would read it raises. A rank that does not hold
a gradient must not expose a part of it, nor None: a clip would take None for "no gradient".

Knows: torch's dispatch of operations. Does not know: when a backward begins or ends, ranks, stages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
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

from ..runtime.backward_tracker import NO_TASK
from ..runtime.bucket import Bucket
from ..runtime.compiled_calls import untraced_methods

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
        aten = torch.ops.aten
        first = args[0] if args else None
        if func is aten.detach.default:
            return first
        if func in (aten.add_.Tensor, aten.add.Tensor) and isinstance(first, cls):
            if current_graph_task_id() != NO_TASK and not kwargs:
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
        remedy = f"use optimizer.clip_grad_norm_(max_norm) to clip and {_READ}"
        if current_graph_task_id() != NO_TASK:
            remedy = (
                "something else asks for it inside the backward. If a hook does, read it when backward() has returned. "
                "Do not wrap the model in DistributedDataParallel, which would reduce gradients twice"
            )
        elif action.startswith("an assignment"):
            remedy = "set optimizer.divisor or use optimizer.clip_grad_norm_(max_norm) to change it, and " + _READ
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
