"""The manifest comes back as it was written; a changed one is an error, and no other exception."""

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

MORE = settings(max_examples=10 * settings().max_examples)
WHOLE = Manifest(
    step=7,
    parameters=(
        SavedParameter("weight", ("weight", "head.weight"), (3, 2), "F32", 0, True),
        SavedParameter("ä\n", (), (), "BF16", None, False),
    ),
    param_groups=({"lr": 0.001, "betas": {"$tuple": [0.9, 0.999]}, "params": ["weight"]},),
    files={
        "model/model-00001-of-00001.safetensors": FileSums(4200, (0, 2**32 - 1)),
        "ranks/rank-00000.safetensors": FileSums(3, (17,)),
        "empty": FileSums(0, ()),
    },
    block_bytes=4096,
    not_saved=("a.b",),
    written_by={"world_size": 3, "torch": "2"},
)
TEXT = WHOLE.to_bytes()

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
paths = st.lists(st.text("ab./-\n", min_size=1, max_size=4), min_size=1, max_size=3).map("/".join)


def is_inside(path: str) -> bool:
    return not any(part in ("", ".", "..") for part in path.split("/"))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    block_bytes = draw(st.integers(1, 5000))
    files = {}
    for path in draw(st.lists(paths.filter(is_inside), unique=True, max_size=3)):
        nbytes = draw(st.integers(0, 3 * block_bytes))
        blocks = -(-nbytes // block_bytes)
        files[path] = FileSums(
            nbytes, tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=blocks, max_size=blocks)))
        )
    parameters = st.builds(
        SavedParameter,
        names,
        st.lists(names, max_size=2).map(tuple),
        st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
        st.sampled_from(["F32", "BF16"]),
        st.none() | st.integers(0, 3),
        st.booleans(),
    )
    options = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | names
    groups = st.dictionaries(names, options, max_size=3).map(lambda group: {**group, "params": ["a"]})
    return Manifest(
        draw(st.integers(0, 2**40)),
        tuple(draw(st.lists(parameters, max_size=2))),
        tuple(draw(st.lists(groups, max_size=2))),
        files,
        block_bytes,
        tuple(draw(st.lists(names, max_size=2))),
        draw(st.dictionaries(names, options, max_size=2)),
    )


def signed(found: dict[str, Any]) -> bytes:
    """Return a manifest with these keys whose content and SHA-256 are right, as somebody could forge it."""
    rest = {key: value for key, value in found.items() if key != "sha256"}
    if isinstance(rest.get("files"), dict) and "content" in rest:
        files = {path: sums for path, sums in rest["files"].items() if not path.startswith("ranks/")}
        chosen = {path: only(sums, "bytes", "crc32") for path, sums in files.items()}
        rest["content"] = digest({"block_bytes": rest.get("block_bytes"), "files": chosen})
    return manifest_text({**rest, "sha256": digest(rest)})


def only(value: Any, *keys: str) -> Any:
    return {key: value[key] for key in keys if key in value} if isinstance(value, dict) else value


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# -- what is whole -----------------------------------------------------------------------------------------------------


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
    found["written_by"]["more"] = 2
    found["files"]["empty"]["more"] = "x"
    read = Manifest.from_bytes(signed(found))
    assert (read.parameters, read.files, read.step) == (WHOLE.parameters, WHOLE.files, WHOLE.step)
    assert read.written_by == {**WHOLE.written_by, "more": 2}


@pytest.mark.parametrize("version", [VERSION + 1, 0, -1, None, "1", 1.0, True, [1]])
def test_another_version_is_an_error_of_its_own_before_anything_else_is_read(version: object) -> None:
    for found in ({**json.loads(TEXT), "version": version}, {"format": "zero.checkpoint", "version": version}):
        with pytest.raises(VersionError, match=r"it has version .* and this release of zero reads 1: read it with"):
            Manifest.from_bytes(json.dumps(found).encode())


@pytest.mark.parametrize(
    "text", [b"", b"null", b"[]", b"{}", b'{"format":"other","version":1}', b'{"format":1}', b"\xff"]
)
def test_what_is_no_manifest_is_an_error(text: bytes) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(text)


# -- changes -----------------------------------------------------------------------------------------------------------


def flipped(text: bytes, bit: int) -> bytes:
    changed = bytearray(text)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_every_changed_bit_of_the_text_is_an_error(every: int) -> None:
    for bit in range(0, 8 * len(TEXT), every):
        with pytest.raises(FormatError):
            Manifest.from_bytes(flipped(TEXT, bit))


@given(st.integers(0, len(TEXT) - 1), st.sampled_from(' \t\n\r,:09aAeE-.+{}[]"\\'))
@MORE
def test_every_changed_character_of_the_text_is_an_error(place: int, character: str) -> None:
    for changed in (
        TEXT[:place] + character.encode() + TEXT[place + 1 :],
        TEXT[:place] + character.encode() + TEXT[place:],
        TEXT[:place] + TEXT[place + 1 :],
    ):
        if changed != TEXT:
            with pytest.raises(FormatError):
                Manifest.from_bytes(changed)


def test_another_form_of_equal_json_is_an_error() -> None:
    found = json.loads(TEXT)
    assert Manifest.from_bytes(signed(found)) == WHOLE
    assert Manifest.from_bytes(signed(dict(sorted(found.items())))) == WHOLE  # another order of its keys is none
    for text in (
        json.dumps(found).encode(),
        json.dumps(found, indent=1).encode() + b"\n",
        TEXT.replace(b"\\u00e4", "ä".encode()),
        TEXT + b" ",
        b" " + TEXT,
        TEXT.replace(b'"step": 7', b'"step": 7.0'),
    ):
        with pytest.raises(FormatError, match="its text was changed"):
            Manifest.from_bytes(text)


@pytest.mark.parametrize("length", range(0, len(TEXT), 50))
@pytest.mark.by_default("0", "50", "500")
def test_a_text_that_ends_early_is_an_error(length: int) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(TEXT[:length])


# -- forgeries: the SHA-256 is right, and something else is not --------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places inside a JSON value."""
    if path:
        yield path
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed_at(path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> bytes:
    found = json.loads(TEXT)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return signed(found)


FREE = {"written_by", "more"}  # information only: any values
KNOWN = [path for path in places(json.loads(TEXT)) if path[0] not in FREE | {"sha256"}]
OF_A_GROUP = [path for path in KNOWN if path[0] == "param_groups" and len(path) > 2 and path[2] != "params"]
STRICT = [path for path in KNOWN if path not in OF_A_GROUP]


@pytest.mark.parametrize(
    "path", [path for path in STRICT if isinstance(path[-1], str) and (path[0], len(path)) != ("files", 2)], ids=str
)
def test_a_missing_key_is_a_format_error(path: tuple[Any, ...]) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(changed_at(path, lambda inner, key: inner.pop(key)))


WRONG: list[Any] = [None, True, -1, 0.5, 1.0, 2**63, 2**70, "text", "1", [], {}, [None], [[]], {"a": 1}]


def test_a_value_of_another_type_is_a_format_error_or_another_whole_manifest() -> None:
    """A value that happens to be of the right type gives another manifest, which is read as it stands."""
    for path in STRICT:
        for wrong in WRONG:

            def put(inner: Any, key: Any, wrong: Any = wrong) -> None:
                inner[key] = wrong

            text = changed_at(path, put)
            try:
                found = Manifest.from_bytes(text)
            except FormatError:
                continue
            assert json.loads(found.to_bytes()) == json.loads(text), (path, wrong)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("step",), "7"),
        (("step",), True),
        (("step",), -1),
        (("block_bytes",), 0),
        (("block_bytes",), 4096.0),
        (("files",), []),
        (("files", "empty"), []),
        (("files", "empty", "bytes"), -5),
        (("files", "empty", "bytes"), True),
        (("files", "empty", "bytes"), 2**63),
        (("files", "empty", "crc32"), [0]),
        (("files", "empty", "crc32"), {}),
        (("files", "ranks/rank-00000.safetensors", "crc32", 0), 2**32),
        (("files", "ranks/rank-00000.safetensors", "crc32", 0), -1),
        (("files", "ranks/rank-00000.safetensors", "crc32", 0), "17"),
        (("parameters",), {}),
        (("parameters", 0), []),
        (("parameters", 0, "name"), None),
        (("parameters", 0, "names"), "weight"),
        (("parameters", 0, "shape"), [-1]),
        (("parameters", 0, "shape"), [1.5]),
        (("parameters", 0, "group"), "0"),
        (("parameters", 0, "trainable"), 1),
        (("param_groups",), None),
        (("param_groups", 0), 1),
        (("param_groups", 0, "params"), "weight"),
        (("param_groups", 0, "params"), [1]),
        (("not_saved",), "a.b"),
        (("written_by",), [["a", "b"]]),
    ],
    ids=str,
)
def test_a_forged_value_is_a_format_error(path: tuple[Any, ...], wrong: Any) -> None:
    def put(inner: Any, key: Any) -> None:
        inner[key] = wrong

    with pytest.raises(FormatError, match="its text is not that of a manifest"):
        Manifest.from_bytes(changed_at(path, put))


def test_a_block_is_never_larger_than_its_limit() -> None:
    """A reader allocates a block."""
    small = replace(WHOLE, files={"empty": FileSums(0, ()), "one": FileSums(3, (17,))})
    assert Manifest.from_bytes(replace(small, block_bytes=LARGEST_BLOCK).to_bytes()).block_bytes == 1 << 30
    for block_bytes in (LARGEST_BLOCK + 1, 2**60):
        with pytest.raises(FormatError, match="is not from 0 to 1073741824"):
            Manifest.from_bytes(replace(small, block_bytes=block_bytes).to_bytes())


def test_a_content_that_is_not_that_of_the_files_is_an_error() -> None:
    found = {key: value for key, value in json.loads(TEXT).items() if key != "sha256"}
    found["content"] = digest("")
    text = manifest_text({**found, "sha256": digest(found)})
    with pytest.raises(FormatError, match="its files do not have its content"):
        Manifest.from_bytes(text)


LEAVING = [
    "",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/..",
    "/",
    "/etc/passwd",
    "a//b",
    "a/",
    "./a",
    "a/.",
    "a\\b",
    "..\\a",
    "a\0b",
]


@pytest.mark.parametrize("path", LEAVING, ids=repr)
def test_a_path_that_leaves_the_folder_is_a_format_error(path: str) -> None:
    with pytest.raises(FormatError, match="is not a path inside a checkpoint"):
        check_path(path)
    with pytest.raises(FormatError, match="is not a path inside a checkpoint"):
        Manifest.from_bytes(replace(WHOLE, files={path: FileSums(0, ())}).to_bytes())


@given(paths)
@MORE
def test_a_path_is_taken_if_it_stays_inside(path: str) -> None:
    if is_inside(path):
        check_path(path)
    else:
        with pytest.raises(FormatError):
            check_path(path)


@pytest.mark.parametrize("key", ["written_by", "more", "param_groups"])
def test_what_is_nested_deeply_is_an_error(key: str) -> None:
    for depth in (500, 900, 2_000, 100_000):
        text = TEXT.replace(b'"step": 7', b'"step": 7, "%s": %s' % (key.encode(), b"[" * depth + b"]" * depth))
        with pytest.raises(FormatError):
            Manifest.from_bytes(text)


# -- names -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.text("ab.", min_size=1, max_size=4), max_size=4), st.text("ab_", min_size=1, max_size=3))
@MORE
def test_the_key_of_a_state_gives_its_parameter_and_its_name(parameters: list[str], name: str) -> None:
    for parameter in parameters:
        found = split_key(state_key(parameter, name), parameters)
        assert found == (parameter, name)
    assert split_key(state_key("other", name), parameters) is None
