"""Nested values become JSON and tensors, and the same values again, bit by bit; all else is an error by its place."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zero.checkpoint.format.tensorfile import METADATA, parse_json
from zero.core.bits import as_bytes
from zero.core.statetree import (
    DTYPES,
    FormatError,
    decode,
    decode_states,
    encode,
    encode_inline,
    encode_states,
    kinds_in,
    rebuilt,
)
from zero.step.arguments import same

from ..support.blockwise import BLOCK, Blocks
from ..support.plain import bits
from ..support.rows import count

MORE = settings(max_examples=count(1, 5) * settings().max_examples)


def exact(value: Any) -> tuple[Any, ...]:
    """Return a value as tuples that are equal if types, order and bits are."""
    inner: Any = value
    if isinstance(value, dict):
        inner = [(exact(key), exact(each)) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        inner = list(map(exact, value))
    elif isinstance(value, Tensor):
        inner = value.dtype, value.shape, value.requires_grad, bits(value).tolist() if value.numel() else None
    elif isinstance(value, (np.ndarray, np.generic)):
        inner = value.dtype, value.shape, value.tobytes()
    elif isinstance(value, float):
        inner = struct.pack("d", value)
    return type(value), inner


def through_json(value: Any) -> Any:
    """Return a value after it was JSON's text."""
    return parse_json(json.dumps(value, allow_nan=False).encode(), "tree")


def round_trip(value: Any) -> Any:
    tree, tensors = encode(value, "state")
    written = {name: (as_bytes(t.contiguous()).clone(), t.dtype, t.shape) for name, t in tensors.items()}
    return decode(through_json(tree), {n: data.view(dtype).view(shape) for n, (data, dtype, shape) in written.items()})


def assert_survives(value: Any) -> None:
    """Assert that a value comes back from a file and from inside the JSON."""
    assert exact(round_trip(value)) == exact(value)
    assert exact(decode(through_json(encode_inline(value, "state")), {})) == exact(value)


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    """Draw a tensor of any dtype and bits: 0-d, empty, transposed, or a part of a larger one."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    nbytes = math.prod(shape) * dtype.itemsize
    data = torch.tensor(list(draw(st.binary(min_size=nbytes, max_size=nbytes))), dtype=torch.uint8)
    made = (data % 2 == 1 if dtype is torch.bool else data.view(dtype)).view(shape)
    form = draw(st.sampled_from(["plain", "transposed", "part"]))
    if form == "transposed" and len(shape) > 1:
        return made.transpose(0, -1)
    return made[1:] if form == "part" and shape and shape[0] > 1 else made


OF_TORCH_ALONE = {dtype for name, dtype in DTYPES.items() if name == "BF16" or name.startswith("F8")}
arrays = any_tensor().filter(lambda tensor: tensor.dtype not in OF_TORCH_ALONE).map(Tensor.numpy)
keys = st.text(max_size=3) | st.sampled_from(["$", "$tensor", "$dict", "a.b", "a", "b", ""]) | st.integers()
ODD = [None, True, False, 2**63, -(2**64), 10**4000, -0.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324]
leaves = st.one_of(
    st.sampled_from(ODD),
    st.integers(),
    st.floats(),
    st.integers(0, 2**52).map(lambda bits: struct.unpack(">d", struct.pack(">Q", 0x7FF << 52 | bits))[0]),  # any NaN
    st.text(max_size=5) | st.binary(max_size=5),
    any_tensor() | arrays,
    arrays.map(lambda array: array[..., ::-1] if array.ndim else array[()]),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys | st.none() | st.booleans(), inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=8,
)
names = st.text(max_size=3).filter(lambda name: not name.startswith("$"))


@given(values, st.dictionaries(names, values, max_size=3))
@MORE
def test_a_value_comes_back_with_its_types_its_order_and_its_bits(value: Any, states: dict[str, Any]) -> None:
    """States have their large tensors beside the JSON."""
    assert_survives({"a": value})
    found, tensors = encode_states(states, "state")
    back = decode_states(through_json(found), tensors)
    assert exact(dict(sorted(back.items()))) == exact(dict(sorted(states.items())))
    assert all(isinstance(states.get(name), Tensor) or tensor.numel() > 1 for name, tensor in tensors.items())


def test_tensors_of_equal_paths_keep_apart() -> None:
    equal = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1), "b_": torch.ones(2)}, METADATA: torch.ones(3)}
    _, tensors = encode(equal, "state")
    assert len(tensors) == 4
    assert METADATA not in tensors  # no tensor of a file may have this name
    assert_survives(equal)
    assert_survives([np.empty(0)[::-1], torch.empty(0).as_strided((0, 3), (1, 7))])


def test_a_tensor_subclass_is_rebuilt_by_its_class_from_what_it_wraps() -> None:
    """Also one whose tensors are subclasses, inside a list."""
    one = Blocks.of(torch.arange(2.0 * BLOCK).view(2, BLOCK), signed=False)
    nested = Blocks(one, torch.ones(2), True, one.shape, torch.float64)
    states = {"a": one, "list": [nested, torch.ones(2)], "small": torch.ones(1)}
    encoded, tensors = encode_states(states, "state")
    inside = {f"list.0.{name}" for name in ("codes.codes", "codes.scale", "scale")}
    assert tensors.keys() == {"a.codes", "a.scale", *inside, "list.1", "small"}
    found = decode_states(through_json(encoded), tensors, kinds_in(states))
    assert same(states, {key: found[key] for key in states})
    assert same(one, rebuilt(one, torch.clone))


# -- what cannot be saved ----------------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Level(IntEnum):
    LOW = 1


class OwnTensor(Tensor):
    pass


REFUSED: list[tuple[Any, str]] = [
    (lambda: 0, "is a function"),
    (Level, "is a class"),
    (Level.LOW, "is a Level"),
    ({1}, "is a set"),
    (Point(1, 2), "is a Point"),
    (torch.ones(2).shape, "is a Size"),
    (1j, "is a complex"),
    (defaultdict(list), "is a defaultdict"),
    (torch.ones(2).to_sparse(), r"is a Tensor of torch\.float32, torch\.sparse_coo"),
    (torch.ones(2).as_subclass(OwnTensor), "is a OwnTensor"),
    (torch.ones(2, device="meta"), r"is a Tensor of torch\.float32, torch\.strided, on meta"),
    (torch.ones(2, dtype=torch.complex128), r"is a Tensor of torch\.complex128"),
    *((value, "is a NumPy value of dtype") for value in (np.array([object()]), np.array(["a"]), np.str_("a"))),
    (np.array(["2026-01-01"], dtype="datetime64[D]"), "is a NumPy value of dtype"),
    (np.ones(2, dtype=">f4"), r"is a NumPy value of dtype\('>f4'\)"),
    (np.ma.array([1, 2], mask=[False, True]), "is a MaskedArray"),
    ("\ud800", "is text that is no Unicode"),
    (10**5000, "is a number of 16,610 bits"),
    ({math.inf: 1}, r"has the key inf \(float\): only text and finite numbers"),
    ({(1, 2): 1}, r"has the key \(1, 2\) \(tuple\)"),
    ({np.int64(1): 1}, r"has the key .*1.* \(int64\)"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_saved_is_an_error_that_names_its_place() -> None:
    for value, why in REFUSED:
        for state, place in (
            ({"scheduler": {"lr_lambdas": [value]}}, r"state\['scheduler'\]\['lr_lambdas'\]\[0\] "),
            ((1, {2: value}), r"state\[1\]\[2\] "),
            (OrderedDict(a={"$": value}), r"state\['a'\]\['\$'\] "),
        ):
            for call in (encode, encode_inline):
                with pytest.raises(TypeError, match=f"^{place}{why}"):
                    call(state, "state")
    cycle: list[Any] = []
    cycle.append(cycle)
    for value, why in (
        ([torch.nested.nested_tensor([torch.ones(1)])], r"^state\[0\] is a Tensor of torch\.float32"),
        ({"a": {"\ud800": 1}}, r"^a key of state\['a'\] is"),
        ({"a": {10**5000: 1}}, r"^a key of state\['a'\] is"),
        (cycle, "^state is nested too deeply to be saved, or contains itself"),
    ):
        with pytest.raises(TypeError, match=why):
            encode(value, "state")
    inside = r"a state of the name '{}\.0', and a tensor of this name inside"
    states: dict[str, Any]
    for states, why in (
        ({"$a": 1}, "a state whose name is no text, or begins with"),
        ({"a": [torch.ones(2)], "a.0": torch.ones(2)}, inside.format("a")),
        ({"m": [torch.ones(3)]}, inside.format("m")),
    ):
        with pytest.raises(TypeError, match=why):
            encode_states(states, "state", taken=["m.0"])


# -- what cannot be read -----------------------------------------------------------------------------------------------

ONE = {"dtype": "F32", "shape": [1], "data": "AACAPw=="}
SUBCLASS: dict[str, Any] = {
    "class": "tests.support.blockwise.Blocks",
    "parts": {"codes": {"$tensor": "a"}, "scale": {"$tensor": "a"}},
    "facts": {"$tuple": [True, {"$size": [1]}, {"as": {"$dtype": "F32"}}]},
    "shape": [1],
    "stride": [1],
}
TENSORS = {"a": torch.ones(1), "bf16": torch.ones(1, dtype=torch.bfloat16)}
WRONG: dict[str, list[Any]] = {
    "set": [[1]],
    "float": ["one", "zzzzzzzzzzzzzzzz"],
    "bytes": ["A", "AAE=!"],
    "tuple": ["abc"],
    "dict": [[1], [[1, 2, 3]], [[[], 1]]],
    "Counter": [None],
    "tensor": ["b", ["a"]],
    "array": ["b", "bf16"],
    "scalar": [{"a": 1}],
    "inline": [
        *(None, {}, {**ONE, "dtype": "F99"}, {**ONE, "dtype": []}, {**ONE, "data": "AAA="}, {**ONE, "data": None}),
        *({**ONE, "shape": shape} for shape in ([2], [-1], [2**70])),
    ],
    "size": [["a"]],
    "dtype": ["F99", []],
    "subclass": [
        *(None, {"parts": {}}, {"class": SUBCLASS["class"]}, {**SUBCLASS, "class": []}),
        *({**SUBCLASS, "class": "os.system"}, {**SUBCLASS, "parts": {"codes": 1}}),
        *({**SUBCLASS, "facts": None}, {**SUBCLASS, "shape": "a"}),
    ],
}


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


def test_what_encode_does_not_make_is_a_format_error() -> None:
    kinds = kinds_in(Blocks.of(torch.zeros(BLOCK), True))
    wrong = [{f"${tag}": inner} for tag, each in WRONG.items() for inner in each]
    for unreadable in (*wrong, {"$tuple": [], "a": 1}, deep()):
        for tree in (unreadable, [{"a": unreadable}], {"$tuple": [unreadable]}):
            with pytest.raises(FormatError, match="a saved state"):
                decode(tree, TENSORS, kinds)
