"""A plain optimizer, as a user of another library builds it, becomes a `ZeroOptimizer` with the same class and options.

Knows: torch.optim's objects, and which modules and optimizers one trainer has. Does not know: which library that is.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..optimizer import ZeroOptimizer

Options = Mapping[str, Any]
_NO_OPTIONS = (
    "params",
    "optimizer_class",
    "module",
    "optimizer_kwargs",
    "defaults",
)  # what the plain optimizer provides
OPTIONS = frozenset(inspect.signature(ZeroOptimizer).parameters) - {*_NO_OPTIONS}


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
    plain.param_groups = []
    if hasattr(ours, "train"):  # a class that steps in train mode alone
        plain.param_groups = [{**group, "params": []} for group in groups]
        plain.train()  # type: ignore[attr-defined]
    plain.step()  # without parameters; schedulers warn if the optimizer that they were built with takes no step
    plain.param_groups = ours.param_groups
    return ours


def on_cpu(states: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a copy of a state dict on the CPU, in which tied tensors are tied."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    found: OrderedDict[str, Any] = OrderedDict()
    for name, value in states.items():
        if isinstance(value, Tensor):
            place = (value.data_ptr() or name, value.shape, value.stride(), value.dtype)
            if place not in copies:
                copies[place] = value.detach().to("cpu", copy=True)
            value = copies[place]
        found[name] = value
    return found


class Conversions:
    """The modules of one trainer, and the optimizers that it has converted.

    Args:
        options: of `ZeroOptimizer`, for each plain optimizer.
        where: the class that the user gave the options to, for errors.
    """

    def __init__(self, options: Options, where: str) -> None:
        self.options, self.where = options, where
        self._modules: list[nn.Module] = []
        self._converted: list[tuple[nn.Module, ZeroOptimizer]] = []

    @property
    def optimizers(self) -> list[ZeroOptimizer]:
        """The converted optimizers, in order."""
        return [optimizer for _, optimizer in self._converted]

    def add(self, module: nn.Module) -> None:
        """Note a module whose optimizer will be given to `convert`."""
        if not any(known is module for known in self._modules):
            self._modules.append(module)

    def convert(self, optimizer: torch.optim.Optimizer) -> ZeroOptimizer:
        """Return the `ZeroOptimizer` of a plain optimizer, or ``optimizer`` if it is one. All ranks.

        Raises `ValueError` if no noted module has the parameters, or if options were given for a `ZeroOptimizer`.
        """
        module = self._module_of(optimizer)
        if not isinstance(optimizer, ZeroOptimizer):
            optimizer = convert(optimizer, module, self.options)
        elif self.options:
            raise ValueError(
                f"{self.where} got {', '.join(self.options)}, and an optimizer that is a ZeroOptimizer already: give "
                f"the options to one of them, or {self.where} a plain optimizer"
            )
        self._converted.append((module, optimizer))
        return optimizer

    def _module_of(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for module in self._modules:
            if listed and {id(each) for each in listed} <= {id(each) for each in module.parameters()}:
                return module
        raise ValueError(
            f"{self.where}: no model that was set up has all parameters of the {type(optimizer).__name__}: set up the "
            "model before its optimizer, and build the optimizer over parameters of that model alone"
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

    @contextmanager
    def gathered(self, module: nn.Module | None = None, *, write: bool = False) -> Iterator[None]:
        """Return a context in which the parameters of ``module`` (None: of all modules) are whole. All ranks."""
        with ExitStack() as stack:
            for of, optimizer in self._converted:
                if module is None or of is module:
                    stack.enter_context(optimizer.gathered(write=write))
            yield

    def state_dict(self, module: nn.Module) -> OrderedDict[str, Any]:
        """Return a copy of the whole ``module.state_dict()``, on the CPU, on rank 0, and {} elsewhere. All ranks."""
        with self.gathered(module):
            if any(optimizer.rank for of, optimizer in self._converted if of is module):
                return OrderedDict()
            return on_cpu(module.state_dict())

    def close(self) -> None:
        """Make all models plain again, and forget them. All ranks."""
        for optimizer in self.optimizers:
            optimizer.close()
        self.forget()

    def forget(self) -> None:
        """Hold no model and no optimizer any longer. Local."""
        self._modules, self._converted = [], []
