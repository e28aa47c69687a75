"""The classes that users name, and which options of a param group are arguments of a class's constructor.

Knows: classes, and what their constructors make. Does not know: which param group has which class, how it is stepped.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from .equality import same

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
            "each rank had all parameters: name the class for one process, which ranks step over what they own"
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
