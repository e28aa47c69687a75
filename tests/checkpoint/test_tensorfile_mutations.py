"""Headers of safetensors files that were changed at random: the reader here takes and refuses what safetensors' own
reader takes and refuses."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.checkpoint.format.tensorfile import TensorEntry, parse_json
from zero.core.statetree import FormatError

from .readers import HUGE, assert_both_agree, with_header

MORE = settings(max_examples=10 * settings().max_examples)

# -- mutations ---------------------------------------------------------------------------------------------------------

RAW = [
    *("0", "1", "2", "4", "-1", "-0", "1.0", "1e0", "true", "null", "NaN", HUGE, str(2**64), "01", ""),
    *('"F32"', '"F16"', '"BOOL"', '"F99"', '"\\ud800"', '""', "[]", "{}", "[0]", "[1]", "[1,1]", "[2]", "[0,0]"),
    *("[0,2]", "[0,4]", "[2,4]", "[4,8]", "[8,12]", "[4,0]", "[0,1.0]", "[-1,4]", f"[0,{HUGE}]", '{"a":"b"}'),
]
Fields = list[tuple[str, str]]  # of an object: names and values, as JSON


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Draw the header of a file with up to three tensors, some of its places changed, and as many bytes as it needs."""
    drawn = draw(st.lists(st.tuples(st.sampled_from(["F32", "F16", "BOOL"]), st.lists(st.integers(0, 3), max_size=2))))
    objects: list[tuple[str, Fields]] = []
    end = 0
    for number, (dtype, shape) in enumerate(drawn[:3]):
        made = TensorEntry(f"t{number}", dtype, tuple(shape), end)
        end = made.end
        fields = [("dtype", f'"{dtype}"'), ("shape", json.dumps(shape)), ("data_offsets", f"[{made.begin},{end}]")]
        objects.append((made.name, fields))
    if draw(st.booleans()):
        objects.append(("__metadata__", [("a", '"b"'), ("c", '"d"')]))
    objects = draw(st.permutations(objects))
    for _ in range(draw(st.integers(0, 2)) if objects else 0):
        number = draw(st.integers(0, len(objects) - 1))
        name, fields = objects[number]
        place = draw(st.integers(0, len(fields) - 1)) if fields else 0
        change = draw(st.sampled_from(["value", "value", "value", "name", "drop", "field twice", "object", "twice"]))
        if change == "twice":
            objects.append(objects[number])
        elif change == "object":
            objects[number] = (draw(st.sampled_from(["t0", "t1", "__metadata__", "\\ud800", "x"])), fields)
        elif fields:
            key, value = fields[place]
            raw = draw(st.sampled_from(RAW)) if change == "value" else value
            key = draw(st.sampled_from(["dtype", "shape", "data_offsets", "x"])) if change == "name" else key
            more = {"drop": [], "field twice": [(key, value)] * 2}.get(change, [(key, raw)])
            objects[number] = (name, [*fields[:place], *more, *fields[place + 1 :]])
    inner = [f'"{name}":{{' + ",".join(f'"{k}":{v}' for k, v in fields) + "}" for name, fields in objects]
    text = "{" + ",".join(inner) + "}" + " " * draw(st.integers(0, 2))
    return with_header(text.encode(), bytes(draw(st.sampled_from([end, end, end, end + 4, max(end - 1, 0)]))))


@given(
    headers(),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
    st.integers(0, 400),
    st.binary(max_size=4),
    st.integers(0, 4),
)
@MORE
def test_both_readers_agree_whatever_bytes_are_changed_inserted_or_lost(
    file: bytes, changes: list[tuple[int, int]], place: int, more: bytes, less: int
) -> None:
    assert_both_agree(file)
    changed = bytearray(file)
    for at, value in changes:
        if changed:
            changed[at % len(changed)] = value
    assert_both_agree(bytes(changed))
    length = int.from_bytes(file[:8], "little")
    text, data = file[8 : 8 + length], file[8 + length :]
    place = place % (length + 1)
    assert_both_agree(with_header(text[:place] + more + text[place + less :], data))


@given(st.text(max_size=30))
@MORE
def test_json_is_read_as_it_is_written(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        with pytest.raises(FormatError):
            parse_json(json.dumps([{"a": [text]}]).encode(), "text")
    else:
        for ascii_only in (True, False):
            assert parse_json(json.dumps({text: [text]}, ensure_ascii=ascii_only).encode(), "text") == {text: [text]}
