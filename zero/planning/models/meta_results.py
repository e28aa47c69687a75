"""Results of common operations on meta tensors, by their shapes.

Knows: the shape, dtype and layout of a result. Does not know: what is counted.

torch's own kernels for the meta device give the same results, but the first of them imports torch's compiler, which
takes two seconds and 150 MB. They run for every operation that has no rule here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from collectives.torch_internals import TorchDispatchMode, missing

Arguments = tuple[Any, ...]


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results: in lists, tuples, dicts, and by themselves."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)


def _new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of the same shape, and of the same order of strides if there are no gaps."""
    if tensor.is_contiguous():
        return _new(tensor.shape, dtype or tensor.dtype)
    strides, step = [0] * tensor.ndim, 1
    for dim in sorted(range(tensor.ndim), key=lambda dim: (tensor.stride(dim), -dim)):
        strides[dim] = step
        step *= tensor.shape[dim]
    return torch.empty_strided(tensor.shape, strides, dtype=dtype or tensor.dtype, device="meta")


def _same(first: Tensor, *_: Any) -> Tensor:
    return _like(first)


def _itself(first: Tensor, *_: Any) -> Tensor:
    return first


def _pointwise(first: Tensor, second: Any, *_: Any) -> Tensor:
    """Return the result of two operands, one of which may be a number."""
    dtype = torch.result_type(first, second)
    if not isinstance(second, Tensor) or second.shape == first.shape:
        return _like(first, dtype)
    sizes = itertools.zip_longest(reversed(first.shape), reversed(second.shape), fillvalue=1)
    shape = torch.Size([theirs if ours == 1 else ours for ours, theirs in sizes][::-1])
    if shape == first.shape or shape == second.shape:
        return _like(first if shape == first.shape else second, dtype)
    return _new(shape, dtype)


def _mm(left: Tensor, right: Tensor) -> Tensor:
    return _new((*left.shape[:-1], right.shape[-1]), left.dtype)


def _layer_norm(x: Tensor, shape: list[int], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = (*x.shape[: x.ndim - len(shape)], *(1 for _ in shape))
    dtype = torch.promote_types(x.dtype, torch.float32)  # statistics of 16-bit inputs are float32
    return _like(x), _new(rows, dtype), _new(rows, dtype)


def _layer_norm_backward(_: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    *_others, weight, bias, mask = rest
    return tuple(_like(tensor) if wanted else None for tensor, wanted in zip((x, weight, bias), mask, strict=True))


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return _new(shape, tensors[0].dtype)


def _nll_loss(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _new((), x.dtype), _new((), x.dtype)


RULES: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(("gelu", "silu", "relu", "cos", "sin", "triu", "_softmax"), _same),
    **dict.fromkeys(("gelu_backward", "silu_backward", "threshold_backward", "_log_softmax"), _same),
    **dict.fromkeys(("uniform_", "normal_", "fill_", "zero_", "add_", "mul_"), _itself),
    **dict.fromkeys(("add", "sub", "mul", "div"), _pointwise),
    "masked_fill": _same,
    "mm": _mm,
    "bmm": _mm,
    "addmm": lambda bias, left, right: _mm(left, right),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "embedding": lambda weight, indices, *_: _new((*indices.shape, weight.shape[-1]), weight.dtype),
    "cat": _cat,
    "nll_loss_backward": lambda gradient, x, *_: _like(x),
    "slice_backward": lambda gradient, sizes, *_: _new(sizes, gradient.dtype),
    "_softmax_backward_data": lambda gradient, out, dim, dtype: _like(gradient, dtype),
    "_log_softmax_backward_data": lambda gradient, out, dim, dtype: _like(gradient, dtype),
}
"""Results by the name of the operation, of those whose options do not change them."""

COPIES: Final = {"_to_copy", "clone", "ones_like", "empty_like"}


def result_of(function: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation, by a rule if there is one and all its tensors are on the meta device."""
    name = function.overloadpacket.__name__
    if all(tensor.device.type == "meta" for tensor in tensors_in((args, kwargs))):
        if name in COPIES and not kwargs.keys() - {"dtype", "memory_format", "pin_memory"}:
            dtype = kwargs.get("dtype") or args[0].dtype
            contiguous = kwargs.get("memory_format") is torch.contiguous_format
            return _new(args[0].shape, dtype) if contiguous else _like(args[0], dtype)
        if name == "arange" and kwargs.get("device") == torch.device("meta") and len(args) == 1:
            return torch.empty(args[0], dtype=kwargs.get("dtype") or torch.int64, device="meta")
        if name == "nll_loss_forward" and args[3] == 1:  # the mean
            return _nll_loss(*args)
        if name == "new_empty" and not kwargs.keys() - {"dtype", "pin_memory"}:
            return _new(args[1], kwargs.get("dtype") or args[0].dtype)
        options = {} if name in ("gelu", "gelu_backward") else kwargs  # "approximate" changes no shape
        if name in RULES and not options.keys() - {"generator", "pin_memory"}:
            return RULES[name](*args)
    return function(*args, **kwargs)


def dispatched(handle: Callable[[Any, Arguments, Mapping[str, Any]], Any]) -> Any:
    """Return a context in which every operation goes through ``handle(function, args, kwargs)``."""
    if (gone := missing(TorchDispatchMode)) is not None:
        gone()

    def dispatch(_: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return handle(function, args, kwargs or {})

    # Without the second entry torch wraps the first, and its first call imports torch's compiler.
    members = {"__torch_dispatch__": dispatch, "_should_skip_dynamo": classmethod(lambda cls: False)}
    return type("DispatchMode", (TorchDispatchMode,), members)()


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Make tensors on the meta device inside, as ``torch.device("meta")`` does, by the rules of this module."""
    with torch.device("meta"), dispatched(result_of):
        yield
