"""The first difference of two nested values in type, order or bits."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero.checkpoint.format.tensorfile import parse_json

from ..support.plain import bits


def difference(a: Any, b: Any, place: str = "value") -> str | None:
    """Return the first place at which two values differ in type, order or bits; None if they are the same."""
    if type(a) is not type(b):
        return f"{place}: {type(a)} {type(b)}"
    if isinstance(a, dict):
        keys = [(type(key), key) for key in a] == [(type(key), key) for key in b]
        pairs = zip(a.items(), b.items(), strict=True) if keys else ()
        found = (difference(x, y, f"{place}[{key!r}]") for (key, x), (_, y) in pairs)
        return next(filter(None, found), None) if keys else f"{place}: {list(a)} {list(b)}"
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{place}: {len(a)} {len(b)}"
        parts = (difference(x, y, f"{place}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next(filter(None, parts), None)
    if isinstance(a, Tensor):
        facts = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        same = facts and (not a.numel() or torch.equal(bits(a), bits(b)))
    elif isinstance(a, (np.ndarray, np.generic)):
        same = (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    elif isinstance(a, float):
        same = struct.pack("d", a) == struct.pack("d", b)
    else:
        same = a == b
    return None if same else f"{place}: {a!r} {b!r}"


def through_json(value: Any) -> Any:
    """Return a value after it was JSON's text."""
    return parse_json(json.dumps(value, allow_nan=False).encode(), "tree")
