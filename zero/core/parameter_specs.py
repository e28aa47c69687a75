"""Turns the user's input (a module, parameters, param groups) into the specs of the layout, and checks it.

Names of the parts and tensors of a module, as the module has them without `torch.compile` and `checkpoint_wrapper`.

    torch.compile(model)                          "_orig_mod.blocks.0.weight"                   -> "blocks.0.weight"
    model.blocks[0] = torch.compile(block)        "blocks.0._orig_mod.weight"                   -> "blocks.0.weight"
    model.blocks[0] = checkpoint_wrapper(block)   "blocks.0._checkpoint_wrapped_module.weight"  -> "blocks.0.weight"

In a module a wrapper is known by its class, so that another module may have a child of such a name. In a name from
elsewhere (a file, a state dict) it is known by its name, and only if the name is not one of the model as it is.

Finds tensors that share memory or a version counter and are different objects, and memory with gaps.

Knows: modules, parameters, their names, addresses, strides and version counters. Does not know: ranks, gradients,
optimizers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter, getitem, is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from collectives.torch_internals import (
    WRAPPERS,
    is_traceable_wrapper_subclass,
    make_subclass,
    set_version_counters,
    wrapped_key,
)

from .bits import dense_stride, is_dense
from .layout import Dtypes, ParameterSpec

MASTERS = "masters"  # a key of state dicts, and a folder of checkpoints: the master weights
_Value = TypeVar("_Value")
_DDP = "module."
Rename = Mapping[str, str | None] | Callable[[str], str | None]
"""Old names -> new ones, None for what is left out."""


def named_parts(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module, as ``module.named_modules`` does. What a wrapper wraps has the wrapper's own name."""
    found: dict[str, tuple[str, nn.Module]] = {}  # by torch's name: that without wrappers, and the module
    for name, part in module.named_modules(remove_duplicate=remove_duplicate):
        above, _, key = name.rpartition(".")
        plain = ""
        if name:
            prefix, holder = found.get(above, (above, None))  # None: a key with a dot, or names of the class's own
            plain = prefix if holder is not None and key == wrapped_key(holder) else child_name(prefix, key)
        found[name] = plain, part
        yield plain, part


def named_children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of ``module``, whose own name is ``prefix``, as ``module.named_children`` does."""
    inside = wrapped_key(module)
    for key, child in module.named_children():
        yield prefix if key == inside else child_name(prefix, key), child


def named_parameters(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter, as ``module.named_parameters`` does."""
    return _members(module, "_parameters", remove_duplicate)


def own_parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters that ``module.named_parameters`` yields, which a class may choose, with their names."""
    names = {id(parameter): name for name, parameter in named_parameters(module)}
    return [(names.get(id(parameter), name), parameter) for name, parameter in module.named_parameters()]


def named_buffers(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield each buffer, as ``module.named_buffers`` does."""
    return _members(module, "_buffers", remove_duplicate)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, once for each of their names."""
    yield from named_parameters(module, remove_duplicate=False)
    yield from named_buffers(module, remove_duplicate=False)


def state_dict_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield name, tensor, and whether it is a buffer, of all that a module's ``state_dict`` has, in its order."""
    for prefix, part in named_parts(module, remove_duplicate=False):
        for key, parameter in part._parameters.items():
            if parameter is not None:
                yield child_name(prefix, key), parameter, False
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                yield child_name(prefix, key), buffer, True


def _members(module: nn.Module, registry: str, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for prefix, part in named_parts(module, remove_duplicate=remove_duplicate):
        for key, tensor in getattr(part, registry).items():
            if tensor is not None and id(tensor) not in seen:
                if remove_duplicate:
                    seen.add(id(tensor))
                yield child_name(prefix, key), tensor


def child_name(prefix: str, key: str) -> str:
    """Return the name of what a module called ``prefix`` has under ``key``."""
    return f"{prefix}.{key}" if prefix else key


# -- names from elsewhere ----------------------------------------------------------------------------------------------


def without_wrappers(name: str) -> str:
    """Return a name without what wrappers have put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or name


def all_without_wrappers(names: Iterable[str]) -> list[str]:
    """Return names that a user gives, without what wrappers have put into them; as they are if two would be equal."""
    given = list(names)
    plain = [without_wrappers(name) for name in given]
    return plain if len(set(plain)) == len(set(given)) else given


def known_as(name: str, known: Container[str]) -> str:
    """Return the name under which a model knows a tensor that is called ``name`` elsewhere; ``name`` if it does not.

    ``known``: the names of the model.
    """
    plain = without_wrappers(name)
    return plain if name not in known and plain in known else name


def by_known_name(values: Mapping[str, _Value], known: Container[str]) -> dict[str, _Value]:
    """Return ``values`` by the names of the model: see `known_as`. A value whose name is taken keeps its own."""
    found = {name: known_as(name, known) for name in values}
    return {name if plain in values else plain: values[name] for name, plain in found.items()}


def remark_on_prefix(names: Iterable[str], known: Container[str]) -> str:
    """Return what an error adds if all names would be names of the model without the prefix of DistributedDataParallel;
    else an empty text."""
    plain = [without_wrappers(name) for name in names]
    if not plain or not all(name.startswith(_DDP) and name.removeprefix(_DDP) in known for name in plain):
        return ""
    return (
        f". Its names begin with {_DDP!r}, which DistributedDataParallel puts before those of the model: take that away"
    )


def renamed(
    rename: Rename | None, saved: Iterable[str], known: Container[str], where: str, also: Container[str] = ()
) -> dict[str, str]:
    """Return saved name -> new name, without what is left out.

    Args:
        rename: saved name -> new name, or None to leave it out; a mapping has only the names that change.
        saved: all saved names.
        known: the names of the model, as far as they are known.
        where: what has the saved names, for errors: "the checkpoint".
        also: further names that a mapping may have.

    Raises:
        ValueError: a mapping has a name that was not saved, two saved names become one, or ``rename`` raises.
        TypeError: a new name is no text, or ``rename`` is neither a mapping nor a function.
    """
    if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
        raise TypeError(f"rename must be a mapping from saved names to new ones, or a function, not {rename!r}")
    there = dict.fromkeys(saved)
    if isinstance(rename, Mapping):
        for name in rename:
            if name not in there and name not in also:
                raise ValueError(f"rename: {where} has no {name!r}")
    found: dict[str, str] = {}
    before: dict[str, str] = {}  # the other way round
    for name in there:
        new = new_name(rename, name)
        if new is None:
            continue
        plain = known_as(new, known)
        new = new if plain in there and plain != name else plain  # a name that is taken keeps its own
        if new in before:
            raise ValueError(f"rename: {before[new]!r} and {name!r} of {where} would both become {new!r}")
        found[name], before[new] = new, name
    return found


def call_given(option: str, function: Callable[..., Any], place: str, *given: Any) -> Any:
    """Return what a user's function returns. Raises `ValueError` naming the option and the place if it raises."""
    try:
        return function(*given)
    except Exception as error:
        raise ValueError(f"{option}: the function failed for {place} ({type(error).__name__}: {error})") from error


def new_name(rename: Rename | None, name: str) -> str | None:
    """Return the new name of one saved name; None if it is left out. Raises like `renamed`."""
    if isinstance(rename, Mapping):
        new = rename.get(name, name)
    elif rename is None:
        return name
    else:
        new = call_given("rename", rename, repr(name), name)
    if new is not None and not isinstance(new, str):
        raise TypeError(f"rename: the new name of {name!r} is {new!r}, neither a text nor None")
    return new


HELD_ELSEWHERE = (
    "{what} belongs to another stage-3 optimizer, which holds the values: close() that one first, or build the model "
    "anew. To train parts of a model differently, give one optimizer param groups, each with its own optimizer_class "
    "and options, build one optimizer per submodule, or leave parts out of the first one by ignored="
)
COPY = "p.copy_(t) under torch.no_grad()"
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


_REGISTRY, _KEY, _PARAMETER = map(attrgetter, ("registry", "key", "parameter"))


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
    if any("param_names" in group or any(isinstance(one, tuple) for one in group["params"]) for group in groups):
        name_empty(groups)
    return groups


def name_empty(groups: Iterable[dict[str, Any]]) -> None:
    """Give the groups without parameters the (no) names that torch.optim wants from all groups if one has names."""
    for group in groups:
        if not group["params"]:
            group.setdefault("param_names", [])


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
        ValueError, TypeError: a parameter is not a leaf, is trained and cannot be laid out, or is laid out and in no
            unit. The message names it.
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
    return [parameter for _, parameter, _ in found], [spec for _, _, spec in found]


def _check(parameter: Tensor, name: str, *, may_be_meta: bool) -> None:
    if is_lazy(parameter):
        raise ValueError(f"{name!r} is not initialised yet: run a forward of its lazy module first")
    if is_released(parameter):
        raise ValueError(HELD_ELSEWHERE.format(what=repr(name)))
    check_not_inference(parameter, name)
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


def check_not_inference(tensor: Tensor, name: str) -> None:
    """Raise `ValueError` if a tensor was made in inference mode."""
    with as_plain():
        if tensor.is_inference():
            raise ValueError(
                f"{name!r} was made under torch.inference_mode(), where torch makes tensors with which nothing can be "
                "trained: build the model outside of it, or put a clone() in its place"
            )


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


def misplaced(bound: Sequence[Binding]) -> str | None:
    """Return an error text if a module no longer holds the parameter that it had, else None."""
    for name in replaced(bound):
        return (
            f"the module's {name!r} was replaced after the optimizer was built (as by load_state_dict(assign=True)): "
            f"build a new optimizer; next time edit the parameter that is there, by {COPY}"
        )
    return None


def changed(parameter: Tensor, spec: ParameterSpec) -> str | None:
    """Return an error text if a parameter was cast or moved since its optimizer was built, else None."""
    if parameter.dtype is spec.dtypes.param_dtype and str(parameter.device) == spec.device:
        return None
    return (
        f"{spec.name!r} is now {parameter.dtype} on {parameter.device}, but was {spec.dtypes.param_dtype} on "
        f"{spec.device} when the optimizer was built: move and cast the model before that"
    )


def replaced(bound: Sequence[Binding]) -> list[str]:
    """Return the names under which a module no longer holds the parameter that it had."""
    held = map(getitem, map(_REGISTRY, bound), map(_KEY, bound))
    with suppress(KeyError):  # one is gone
        if all(map(is_, held, map(_PARAMETER, bound))):  # at each step: nothing for each parameter in Python
            return []
    return [b.name for b in bound if b.key not in b.registry or b.registry[b.key] is not b.parameter]


Named = tuple[str, Tensor]


class _Memory:
    """The addresses ``[begin, end)`` of a tensor, perhaps with gaps, on any device, as those of an array: never read.
    ``moves``: into a bucket, 2 if it may be updated there, 1 if not; 0: it stays."""

    def __init__(self, tensor: Tensor, name: str, trained: bool, moves: int) -> None:
        self.name, self.trained, self.moves = name, trained, moves
        self.device, self.begin = tensor.device, tensor.data_ptr()
        strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
        self.end = self.begin + reach + tensor.itemsize
        about = {"shape": tuple(tensor.shape), "strides": strides, "typestr": f"|V{tensor.itemsize}"}
        self.__array_interface__ = {**about, "data": (self.begin, True), "version": 3}


def check_memory_apart(listed: Sequence[Named], unlisted: Sequence[Named], others: Iterable[Named]) -> list[str]:
    """Check tensors that move into buckets: ``listed`` ones, which may be updated there, and ``unlisted`` ones.

    Raises `ValueError` naming two that share memory, if one is trained or both are listed; one may be of ``others``.
    Returns warnings: of other such pairs, and of memory with gaps.
    """
    import numpy as np  # here, because an import of the library needs torch alone

    known = {id(tensor): (0, name, tensor) for name, tensor in others}
    for moves, moving in ((1, unlisted), (2, listed)):
        known |= {id(tensor): (moves, name, tensor) for name, tensor in moving}
    spans, near, found = [], list[_Memory](), []
    for moves, name, tensor in known.values():
        for part in () if is_lazy(tensor) else parts_of(tensor):
            if part.layout is torch.strided and part.numel() and part.device.type != "meta":
                spans.append(_Memory(part, name, tensor.requires_grad, moves))
    for span in sorted(spans, key=lambda span: (str(span.device), span.begin)):
        near = [other for other in near if other.device == span.device and other.end > span.begin]
        for other in (other for other in near if other.moves or span.moves):
            if np.shares_memory(np.asarray(other), np.asarray(span)):
                text = f"{other.name!r} and {span.name!r} share memory"
                if other.trained or span.trained or other.moves + span.moves == 4:
                    raise ValueError(
                        f"{text} but are different parameters or buffers: tie them by using one parameter in both "
                        "places, or give one of them its own memory with .clone()"
                    )
                found.append(f"{text} now. After this, edits of one do not reach the other")
        near.append(span)
    if gaps := [name for name, p in (*listed, *unlisted) if p.numel() > 1 and not is_dense(p.shape, p.stride())]:
        named = ", ".join(map(repr, gaps[:3])) + (f" and {len(gaps) - 3} more" if len(gaps) > 3 else "")
        found.append(
            f"gaps in the memory of {named}, such as big[:, ::2] has, are closed from now on. The plain loop sums over "
            "gaps in another order, so last bits may differ: set p.data = p.data.contiguous() before both loops"
        )
    return found


def give_own_counters(parameters: Sequence[Named], others: Iterable[Named]) -> None:
    """Give parameters that share a version counter, as views of one tensor do, one each: edits are found by it.

    Raises `ValueError` naming a parameter to which a graph or a weak reference holds.
    """
    known = {id(tensor): tensor for _, tensor in (*parameters, *others)}
    with as_plain():
        tensors = tuple(tensor for tensor in known.values() if not tensor.is_inference())
        before = tuple(tensor._version for tensor in tensors)
        set_version_counters(tensors, tuple(range(len(tensors))))
        shared = {id(tensor) for number, tensor in enumerate(tensors) if tensor._version != number}
        set_version_counters(tensors, before)
    for name, parameter in parameters:
        if id(parameter) in shared:
            with torch.inference_mode(False):
                made = make_subclass(type(parameter), parameter.data, parameter.requires_grad)
            made.grad = parameter.grad
            vars(made).update(vars(parameter))
            try:
                torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise ValueError(
                    f"{name!r} shares a version counter with another tensor, as views of one tensor do, and cannot get "
                    f"its own ({error}): build the optimizer before the first forward, or give it memory of its own: "
                    "nn.Parameter(p.detach().clone())"
                ) from error
            parameter._backward_hooks = parameter._backward_hooks  # which registers them anew
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
