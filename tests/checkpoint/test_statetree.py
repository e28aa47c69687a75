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


def exact(value: Any) -> tuple[Any, ...]:
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
    return parse_json(json.dumps(value, allow_nan=False).encode(), "tree")


def round_trip(value: Any) -> Any:
    tree, tensors = encode(value, "state")
    written = {name: (as_bytes(t.contiguous()).clone(), t.dtype, t.shape) for name, t in tensors.items()}
    return decode(through_json(tree), {n: data.view(dtype).view(shape) for n, (data, dtype, shape) in written.items()})


def assert_survives(value: Any) -> None:
    assert exact(round_trip(value)) == exact(value)
    assert exact(decode(through_json(encode_inline(value, "state")), {})) == exact(value)


NUMBERS = [0, -1, 2**63, -(2**64), 10**4000, 0.1, -0.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324]
(SIGNALLING,) = struct.unpack(">d", bytes.fromhex("7ff0000000000001"))
BYTES = torch.arange(250, 250 + 48).to(torch.uint8)
MADE = {name: (BYTES % 2 == 1 if dtype is torch.bool else BYTES.view(dtype)) for name, dtype in DTYPES.items()}
ARRAYS = [tensor.numpy() for name, tensor in MADE.items() if name != "BF16" and not name.startswith("F8")]
VALUES: dict[str, Any] = {
    "plain": [None, True, False, *NUMBERS, SIGNALLING, "", "ä\0", b"", b"\xff\0"],
    "": [(), [], {}, (1, [(2,)]), [[[]]], OrderedDict(), Counter()],
    "$": {"$": 1, "$tensor": "a", "$dict": [], "a.b": {"": 0}, "$tuple": []},
    "keys": {1: 2, "1": 3, None: {4: 5}, False: 6, -(2**70): 7},
    "ordered": OrderedDict(b=1, a=OrderedDict({2: torch.ones(2), "x": []})),
    "counted": Counter({"a": 3, 4: 2**65}),
    "tensors": [each[:1] for each in MADE.values()] + list(MADE.values()),
    "scalars": [each[0] for each in MADE.values()],
    "shapes": [torch.empty(0, 3), torch.arange(6.0).view(2, 3).t(), torch.arange(6.0)[2:], torch.ones(2, 1, 3)],
    "arrays": [*ARRAYS, *(array[::-1] for array in ARRAYS), *(array[:0] for array in ARRAYS)],
    "of NumPy": [array[0] for array in ARRAYS],
}


def test_a_value_comes_back_with_its_types_its_order_and_its_bits() -> None:
    """States have their large tensors beside the JSON."""
    assert_survives(VALUES)
    for value in VALUES.values():
        assert_survives(value)
    states = {f"state of {name}": value for name, value in VALUES.items()} | {
        "one": torch.ones(1),
        "all": torch.ones(3),
    }
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
