"""Manifests, safetensors headers and nested values come back bit by bit; all else is an error by its place."""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from torch import Tensor

from zero.checkpoint.format.manifest import (
    LARGEST_BLOCK,
    VERSION,
    FileSums,
    Manifest,
    SavedParameter,
    VersionError,
    check_path,
)
from zero.checkpoint.format.tensorfile import (
    LONGEST_HEADER,
    METADATA,
    PAGE,
    Header,
    TensorEntry,
    header_bytes,
    header_length,
    index_bytes,
    parse_header,
    parse_index,
    parse_json,
)
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
from .saved import OF_RANK, digest, manifest_text

WHOLE = Manifest(
    step=7,
    parameters=(
        SavedParameter("weight", ("weight", "head.weight"), (3, 2), "F32", 0, True),
        SavedParameter("ä\n\0", (), (), "BF16", None, False),
    ),
    param_groups=({"lr": 0.001, "betas": {"$tuple": [0.9, 0.999]}, "params": ["weight"]},),
    files={
        "model/model-00001-of-00001.safetensors": FileSums(4200, (0, 2**32 - 1)),
        OF_RANK: FileSums(3, (17,)),
        "empty": FileSums(0, ()),
    },
    block_bytes=4096,
    not_saved=("a.b",),
    written_by={"world_size": 3, "torch": "2", "ö": -(2**70)},
)
TEXT = WHOLE.to_bytes()


def signed(found: dict[str, Any], content: str | None = None) -> bytes:
    rest = {key: value for key, value in found.items() if key != "sha256"}
    files = rest.get("files")
    if isinstance(files, dict) and "content" in rest:
        shared = {path: sums for path, sums in files.items() if path != OF_RANK}
        for path, sums in shared.items():
            if isinstance(sums, dict):
                shared[path] = {key: value for key, value in sums.items() if key in ("bytes", "crc32")}
        right = digest({"block_bytes": rest.get("block_bytes"), "files": shared})
        rest["content"] = right if content is None else content
    return manifest_text({**rest, "sha256": digest(rest)})


def test_the_content_depends_on_the_files_alone_but_not_on_those_of_ranks() -> None:
    """And keys that this release does not know are ignored everywhere."""
    assert Manifest.from_bytes(TEXT) == WHOLE
    assert Manifest.from_bytes(TEXT).to_bytes() == TEXT
    more = {**WHOLE.files, "ranks/rank-00001.safetensors": FileSums(1, (1,))}
    assert replace(WHOLE, step=8, written_by={}, files=more).content == WHOLE.content
    for path, sums in (("empty", FileSums(1, (0,))), ("more", FileSums(0, ()))):
        assert replace(WHOLE, files={**WHOLE.files, path: sums}).content != WHOLE.content
    assert replace(WHOLE, files=dict(reversed(list(WHOLE.files.items())))).content == WHOLE.content
    found = json.loads(TEXT)
    assert found["content"] == WHOLE.content
    for part in (found, found["parameters"][0], found["param_groups"][0], found["files"]["empty"]):
        part["more"] = {"a": [None, 1, "x"]}
    read = Manifest.from_bytes(signed(dict(sorted(found.items()))))
    assert (read.parameters, read.files, read.step) == (WHOLE.parameters, WHOLE.files, WHOLE.step)


@pytest.mark.parametrize("version", [VERSION + 1, 0, None, "1", 1.0, True])
def test_another_version_is_an_error_of_its_own_before_anything_else_is_read(version: object) -> None:
    for found in ({**json.loads(TEXT), "version": version}, {"format": "zero.checkpoint", "version": version}):
        with pytest.raises(VersionError, match=r"it has version .* and this release of zero reads 1: read it with"):
            Manifest.from_bytes(json.dumps(found).encode())


def changed_texts() -> Iterator[bytes]:
    for place, byte in enumerate(TEXT):
        before, after = TEXT[:place], TEXT[place + 1 :]
        yield from (before + bytes([byte ^ 1 << place % 8]) + after, before + after, before)
        yield before + b"%c " % byte + after
    yield from (b"null", b"[]", b"{}", b'{"format":"other","version":1}', b'{"format":1}', b"\xff")
    yield from (TEXT + b" ", b" " + TEXT, json.dumps(json.loads(TEXT)).encode())
    yield from (TEXT.replace(b"\\u00e4", "ä".encode()), TEXT.replace(b'"step": 7', b'"step": 7.0'))
    for key, depth in itertools.product((b"written_by", b"more", b"param_groups"), (500, 100_000)):
        yield TEXT.replace(b'"step": 7', b'"step": 7, "%s": %s' % (key, b"[" * depth + b"]" * depth))
    yield signed(json.loads(TEXT), content=digest(""))


def test_every_changed_byte_of_the_text_is_an_error() -> None:
    assert Manifest.from_bytes(signed(json.loads(TEXT))) == WHOLE
    for text in changed_texts():
        with pytest.raises(FormatError):
            Manifest.from_bytes(text)


FORGED: list[tuple[tuple[Any, ...], list[Any]]] = [
    (("step",), ["7", True, -1, 7.0, 2**63, None]),
    (("block_bytes",), [0, 4096.0, None]),
    (("files",), [[], None]),
    (("files", "empty"), [[], None]),
    (("files", "empty", "bytes"), [-5, True, 2**63, 1]),
    (("files", "empty", "crc32"), [[0], {}, "", None]),
    (("files", OF_RANK, "crc32", 0), [2**32, -1, "17", 17.0]),
    (("parameters",), [{}, None]),
    (("parameters", 0), [[], "text", {}]),
    (("parameters", 0, "name"), [None, 1]),
    (("parameters", 0, "names"), ["weight", [1], {}]),
    (("parameters", 0, "shape"), [[-1], [1.5], [True], "1", {}]),
    (("parameters", 0, "dtype"), [None, 32]),
    (("parameters", 0, "group"), ["0", True, -1]),
    (("parameters", 0, "trainable"), [1, None]),
    (("param_groups",), [None, {}]),
    (("param_groups", 0), [1, []]),
    (("param_groups", 0, "params"), ["weight", [1], {}]),
    (("not_saved",), ["a.b", {}]),
    (("not_saved", 0), [1, None]),
    (("written_by",), [[["a", "b"]], None]),
]


def test_a_forged_value_and_a_missing_one_are_format_errors() -> None:
    for path, values in FORGED:
        for wrong in [..., *values]:
            found = json.loads(TEXT)
            inner = found
            for key in path[:-1]:
                inner = inner[key]
            if wrong is not ...:
                inner[path[-1]] = wrong
            elif isinstance(path[-1], int) or path == ("files", "empty"):
                continue  # without it another manifest is whole
            else:
                del inner[path[-1]]
            with pytest.raises(FormatError, match=None if wrong is ... else "its text is not that of a manifest"):
                Manifest.from_bytes(signed(found))


def test_a_block_above_the_limit_is_an_error() -> None:
    """A reader allocates a block."""
    small = replace(WHOLE, files={"empty": FileSums(0, ()), "one": FileSums(3, (17,))})
    assert Manifest.from_bytes(replace(small, block_bytes=LARGEST_BLOCK).to_bytes()).block_bytes == 1 << 30
    for block_bytes in (LARGEST_BLOCK + 1, 2**60):
        with pytest.raises(FormatError, match="is not from 0 to 1073741824"):
            Manifest.from_bytes(replace(small, block_bytes=block_bytes).to_bytes())


def test_a_path_is_taken_if_it_stays_inside() -> None:
    for path in ("a", "a b/..c\n/-", ".a/b."):
        check_path(path)
    for path in ("", "/", "/etc/passwd", "a\\b", "..\\a", "a\0b", "..", ".", "a/../b", "./a", "a//b", "a/"):
        with pytest.raises(FormatError, match="is not a path inside a checkpoint"):
            Manifest.from_bytes(replace(WHOLE, files={path: FileSums(0, ())}).to_bytes())


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
REFUSED_HEADERS = [
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
        for text in (*REFUSED_HEADERS, *TAKEN)
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


UNSAVABLE: list[tuple[Any, str]] = [
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
    for value, why in UNSAVABLE:
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
