"""The manifest comes back as it was written; a changed or a forged one is a format error, and no other exception."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from zero.checkpoint.format.manifest import (
    LARGEST_BLOCK,
    VERSION,
    FileSums,
    Manifest,
    SavedParameter,
    VersionError,
    check_path,
)
from zero.core.statetree import FormatError

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
