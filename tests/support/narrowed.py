"""Mixed precision in a plain loop, by hand: modules that compute in 16 bits or 32, master weights, and casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from zero import MixedPrecision

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = (torch.float64, FP32, BF16, FP16)
PRECISIONS = {
    "bf16": MixedPrecision(BF16, buffer_dtype=BF16),
    "fp16": MixedPrecision(FP16, buffer_dtype=FP16),
    "bf16, sent in fp32": MixedPrecision(BF16, reduce_dtype=FP32, buffer_dtype=BF16),
    "bf16, added up in bf16": MixedPrecision(BF16, accumulate_dtype=BF16, buffer_dtype=BF16),
    "fp32, sent in bf16": MixedPrecision(FP32, reduce_dtype=BF16, buffer_dtype=FP32),
    "fp32, added up in bf16": MixedPrecision(FP32, reduce_dtype=BF16, accumulate_dtype=BF16, buffer_dtype=FP32),
}


def precision_of(given: Any, name: str, module: nn.Module) -> Any:
    """Return the precision of a module. Of patterns, the last one decides that matches it or a module around it."""
    if not isinstance(given, Mapping):
        return given(name, module) if callable(given) else given
    places = [""] + [name[:end] for end in range(1, len(name) + 1) if name[end:][:1] in ("", ".")]
    return [own for pattern, own in given.items() if any(fnmatchcase(place, pattern) for place in places)][-1]


def sum_dtypes(model: nn.Module, precision: Any) -> dict[Tensor, torch.dtype]:
    found = {parameter: parameter.dtype for parameter in model.parameters()}
    for name, module in reversed(list(model.named_modules())) if precision is not None else ():
        own = precision_of(precision, name, module)
        for parameter in module.parameters(recurse=False) if own.param_dtype is not None else ():
            found[parameter] = getattr(own, "accumulate_dtype", FP32)
    return found


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: cast(getattr(value, field.name), dtype) for field in fields(value)})
    return value


def cast_at_borders(model: nn.Module, given: Any) -> None:
    """Cast what enters and leaves the modules that have another precision than the module around them."""
    around: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = around[name] = precision_of(given, name, module)
        above = name.rpartition(".")[0]
        while name and isinstance(nn.Module.get_submodule(model, above), nn.ModuleList):  # which has no forward
            above = above.rpartition(".")[0]
        if (name and own == around[above]) or isinstance(module, nn.ModuleList):
            continue
        if own.cast_forward_inputs and own.param_dtype is not None:
            nn.Module.register_forward_pre_hook(module, _entering(own.param_dtype), with_kwargs=True)
        if getattr(own, "output_dtype", None) is not None:  # older commits, on which `tests.net` runs, have none
            nn.Module.register_forward_hook(module, _leaving(own.output_dtype))


def _entering(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda _, args, kwargs: (
        tuple(cast(arg, dtype) for arg in args),
        {key: cast(value, dtype) for key, value in kwargs.items()},
    )


def _leaving(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda _, __, output: cast(output, dtype)


def _is_plain(parameter: Tensor) -> bool:
    """Return False for a frozen tensor subclass, whose values no cast reaches."""
    return type(parameter) is nn.Parameter


class Narrowed:
    """A model in mixed precision, and its master weights.

    ``parameters`` are the model's. ``updated`` are what an optimizer steps: the master weights, or the parameters
    themselves. Mean gradients are the ``grad`` of ``held``, in the dtype in which they are added up.
    """

    def __init__(self, model: nn.Module, precision: Any, rounding: Any = None) -> None:
        """``rounding``: a `zero.StochasticRounding`. Parameters in bf16 then have no master weights."""
        self.rounding = rounding
        self.parameters = [p for p in model.parameters() if p.dtype in FLOATS and (p.requires_grad or _is_plain(p))]
        self.held = self.updated = list[Tensor](self.parameters)
        self.dtypes: list[tuple[torch.dtype, torch.dtype]] = []  # of each: those that travels, and of the sum
        self.is_mixed = precision is not None
        if not self.is_mixed:
            self.dtypes = [(p.dtype, p.dtype) for p in self.parameters]
            return
        modules = list(model.named_modules())
        wanted = {
            id(p): precision_of(precision, name, module)
            for name, module in reversed(modules)
            for p in module.parameters(recurse=False)
        }
        self.updated, self.held = [], []
        for p in self.parameters:
            own, wide = wanted[id(p)], p.detach().clone()
            dtype = own.param_dtype or p.dtype
            p.data = wide.to(dtype)  # a frozen parameter has no master weights until it is trained
            master = wide.dtype if wide.dtype.itemsize > 2 or own.param_dtype is None else FP32
            updated = (wide if p.requires_grad else p.detach()).to(master, copy=True).requires_grad_()
            self.updated.append(p if rounding is not None and dtype is BF16 else updated)
            total = p.dtype if own.param_dtype is None else getattr(own, "accumulate_dtype", FP32)
            self.dtypes.append((own.reduce_dtype or dtype, total))
            is_held = self.updated[-1].dtype is total
            self.held.append(self.updated[-1] if is_held else torch.zeros_like(self.updated[-1], dtype=total))
        for name, module in modules:
            dtype = getattr(precision_of(precision, name, module), "buffer_dtype", None)
            for buffer in module.buffers(recurse=False) if dtype is not None else ():
                buffer.data = buffer.to(dtype)
        cast_at_borders(model, precision)

    def travelling(self, index: int, gradient: Tensor) -> Tensor:
        """Return a contribution as the owner adds it up: cast to the reduce dtype, and then to the accumulate dtype."""
        return self.wide(index, gradient.to(self.dtypes[index][0]))

    def wide(self, index: int, gradient: Tensor) -> Tensor:
        return gradient.to(self.dtypes[index][1])

    def contributed(self, index: int, before: Tensor | None, gradient: Tensor, *, travels: bool) -> Tensor:
        """Return a rank's contribution after a further gradient. One that is reduced at once is rounded once."""
        if before is None:
            return gradient if travels else self.wide(index, gradient)
        return before + self.wide(index, gradient)

    @torch.no_grad()
    def followed(self) -> list[Tensor]:
        """Return the weights with which the next step begins: values that the user wrote into the model take effect."""
        found = []
        for p, wide in zip(self.parameters, self.updated, strict=True):
            as_integers = INTEGERS[p.itemsize]
            rounded = wide.detach().to(p.dtype)
            written = p.detach().view(as_integers) != rounded.view(as_integers)
            written &= ~(p.detach().isnan() & rounded.isnan())
            found.append(torch.where(written, p.to(wide.dtype), wide))
        return found

    def follow(self) -> None:
        """Let the wide weights take over what the user wrote into the model."""
        for wide, followed in zip(self.updated, self.followed(), strict=True) if self.is_mixed else ():
            wide.detach().copy_(followed)

    def exchange(self, optimizer: Any, mode: str) -> None:
        self.follow()
        getattr(optimizer, mode)()
        for p, wide in zip(self.parameters, self.updated, strict=True) if self.is_mixed else ():
            p.data.copy_(wide.detach())

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self.follow()
        if self.rounding is not None:
            self._round(optimizer, scaler)
            return
        if self.is_mixed:
            for wide, held in zip(self.updated, self.held, strict=True):
                wide.grad = None if held.grad is None else held.grad.to(wide.dtype)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
        if self.is_mixed:
            for p, wide in zip(self.parameters, self.updated, strict=True):
                if wide.grad is not None:
                    p.data.copy_(wide.detach())

    def _round(self, optimizer: Any, scaler: torch.amp.GradScaler | None) -> None:
        gradients = {wide: held.grad for wide, held in zip(self.updated, self.held, strict=True)}
        own_step = optimizer.step

        def step() -> None:
            optimizer.step = own_step
            if hasattr(optimizer, "round"):  # which has several classes
                optimizer.round(self.rounding, gradients)
            else:
                self.rounding.step(optimizer, gradients)

        if scaler is None:
            step()
        else:
            optimizer.step = step
            scaler.step(optimizer)
            optimizer.step = own_step
        for p, wide in zip(self.parameters, self.updated, strict=True):
            if wide is not p and gradients[wide] is not None:
                p.data.copy_(wide.detach())

    def show(self, gradients: Sequence[Tensor | None]) -> None:
        for held, gradient in zip(self.held, gradients, strict=True):
            held.grad = gradient
