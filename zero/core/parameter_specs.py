"""Turns the user's input (a module, parameters, param groups) into the specs of the layout, and checks it.

Knows: modules, parameters, names. Does not know: ranks, gradients, optimizers.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from collectives.torch_internals import is_traceable_wrapper_subclass

from .bits import dense_stride
from .layout import Dtypes, ParameterSpec
from .names import all_without_wrappers, child_name, named_parameters, named_parts, own_parameters

HELD_ELSEWHERE = (
    "{what} belongs to another stage-3 optimizer, which holds the values: close() that one first, or build the model "
    "anew. To train parts of a model differently, give one optimizer param groups, each with its own optimizer_class "
    "and options, build one optimizer per submodule, or leave parts out of the first one by ignored="
)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, nn.Parameter)
as_plain = torch.DisableTorchFunctionSubclass  # inside this context a released parameter behaves as an ordinary tensor


@dataclass(frozen=True)
class Binding:
    """A place in a module that holds a parameter: ``registry[key] is parameter`` until the parameter is replaced."""

    registry: dict[str, Any]
    key: str
    name: str
    parameter: Tensor


def is_released(parameter: object) -> bool:
    """Return whether a parameter is released, which means that it has no memory."""
    return getattr(type(parameter), "released", False) is True


def has_own_dispatch(tensor: Tensor) -> bool:
    """Return whether a tensor's class manages its memory itself, with its own ``__torch_dispatch__``, as wrappers."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_laid_out(parameter: Tensor) -> bool:
    """Return whether a parameter's elements lie in buckets. All others are *replicated*: every rank keeps them whole.

    A frozen subclass without a ``__torch_dispatch__`` is replicated, too. Quantised weights keep scales beside their
    memory, and their dtype may be a float dtype although the memory holds something else.
    """
    if parameter.dtype not in FLOATS or has_own_dispatch(parameter):
        return False
    return parameter.requires_grad or type(parameter) in _PLAIN or is_released(parameter)


def is_copied(parameter: Tensor) -> bool:
    """Return whether a parameter consists of its bytes alone, so that copying rank 0's bytes copies the parameter.

    A replicated subclass holds more than bytes. Rank 0's bytes with another rank's scales would be the weights of no
    model, so such a parameter is compared over the ranks instead.
    """
    return is_laid_out(parameter) or type(parameter) in _PLAIN


def flattened(tensor: Tensor) -> tuple[Sequence[str], Any]:
    """Return the names of the tensors that a wrapper subclass wraps, and its further metadata. Else (), None."""
    given: Any = tensor
    if not is_traceable_wrapper_subclass(given):
        return (), None
    found: tuple[Sequence[str], Any] = given.__tensor_flatten__()
    return found


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the ordinary tensors that hold a tensor's elements: its own memory, or the tensors that a subclass wraps;
    none if it has neither."""
    names, _ = flattened(tensor)
    if names:
        wrapped = [getattr(tensor, name) for name in names]  # a DTensor also names its mesh
        return [part for inner in wrapped if isinstance(inner, Tensor) for part in parts_of(inner)]
    if type(tensor) in _PLAIN:
        return [tensor.detach()]
    with as_plain():
        memory = tensor.untyped_storage()
        if tensor.numel() and not memory.nbytes():
            return []
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return [made.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())]


def as_groups(params: Any, ignored: Container[Tensor] = ()) -> list[dict[str, Any]]:
    """Return the user's ``params`` as torch.optim's list of groups. A module becomes one group of named parameters,
    without those that are ``ignored``."""
    if isinstance(params, Tensor):
        raise TypeError("params must be a module, an iterable of parameters or of param groups, not one tensor")
    if isinstance(params, nn.Module):
        params = [(name, parameter) for name, parameter in own_parameters(params) if parameter not in ignored]
    given = _in_order(params, "params")
    if not given:
        raise ValueError(
            "the parameter list is empty, or all is in ignored=: pass the model, parameters or param groups"
        )
    if not any(isinstance(entry, dict) for entry in given):
        return [{"params": members_of(given, "params")}]
    groups = []
    for number, group in enumerate(given):
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(
                f"params[{number}] is {_brief(group)}, not a param group with 'params': where one entry is a group, "
                "all must be"
            )
        groups.append({**group, "params": members_of(group["params"], f"params[{number}]['params']")})
    return groups


def members_of(params: Any, place: str) -> list[Any]:
    """Return parameters, or (name, parameter) pairs, as a list.

    Raises `TypeError` naming an entry that is neither, and its position in ``place``.
    """
    members = [params] if isinstance(params, Tensor) else _in_order(params, place)
    for number, entry in enumerate(members):
        is_pair = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
        if not isinstance(entry[1] if is_pair else entry, Tensor):
            raise TypeError(f"{place}[{number}] is {_brief(entry)}, neither a parameter nor a (name, parameter) pair")
    return members


def _in_order(params: Any, place: str) -> list[Any]:
    if isinstance(params, (set, frozenset)):
        raise TypeError(f"{place} must be in an order that all ranks share; a set has none: pass a list")
    if not isinstance(params, Iterable):
        raise TypeError(f"{place} is {_brief(params)}, and must be parameters, param groups or a module")
    return list(params)


def _brief(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind}" if hasattr(value, "shape") else f"{reprlib.repr(value)} ({kind})"


def device_of(groups: Sequence[Mapping[str, Any]]) -> torch.device:
    """Return the device of the first parameter on an accelerator; else of the first one. If there is none, return the
    CPU; construction fails later."""
    entries = (entry for group in groups for entry in group["params"])
    parts = (part for entry in entries for part in (entry if isinstance(entry, tuple) else (entry,)))
    devices = (part.device for part in parts if isinstance(part, Tensor))
    return min(devices, key=lambda device: device.type in ("cpu", "meta"), default=torch.device("cpu"))


def check_one_device(specs: Iterable[ParameterSpec], reason: str) -> None:
    """Raise `ValueError` naming two parameters that are trained on different devices. ``reason``: why they cannot be;
    empty if they can."""
    trained = [spec for spec in specs if spec.trainable]
    for spec in trained if reason else ():
        if spec.device != trained[0].device:
            raise ValueError(
                f"{trained[0].name!r} is on {trained[0].device} and {spec.name!r} on {spec.device}: what is trained "
                f"must be on one device {reason}"
            )


def check_buffers(buffers: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `ValueError` naming a buffer that cannot be overwritten with rank 0's values."""
    for name, buffer in buffers:
        if _overlaps_itself(buffer):
            raise ValueError(f"buffer {name!r} overlaps itself in memory, as expand() makes: give it its own memory")


def check_modules(module: nn.Module | None) -> None:
    """Raise `ValueError` naming a part of the module that cannot be used: a ScriptModule, whose parameters are not
    Python objects, or a DistributedDataParallel, which reduces gradients itself."""
    for name, part in () if module is None else named_parts(module):
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{name or 'the module'!r} is a DistributedDataParallel, which would reduce gradients twice: pass the "
                "model inside it (its .module)"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"{name or 'the module'!r} is a ScriptModule, whose parameters cannot be sharded: build the optimizer "
                "first, then script"
            )


def check_listed(groups: Sequence[dict[str, Any]], module: nn.Module | None, ignored: Container[Tensor]) -> None:
    """Raise `ValueError` naming a parameter that is listed twice, before torch raises its own error, or that is
    ``ignored``."""
    names = {id(binding.parameter): binding.name for binding in reversed(bindings(module))}
    seen: set[int] = set()
    for index, entry in enumerate(entry for group in groups for entry in group["params"]):
        given, parameter = entry if isinstance(entry, tuple) else (None, entry)
        name = names.get(id(parameter)) or given or f"parameter {index}"
        if id(parameter) in seen:
            raise ValueError(f"{name!r} is listed twice in the parameters: list each once")
        if parameter in ignored:
            raise ValueError(f"{name!r} is ignored, and is in a param group: leave it out of one of them")
        seen.add(id(parameter))


def check_new(entries: Sequence[Any], before: Sequence[Tensor], listed: Iterable[ParameterSpec]) -> None:
    """Raise `ValueError` naming a parameter of a further group that is in a param group already.

    ``before``: the parameters of all groups so far; ``listed``: their specs, in any order.
    """
    names = {spec.index: spec.name for spec in listed}
    known = {id(parameter): names[index] for index, parameter in enumerate(before)}
    for entry in entries:
        parameter = entry[1] if isinstance(entry, tuple) else entry
        if id(parameter) in known:
            raise ValueError(f"add_param_group: {known[id(parameter)]!r} is in a param group already: leave it out")


def with_names(entries: Sequence[Any], module: nn.Module, first_index: int) -> list[Any]:
    """Return the entries of a further group; if none has a name, each is paired with its name in the module.

    A parameter that is not in the module is named by its index.
    """
    if any(isinstance(entry, tuple) for entry in entries):
        return list(entries)
    names = {id(parameter): name for name, parameter in named_parameters(module)}
    numbered = enumerate(entries, start=first_index)
    return [(names.get(id(entry), f"parameter {index}"), entry) for index, entry in numbered]


def bindings(module: nn.Module | None, ignored: Container[Tensor] = ()) -> list[Binding]:
    """Return all places in which ``module`` keeps a parameter that is not ``ignored``, in order of registration, ties
    included."""
    found = []
    for prefix, part in () if module is None else named_parts(module):
        for key, parameter in part._parameters.items():
            if parameter is not None and parameter not in ignored:
                found.append(Binding(part._parameters, key, child_name(prefix, key), parameter))
    return found


def specs(
    groups: Sequence[dict[str, Any]],
    module: nn.Module | None,
    first_index: int = 0,
    first_group: int = 0,
    units: Mapping[int, int] | None = None,
    dtypes: Callable[[Tensor], Dtypes] | None = None,
    meta: torch.device | None = None,
) -> tuple[list[Tensor], list[ParameterSpec]]:
    """Return the listed parameters and their specs in the module's order of registration; without a module, as listed.

    Args:
        groups: torch.optim's param groups.
        module: the module that holds the parameters, if any.
        first_index: the index of the first parameter of ``groups`` in torch.optim's dicts.
        first_group: the number of the first of ``groups``.
        units: id of a parameter -> its unit; None at stages without units.
        dtypes: returns the dtypes of a parameter's bucket. None: all are its own.
        meta: the device on which parameters of the meta device will get memory; None if there must be none.

    Raises:
        ValueError, TypeError: a parameter shares memory with another (or is listed twice), is not a leaf, is trained
            and cannot be laid out, or is laid out and in no unit. The message names it.
    """
    names: dict[int, list[str]] = {}
    order: dict[int, int] = {}
    for binding in bindings(module):
        names.setdefault(id(binding.parameter), []).append(binding.name)
        order.setdefault(id(binding.parameter), len(order))
    written = [name for group in groups for name in group.get("param_names") or ()]
    plain = dict(zip(written, all_without_wrappers(written), strict=True))
    found: list[tuple[int, Tensor, ParameterSpec]] = []
    index = first_index
    for number, group in enumerate(groups):
        given = group.get("param_names") or [None] * len(group["params"])
        for name, parameter in zip(given, group["params"], strict=True):
            aliases = names.get(id(parameter)) or ([plain[name]] if name is not None else [])
            label = aliases[0] if aliases else f"parameter {index}"
            _check(parameter, label, may_be_meta=meta is not None)
            laid_out = is_laid_out(parameter)
            if laid_out and units is not None and id(parameter) not in units:
                raise ValueError(
                    f"{label!r} is not a parameter of the module that the optimizer was built with, around whose "
                    "forwards stage 3 gathers: build the optimizer over a module that holds it"
                )
            spec = ParameterSpec(
                tuple(aliases),
                tuple(parameter.shape),
                dense_stride(parameter) if laid_out else parameter.stride(),
                Dtypes.all(parameter.dtype) if dtypes is None or not laid_out else dtypes(parameter),
                str(meta if parameter.device.type == "meta" else parameter.device),
                parameter.requires_grad,
                first_group + number,
                index,
                units[id(parameter)] if laid_out and units is not None else 0,
            )
            found.append((order.get(id(parameter), len(order) + index), parameter, spec))
            index += 1
    found.sort(key=lambda entry: entry[0])
    _check_apart([(parameter, spec.name) for _, parameter, spec in found if is_laid_out(parameter)])
    return [parameter for _, parameter, _ in found], [spec for _, _, spec in found]


def _check(parameter: Tensor, name: str, *, may_be_meta: bool) -> None:
    if is_lazy(parameter):
        raise ValueError(f"{name!r} is not initialised yet: run a forward of its lazy module first")
    if is_released(parameter):
        raise ValueError(HELD_ELSEWHERE.format(what=repr(name)))
    if parameter.requires_grad and not is_laid_out(parameter):
        raise TypeError(_untrainable(parameter, name))
    if not parameter.is_leaf:
        raise ValueError(f"{name!r} is the result of a computation: pass the leaf tensors that it depends on")
    check_memory(parameter, name, may_be_meta=may_be_meta)


def _untrainable(parameter: Tensor, name: str) -> str:
    """Return why a parameter cannot be trained, and the remedy."""
    freeze = "or freeze it with requires_grad_(False) before the optimizer is built"
    if has_own_dispatch(parameter):
        local = "its to_local() as an nn.Parameter, which clip_grad_norm_(over=...) knows to be a part of a model"
        plain = local if hasattr(parameter, "device_mesh") else "an nn.Parameter of ordinary memory"
        return (
            f"{name!r} is a {type(parameter).__name__}, a tensor subclass with its own __torch_dispatch__, whose "
            f"memory cannot be sharded: put {plain} in its place, {freeze}"
        )
    if parameter.is_complex():
        return (
            f"{name!r} is {parameter.dtype}, and only real parameters are trained: keep its real view, "
            f"nn.Parameter(torch.view_as_real(z)), and use torch.view_as_complex(p) in the forward, {freeze}"
        )
    return f"{name!r} is {parameter.dtype}: train one of {', '.join(map(str, FLOATS))}, {freeze}"


def check_memory(parameter: Tensor, name: str, *, may_be_meta: bool) -> None:
    """Raise `ValueError` if a parameter's memory is not ordinary.

    The memory of a class with its own ``__torch_dispatch__`` is not checked.
    """
    if has_own_dispatch(parameter):
        return
    if parameter.layout is not torch.strided or (parameter.device.type == "meta" and not may_be_meta):
        raise ValueError(f"{name!r} has no ordinary memory (layout {parameter.layout}, device {parameter.device})")
    if _overlaps_itself(parameter):
        raise ValueError(
            f"{name!r} overlaps itself in memory (shape {tuple(parameter.shape)}, strides {parameter.stride()}, as "
            "expand() makes): give it its own memory with .contiguous() or .clone()"
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _check_apart(parameters: Sequence[tuple[Tensor, str]]) -> None:
    spans = []
    for parameter, name in parameters:
        if parameter.numel() and parameter.device.type != "meta":
            reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            begin = parameter.data_ptr()
            spans.append((begin, begin + (reach + 1) * parameter.element_size(), name))
    spans.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError(
                f"{name!r} and {other!r} share memory but are different parameters: tie them by using one parameter in "
                "both places"
            )


def misplaced(bound: Iterable[Binding]) -> str | None:
    """Return an error text if a module no longer holds the parameter that it had, else None."""
    for name in replaced(bound):
        return f"the module's {name!r} was replaced after the optimizer was built: build a new optimizer"
    return None


def changed(parameter: Tensor, spec: ParameterSpec) -> str | None:
    """Return an error text if a parameter was cast or moved since its optimizer was built, else None."""
    if parameter.dtype is spec.dtypes.param_dtype and str(parameter.device) == spec.device:
        return None
    return (
        f"{spec.name!r} is now {parameter.dtype} on {parameter.device}, but was {spec.dtypes.param_dtype} on "
        f"{spec.device} when the optimizer was built: move and cast the model before that"
    )


def replaced(bound: Iterable[Binding]) -> Iterator[str]:
    """Return the names under which a module no longer holds the parameter that it had."""
    return (binding.name for binding in bound if binding.registry.get(binding.key) is not binding.parameter)
