"""A plain optimizer, as a user of another library builds it, becomes a `ZeroOptimizer` with the same class and options.

The error for a gradient that no optimizer averages, in the place of DistributedDataParallel, which would.

A model holds the optimizer that has its values, so that it outlives its trainer, and the next one finds them.

Knows: torch.optim's objects, and which modules and optimizers one trainer has. Does not know: which library that is.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.parameter_specs import is_laid_out, is_released, named_parameters
from ..core.units import Ignored
from ..gradients.hooks import owners_of
from ..optimizer import ZeroOptimizer
from ..runtime.compiled_calls import untraced


def _watch(parameter: Any, trainer: weakref.ref[object], message: str) -> Any:
    """Let a backward raise `RuntimeError` if it gives a gradient to a parameter without an owner. Local.

    Each rank would train it by itself. The hook stays until it finds an owner, or the ``trainer`` is gone. Return its
    handle.
    """

    @untraced
    def check(parameter: Tensor) -> None:
        if trainer() is not None and not owners_of(parameter):
            raise RuntimeError(message)
        handle.remove()

    trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(check)
    parameter.requires_grad_(trainable)
    return handle


OR_IGNORE = ", or give ignored=, if each rank trains its own"
"""The end of a remedy where the user gives options of `ZeroOptimizer`."""

Options = Mapping[str, Any]
_OF_PLAIN = {"params", "optimizer_class", "module", "optimizer_kwargs", "defaults"}  # the plain optimizer gives these
OPTIONS = frozenset(inspect.signature(ZeroOptimizer).parameters) - _OF_PLAIN


def split(arguments: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments that are options of `ZeroOptimizer`, and all others.

    ``mixed_precision`` is an option unless it is a string or None: accelerate has an argument of that name, too.
    """
    ours = {
        name: value
        for name, value in arguments.items()
        if name in OPTIONS and (name != "mixed_precision" or not isinstance(value, str | None))
    }
    return ours, {name: value for name, value in arguments.items() if name not in ours}


def convert(plain: torch.optim.Optimizer, module: nn.Module, options: Options) -> ZeroOptimizer:
    """Build a `ZeroOptimizer` with the class, the param groups, the arguments and the states of ``plain``. All ranks.

    The list of param groups is then one for both, so that schedulers built with ``plain`` set the learning rates with
    which the `ZeroOptimizer` steps.

    Raises:
        TypeError: the class has arguments that its ``defaults`` do not hold.
        ValueError: hooks are registered on ``plain``.
        ValueError, TypeError: as `ZeroOptimizer` raises.
    """
    arguments = list(inspect.signature(type(plain)).parameters.values())[1:]
    named = [each.name for each in arguments if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    if lost := [name for name in named if name not in plain.defaults]:
        raise TypeError(
            f"{type(plain).__name__} does not keep its arguments {', '.join(lost)} in its defaults, from which they "
            "would be taken: build a ZeroOptimizer yourself, and give that instead of the plain optimizer"
        )
    # private: torch lists an optimizer's hooks in attributes whose names begin so
    if hooks := [name for name, value in vars(plain).items() if name.startswith("_optimizer_") and value]:
        raise ValueError(
            f"the {type(plain).__name__} has hooks ({', '.join(hooks)}), which a ZeroOptimizer would not call: "
            "register them on the ZeroOptimizer, after it is set up"
        )
    states = plain.state_dict() if plain.state else None
    groups = [dict(group) for group in plain.param_groups]
    defaults = {name: plain.defaults[name] for name in named}
    ours = ZeroOptimizer(groups, type(plain), module=module, **options, optimizer_kwargs=defaults)
    if states is not None:
        ours.load_state_dict(states)
    plain._opt_called = True  # type: ignore[attr-defined]  # private: else schedulers built with it warn of no step
    plain.param_groups = ours.param_groups
    return ours


def on_cpu(states: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a copy of a state dict on the CPU, in which tied tensors are tied, with the versions of its modules."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    found: OrderedDict[str, Any] = OrderedDict()
    vars(found).update(getattr(states, "__dict__", {}))  # private: torch's `_metadata`, by which modules load
    for name, value in states.items():
        if isinstance(value, Tensor):
            place = (value.data_ptr() or name, value.shape, value.stride(), value.dtype)
            if place not in copies:
                copies[place] = value.detach().to("cpu", copy=True)
            value = copies[place]
        found[name] = value
    return found


@contextmanager
def gathered(optimizers: Iterable[ZeroOptimizer], *, write: bool = False) -> Iterator[None]:
    """Return a context in which the parameters of the optimizers are whole. All ranks."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.gathered(write=write))
        yield


class Conversions:
    """The modules of one trainer, and the optimizers that it has converted.

    Args:
        options: of `ZeroOptimizer`, for each plain optimizer.
        where: the class that the user gave the options to, for errors.
        remedy: what its user does about a parameter without an optimizer, for errors.
    """

    def __init__(self, options: Options, where: str, remedy: str) -> None:
        self.options, self.where, self._remedy = options, where, remedy
        given = () if options.get("ignored") is None else options["ignored"]
        several = isinstance(given, Iterable) and not isinstance(given, nn.Module | Tensor | str)
        self._ignored: list[Any] = list(given) if several else [given]
        self._modules: dict[nn.Module, list[Any]] = {}  # each with the handles of its hooks
        self._converted: list[tuple[Sequence[nn.Module], ZeroOptimizer]] = []

    @property
    def optimizers(self) -> list[ZeroOptimizer]:
        """The converted optimizers, in order."""
        return [optimizer for _, optimizer in self._converted]

    def optimizers_of(self, module: Any) -> list[ZeroOptimizer]:
        """Return the converted optimizers of a module, in order."""
        return [each for modules, each in self._converted if any(of is module for of in modules)]

    def add(self, module: nn.Module, *, trained: bool = True) -> None:
        """Note a module whose optimizer will be given to `convert`. Local.

        Until then a backward that gives it gradients raises `RuntimeError`, unless ``trained`` is False. Raises
        `ValueError` if a parameter is not initialised.
        """
        handles = self._modules.setdefault(module, [])
        if trained:
            for handle in handles:
                handle.remove()
            handles[:] = self._watch(module)

    def _watch(self, module: nn.Module) -> list[Any]:
        """Watch the parameters of a module that no optimizer of it has or ignores, and return the handles of the hooks.

        Frozen ones are watched, too: they may be unfrozen later. None is watched once one of the optimizers is closed.
        """
        of = f"of the {type(module).__name__}"
        if lazy := [name for name, parameter in named_parameters(module) if is_lazy(parameter)]:
            raise ValueError(
                f"{self.where}: {lazy[0]!r} {of} is not initialised yet: run a forward of its lazy module first"
            )
        all_parts = [optimizer._engine.parts for optimizer in self.optimizers_of(module)]
        left_out = [Ignored(self._ignored_in(module), module), *(parts.storage.ignored for parts in all_parts)]
        handles = []
        for name, parameter in named_parameters(module):
            if parameter.is_meta or not is_laid_out(parameter) or any(parameter in each for each in left_out):
                continue
            floating = parameter.is_floating_point() or parameter.is_complex()
            frozen = not parameter.requires_grad and not is_released(parameter)
            if owners_of(parameter) or (frozen and (parameter.is_inference() or not floating)):
                continue  # the owner's, or frozen for ever
            message = (
                f"{self.where}: a backward gave a gradient to {name!r} {of}, and no ZeroOptimizer has it, so the ranks "
                f"would not average it: {self._remedy}. If nothing trains the parameter, freeze it by "
                "requires_grad_(False)"
            )
            handles.append(_watch(parameter, weakref.ref(self), message))
        for parts in all_parts:
            parts.reducer.hooks.remove_also(handles)
        return handles

    def _ignored_in(self, *modules: nn.Module) -> list[Any]:
        """Return the entries of ``ignored`` that are parts of these modules, and those that cannot be parts."""
        every = nn.ModuleList(modules)
        parts = {id(part) for part in (*every.modules(), *every.parameters(), *every.buffers())}
        return [each for each in self._ignored if id(each) in parts or not isinstance(each, nn.Module | Tensor)]

    def convert(self, optimizer: torch.optim.Optimizer) -> ZeroOptimizer:
        """Return the `ZeroOptimizer` of a plain optimizer, or ``optimizer`` if it is one. All ranks.

        It may train parameters of several modules. Raises `ValueError` if noted modules lack some of the parameters, or
        if options were given for a `ZeroOptimizer`.
        """
        modules = self._modules_of(optimizer)
        if not isinstance(optimizer, ZeroOptimizer):
            options = {**self.options, "ignored": self._ignored_in(*modules)}
            optimizer = convert(optimizer, *_as_one(modules, options))
        elif self.options:
            raise ValueError(
                f"{self.where} got {', '.join(self.options)}, and an optimizer that is a ZeroOptimizer already: give "
                f"the options to one of them, or {self.where} a plain optimizer"
            )
        self._converted.append((modules, optimizer))
        for module in modules:
            self.add(module)  # again: it may have got memory, or further parameters
        return optimizer

    def adopt(self, module: nn.Module, optimizer: ZeroOptimizer) -> None:
        """Note the one optimizer of a module, which another trainer may have built. Local."""
        self._modules, self._converted = {module: []}, [([module], optimizer)]

    def _modules_of(self, optimizer: torch.optim.Optimizer) -> Sequence[nn.Module]:
        """Return the first noted module that has all parameters of an optimizer, or else all that have some."""
        listed = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        having = [(module, listed & {id(each) for each in module.parameters()}) for module in self._modules]
        found = next(([module] for module, has in having if has == listed), [module for module, has in having if has])
        if listed and set().union(*(has for _, has in having)) == listed:
            return found
        raise ValueError(
            f"{self.where}: the models that were set up do not have all parameters of the {type(optimizer).__name__}: "
            "set up each model before its optimizer, and build the optimizer over parameters of such models alone"
        )

    def of(self, parameters: Iterable[Tensor]) -> ZeroOptimizer:
        """Return the optimizer whose trainable parameters these are. Raises `ValueError` if no optimizer has them."""
        given = {id(each) for each in parameters if each.requires_grad}
        for optimizer in self.optimizers:
            own = {id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad}
            if own == given:
                return optimizer
        raise ValueError(
            f"{self.where} clips all parameters of an optimizer by their common norm: give all of them, and no others"
        )

    def state_dict(self, module: nn.Module, wanted: bool = False) -> OrderedDict[str, Any]:
        """Return a copy of the whole ``module.state_dict()``, on the CPU, on rank 0 and where it is ``wanted``.

        Other ranks return {}. All ranks.
        """
        with gathered(optimizers := self.optimizers_of(module)):
            if not wanted and any(optimizer.rank for optimizer in optimizers):
                return OrderedDict()
            return on_cpu(module.state_dict())

    def close(self) -> None:
        """Make all models plain again, and forget them. All ranks."""
        for optimizer in self.optimizers:
            optimizer.close()
        self.forget()

    def forget(self) -> None:
        """Hold no model and no optimizer any longer, and leave no hooks. Local."""
        for handle in (handle for handles in self._modules.values() for handle in handles):
            handle.remove()
        self._modules, self._converted = {}, []


def _as_one(modules: Sequence[nn.Module], options: Options) -> tuple[nn.Module, Options]:
    """Return a module that has these modules, and the options that mean for it what they mean for each of them."""
    if len(modules) == 1:
        return modules[0], options
    precision = options.get("mixed_precision")
    if isinstance(precision, Mapping) or callable(precision):
        raise ValueError(
            "mixed_precision has names of modules, which one optimizer over several models does not know: give one "
            "MixedPrecision for all of them, or set up an optimizer for each model"
        )
    if precision is not None:
        # for each module: the one around them has no forward, at which it would cast inputs
        options = {**options, "mixed_precision": {"*": precision}}
    return nn.ModuleDict({str(number): module for number, module in enumerate(modules)}), options


_NAME = "_zero_optimizer"


class _Held:
    """Holds an optimizer. A copy of the model, also an unpickled one, has an empty dict in its place."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self.optimizer = optimizer

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


def hold(module: Any, optimizer: ZeroOptimizer) -> None:
    """Let a module hold its optimizer until `release`. Local."""
    vars(module)[_NAME] = _Held(optimizer)


def held_in(module: Any) -> list[ZeroOptimizer]:
    """Return the optimizers, not closed, that the module and its parts hold. Local."""
    found = [held.optimizer for part in module.modules() if isinstance(held := vars(part).get(_NAME), _Held)]
    return [optimizer for optimizer in found if not optimizer._engine.is_closed]


def release(module: Any) -> None:
    """Close the optimizers that the module and its parts hold: it is plain again. All ranks."""
    for optimizer in held_in(module):
        optimizer.close()
    for part in module.modules():
        vars(part).pop(_NAME, None)


def check_started(found: int, where: str, remedy: str) -> None:
    """Raise `ValueError` if more processes were started than ``where`` has ``found``. Local."""
    started = os.environ.get("WORLD_SIZE", "1")
    if started.isdecimal() and int(started) > found:
        raise ValueError(
            f"{started} processes were started, but {where} has found {found}: each would train alone; {remedy}"
        )
