"""Casts of mixed precision other than those of parameters: a module's buffers, and the inputs of its forward."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core.parameter_specs import FLOATS, is_laid_out
from ..runtime.compiled_calls import untraced


def cast(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Cast tensors in place: each keeps its identity. Tensors that no layout can hold stay as they are."""
    for tensor in tensors:
        if is_laid_out(tensor) and tensor.dtype is not dtype:
            tensor.data = tensor.detach().to(dtype)


class Owner(Protocol):
    """The object for which an `InputCast` works."""

    @property
    def superseded(self) -> bool: ...

    def cast_problem(self) -> str | None:
        """Return an error's text if the model itself was cast since the owner was built, else None."""


class InputCast:
    """A forward-pre hook that casts the floating-point inputs of a module, before any other hook.

    It does nothing once its owner is gone or superseded. A copy of the module has one without an owner, so that it
    computes in the same dtype.
    """

    def __init__(self, dtype: torch.dtype, owner: Owner | None = None) -> None:
        self._dtype, self._owner = dtype, None if owner is None else weakref.ref(owner)

    @untraced
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._is_over():
            return args, kwargs
        owner = None if self._owner is None else self._owner()
        problem = None if owner is None else owner.cast_problem()
        if problem is not None:
            raise RuntimeError(problem)
        dtype = self._dtype
        return tuple(_cast(arg, dtype) for arg in args), {key: _cast(value, dtype) for key, value in kwargs.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return InputCast, (self._dtype,)

    def _is_over(self) -> bool:
        owner = None if self._owner is None else self._owner()
        return self._owner is not None and (owner is None or owner.superseded)

    @staticmethod
    def remove(module: nn.Module, owner: Owner) -> None:
        """Remove the module's hooks of this owner, and those whose owner is gone or superseded."""
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, InputCast) and (hook._is_over() or (hook._owner and hook._owner() is owner)):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)

    @classmethod
    def put(cls, module: nn.Module, dtype: torch.dtype, owner: Owner) -> None:
        cls.remove(module, owner)
        module.register_forward_pre_hook(cls(dtype, owner), prepend=True, with_kwargs=True)


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
