"""The class of released parameters: those whose values are not to be used now.

Knows: which operations on a parameter need no values: its attributes and `repr`, a conversion that changes nothing, and
gradients with respect to it. Does not know: where the values are.

A released parameter is the same object with the same name, shape and dtype. Its class is a subclass of its own class
that raises on every other use. If its unit is gathered, its data is a single NaN, expanded, in memory that no other
parameter shares; otherwise it is a view of memory that always has the values of now. So a use that bypasses the class
cannot crash, return an old value, or reach the values of another parameter.

Alternative that was considered: a storage resized to zero. About two thirds of the usual operations on a parameter then
crash the interpreter, and a graph that was recorded before keeps an old version counter.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence, Set
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import graph as autograd_graph

from collectives.torch_internals import (
    TracingContext,
    TransformType,
    get_interpreter_stack,
    has_compatible_shallow_copy_type,
)

from ..core.layout import ParameterSpec
from ..core.parameter_specs import COPY, as_plain, is_released
from ..core.units import is_scripted
from ..runtime.backward_tracker import callers
from ..runtime.compiled_calls import untraced
from .module_hooks import ForwardMethod

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")
SpecOf = Callable[[Tensor], ParameterSpec | None]

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
_COPYING = ("save", "save_to_buffer", "__deepcopy__")  # methods of ScriptModules
_CASTS = ("to", "type", "double", "float", "half", "bfloat16", "cpu", "cuda", "xpu")  # called by methods of nn.Module


def _answerable() -> frozenset[Any]:
    tensor: Any = Tensor  # its attributes are descriptors without annotations
    found = {getattr(tensor, name).__get__ for name in _GETTERS if hasattr(tensor, name)}  # names differ by version
    found |= {getattr(tensor, name).__set__ for name in _SETTERS if hasattr(tensor, name)}
    found |= {tensor.grad.__delete__, has_compatible_shallow_copy_type}  # the latter is called by `nn.Module.to`
    return frozenset(found | {getattr(tensor, name) for name in _METHODS})


ANSWERABLE = _answerable()
_SAVE = (
    "to save, all ranks call optimizer.full_state_dict(to=0), which returns the whole one on rank 0, or "
    "zero.save(path, optimizer), or all enter 'with optimizer.gathered():', where model.state_dict() is whole"
)
_DATA: Any = Tensor.data
_FINDS_NODES = {each.__code__ for each in (autograd_graph.get_gradient_edge, autograd_graph.register_multi_grad_hook)}
_WHOLE_USES: dict[CodeType, tuple[str, str]] = {
    nn.Module.load_state_dict.__code__: (
        "model.load_state_dict()",
        "load inside 'with optimizer.gathered(write=True):', which all ranks enter, or before the optimizer is built",
    ),
    torch.save.__code__: ("torch.save()", _SAVE),
    torch.jit.save.__code__: ("torch.jit.save()", "call it inside 'with optimizer.gathered():', which all ranks enter"),
    nn.Module.state_dict.__code__: ("model.state_dict()", _SAVE),
    nn.Parameter.__reduce_ex__.__code__: ("pickle", _SAVE),
    copy.deepcopy.__code__: ("copy.deepcopy()", "copy inside 'with optimizer.gathered():', which all ranks enter"),
}
"""What is called to save, load or copy a whole model, by its code: its name, and what to do instead."""


def released_class(base: type[Tensor], spec_of: SpecOf, recall: Callable[[Tensor], bool | None]) -> type[Tensor]:
    """Return a subclass of a parameter's class ``base`` for parameters that are released.

    ``spec_of`` returns the spec of the parameter that an error names, or None if the optimizer that held its values is
    gone. ``recall`` gives a parameter its values again if its use now is that of a backward; it returns whether.
    """

    @untraced
    def answer(
        cls: type, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ANSWERABLE:
            with as_plain():
                return func(*args, **(kwargs or {}))
        without_values = _WITHOUT_VALUES.get(func)
        if without_values is not None:
            result = without_values(spec_of, func, *args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        found = next((a for a in _flat([args, kwargs]) if is_released(a)), None)
        spec = None if found is None else spec_of(found)
        if spec is None:
            raise RuntimeError(
                f"{_called(func)}: the optimizer that held this parameter's values is gone. Build the model anew; next "
                "time call optimizer.close() before the optimizer is deleted"
            )
        if found is not None and recall(found):
            return func(*args, **(kwargs or {}))
        if TracingContext.try_get() is not None:
            raise RuntimeError(
                f"{spec.name!r} is released: in a compiled function only its module can use a parameter of stage 3. "
                "Call optimizer.zero_grad() there, not model.zero_grad(). Use p.grad, optimizer.full_grad(p) and "
                "optimizer.param_groups outside of that function"
            )
        running = set(callers())
        for code, (call, remedy) in _WHOLE_USES.items():
            if code in running:
                raise RuntimeError(
                    f"{call}: {remedy}. {spec.name!r} is released: at stage 3 a parameter has values only inside its "
                    "unit's forward and backward"
                )
        raise RuntimeError(
            f"{_called(func)}: {spec.name!r} is released: at stage 3 a parameter has values only inside its unit's "
            "forward and backward. Read it inside 'with optimizer.gathered():', and edit it inside "
            "'gathered(write=True)'. Call the unit itself, not its forward() or a part of it; after "
            f"zero.register_forward_method another method gathers, too{_further_remedy(func, running)}"
        )

    def represent(self: Tensor, **_: Any) -> str:
        spec = spec_of(self)
        values = "its optimizer is gone" if spec is None else "values inside optimizer.gathered()"
        name = "" if spec is None else f" {spec.name!r}"
        facts = f"shape {tuple(self.shape)}, {self.dtype}, {self.device}, requires_grad={self.requires_grad}"
        return f"<{base.__name__}{name}, released ({values}): {facts}>"

    body = {
        "released": True,
        "__torch_function__": classmethod(answer),
        "__repr__": represent,
        "__module__": __name__,
    }
    made: type[Tensor] = type(base).__call__(type(base), "Released", (base,), body)
    return made


# -- operations without values --------------------------------------------------------------------------------------
# Each is called with the function that the user called and its arguments. It returns NotImplemented if these need
# values.


def _formatted(spec_of: SpecOf, func: Any, parameter: Tensor, format_spec: str = "", **_: Any) -> Any:
    return NotImplemented if format_spec else repr(parameter)


def _converted(spec_of: SpecOf, func: Any, parameter: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the parameter itself if the conversion changes nothing, as torch does for every tensor."""
    spec = spec_of(parameter)
    if spec is None or not is_released(parameter):
        return NotImplemented
    memory_format = kwargs.pop("memory_format", torch.preserve_format)
    small = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    like = torch.empty_strided(spec.shape, spec.stride, device="meta")
    try:
        same = func(small, *args, **kwargs) is small and like.to(memory_format=memory_format) is like
    except Exception:  # for example, a device that torch was not built for
        same = False
    return parameter if same else NotImplemented


def _replaced(spec_of: SpecOf, func: Any, parameter: Tensor, data: Any) -> Any:
    """Accept `p.data = p`: `nn.Module.to` assigns the result of a conversion, also if it is the parameter itself."""
    return None if data is parameter else NotImplemented


def _differentiated(spec_of: SpecOf, func: Any, outputs: Any, inputs: Any, **options: Any) -> Any:
    """Call `torch.autograd.grad` with graph edges in the place of released inputs."""
    materialize, create = options.pop("materialize_grads", False), options.get("create_graph", False)
    if any(is_released(tensor) for tensor in _flat([outputs, options])):
        return NotImplemented
    found = func(outputs, _edges(inputs), **options)
    if materialize:
        with as_plain():
            pairs = zip(found, inputs, strict=True)
            return tuple(torch.zeros_like(p, requires_grad=create) if g is None else g for g, p in pairs)
    return found


def _accumulated(spec_of: SpecOf, func: Any, tensors: Any, *, inputs: Any = None, **options: Any) -> Any:
    """Call `torch.autograd.backward` with graph edges in the place of released inputs."""
    if inputs is None or any(is_released(tensor) for tensor in _flat([tensors, options])):
        return NotImplemented
    return func(tensors, inputs=_edges(inputs), **options)


def _viewed(spec_of: SpecOf, func: Any, parameter: Tensor, other: Any) -> Any:
    """Let torch find the node that accumulates a parameter's gradient, for hooks that users register."""
    if other is not parameter or _FINDS_NODES.isdisjoint(callers()):
        return NotImplemented
    with as_plain():
        return func(parameter, other)


def _edges(inputs: Sequence[Any]) -> list[Any]:
    """Return ``inputs`` with the gradient edge of each released parameter in its place.

    Running the whole backward under `as_plain` instead would disable the check in the user's hooks, too.
    """
    with as_plain():
        return [torch.autograd.graph.get_gradient_edge(each) if is_released(each) else each for each in inputs]


def _without_values() -> dict[Any, Callable[..., Any]]:
    tensor: Any = Tensor
    converting = ("to", "cpu", "cuda", "float", "half", "double", "bfloat16", "type")
    return {
        tensor.__repr__: _formatted,
        tensor.__format__: _formatted,
        **{getattr(tensor, name): _converted for name in converting},
        tensor.data.__set__: _replaced,
        tensor.view_as: _viewed,
        torch.autograd.grad: _differentiated,
        torch.autograd.backward: _accumulated,
    }


_WITHOUT_VALUES = _without_values()


def _further_remedy(func: Any, running: Set[CodeType]) -> str:
    """Return a further remedy for the error's text, if the call is a known misuse; else an empty text."""
    if getattr(func, "__name__", "") in _CASTS:
        return "; move and cast the model before the optimizer is built, or after its close()"
    if getattr(func, "__self__", None) is _DATA or nn.utils.vector_to_parameters.__code__ in running:
        return f". There, {COPY} edits it, not p.data = t"
    if nn.parallel.DistributedDataParallel.__init__.__code__ in running:
        return "; do not wrap the model in DistributedDataParallel, which would reduce the gradients a second time"
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


def weakly(method: Callable[[_Given], _Found]) -> Callable[[_Given], _Found | None]:
    """Return a function that calls a bound method without keeping its object alive, and returns None after its end."""
    reference = weakref.WeakMethod(method)

    def call(given: _Given) -> _Found | None:
        known = reference()
        return None if known is None else known(given)

    return call


def guard_copies(root: nn.Module) -> list[ForwardMethod]:
    """Let the methods by which ScriptModules copy memory, without a call of Python, raise while it is released."""
    scripted = [part for part in root.modules() if is_scripted(part)]
    return [ForwardMethod(part, name, _use, lambda *_: None) for part in scripted for name in _COPYING]


def _use(module: nn.Module) -> None:
    for parameter in filter(is_released, module.parameters()):
        parameter.data_ptr()


def refuse_transforms(name: str) -> None:
    """Raise `RuntimeError` inside a `torch.func` transform that differentiates. ``name``: the unit's.

    A tensor that is assigned to a parameter there is a wrapper, which is invalid after the transform.
    """
    under_way = get_interpreter_stack()
    if under_way is None:
        return
    deriving = (TransformType.Grad, TransformType.Jvp)
    if any(transform.key() in deriving for transform in under_way):
        raise RuntimeError(
            f"unit {name!r} inside a transform of torch.func: at stage 3 grad, vjp, jvp, jacrev, jacfwd and hessian "
            "do not work on the model. Use torch.autograd.grad, torch.autograd.functional, torch.autograd.forward_ad "
            "or torch.func.vmap; or transform a copy, made by copy.deepcopy(model) inside 'with optimizer.gathered():'"
        )
