"""What stands in the place of a parameter whose memory was given back.

Knows: which questions about a parameter can be answered without its values. Does not know: where the values are.

A released parameter is the same object with the same name, shape and dtype; its class is a subclass of its own that
raises on every other use, and its data is a single NaN, expanded, which belongs to this parameter alone. So no use can
crash, show an old number, or reach the values of another parameter.

Considered instead: a storage resized to nothing. Two thirds of what people do to a parameter is then a crash of the
interpreter, and a graph that was recorded before keeps an old version counter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

# fmt: off
_GETTERS = (
    "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "device", "dtype", "grad", "grad_fn", "is_cpu",
    "is_cuda", "is_leaf", "is_meta", "is_mps", "is_mkldnn", "is_nested", "is_quantized", "is_sparse", "is_xla",
    "is_xpu", "itemsize", "layout", "name", "names", "ndim", "output_nr", "requires_grad", "retains_grad", "shape",
)
_SETTERS = ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_METHODS = (
    "__len__", "dim", "element_size", "get_device", "is_complex", "is_floating_point", "is_same_size", "is_signed",
    "ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size",
)
# fmt: on
_CASTS = ("to", "type", "double", "float", "half", "bfloat16", "cpu", "cuda", "xpu")  # what nn.Module calls


def _answerable() -> frozenset[Any]:
    tensor: Any = Tensor  # its attributes are descriptors, which torch leaves without annotations
    found = {getattr(tensor, name).__get__ for name in _GETTERS if hasattr(tensor, name)}  # names differ by version
    found |= {getattr(tensor, name).__set__ for name in _SETTERS}
    return frozenset(found | {tensor.grad.__delete__} | {getattr(tensor, name) for name in _METHODS})


ANSWERABLE = _answerable()
as_plain = torch._C.DisableTorchFunctionSubclass  # a context in which a released parameter is an ordinary tensor


def released_class(base: type[Tensor], name_of: Callable[[Tensor], str | None]) -> type[Tensor]:
    """A subclass of a parameter's class for its time without memory. ``name_of`` says which parameter an error is
    about; None when the optimizer that had its values is gone."""

    def refuse(
        cls: type, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ANSWERABLE:
            with as_plain():
                return func(*args, **(kwargs or {}))
        found = next((a for a in _flat([args, kwargs]) if is_released(a)), None)
        name = None if found is None else name_of(found)
        if name is None:
            raise RuntimeError(
                f"{_called(func)}: the optimizer that held this parameter's values is gone: build the model anew, and "
                "call optimizer.close() before the optimizer goes"
            )
        raise RuntimeError(
            f"{_called(func)}: {name!r} is released: at stage 3 a parameter has values only inside its unit's forward "
            "and backward; read it inside 'with optimizer.gathered():', edit it inside 'gathered(write=True)', and "
            f"call the unit itself rather than its forward() or a part of it{_further_remedy(func)}"
        )

    body = {"released": True, "__torch_function__": classmethod(refuse), "__module__": __name__}
    made: type[Tensor] = type(base).__call__(type(base), "Released", (base,), body)
    return made


def is_released(parameter: object) -> bool:
    """True while a parameter has no memory."""
    return getattr(type(parameter), "released", False) is True


def _further_remedy(func: Any) -> str:
    """What else there is to do, where it is a known habit that met a released parameter."""
    if getattr(func, "__name__", "") in _CASTS:
        return "; move and cast the model before the optimizer is built, or after its close()"
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.parallel.DistributedDataParallel.__init__.__code__:
            return "; take DistributedDataParallel away, since two systems would add up the gradients"
        frame = frame.f_back
    return ""


def _called(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    descriptor = getattr(func, "__self__", None)
    if name in ("__get__", "__set__") and descriptor is not None:
        return f".{getattr(descriptor, '__name__', 'a property')}"
    return f"{name}()"


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _flat(item)]
    return [value]
