"""Values that cannot be saved are named by their place; JSON that no value has made is a format error."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zero.core.statetree import FormatError, decode, encode, encode_inline, encode_states, kinds_in

from ..support.blockwise import BLOCK, Blocks
from .values import difference, through_json

MORE = settings(max_examples=5 * settings().max_examples)

# -- what cannot be saved ----------------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Level(IntEnum):
    LOW = 1


class Own:
    pass


class OwnTensor(Tensor):
    pass


def a_cycle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


REFUSED: dict[str, tuple[Any, str]] = {
    "a lambda": (lambda: 0, "is a function"),
    "a function": (a_cycle, "is a function"),
    "a class": (Own, "is a class"),
    "an object": (Own(), "is a Own"),
    "a set": ({1}, "is a set"),
    "a named tuple": (Point(1, 2), "is a Point"),
    "a size": (torch.ones(2).shape, "is a Size"),
    "an enum": (Level.LOW, "is a Level"),
    "a complex number": (1j, "is a complex"),
    "a default dict": (defaultdict(list), "is a defaultdict"),
    "a sparse tensor": (torch.ones(2).to_sparse(), r"is a Tensor of torch\.float32, torch\.sparse_coo"),
    "a tensor of a class of its own": (torch.ones(2).as_subclass(OwnTensor), "is a OwnTensor"),
    "a tensor without memory": (
        torch.ones(2, device="meta"),
        r"is a Tensor of torch\.float32, torch\.strided, on meta",
    ),
    "a tensor of complex128": (torch.ones(2, dtype=torch.complex128), r"is a Tensor of torch\.complex128"),
    "objects in an array": (np.array([Own()]), "is a NumPy value of dtype"),
    "text in an array": (np.array(["a"]), "is a NumPy value of dtype"),
    "dates in an array": (np.array(["2026-01-01"], dtype="datetime64[D]"), "is a NumPy value of dtype"),
    "a text of NumPy": (np.str_("a"), "is a NumPy value of dtype"),
    "another order of bytes": (np.ones(2, dtype=">f4"), r"is a NumPy value of dtype\('>f4'\)"),
    "an array with a mask": (np.ma.array([1, 2], mask=[False, True]), "is a MaskedArray"),
    "a lone surrogate": ("\ud800", "is text that is no Unicode"),
    "a number of 5,000 digits": (10**5000, "is a number of 16,610 bits"),
    "a key that is a float": ({0.5: 1}, r"has the key 0\.5 \(float\)"),
    "a key that is a tuple": ({(1, 2): 1}, r"has the key \(1, 2\) \(tuple\)"),
    "a key of NumPy": ({np.int64(1): 1}, r"has the key .*1.* \(int64\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved_is_an_error_that_names_its_place(what: str) -> None:
    value, why = REFUSED[what]
    for state, place in (
        ({"scheduler": {"lr_lambdas": [value]}}, r"state\['scheduler'\]\['lr_lambdas'\]\[0\] "),
        ((1, {2: value}), r"state\[1\]\[2\] "),
        ([1, 0.5, value], r"state\[2\] "),
        (OrderedDict(a={"$": value}), r"state\['a'\]\['\$'\] "),
    ):
        with pytest.raises(TypeError, match=f"^{place}{why}"):
            encode(state, "state")
        with pytest.raises(TypeError, match=f"^{place}{why}"):
            encode_inline(state, "state")


REFUSED_STATES: list[tuple[dict[str, Any], str]] = [
    ({"$a": 1}, "a state whose name is no text, or begins with"),
    ({"a": [torch.ones(2)], "a.0": torch.ones(2)}, r"a state of the name 'a\.0', and a tensor of this name inside"),
    ({"m": [torch.ones(3)]}, r"a state of the name 'm\.0', and a tensor of this name inside"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_json_or_a_file_cannot_hold_is_refused() -> None:
    """A nested tensor's class and layout are ordinary."""
    nested = torch.nested.nested_tensor([torch.ones(1)])
    for value, why in (
        ([nested], r"^state\[0\] is a Tensor of torch\.float32"),
        ({"a": {"\ud800": 1}}, r"^a key of state\['a'\] is"),
        ({"a": {10**5000: 1}}, r"^a key of state\['a'\] is"),
        (a_cycle(), "^state is nested too deeply to be saved, or contains itself"),
    ):
        with pytest.raises(TypeError, match=why):
            encode(value, "state")
    for states, why in REFUSED_STATES:
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


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


UNREADABLE: dict[str, Any] = {
    "an unknown tag": {"$set": [1]},
    "no tag": {"$": 1},
    "a tag of a type": {"$type": "os.system"},
    "a tag beside another key": {"$tuple": [], "a": 1},
    "a float that is none": {"$float": "one"},
    "a float of 16 letters": {"$float": "zzzzzzzzzzzzzzzz"},
    "bytes that are none": {"$bytes": "A"},
    "bytes with a letter too many": {"$bytes": "AAE=!"},
    "a tuple of text": {"$tuple": "abc"},
    "a dict of numbers": {"$dict": [1]},
    "a dict of three": {"$dict": [[1, 2, 3]]},
    "a dict with a list as key": {"$dict": [[[], 1]]},
    "a counter of null": {"$Counter": None},
    "a tensor that is missing": {"$tensor": "b"},
    "a tensor that is a list": {"$tensor": ["a"]},
    "an array that is missing": {"$array": "b"},
    "an array of bf16": {"$array": "bf16"},
    "a scalar of text": {"$scalar": {"a": 1}},
    "inline: null": {"$inline": None},
    "inline: nothing": {"$inline": {}},
    "inline: another dtype": {"$inline": {**ONE, "dtype": "F99"}},
    "inline: a dtype of a list": {"$inline": {**ONE, "dtype": []}},
    "inline: another shape": {"$inline": {**ONE, "shape": [2]}},
    "inline: a shape to be guessed": {"$inline": {**ONE, "shape": [-1]}},
    "inline: a large shape": {"$inline": {**ONE, "shape": [2**70]}},
    "inline: half an element": {"$inline": {**ONE, "data": "AAA="}},
    "inline: data of null": {"$inline": {**ONE, "data": None}},
    "a size of text": {"$size": ["a"]},
    "another dtype": {"$dtype": "F99"},
    "a dtype of a list": {"$dtype": []},
    "a subclass of null": {"$subclass": None},
    "a subclass without a class": {"$subclass": {"parts": {}}},
    "a subclass of a list": {"$subclass": {**SUBCLASS, "class": []}},
    "another subclass": {"$subclass": {**SUBCLASS, "class": "os.system"}},
    "a subclass without parts": {"$subclass": {"class": SUBCLASS["class"]}},
    "a subclass with other parts": {"$subclass": {**SUBCLASS, "parts": {"codes": 1}}},
    "a subclass with other facts": {"$subclass": {**SUBCLASS, "facts": None}},
    "a subclass of another shape": {"$subclass": {**SUBCLASS, "shape": "a"}},
    "deep": deep(),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_encode_does_not_make_is_a_format_error(what: str) -> None:
    tensors = {"a": torch.ones(1), "bf16": torch.ones(1, dtype=torch.bfloat16)}
    for tree in (UNREADABLE[what], [{"a": UNREADABLE[what]}], {"$tuple": [UNREADABLE[what]]}):
        with pytest.raises(FormatError, match="a saved state"):
            decode(tree, tensors, kinds_in(Blocks.of(torch.zeros(BLOCK), True)))


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.just("a"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["$float", "$bytes", "$tuple", "$dict", "$Counter", "$tensor", "$array", "$scalar", "$inline"]
            ),
            inner | st.fixed_dictionaries({"dtype": inner, "shape": inner, "data": inner}),
            min_size=1,
            max_size=1,
        )
    ),
    max_leaves=6,
)


@given(any_json)
@MORE
def test_whatever_json_there_is_it_is_a_value_or_a_format_error(tree: Any) -> None:
    try:
        value = decode(tree, {"a": torch.ones(1)})
    except FormatError:
        return
    assert difference(decode(through_json(encode_inline(value, "state")), {}), value) is None
