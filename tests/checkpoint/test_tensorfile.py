"""Headers and indices of safetensors files: safetensors reads what is written here, and the reader here takes and
refuses what safetensors' own reader takes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as save_bytes
from torch import Tensor

from zero.checkpoint.format.tensorfile import (
    LONGEST_HEADER,
    PAGE,
    Header,
    TensorEntry,
    header_bytes,
    header_length,
    index_bytes,
    parse_index,
)
from zero.core.statetree import DTYPES, NAMES, FormatError

from ..support.plain import assert_same_bits, bits
from .readers import HUGE, STRICTER, assert_both_agree, ours, theirs, with_header


def tensors() -> dict[str, Tensor]:
    """Return a tensor of every dtype and of every kind of shape, with other bits each."""
    found = {"scalar": torch.tensor(-0.0), "empty": torch.empty(0, 3, 0), 'text ä"\\\n': torch.ones(2, 1)}
    for name, dtype in DTYPES.items():
        nbytes = 15 * dtype.itemsize
        data = torch.arange(nbytes, dtype=torch.uint8)
        found[name] = (data % 2 == 1 if dtype is torch.bool else (data * 7).view(dtype)).view(3, 5)
    return found


def entries_of(named: dict[str, Tensor]) -> list[TensorEntry]:
    entries, end = [], 0
    for name, tensor in named.items():
        entries.append(TensorEntry(name, NAMES[tensor.dtype], tuple(tensor.shape), end))
        end = entries[-1].end
    return entries


def file_of(named: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    data = b"".join(bytes(bits(tensor).tolist()) for tensor in named.values())
    return header_bytes(entries_of(named), metadata) + data


# -- what is written ---------------------------------------------------------------------------------------------------


def test_both_readers_read_what_is_written_and_the_data_begins_at_a_page(tmp_path: Path) -> None:
    named, metadata = tensors(), {"tied": "kept", "ä": "ö\n\0"}
    file = file_of(named, metadata)
    found = ours(file)
    assert found.data % PAGE == 0
    assert list(found.tensors) == entries_of(named)
    assert found.metadata == {"format": "pt", **metadata}
    (tmp_path / "a").write_bytes(file)
    for name, tensor in load_file(tmp_path / "a").items():
        assert_same_bits(tensor, named[name], name)
    assert_both_agree(file)
    assert ours(file_of({}, {})) == Header(PAGE, (), {"format": "pt"})
    assert ours(with_header(b"{}")) == Header(10, (), {})


def test_a_header_that_no_reader_takes_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="two tensors of a file have one name"):
        header_bytes([TensorEntry("a", "F32", ()), TensorEntry("a", "F32", (), 4)], {})
    assert LONGEST_HEADER == 100_000_000
    monkeypatch.setattr("zero.checkpoint.format.tensorfile.LONGEST_HEADER", 5000)
    assert len(header_bytes([], {"a": "a" * 4000})) == PAGE
    with pytest.raises(ValueError, match="the header of 0 tensors has 8,184 bytes: at most 5,000"):
        header_bytes([], {"a": "a" * 4100})


def test_what_safetensors_writes_is_read_here() -> None:
    named = {name: tensor for name, tensor in tensors().items() if name != "F8_E8M0"}  # it reads it, but cannot write
    file = save_bytes(named, {"a": "b"})
    found = ours(file)
    assert found.metadata == {"a": "b"}
    assert {entry.name for entry in found.tensors} == set(named)
    for entry in found.tensors:
        data = bytearray(file[found.data + entry.begin : found.data + entry.end])
        read = torch.frombuffer(data, dtype=DTYPES[entry.dtype]) if data else torch.empty(0)
        assert_same_bits(read.view(entry.shape), named[entry.name], entry.name)


# -- what is read ------------------------------------------------------------------------------------------------------


def entry(dtype: str = '"F32"', shape: str = "[1]", offsets: str = "[0,4]") -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


DEEP = "[" * 200_000
MALFORMED = {
    "nothing": "",
    "no object": "[]",
    "a space in front": " {}",
    "a byte order mark": "\ufeff{}",
    "an entry that is a number": '{"a":1}',
    "an entry that is a list": '{"a":["F32",[1],[0,4]]}',
    "no dtype": '{"a":{"shape":[1],"data_offsets":[0,4]}}',
    "no offsets": '{"a":{"dtype":"F32","shape":[1]}}',
    "a further field": '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1}}',
    "a field twice": '{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "a name twice": '{"a":' + entry() + ',"a":' + entry() + "}",
    "a name twice, escaped": '{"a":' + entry() + ',"\\u0061":' + entry() + "}",
    "a name of the metadata twice": '{"__metadata__":{"a":"b","a":"c"}}',
    **{f"metadata {value}": f'{{"__metadata__":{value}}}' for value in ("null", "1", "0", "[]", '""', "false", "[[]]")},
    **{f"metadata of {value}": f'{{"__metadata__":{{"a":{value}}}}}' for value in ("null", "1", "true", "[]", "{}")},
    **{
        f"dtype {value}": f'{{"a":{entry(dtype=value)}}}'
        for value in ('"F99"', '"f32"', '""', '"F4"', '"F6_E2M3"', "null", "1", "[]", "{}", '["F32"]', '{"F32":null}')
    },
    **{
        f"shape {value}": f'{{"a":{entry(shape=value)}}}'
        for value in (
            *("[-1]", "[-0]", "[1.0]", "[1e0]", "[true]", "[null]", '["1"]', "[[1]]", "1", "null", "{}", '"1"'),
            *("[2]", "[0]", "[]", "[1,1]", "[01]", "[+1]", "[1,]", "[NaN]", "[Infinity]", "[1e400]", f"[{HUGE}]"),
            *(f"[{2**64 - 1}]", f"[{2**64}]", f"[{'1' * 5000}]", f"[{HUGE},2]", f"[{2**62},{2**62},{2**62}]"),
        )
    },
    **{
        f"no elements, shape {value}": f'{{"a":{entry(shape=value, offsets="[0,0]")}}}'
        for value in ("[0]", "[-0]", f"[0,{HUGE}]", f"[0,{2**64}]", f"[{2**62},{2**62},0]", f"[0,{2**62},{2**62}]")
    },
    **{
        f"offsets {value}": f'{{"a":{entry(offsets=value)}}}'
        for value in (
            *("[0,3]", "[0,5]", "[4,8]", "[4,0]", "[1,5]", "[-4,0]", "[-0,4]", "[0.0,4]", "[0,4.0]", "[false,4]"),
            *("[0]", "[]", "[0,4,4]", "4", "null", "{}", '["0","4"]', f"[{HUGE},{2**63 + 4}]", f"[0,{2**64 + 4}]"),
        )
    },
    "entries that overlap": '{"a":' + entry() + ',"b":' + entry() + "}",
    "entries with a gap": '{"a":' + entry() + ',"b":' + entry(offsets="[8,12]") + "}",
    "a hole at the beginning": '{"a":' + entry(offsets="[4,8]") + "}",
    "a lone surrogate in a name": '{"\\ud800":' + entry() + "}",
    "surrogates in a wrong order": '{"__metadata__":{"a":"\\udc00\\ud800"}}',
    "a control character": '{"__metadata__":{"a":"\n"}}',
    "objects without end": DEEP,
    "a deep shape": '{"a":' + entry(shape=DEEP + "]" * len(DEEP)) + "}",
}
WELL_FORMED = {
    "one": '{"a":' + entry() + "}",
    "spaces": "{ }  \n\t\r",
    "an escaped name": '{"\\u0061\\n\\ud83d\\ude00":' + entry() + "}",
    "no name": '{"":' + entry() + "}",
    "two in another order": '{"b":' + entry(offsets="[4,8]") + ',"a":' + entry() + "}",
    "an empty one between two": '{"b":'
    + entry(offsets="[4,8]")
    + ',"c":'
    + entry(shape="[0]", offsets="[4,4]")
    + ',"a":'
    + entry()
    + "}",
    "text as metadata": '{"__metadata__":{"a":"b","c":"[]"}}',
}


def test_both_readers_agree_on_a_header_and_every_difference_has_a_name(tmp_path: Path) -> None:
    """Each one of `STRICTER` occurs; otherwise it could hide a difference that nobody wants."""
    taken, differences = set(), set()
    path = tmp_path / "a.safetensors"
    for what, text in {**MALFORMED, **WELL_FORMED}.items():
        for nbytes in (0, 4, 8, 12):
            file = with_header(text.encode(), bytes(nbytes))
            assert_both_agree(file)
            path.write_bytes(file)
            try:
                with safe_open(path, "pt") as opened:
                    assert set(opened.keys()) == set(theirs(file) or {})
            except safetensors.SafetensorError:
                assert theirs(file) is None
            try:
                ours(file)
                taken.add(what)
            except FormatError as error:
                if theirs(file) is not None:
                    differences |= {name for name, known in STRICTER.items() if re.search(known, str(error))}
    assert taken - set(WELL_FORMED) == {"metadata null", "no elements, shape [0]", "shape []", "shape [1,1]"}
    assert taken >= set(WELL_FORMED)
    assert differences == set(STRICTER)


def test_a_file_that_ends_anywhere_is_refused() -> None:
    file = with_header(WELL_FORMED["one"].encode(), bytes(4))
    assert ours(file).tensors == (TensorEntry("a", "F32", (1,)),)
    for changed in (*(file[:length] for length in range(len(file))), file + b"\0"):
        assert_both_agree(changed)
        with pytest.raises(FormatError):
            ours(changed)
    for length in (LONGEST_HEADER + 1, 2**60, 2**63, 2**64 - 1):
        with pytest.raises(FormatError, match="at most 100,000,000 are read"):
            header_length(length.to_bytes(8, "little"), 2**62)
    with pytest.raises(FormatError, match="does not fit into its 100 bytes"):
        header_length((93).to_bytes(8, "little"), 100)
    for bad in (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80"):
        with pytest.raises(FormatError, match="its header is not JSON"):
            ours(with_header(b'{"__metadata__":{"a":"' + bad + b'"}}'))


# -- indices -----------------------------------------------------------------------------------------------------------


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
