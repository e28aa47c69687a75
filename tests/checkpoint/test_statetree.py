"""Nested values become JSON and tensors, and the same values again: types, order and bits. Code never does."""

from __future__ import annotations

import json
import math
import random
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

from zero.checkpoint.format.tensorfile import METADATA, parse_json
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
from ..support.plain import bits

MORE = settings(max_examples=10 * settings().max_examples)
NUMPY_DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64"),
]


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


def round_trip(value: Any) -> Any:
    tree, tensors = encode(value, "state")
    written = {name: (as_bytes(t.contiguous()).clone(), t.dtype, t.shape) for name, t in tensors.items()}
    return decode(through_json(tree), {n: data.view(dtype).view(shape) for n, (data, dtype, shape) in written.items()})


def assert_survives(value: Any) -> None:
    assert difference(round_trip(value), value) is None, difference(round_trip(value), value)


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


@given(values)
@MORE
def test_a_value_comes_back_with_its_types_its_order_and_its_bits(value: Any) -> None:
    assert_survives(value)
    assert_survives({"a": value})


@given(values)
@MORE
def test_a_value_survives_inside_the_json(value: Any) -> None:
    assert difference(decode(through_json(encode_inline(value, "state")), {}), value) is None


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


def test_a_tensor_inside_a_state_takes_no_name_of_another_one() -> None:
    array = np.arange(4.0)
    found, tensors = encode_states({"m": array}, "state", taken=["step"])
    assert np.array_equal(decode_states(through_json(found), tensors)["m"], array)
    with pytest.raises(TypeError, match=r"a state of the name 'm\.0', and a tensor of this name inside"):
        encode_states({"m": [torch.ones(3)]}, "state", taken=["m.0"])


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ({"$a": 1}, "a state whose name is no text, or begins with"),
        ({"a": [torch.ones(2)], "a.0": torch.ones(2)}, "a state of the name 'a.0', and a tensor of this name inside"),
    ],
)
def test_states_that_could_not_be_told_apart_are_refused(states: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        encode_states(states, "state")


@pytest.mark.parametrize(
    "data",
    [
        "7ff8000000000000",
        "fff8000000000000",
        "7ff0000000000001",
        "fff8dead00000001",
        "7ff0000000000000",
        "8000000000000000",
    ],
)
def test_a_float_keeps_its_bits(data: str) -> None:
    value = struct.unpack(">d", bytes.fromhex(data))[0]
    assert struct.pack(">d", round_trip(value)).hex() == data


@pytest.mark.parametrize(
    "values", [[0.5], (1, None, 0.25), [True, -0.0], (7,)], ids=["floats", "numbers", "floats and flags", "indices"]
)
@pytest.mark.by_default
def test_a_list_of_numbers_is_encoded_without_a_call_for_each_of_them(values: Any) -> None:
    """A list of losses or indices may be long, and a save encodes it while training waits."""

    def calls_for(value: Any) -> int:
        found = 0

        def count(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal found
            found += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            encode({"history": value}, "state")
        finally:
            sys.setprofile(before)
        return found

    assert 0 < calls_for(values * 1000) == calls_for(values * 2)
    assert_survives(values * 3)


def test_an_empty_tensor_may_have_any_strides() -> None:
    """NumPy gives an empty array of one dimension stride 0, for instance when it is reversed."""
    for value in (np.empty(0)[::-1], torch.empty(0).as_strided((0,), (0,)), torch.empty(0).as_strided((0, 3), (1, 7))):
        assert_survives([value])
        assert difference(decode(through_json(encode_inline([value], "state")), {}), [value]) is None


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


def test_a_small_tensor_can_stand_inside_the_json() -> None:
    expected = {"$inline": {"dtype": "BF16", "shape": [], "data": "gD8="}}
    assert encode_inline(torch.tensor(1.0, dtype=torch.bfloat16), "lr") == expected
    assert encode_inline([np.float32(1)], "lr") == [
        {"$scalar": {"$inline": {"dtype": "F32", "shape": [], "data": "AACAPw=="}}}
    ]


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


def test_tensors_of_equal_paths_keep_apart() -> None:
    value = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1), "b_": torch.ones(2)}, METADATA: torch.ones(3)}
    _, tensors = encode(value, "state")
    assert len(tensors) == 4
    assert METADATA not in tensors  # no tensor of a file may have this name
    assert_survives(value)


def test_a_parameter_comes_back_as_a_tensor_and_the_tensors_share_memory_until_they_are_copied() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3))
    _, tensors = encode({"a": parameter, "b": parameter.t()}, "state")
    assert tensors["a"].data_ptr() == parameter.data_ptr()
    found = round_trip([parameter, parameter.t(), parameter[:, 1]])
    assert difference(found, [parameter.detach(), parameter.detach().t(), parameter.detach()[:, 1]]) is None


def test_conjugated_and_negated_views_have_their_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert difference(round_trip([value.conj(), value.conj().imag]), [value.conj().resolve_conj(), -value.imag]) is None


# -- what programs save ------------------------------------------------------------------------------------------------

Scheduler = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2, 2]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 10)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_a_scheduler_survives_and_goes_on(name: str) -> None:
    def build() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def step(optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
        optimizer.step()
        scheduler.step(*([0.5] if name == "ReduceLROnPlateau" else []))
        return float(optimizer.param_groups[0]["lr"])

    optimizer, scheduler = build()
    for _ in range(3):
        step(optimizer, scheduler)
    assert_survives(scheduler.state_dict())
    again, restored = build()
    restored.load_state_dict(round_trip(scheduler.state_dict()))
    again.load_state_dict(optimizer.state_dict())
    assert [step(again, restored) for _ in range(3)] == [step(optimizer, scheduler) for _ in range(3)]


def test_the_state_of_a_scaler_survives() -> None:
    assert_survives(torch.amp.GradScaler("cpu").state_dict())


def test_random_generators_go_on_where_they_were() -> None:
    states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
    drawn = (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())
    found = round_trip(states)
    assert difference(found, states) is None
    torch.set_rng_state(found["torch"])
    np.random.set_state(found["numpy"])
    random.setstate(found["random"])
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == drawn
    assert_survives(np.random.default_rng(0).bit_generator.state)


def test_the_dict_of_an_optimizer_survives() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1))
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert_survives(optimizer.state_dict())
