"""Headers of safetensors files as this library and safetensors' own reader find them; both must agree."""

from __future__ import annotations

import re
from typing import Any

import safetensors

from zero.checkpoint.format.tensorfile import Header, header_length, parse_header
from zero.core.statetree import FormatError

HUGE = str(2**63)
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
    """Read a header as this library does."""
    length = header_length(file[:8], len(file))
    return parse_header(file[8 : 8 + length], len(file))


def theirs(file: bytes) -> dict[str, Any] | None:
    """Return what safetensors' own reader finds, by name; None if it refuses the file."""
    try:
        return dict(safetensors.deserialize(file))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return None


def assert_both_agree(file: bytes) -> None:
    """Assert that both readers refuse a file, or find the same in it, but for `STRICTER`."""
    expected = theirs(file)
    found, why = None, ""
    try:
        found = ours(file)
    except FormatError as error:
        why = str(error)
    if found is None:
        assert expected is None or any(re.search(known, why) for known in STRICTER.values()), why
        return
    assert expected is not None, f"safetensors refuses it: {file!r}"
    read = {
        entry.name: (entry.dtype, list(entry.shape), file[found.data + entry.begin : found.data + entry.end])
        for entry in found.tensors
    }
    assert read == {name: (each["dtype"], each["shape"], bytes(each["data"])) for name, each in expected.items()}
    assert found.nbytes == len(file)
