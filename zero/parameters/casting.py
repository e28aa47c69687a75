"""Casts of mixed precision other than those of parameters: a module's buffers, inputs and outputs."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core.parameter_specs import FLOATS, is_laid_out
from ..precision import Border
from ..runtime.compiled_calls import untraced


def cast(tensor: Tensor, dtype: torch.dtype) -> None:
    """Cast a tensor in place: it keeps its identity. One that no layout can hold stays as it is."""
    if is_laid_out(tensor) and tensor.dtype is not dtype:
        tensor.data = tensor.detach().to(dtype)


class Owner(Protocol):
    """The object for which tensors are cast at borders."""

    @property
    def superseded(self) -> bool: ...

    def cast_problem(self) -> str | None:
        """Return an error's text if the model itself was cast since the owner was built, else None."""


class BorderCast:
    """A hook that casts the floating-point tensors that enter or leave a module.

    It does nothing once its owner is gone or superseded. A copy of the module has one without an owner, so that it
    computes in the same dtypes. A compiler traces it, but not whether there is an owner.
    """

    def __init__(self, dtype: torch.dtype, owner: Owner | None = None) -> None:
        self._dtype, self._owner = dtype, None if owner is None else weakref.ref(owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._dtype,)

    def works_for(self, owner: Owner) -> bool:
        """Return whether it is a hook of this owner, or of none any more."""
        return self._owner is not None and (self._is_over() or self._owner() is owner)

    def _is_over(self) -> bool:
        owner = None if self._owner is None else self._owner()
        return self._owner is not None and (owner is None or owner.superseded)


class InputCast(BorderCast):
    """A forward-pre hook that casts the inputs of a module, before any other hook."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.compiler.is_compiling() and self._is_over():
            return args, kwargs
        dtype = self._dtype
        return tuple(_cast(arg, dtype) for arg in args), {key: _cast(value, dtype) for key, value in kwargs.items()}


class OutermostInputCast(InputCast):
    """The same for the outermost module. It raises if the model itself was cast since its owner was built."""

    @untraced
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        owner = None if self._owner is None or self._is_over() else self._owner()
        problem = None if owner is None else owner.cast_problem()
        if problem is not None:
            raise RuntimeError(problem)
        return super().__call__(module, args, kwargs)


class OutputCast(BorderCast):
    """A forward hook that casts the outputs of a module, before any other hook."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not torch.compiler.is_compiling() and self._is_over():
            return output
        return _cast(output, self._dtype)


def put_casts(border: Border, owner: Owner | None) -> None:
    """Let a module cast what enters and leaves it. ``owner``: None if it does so for good."""
    module, precision = border.module, border.precision
    if precision.cast_forward_inputs and precision.param_dtype is not None:
        kind = InputCast if border.name else OutermostInputCast
        nn.Module.register_forward_pre_hook(module, kind(precision.param_dtype, owner), prepend=True, with_kwargs=True)
    if precision.output_dtype is not None:
        nn.Module.register_forward_hook(module, OutputCast(precision.output_dtype, owner), prepend=True)


def remove_casts(module: nn.Module, owner: Owner) -> None:
    """Remove the hooks of this owner from all modules, and those whose owner is gone or superseded."""
    for part in module.modules():
        hooks: list[tuple[int, Any]] = [*part._forward_pre_hooks.items(), *part._forward_hooks.items()]
        for key, hook in hooks:
            if isinstance(hook, BorderCast) and hook.works_for(owner):
                part._forward_pre_hooks.pop(key, None)
                part._forward_pre_hooks_with_kwargs.pop(key, None)
                part._forward_hooks.pop(key, None)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating-point tensors cast, also those in sequences, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in FLOATS and value.dtype is not dtype else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)
        for key, item in value.items():
            changed[key] = _cast(item, dtype)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _cast(getattr(value, name), dtype) for name in names})
    return value
