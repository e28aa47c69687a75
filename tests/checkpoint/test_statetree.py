"""Nested values become JSON and tensors, and the same values again: types, order and bits. Code never does."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

from zero.checkpoint.format.tensorfile import METADATA
from zero.core.bits import as_bytes
from zero.core.statetree import (
    DTYPES,
    decode,
    decode_states,
    encode,
    encode_inline,
    encode_states,
    kinds_in,
    rebuilt,
)
from zero.step.equality import same

from ..support.blockwise import BLOCK, Blocks
from .values import difference, through_json

MORE = settings(max_examples=5 * settings().max_examples)
NUMPY_DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64"),
]


def round_trip(value: Any) -> Any:
    tree, tensors = encode(value, "state")
    written = {name: (as_bytes(t.contiguous()).clone(), t.dtype, t.shape) for name, t in tensors.items()}
    return decode(through_json(tree), {n: data.view(dtype).view(shape) for n, (data, dtype, shape) in written.items()})


def assert_survives(value: Any) -> None:
    """Assert that a value comes back from a file and from inside the JSON."""
    assert difference(round_trip(value), value) is None
    assert difference(decode(through_json(encode_inline(value, "state")), {}), value) is None


def from_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
    """Return the 1-D tensor of these bytes, which may be any."""
    if dtype is torch.bool:
        return torch.tensor([byte % 2 == 1 for byte in data], dtype=torch.bool)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype)


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    """Draw a tensor of any dtype and bits: 0-d, empty, transposed, or a part of a larger one."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    nbytes = math.prod(shape) * (1 if dtype is torch.bool else dtype.itemsize)
    made = from_bytes(draw(st.binary(min_size=nbytes, max_size=nbytes)), dtype).view(shape)
    form = draw(st.sampled_from(["plain", "transposed", "part"]))
    if form == "transposed" and len(shape) > 1:
        return made.transpose(0, -1)
    if form == "part" and shape and shape[0] > 1:
        return made[1:]
    return made


@st.composite
def any_array(draw: st.DrawFn) -> np.ndarray[Any, Any] | np.generic:
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    count = draw(st.integers(0, 4))
    size = count * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    flat = np.array([byte % 2 == 1 for byte in data]) if dtype.kind == "b" else np.frombuffer(data, dtype=dtype)
    form = draw(st.sampled_from(["1-D", "2-D", "0-d", "scalar", "reversed"]))
    if form in ("0-d", "scalar") and count:
        scalar: np.generic = flat[0]
        return scalar if form == "scalar" else np.array(scalar)
    return flat.reshape(1, count) if form == "2-D" else flat[::-1] if form == "reversed" else flat


keys = st.text(max_size=3) | st.sampled_from(["$", "$tensor", "$dict", "a.b", "a", "b", ""]) | st.integers()
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, -(2**64), 10**4000, -0.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324]),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    any_tensor(),
    any_array(),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(keys | st.none() | st.booleans(), inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=8,
)


def of_programs() -> dict[str, Any]:
    """Return states that programs save: of schedulers, a scaler, generators and an optimizer, and rare tensors."""
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1))
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
    plain = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    linear, cosine = lr_scheduler.LinearLR(plain), lr_scheduler.CosineAnnealingLR(plain, 10)
    schedulers = [
        lr_scheduler.MultiStepLR(plain, [1, 2, 2]),
        lr_scheduler.OneCycleLR(plain, 0.1, total_steps=10),
        lr_scheduler.SequentialLR(plain, [linear, cosine], [2]),
        lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(plain, 0.9)]),
        lr_scheduler.ReduceLROnPlateau(plain),
        lr_scheduler.LambdaLR(plain, lambda step: 0.9**step),
        lr_scheduler.CyclicLR(plain, 0.1, 0.2),
    ]
    nans = ["7ff8000000000000", "fff8000000000000", "7ff0000000000001", "fff8dead00000001", "8000000000000000"]
    return {
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "generators": [torch.get_rng_state(), np.random.get_state(), random.getstate()],
        "bit_generator": np.random.default_rng(0).bit_generator.state,
        "optimizer": optimizer.state_dict(),
        "floats": [struct.unpack(">d", bytes.fromhex(data))[0] for data in nans],
        "no elements": [np.empty(0)[::-1], torch.empty(0).as_strided((0, 3), (1, 7))],
        "equal paths": {"a.b": torch.zeros(1), "a": {"b": torch.ones(1), "b_": torch.ones(2)}, METADATA: torch.ones(3)},
    }


@pytest.mark.parametrize("of", of_programs())
def test_what_programs_save_survives(of: str) -> None:
    value = of_programs()[of]
    assert_survives(value)


@given(values)
@MORE
def test_a_value_comes_back_with_its_types_its_order_and_its_bits(value: Any) -> None:
    assert_survives({"a": value})


names = st.text(max_size=3).filter(lambda name: not name.startswith("$"))


@given(st.dictionaries(names, values, max_size=3))
@MORE
def test_states_survive_with_their_large_tensors_beside_the_json(states: dict[str, Any]) -> None:
    found, tensors = encode_states(states, "state")
    back = decode_states(through_json(found), tensors)
    assert difference(dict(sorted(back.items())), dict(sorted(states.items()))) is None
    assert all(isinstance(states.get(name), Tensor) or tensor.numel() > 1 for name, tensor in tensors.items())
    assert small_ones(found)


def small_ones(tree: Any) -> bool:
    """Return whether no tensor inside the JSON has more than one element."""
    if isinstance(tree, dict) and "$inline" in tree:
        return math.prod(tree["$inline"]["shape"]) <= 1
    return all(map(small_ones, tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([None, True, 1, 0.5, -0.0, "a"], [None, True, 1, 0.5, -0.0, "a"]),
        ({"a": {"b": []}}, {"a": {"b": []}}),
        ([1, 0.5, math.nan, None, False], [1, 0.5, {"$float": "nan"}, None, False]),
        (math.nan, {"$float": "nan"}),
        (-math.inf, {"$float": "-inf"}),
        (b"\0\1", {"$bytes": "AAE="}),
        ((0.9, 0.999), {"$tuple": [0.9, 0.999]}),
        ({1: "a", None: "b"}, {"$dict": [[1, "a"], [None, "b"]]}),
        ({"$a": 1}, {"$dict": [["$a", 1]]}),
        (Counter([3, 3]), {"$Counter": [[3, 2]]}),
        (OrderedDict(a=1), {"$OrderedDict": [["a", 1]]}),
        ({"a": {"b": torch.ones(1)}}, {"a": {"b": {"$tensor": "a.b"}}}),
        ([np.ones(1), np.float64(1)], [{"$array": "0"}, {"$scalar": "1"}]),
        (torch.ones(1), {"$tensor": "value"}),
    ],
)
def test_the_form_of_a_value_is_that_of_the_format(value: Any, expected: Any) -> None:
    tree, _ = encode(value, "state")
    assert json.dumps(tree) == json.dumps(expected)


def test_tensors_of_equal_paths_keep_apart_and_small_ones_can_stand_inside() -> None:
    _, tensors = encode(of_programs()["equal paths"], "state")
    assert len(tensors) == 4
    assert METADATA not in tensors  # no tensor of a file may have this name
    inline = {"dtype": "BF16", "shape": [], "data": "gD8="}
    assert encode_inline([torch.tensor(1.0, dtype=torch.bfloat16)], "lr") == [{"$inline": inline}]
    array = np.arange(4.0)
    found, tensors = encode_states({"m": array}, "state", taken=["step"])
    assert np.array_equal(decode_states(through_json(found), tensors)["m"], array)


def test_a_tensor_subclass_is_rebuilt_by_its_class_from_what_it_wraps() -> None:
    """Also one whose tensors are subclasses, inside a list."""
    values = torch.arange(2.0 * BLOCK).view(2, BLOCK)
    one = Blocks.of(values, signed=False)
    nested = Blocks(one, torch.ones(2), True, values.shape, torch.float64)
    states = {"a": one, "list": [nested, torch.ones(2)], "small": torch.ones(1)}
    encoded, tensors = encode_states(states, "state")
    assert tensors.keys() == {
        "a.codes",
        "a.scale",
        "list.0.codes.codes",
        "list.0.codes.scale",
        "list.0.scale",
        "list.1",
        "small",
    }
    found = decode_states(through_json(encoded), tensors, kinds_in(states))
    assert same(states, {key: found[key] for key in states})
    assert same(states["a"], rebuilt(one, torch.clone))


def test_tensors_share_memory_with_parameters_and_views_have_their_values() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3))
    _, tensors = encode({"a": parameter, "b": parameter.t()}, "state")
    assert tensors["a"].data_ptr() == parameter.data_ptr()
    found = round_trip([parameter, parameter.t(), parameter[:, 1]])
    assert difference(found, [parameter.detach(), parameter.detach().t(), parameter.detach()[:, 1]]) is None
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert difference(round_trip([value.conj(), value.conj().imag]), [value.conj().resolve_conj(), -value.imag]) is None
