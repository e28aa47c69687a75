"""Headers and indices of safetensors files: safetensors reads what is written here, and both readers take the same."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import safetensors

from zero.checkpoint.format.tensorfile import (
    LONGEST_HEADER,
    PAGE,
    Header,
    TensorEntry,
    header_bytes,
    header_length,
    index_bytes,
    parse_header,
    parse_index,
)
from zero.core.statetree import FormatError

STRICTER = {
    "a name occurs twice in one object": r"its header has '.*' twice",
    "the header does not begin with '{'": r"its header is not a JSON object",
    "an entry has a further field, or is no object": r"is not a JSON object of dtype, shape and data_offsets",
    "the dtype's name is inside an object, or torch has no such dtype": r"has dtype .*, which cannot be read here",
    "more elements than memory can have, beside a dimension of 0": r"which no tensor has|whole numbers from 0 on",
}
"""What this library refuses, although safetensors' own reader takes it, and the error that says so."""


def with_header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def ours(file: bytes) -> Header:
    length = header_length(file[:8], len(file))
    return parse_header(file[8 : 8 + length], len(file))


def assert_both_agree(file: bytes) -> str:
    """Assert that both readers refuse a file, or find the same in it, but for `STRICTER`. Return our error."""
    try:
        expected: dict[str, Any] | None = dict(safetensors.deserialize(file))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        expected = None
    try:
        found = ours(file)
    except FormatError as error:
        known = [name for name, words in STRICTER.items() if re.search(words, str(error))]
        return "both refuse it" if expected is None else known[0]  # an IndexError: we alone refuse it
    assert expected is not None, f"safetensors refuses it: {file!r}"
    read = {
        entry.name: (entry.dtype, list(entry.shape), file[found.data + entry.begin : found.data + entry.end])
        for entry in found.tensors
    }
    assert read == {name: (each["dtype"], each["shape"], bytes(each["data"])) for name, each in expected.items()}
    assert found.nbytes == len(file)
    return ""


def test_a_header_that_no_reader_takes_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="two tensors of a file have one name"):
        header_bytes([TensorEntry("a", "F32", ()), TensorEntry("a", "F32", (), 4)], {})
    monkeypatch.setattr("zero.checkpoint.format.tensorfile.LONGEST_HEADER", 5000)
    assert len(header_bytes([], {"a": "a" * 4000})) == PAGE
    with pytest.raises(ValueError, match="the header of 0 tensors has 8,184 bytes: at most 5,000"):
        header_bytes([], {"a": "a" * 4100})


def entry(dtype: str = '"F32"', shape: str = "[1]", offsets: str = "[0,4]", more: str = "") -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}'


DEEP, HUGE = "[" * 200_000, str(2**63)
DTYPE_VALUES = ['"F99"', '"f32"', '""', '"F4"', '"F6_E2M3"', "null", "1", "[]", "{}", '["F32"]', '{"F32":null}']
SHAPES = [
    *("[-1]", "[-0]", "[1.0]", "[1e0]", "[true]", "[null]", '["1"]', "[[1]]", "1", "null", "{}", '"1"'),
    *("[2]", "[0]", "[01]", "[+1]", "[1,]", "[NaN]", "[Infinity]", "[1e400]", f"[{HUGE}]", DEEP + "]" * len(DEEP)),
    *(f"[{2**64 - 1}]", f"[{2**64}]", f"[{'1' * 5000}]", f"[{HUGE},2]", f"[{2**62},{2**62},{2**62}]"),
]
EMPTY_SHAPES = ["[-0]", f"[0,{HUGE}]", f"[0,{2**64}]", f"[{2**62},{2**62},0]", f"[0,{2**62},{2**62}]"]
OFFSETS = [
    *("[0,3]", "[0,5]", "[4,8]", "[4,0]", "[1,5]", "[-4,0]", "[-0,4]", "[0.0,4]", "[0,4.0]", "[false,4]"),
    *("[0]", "[]", "[0,4,4]", "4", "null", "{}", '["0","4"]', f"[{HUGE},{2**63 + 4}]", f"[0,{2**64 + 4}]"),
]
REFUSED = [
    *("", "[]", " {}", "\ufeff{}", DEEP, '{"a":1}', '{"a":["F32",[1],[0,4]]}'),
    *('{"a":{"shape":[1],"data_offsets":[0,4]}}', '{"a":{"dtype":"F32","shape":[1]}}'),
    *('{"a":' + entry(more=more) + "}" for more in (',"more":1', ',"dtype":"F32"')),
    *('{"a":' + entry() + f',"{name}":{entry()}}}' for name in ("a", "\\u0061", "b")),
    '{"a":' + entry() + ',"b":' + entry(offsets="[8,12]") + "}",
    '{"\\ud800":' + entry() + "}",
    *(f'{{"__metadata__":{value}}}' for value in ("1", "0", "[]", '""', "false", "[[]]")),
    *(f'{{"__metadata__":{{"a":{value}}}}}' for value in ("null", "1", "true", "[]", "{}", '"\\udc00\\ud800"', '"\n"')),
    '{"__metadata__":{"a":"b","a":"c"}}',
    *('{"a":' + entry(dtype=value) + "}" for value in DTYPE_VALUES),
    *('{"a":' + entry(shape=value) + "}" for value in SHAPES),
    *('{"a":' + entry(shape=value, offsets="[0,0]") + "}" for value in EMPTY_SHAPES),
    *('{"a":' + entry(offsets=value) + "}" for value in OFFSETS),
]
TAKEN = [
    *("{}", "{ }  \n\t\r", '{"__metadata__":null}', '{"__metadata__":{"a":"b","c":"[]"}}'),
    *('{"a":' + entry(shape=value) + "}" for value in ("[1]", "[]", "[1,1]")),
    '{"a":' + entry(shape="[0]", offsets="[0,0]") + "}",
    *(f'{{"{name}":{entry()}}}' for name in ("", "\\u0061\\n\\ud83d\\ude00")),
    '{"b":' + entry(offsets="[4,8]") + ',"c":' + entry(shape="[0]", offsets="[4,4]") + ',"a":' + entry() + "}",
]


def test_both_readers_agree_on_a_header_and_every_difference_has_a_name() -> None:
    """Each one of `STRICTER` occurs; otherwise it could hide a difference that nobody wants."""
    found = [
        (text, assert_both_agree(with_header(text.encode(), bytes(n))))
        for text in (*REFUSED, *TAKEN)
        for n in (0, 4, 8, 12)
    ]
    assert {text for text, why in found if not why} == set(TAKEN)
    assert {why for _, why in found} == {"", "both refuse it", *STRICTER}


def test_a_file_that_ends_anywhere_is_refused() -> None:
    file = with_header(('{"a":' + entry() + "}").encode(), bytes(4))
    for changed in (*(file[:length] for length in range(len(file))), file + b"\0"):
        assert assert_both_agree(changed)
    for length in (LONGEST_HEADER + 1, 2**60, 2**63, 2**64 - 1):
        with pytest.raises(FormatError, match="at most 100,000,000 are read"):
            header_length(length.to_bytes(8, "little"), 2**62)
    with pytest.raises(FormatError, match="does not fit into its 100 bytes"):
        header_length((93).to_bytes(8, "little"), 100)
    for bad in (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80"):
        with pytest.raises(FormatError, match="its header is not JSON"):
            ours(with_header(b'{"__metadata__":{"a":"' + bad + b'"}}'))


def test_an_index_names_the_file_of_each_tensor_in_its_own_folder() -> None:
    a, b = TensorEntry("a", "F32", (3,)), TensorEntry("b", "BF16", (2, 2))
    text = index_bytes({"one.safetensors": [a], "two.safetensors": [b]})
    assert parse_index(text) == {"a": "one.safetensors", "b": "two.safetensors"}
    assert json.loads(text)["metadata"] == {"total_size": 20}
    assert parse_index(index_bytes({"one.safetensors": []})) == {}
    maps = ["[]", "null", '{"a":"b","a":"c"}']
    leaving = ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "..\\x", "a\0b", "/", "\ud800", 1, None, ["a"]]
    maps += [json.dumps({"a": "fine.safetensors", "b": path}) for path in leaving]
    for refused in (b"", b"[]", b"{}", b"\xff", *(b'{"weight_map":%s}' % found.encode() for found in maps)):
        with pytest.raises(FormatError):
            parse_index(refused)
