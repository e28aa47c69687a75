"""What Hypothesis draws for the tests of the geometry: descriptions of parameters, numbers of ranks and caps."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from hypothesis import strategies as st

from zero.core.layout import Dtypes, ParameterSpec

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
PLAIN = [Dtypes.all(dtype) for dtype in (FP64, FP32, BF16)]
MIXED = [Dtypes(BF16, BF16, FP32, FP32), Dtypes(FP16, FP32, FP32, FP32)]
SHAPES = [
    *[(), (1,), (0, 3), (16,), (17,), (7, 13), (4, 4, 4), (127,), (8191,)],
    *[(2**31 + 5,), (3, 2**31 + 11), (2**31, 2**29 + 1)],
]
UNLIMITED = 2**80
BOUNDARIES = {"cpu": 64, "cuda:0": 512, "xpu:1": 512}  # of slots, in bytes, by device


def spec(
    name: str = "weight",
    shape: tuple[int, ...] = (5,),
    dtypes: Dtypes = PLAIN[1],
    trainable: bool = True,
    **fields: Any,
) -> ParameterSpec:
    """Return the spec of a parameter in contiguous memory."""
    stride = tuple(math.prod([max(1, size) for size in shape[i + 1 :]]) for i in range(len(shape)))
    given_ = {"names": (name,), "stride": stride, "device": "cpu", "group": 0, "index": 0, **fields}
    return ParameterSpec(shape=shape, dtypes=dtypes, trainable=trainable, **given_)


def padded(parameter: ParameterSpec) -> int:
    """Return the elements of a parameter's slot with its padding, from the definition."""
    count, boundary = parameter.numel, BOUNDARIES[parameter.device]
    while count < parameter.numel + boundary:
        if all(count * d.itemsize % boundary == 0 for d in dataclasses.astuple(parameter.dtypes)):
            return count
        count += 1
    raise AssertionError(f"no multiple within {boundary} bytes")


def _spec(number: int, drawn: tuple[tuple[int, ...], Dtypes, bool, int, int], device: str) -> ParameterSpec:
    shape, dtypes, trainable, group, unit = drawn
    return spec(f"p{number}", shape, dtypes, trainable, group=group, unit=unit, index=number, device=device)


_one_parameter = st.tuples(
    st.sampled_from(SHAPES) | st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.sampled_from(PLAIN + MIXED),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 3),
)
lists_with_units = st.tuples(st.lists(_one_parameter, max_size=12), st.sampled_from([*BOUNDARIES])).map(
    lambda drawn: [_spec(number, one, drawn[1]) for number, one in enumerate(drawn[0])]
)
world_sizes = st.integers(1, 8)
bucket_sizes = st.sampled_from([1, 63, 64, 65, 1000, 4096, 2**20, 2**33, UNLIMITED]) | st.integers(1, 3000)
