"""Whether the states and options of two throw-away parameters are equal, bit by bit.

Knows: tensors, and the lists, tuples and dicts that hold them. Does not know: which of them are compared.
"""

from __future__ import annotations

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
