"""The manifest comes back as it was written; a changed or a forged one is a format error, and no other exception."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.checkpoint.format.manifest import (
    LARGEST_BLOCK,
    VERSION,
    FileSums,
    Manifest,
    SavedParameter,
    VersionError,
    check_path,
)
from zero.checkpoint.format.names import split_key, state_key
from zero.core.statetree import FormatError

from .saved import manifest_text

MORE = settings(max_examples=5 * settings().max_examples)
OF_RANK = "ranks/rank-00000.safetensors"
WHOLE = Manifest(
    step=7,
    parameters=(
        SavedParameter("weight", ("weight", "head.weight"), (3, 2), "F32", 0, True),
        SavedParameter("ä\n", (), (), "BF16", None, False),
    ),
    param_groups=({"lr": 0.001, "betas": {"$tuple": [0.9, 0.999]}, "params": ["weight"]},),
    files={
        "model/model-00001-of-00001.safetensors": FileSums(4200, (0, 2**32 - 1)),
        OF_RANK: FileSums(3, (17,)),
        "empty": FileSums(0, ()),
    },
    block_bytes=4096,
    not_saved=("a.b",),
    written_by={"world_size": 3, "torch": "2"},
)
TEXT = WHOLE.to_bytes()

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
paths = st.lists(st.text("ab./-\n", min_size=1, max_size=4), min_size=1, max_size=3).map("/".join)
options = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | names


def is_inside(path: str) -> bool:
    return not any(part in ("", ".", "..") for part in path.split("/"))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    block_bytes = draw(st.integers(1, 5000))
    files = {}
    for path in draw(st.lists(paths.filter(is_inside), unique=True, max_size=3)):
        sums = tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=3)))
        files[path] = FileSums(max(len(sums) * block_bytes - draw(st.integers(0, block_bytes - 1)), 0), sums)
    shapes = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
    aliases = st.lists(names, max_size=2).map(tuple)
    groups = st.none() | st.integers(0, 3)
    parameters = st.builds(
        SavedParameter, names, aliases, shapes, st.sampled_from(["F32", "BF16"]), groups, st.booleans()
    )
    found = draw(st.lists(parameters, max_size=2))
    group = {**draw(st.dictionaries(names, options, max_size=3)), "params": ["a"]}
    written_by = draw(st.dictionaries(names, options, max_size=2))
    return Manifest(draw(st.integers(0, 2**40)), tuple(found), (group,), files, block_bytes, draw(aliases), written_by)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def only(value: Any, *keys: str) -> Any:
    return {key: value[key] for key in keys if key in value} if isinstance(value, dict) else value


def signed(found: dict[str, Any], content: str | None = None) -> bytes:
    """Return a manifest with these keys whose content and SHA-256 are right, as somebody could forge it."""
    rest = {key: value for key, value in found.items() if key != "sha256"}
    if isinstance(rest.get("files"), dict) and "content" in rest:
        shared = {path: only(sums, "bytes", "crc32") for path, sums in rest["files"].items() if path != OF_RANK}
        right = digest({"block_bytes": rest.get("block_bytes"), "files": shared})
        rest["content"] = right if content is None else content
    return manifest_text({**rest, "sha256": digest(rest)})


@given(manifests())
@MORE
def test_a_manifest_comes_back_as_it_was_written(manifest: Manifest) -> None:
    text = manifest.to_bytes()
    found = Manifest.from_bytes(text)
    assert found == manifest
    assert found.to_bytes() == text
    assert json.loads(text)["content"] == found.content


def test_the_content_depends_on_the_files_alone_but_not_on_those_of_ranks() -> None:
    same = replace(
        WHOLE, step=8, written_by={}, files={**WHOLE.files, "ranks/rank-00001.safetensors": FileSums(1, (1,))}
    )
    assert same.content == WHOLE.content
    for path, sums in (("empty", FileSums(1, (0,))), ("more", FileSums(0, ()))):
        assert replace(WHOLE, files={**WHOLE.files, path: sums}).content != WHOLE.content
    turned = dict(reversed(list(WHOLE.files.items())))
    assert replace(WHOLE, files=turned).content == WHOLE.content


def test_unknown_keys_are_ignored_everywhere() -> None:
    found = json.loads(TEXT)
    found["more"] = {"a": [1]}
    found["parameters"][0]["more"] = None
    found["param_groups"][0]["more"] = 1
    found["files"]["empty"]["more"] = "x"
    read = Manifest.from_bytes(signed(dict(sorted(found.items()))))
    assert (read.parameters, read.files, read.step) == (WHOLE.parameters, WHOLE.files, WHOLE.step)


@pytest.mark.parametrize("version", [VERSION + 1, 0, -1, None, "1", 1.0, True, [1]])
def test_another_version_is_an_error_of_its_own_before_anything_else_is_read(version: object) -> None:
    for found in ({**json.loads(TEXT), "version": version}, {"format": "zero.checkpoint", "version": version}):
        with pytest.raises(VersionError, match=r"it has version .* and this release of zero reads 1: read it with"):
            Manifest.from_bytes(json.dumps(found).encode())


def changed_texts() -> Iterator[bytes]:
    """Yield the text with each byte changed in one bit, lost, doubled, and with all behind it cut off."""
    for place, byte in enumerate(TEXT):
        before, after = TEXT[:place], TEXT[place + 1 :]
        yield from (before + bytes([byte ^ 1 << place % 8]) + after, before + after, before)
        yield before + b"%c " % byte + after
    yield from (b"null", b"[]", b"{}", b'{"format":"other","version":1}', b'{"format":1}', b"\xff")
    yield from (TEXT + b" ", b" " + TEXT, json.dumps(json.loads(TEXT)).encode())
    yield from (TEXT.replace(b"\\u00e4", "ä".encode()), TEXT.replace(b'"step": 7', b'"step": 7.0'))


def test_every_changed_byte_of_the_text_is_an_error() -> None:
    assert Manifest.from_bytes(signed(json.loads(TEXT))) == WHOLE
    for text in changed_texts():
        with pytest.raises(FormatError):
            Manifest.from_bytes(text)


# -- forgeries: the SHA-256 is right, and something else is not --------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places inside a JSON value."""
    if path:
        yield path
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed_at(path: tuple[Any, ...], change: Callable[[Any, Any], object]) -> bytes:
    found = json.loads(TEXT)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return signed(found)


STRICT = [
    path
    for path in places(json.loads(TEXT))
    if path[0] not in {"written_by", "sha256"} and (path[0] != "param_groups" or len(path) < 3 or path[2] == "params")
]
WRONG: list[Any] = [None, True, -1, 0.5, 1.0, 2**63, 2**70, "text", "1", [], {}, [None], [[]], {"a": 1}]
FORGED: dict[tuple[Any, ...], list[Any]] = {
    ("step",): ["7", True, -1],
    ("block_bytes",): [0, 4096.0],
    ("files",): [[]],
    ("files", "empty"): [[]],
    ("files", "empty", "bytes"): [-5, True, 2**63],
    ("files", "empty", "crc32"): [[0], {}],
    ("files", OF_RANK, "crc32", 0): [2**32, -1, "17"],
    ("parameters",): [{}],
    ("parameters", 0): [[]],
    ("parameters", 0, "name"): [None],
    ("parameters", 0, "names"): ["weight"],
    ("parameters", 0, "shape"): [[-1], [1.5]],
    ("parameters", 0, "group"): ["0"],
    ("parameters", 0, "trainable"): [1],
    ("param_groups",): [None],
    ("param_groups", 0): [1],
    ("param_groups", 0, "params"): ["weight", [1]],
    ("not_saved",): ["a.b"],
    ("written_by",): [[["a", "b"]]],
}


def put(wrong: Any) -> Callable[[Any, Any], object]:
    return lambda inner, key: inner.__setitem__(key, wrong)


@pytest.mark.parametrize("path", FORGED, ids=str)
def test_a_forged_value_is_a_format_error(path: tuple[Any, ...]) -> None:
    for wrong in FORGED[path]:
        with pytest.raises(FormatError, match="its text is not that of a manifest"):
            Manifest.from_bytes(changed_at(path, put(wrong)))


def test_a_value_of_another_type_is_an_error_or_another_whole_manifest() -> None:
    """A value that happens to be of the right type gives another manifest, which is read as it stands."""
    for path in STRICT:
        for wrong in WRONG:
            text = changed_at(path, put(wrong))
            try:
                found = Manifest.from_bytes(text)
            except FormatError:
                continue
            assert json.loads(found.to_bytes()) == json.loads(text), (path, wrong)
        if isinstance(path[-1], str) and (path[0], len(path)) != ("files", 2):
            with pytest.raises(FormatError):
                Manifest.from_bytes(changed_at(path, lambda inner, key: inner.pop(key)))


def test_a_wrong_content_and_a_block_above_the_limit_are_errors() -> None:
    """A reader allocates a block."""
    with pytest.raises(FormatError, match="its files do not have its content"):
        Manifest.from_bytes(signed(json.loads(TEXT), content=digest("")))
    small = replace(WHOLE, files={"empty": FileSums(0, ()), "one": FileSums(3, (17,))})
    assert Manifest.from_bytes(replace(small, block_bytes=LARGEST_BLOCK).to_bytes()).block_bytes == 1 << 30
    for block_bytes in (LARGEST_BLOCK + 1, 2**60):
        with pytest.raises(FormatError, match="is not from 0 to 1073741824"):
            Manifest.from_bytes(replace(small, block_bytes=block_bytes).to_bytes())


LEAVING = ("", "/", "/etc/passwd", "a\\b", "..\\a", "a\0b")


@given(paths | st.sampled_from(LEAVING))
@MORE
def test_a_path_is_taken_if_it_stays_inside(path: str) -> None:
    if path not in LEAVING and is_inside(path):
        check_path(path)
        return
    with pytest.raises(FormatError, match="is not a path inside a checkpoint"):
        check_path(path)
    with pytest.raises(FormatError, match="is not a path inside a checkpoint"):
        Manifest.from_bytes(replace(WHOLE, files={path: FileSums(0, ())}).to_bytes())


@pytest.mark.parametrize("key", ["written_by", "more", "param_groups"])
def test_what_is_nested_deeply_is_an_error(key: str) -> None:
    for depth in (500, 2_000, 100_000):
        text = TEXT.replace(b'"step": 7', b'"step": 7, "%s": %s' % (key.encode(), b"[" * depth + b"]" * depth))
        with pytest.raises(FormatError):
            Manifest.from_bytes(text)


@given(st.lists(st.text("ab.", min_size=1, max_size=4), max_size=4), st.text("ab_", min_size=1, max_size=3))
@MORE
def test_the_key_of_a_state_gives_its_parameter_and_its_name(parameters: list[str], name: str) -> None:
    for parameter in parameters:
        assert split_key(state_key(parameter, name), parameters) == (parameter, name)
    assert split_key(state_key("other", name), parameters) is None
