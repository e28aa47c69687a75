"""The classes that users name, and which options of a param group are arguments of a class's constructor.

Whether the states and options of two throw-away parameters are equal, bit by bit.

Knows: classes, what their constructors make, and the lists, tuples and dicts of their states. Does not know: which
param group has which class, how it is stepped.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import reprlib
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..core.parameter_specs import flattened


def same(one: Any, other: Any) -> bool:
    """Return whether two states or options are equal: tensors by their bits, numbers and text by what they say.

    Lists, tuples, dicts and tensor subclasses are equal if all that they hold is. Of other objects only the classes
    are compared.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same_tensors(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (bool, int, float, complex, str)):
        return repr(one) == repr(other)  # nan is equal to nan, and -0.0 is not equal to 0.0
    return True


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    names, facts = flattened(one)
    if names:
        theirs, other_facts = flattened(other)
        parts = [(getattr(one, name), getattr(other, name, None)) for name in names]
        return (
            type(one) is type(other) and same([*names, facts], [*theirs, other_facts]) and all(same(*p) for p in parts)
        )
    if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
        return False
    return equal_values(*(each.detach().reshape(-1).contiguous() for each in (one, other)))  # it may be expanded


def equal_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two 1-D tensors of one dtype and length have equal bits.

    All NaNs count as equal: torch's own kernels give different ones.
    """
    if torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
        return True
    if one.is_complex():
        return equal_values(torch.view_as_real(one).reshape(-1), torch.view_as_real(other).reshape(-1))
    if not one.is_floating_point():
        return False
    if one.itemsize == 1:  # torch does not compare them
        one, other = one.float(), other.float()
    equal = (one == other) & (one.signbit() == other.signbit())
    return bool((equal | (one.isnan() & other.isnan())).all())


KEY = "optimizer_class"  # of a param group: a class when it is given, and its qualified name from then on
OptimizerClass = type[torch.optim.Optimizer]
COLLECTIVES = frozenset(
    {"all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "reduce"}
    | {"reduce_scatter", "reduce_scatter_tensor", "gather", "scatter", "isend", "irecv", "send", "recv"}
)
WRAPS = ": name the class of that one, which ranks then step by itself"


def merged(arguments: Mapping[str, Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of the class of an optimizer.

    ``arguments``: those that were given beside those of `ZeroOptimizer`; ``kwargs``: its ``optimizer_kwargs``. Raises
    `TypeError` if these are no mapping by name, or if an argument is given twice.
    """
    if not isinstance(kwargs, Mapping | None) or any(not isinstance(name, str) for name in kwargs or ()):
        raise TypeError(f"optimizer_kwargs must be a dict of arguments by name, not {reprlib.repr(kwargs)}")
    if twice := [name for name in kwargs or () if name in arguments]:
        raise TypeError(f"{twice[0]!r} is given twice, in optimizer_kwargs and beside it: give it once")
    return {**arguments, **(kwargs or {})}


def check_known(optimizer_class: OptimizerClass, arguments: Mapping[str, Any], beside: Iterable[str]) -> None:
    """Raise `TypeError` if the constructor of a class does not take an argument of ``arguments``.

    ``beside``: names of `ZeroOptimizer`'s own arguments, of which the user may have meant one.
    """
    parameters = inspect.signature(optimizer_class).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for name in arguments:
        if name not in parameters:
            near = difflib.get_close_matches(name, [*beside, *parameters], 1)
            error = TypeError(
                f"neither ZeroOptimizer nor {optimizer_class.__name__} has an argument {name!r}"
                + (f": did you mean {near[0]!r}?" if near else "")
            )
            check_takes_parameters(optimizer_class, error)
            raise error


def check_class(named: Any, place: str = "") -> None:
    """Raise `TypeError` unless ``named`` is a class of optimizers that can step.

    ``place``: the param group that names it, with which the error begins.
    """
    if not (isinstance(named, type) and issubclass(named, torch.optim.Optimizer)):
        meant, what = _meant(named), reprlib.repr(named)
        if isinstance(named, type):
            what = f"{_public_name(named)}, which is not derived from torch.optim.Optimizer"
        elif meant is not None and not isinstance(named, str):
            what = f"{'an instance' if meant is type(named) else 'a partial'} of {meant.__name__}"
        remedy = "a class, such as torch.optim.AdamW," if meant is None else f"the class {_public_name(meant)},"
        raise TypeError(f"{place}{KEY} must be a class of optimizers, not {what}: give {remedy} and its arguments here")
    if named is torch.optim.Optimizer or inspect.isabstract(named):
        raise TypeError(f"{place}{KEY} is {named.__name__}, which is abstract: name one that steps")
    groups = inspect.getattr_static(named, "param_groups", None)
    if isinstance(groups, property) and groups.fset is None:
        raise TypeError(f"{place}{KEY} is {named.__name__}, whose param groups are those of another optimizer{WRAPS}")
    if called := _collectives_in(named.step):
        raise TypeError(
            f"{place}{KEY} is {named.__name__}, whose step() calls {' and '.join(called)} of torch.distributed, as if "
            "each rank had all parameters: name the class for one process; each rank steps what it owns with it"
        )


def check_takes_parameters(named: OptimizerClass, error: Exception) -> None:
    """Raise `TypeError` if a class's constructor takes a model, or another optimizer in the place of parameters.

    ``error``: of the constructor, which was given parameters.
    """
    required = [name for name, each in inspect.signature(named).parameters.items() if each.default is each.empty]
    if "model" in required:
        raise TypeError(
            f"{named.__name__} takes a model, so ranks cannot step shards of parameters with it: name a class that "
            "takes parameters alone"
        ) from error
    if required and required[0] in ("optimizer", "base_optimizer", "base"):
        raise TypeError(f"{named.__name__} takes another optimizer in the place of parameters{WRAPS}") from error


def _collectives_in(step: Any) -> list[str]:
    """Return the names of the collectives of torch.distributed that a function calls itself, sorted."""
    step = inspect.unwrap(step)
    names = getattr(getattr(step, "__code__", None), "co_names", ())
    known = [getattr(step, "__globals__", {}).get(name) for name in names]
    homes = {getattr(each, "__name__" if isinstance(each, ModuleType) else "__module__", None) for each in known}
    communicates = any(str(home).startswith("torch.distributed") for home in homes)
    return sorted(COLLECTIVES.intersection(names)) if communicates else []


def _meant(named: Any) -> type | None:
    """Return the class that a user means by an instance, a `functools.partial` or a name of torch.optim; else None."""
    if isinstance(named, torch.optim.Optimizer):
        return type(named)
    found: Any = named.func if isinstance(named, functools.partial) else None
    if isinstance(named, str):
        found = next((vars(torch.optim)[name] for name in vars(torch.optim) if name.lower() == named.lower()), None)
    return found if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) else None


def _public_name(found: type) -> str:
    """Return the name of a class as users write it."""
    if vars(torch.optim).get(found.__name__) is found:
        return f"torch.optim.{found.__name__}"
    return f"{found.__module__}.{found.__qualname__}"


def arguments_of(optimizer_class: OptimizerClass, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a param group that are arguments of its class's constructor.

    If the constructor has ``**kwargs``, an option counts as one of these if the class makes something else with it.
    """
    parameters = inspect.signature(optimizer_class).parameters.values()
    names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    found = {key: value for key, value in options.items() if key in names}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        for key, value in options.items():
            if key not in names and _acts(optimizer_class, found, {**found, key: value}):
                found[key] = value
    return found


def different_argument(optimizer_class: OptimizerClass, one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the name of an argument that has another value in ``other``, and that acts in the constructor, else None.

    If several act together alone, their names are returned.
    """
    if not _acts(optimizer_class, one, other):
        return None
    different = [key for key in {**one, **other} if not same(one.get(key, same), other.get(key, same))]
    for key in different:
        changed = {name: value for name, value in one.items() if name != key}
        if _acts(optimizer_class, one, {**changed, key: other[key]} if key in other else changed):
            return key
    return ", ".join(different)


def _acts(optimizer_class: OptimizerClass, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the constructor makes something else of the arguments ``other`` than of ``one``, beside the
    options of param groups. If it refuses ``other``, it does not."""
    made = _made(optimizer_class, other)
    return made is not None and not same(made, _made(optimizer_class, one))


def _made(optimizer_class: OptimizerClass, arguments: Mapping[str, Any]) -> Any:
    """Return the attributes and the states that the constructor makes, or None if it raises."""
    with torch.random.fork_rng(devices=[]):  # it may draw random numbers, which must be equal in a comparison
        torch.manual_seed(0)
        try:
            made = optimizer_class([torch.zeros(1, 1)], **arguments)
        except Exception:
            return None
    groups = ("defaults", "param_groups", "state")
    kept = {key: value for key, value in vars(made).items() if key not in groups and not key.startswith("_optimizer_")}
    return kept, list(made.state.values())
