"""Mixed precision: narrow numbers to compute with and to send, wide ones to add up in and to update.

Knows: which dtype is for what, the wide weights beside the narrow ones, what else of a module is cast. Does not know:
gradients, ranks, or when a step is.

    master weight (its owner) --- cast ---> parameter --- forward, backward ---> gradient         param_dtype
          ^                                                                         | contribution   reduce_dtype
          +------------ update <--- clip <--- divide <--- sum (its owner) <---------+ fold           accumulate_dtype
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core.bits import INTEGERS, same_bits, seen_at_once
from ..core.layout import Dtypes
from ..core.parameter_specs import FLOATS, is_laid_out

_BLOCK = 1 << 16  # elements that stay in the cache while they are compared


@dataclass(frozen=True)
class MixedPrecision:
    """What a model computes in, gradients travel in, and are added up in; FSDP's terms.

    The optimizer's owner of an element keeps it as a master weight, in fp32 (fp64 of an fp64 parameter).

    Args:
        param_dtype: of the parameters while the model computes; their gradients have it, too.
        reduce_dtype: of what travels to an element's owner; None: ``param_dtype``.
        accumulate_dtype: in which an owner adds up: ``reduce_dtype`` itself, or wider. 16 bits halve a gradient's
            memory, and lose what is small beside the sum.
        buffer_dtype: of the module's floating-point buffers; None: they keep theirs.
        cast_forward_inputs: cast the floating-point tensors that the module is called with to ``param_dtype``.

    Raises:
        TypeError: a dtype is not fp32, bf16 or fp16 (buffers: nor fp64).
        ValueError: ``accumulate_dtype`` is neither ``reduce_dtype`` nor wider.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype = torch.float32
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("param_dtype", FLOATS[1:]),
            ("reduce_dtype", (None, *FLOATS[1:])),
            ("accumulate_dtype", FLOATS[1:]),
            ("buffer_dtype", (None, *FLOATS)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise TypeError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}")
        wider = self.accumulate_dtype.itemsize > self.travel.itemsize
        if self.accumulate_dtype is not self.travel and not wider:
            raise ValueError(
                f"accumulate_dtype {self.accumulate_dtype} is not wider than what travels, {self.travel}, and not the "
                "same: a sum would lose more than its parts; set reduce_dtype, too"
            )

    @property
    def travel(self) -> torch.dtype:
        """What contributions travel in."""
        return self.param_dtype if self.reduce_dtype is None else self.reduce_dtype

    def of(self, dtype: torch.dtype) -> Dtypes:
        """The dtypes of a parameter that the user made in ``dtype`` and the optimizer updates."""
        master = dtype if dtype.itemsize >= 4 else torch.float32
        return Dtypes(self.param_dtype, self.travel, self.accumulate_dtype, master)

    def unlisted(self, _: torch.dtype) -> Dtypes:
        """The dtypes of a parameter that the optimizer does not update."""
        return Dtypes.all(self.param_dtype)


class Master:
    """The weights of one interval in the master's dtype, on a rank that updates them, 1-D; the model computes with the
    interval itself.

    They follow the model: an element that is not its master weight, rounded, was written from outside (an edit, a
    loaded checkpoint), and is the weight from then on.
    """

    def __init__(
        self, narrow: Tensor, dtype: torch.dtype, wide: Tensor | None, empty: Callable[[], Tensor] | None = None
    ) -> None:
        """``narrow``: the interval; ``wide``: its values, where they are known better than from it; ``empty``: the
        memory that they are kept in, each time the same, if that is not to be had anywhere."""
        self._narrow, self._dtype, self._wide, self._empty = narrow, dtype, wide, empty

    @property
    def exists(self) -> bool:
        """False of weights that were never updated: then the narrow ones say it all, and no memory is used."""
        return self._wide is not None

    @property
    def wide(self) -> Tensor:
        """The weights, made from the narrow ones where there are none yet."""
        if self._wide is None:
            self._wide = self._narrow.to(self._dtype) if self._empty is None else self._empty().copy_(self._narrow)
        return self._wide

    def followed(self) -> Tensor:
        """What `follow` would make of them, a copy."""
        if self._wide is None:
            return self._narrow.to(self._dtype)
        copied = Master(self._narrow, self._dtype, self._wide.clone())
        copied.follow()
        return copied.wide

    def follow(self) -> None:
        """Take over what was written into the narrow ones."""
        if self._wide is None:
            return
        at_once = seen_at_once(self._narrow.device)
        block = _BLOCK if at_once else max(1, self._narrow.numel())
        for begin in range(0, self._narrow.numel(), block):
            narrow, wide = self._narrow[begin : begin + block], self._wide[begin : begin + block]
            rounded = wide.to(narrow.dtype)
            if at_once and same_bits(rounded, narrow):
                continue
            as_integers = INTEGERS[narrow.itemsize]
            written = rounded.view(as_integers) != narrow.view(as_integers)
            written &= ~(rounded.isnan() & narrow.isnan())  # which NaN a cast makes depends on the place in a tensor
            wide.copy_(torch.where(written, narrow.to(wide.dtype), wide))

    def forget(self) -> None:
        """From now on the narrow ones say it all."""
        self._wide = None

    def cast(self, begin: int, end: int) -> None:
        """Round these weights, which were updated, to what the model computes with."""
        self._narrow[begin:end].copy_(self.wide[begin:end])


def cast(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Cast what could be laid out in place: each tensor keeps its identity."""
    for tensor in tensors:
        if is_laid_out(tensor) and tensor.dtype is not dtype:
            tensor.data = tensor.detach().to(dtype)


class Owner(Protocol):
    """For whom inputs are cast."""

    @property
    def superseded(self) -> bool: ...

    def cast_problem(self) -> str | None:
        """What is wrong where the model itself was cast since."""


class InputCast:
    """Casts the floating-point tensors that a module is called with, before any other hook, as long as its owner lives
    and was not superseded. A copy of the module has one without an owner: it computes in the same dtype."""

    def __init__(self, dtype: torch.dtype, owner: Owner | None = None) -> None:
        self._dtype, self._owner = dtype, None if owner is None else weakref.ref(owner)

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
        """Take away what casts a module's inputs for this owner, or for one that is gone or superseded."""
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, InputCast) and (hook._is_over() or (hook._owner and hook._owner() is owner)):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)

    @classmethod
    def put(cls, module: nn.Module, dtype: torch.dtype, owner: Owner) -> None:
        cls.remove(module, owner)
        module.register_forward_pre_hook(cls(dtype, owner), prepend=True, with_kwargs=True)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors cast: alone, or in sequences, mappings and dataclasses."""
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
