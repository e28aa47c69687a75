"""Headers and indices of safetensors files: written, and read with every check that safetensors' own reader makes.

    8 bytes     the header's length, little-endian
    header      JSON: {"__metadata__": {text: text}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}, and
                spaces, so that the data begins at a multiple of `PAGE`. `__metadata__` has "strides" if some tensors
                had others than row-major ones when they were saved: JSON, by name
    data        the tensors, row-major, without gaps

Format: https://github.com/huggingface/safetensors, "Format". What safetensors' own reader refuses is refused. So is
what the format forbids although that reader takes it: one name twice, a header that begins with a space, an entry that
has other fields than these three or is no object. And what torch cannot hold: its missing dtypes, 2^63 bytes.

CRC-32s of the blocks of a file, formed from those of the fragments that ranks have written.

    file       | block 0         | block 1         | block 2  |
    fragments  [ rank 0 ][ rank 1 ][ rank 1 ][ rank 0 ][ .... ]     none crosses a border of blocks

A CRC of two neighbours is a function of their CRCs and of the second one's length, so a block's CRC does not depend on
the cuts. The formula is that of zlib's ``crc32_combine``: the first CRC, multiplied by x to the power of 8 times the
length modulo the CRC's polynomial, plus the second.

Knows: the format, checksums of fragments. Does not know: which tensors there are, how bytes are written.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeGuard

from ...core.bits import is_dense
from ...core.statetree import DTYPES, FormatError

PAGE = 4096
LONGEST_HEADER = 100_000_000
METADATA, STRIDES = "__metadata__", "strides"
_FIELDS = {"dtype", "shape", "data_offsets"}
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file. ``begin``: its first byte, counted from the beginning of the data. ``stride``: noted strides,
    of the tensor in memory; its bytes are row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


@dataclass(frozen=True)
class Header:
    """A file's header. ``data``: the first byte of the data in the file. ``tensors``: in the order of their bytes."""

    data: int
    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """The size of the whole file."""
        return self.data + (self.tensors[-1].end if self.tensors else 0)


def header_bytes(tensors: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the length and the header of a file that holds these tensors in this order, which ``begin`` must have."""
    return header_of(tensors_text(tensors), len(tensors), {**metadata, **strides_note(tensors)})


def strides_note(tensors: Sequence[TensorEntry]) -> dict[str, str]:
    """Return the part of a file's metadata that notes strides; empty if there are none to note."""
    found = {entry.name: list(entry.stride) for entry in tensors if entry.stride is not None}
    return {STRIDES: json.dumps(found)} if found else {}


def with_strides(header: Header) -> Header:
    """Return a header with the strides that its metadata notes. Raises `FormatError` if no tensor can have them."""
    found = parse_json(header.metadata.get(STRIDES, "{}").encode(), STRIDES)
    if not isinstance(found, dict):
        raise FormatError("its strides have no names")
    shapes = {entry.name: entry.shape for entry in header.tensors}
    for name, stride in found.items():
        shape = shapes.get(name, ())
        if name not in shapes or not _are_sizes(stride) or len(stride) != len(shape) or not is_dense(shape, stride):
            raise FormatError(f"its strides of {name!r} are not those of a tensor that it has")
    entries = (replace(e, stride=tuple(found[e.name])) if e.name in found else e for e in header.tensors)
    return replace(header, tensors=tuple(entries)) if found else header


def tensors_text(tensors: Sequence[TensorEntry]) -> str:
    """Return what a header says of its tensors, which is its longest part: JSON without the outer braces."""
    entries: dict[str, Any] = {METADATA: None}
    for entry in tensors:
        entries[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    if len(entries) != len(tensors) + 1:
        raise ValueError(
            f"two tensors of a file have one name, or one is called {METADATA!r}, which it keeps for itself"
        )
    del entries[METADATA]
    return _json(entries)[1:-1]


def header_of(text: str, count: int, metadata: Mapping[str, str]) -> bytes:
    """Return the length and the header of a file of ``count`` tensors, which have the text of `tensors_text`."""
    first = _json({METADATA: {"format": "pt", **metadata}})[:-1]
    whole = f"{first},{text}}}" if text else f"{first}}}"
    found = whole.encode()
    found += b" " * (-(len(found) + 8) % PAGE)
    if len(found) > LONGEST_HEADER:
        raise ValueError(f"the header of {count} tensors has {len(found):,} bytes: at most {LONGEST_HEADER:,}")
    return len(found).to_bytes(8, "little") + found


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def header_length(first: bytes, nbytes: int) -> int:
    """Return the header's length, given the ``first`` 8 bytes of a file of ``nbytes``. Raises `FormatError`."""
    if len(first) < 8:
        raise FormatError(f"it has {nbytes} bytes, too few for a header")
    length = int.from_bytes(first[:8], "little")
    if length > LONGEST_HEADER:
        raise FormatError(f"its header would have {length:,} bytes: at most {LONGEST_HEADER:,} are read")
    if 8 + length > nbytes:
        raise FormatError(f"its header of {length:,} bytes does not fit into its {nbytes:,} bytes: it is cut off")
    return length


def parse_header(text: bytes, nbytes: int) -> Header:
    """Return the header whose ``text`` follows the length in a file of ``nbytes``. Raises `FormatError`."""
    found = parse_json(text, "header")
    if not text.startswith(b"{") or not isinstance(found, dict):
        raise FormatError("its header is not a JSON object")
    metadata = found.pop(METADATA, None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{METADATA} of its header is not a map from text to text")
    tensors = sorted((_entry(name, fields) for name, fields in found.items()), key=lambda e: (e.begin, e.end))
    end = 0
    for entry in tensors:
        if entry.begin != end:
            raise FormatError(f"{entry.name!r} begins at byte {entry.begin} of the data instead of {end}")
        end = entry.end
    if 8 + len(text) + end != nbytes:
        raise FormatError(f"it has {nbytes:,} bytes instead of {8 + len(text) + end:,}")
    return Header(8 + len(text), tuple(tensors), metadata)


def _entry(name: str, fields: Any) -> TensorEntry:
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise FormatError(f"the entry of {name!r} is not a JSON object of dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{name!r} has dtype {dtype!r}, which cannot be read here")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_sizes(shape) or not _are_sizes(offsets):
        raise FormatError(f"the shape or the place of {name!r} is not made of whole numbers from 0 on")
    if math.prod(max(size, 1) for size in shape) * DTYPES[dtype].itemsize > _LARGEST:
        raise FormatError(f"{name!r} has shape {shape}, which no tensor has")
    entry = TensorEntry(name, dtype, tuple(shape), offsets[0])
    if entry.end != offsets[1]:
        raise FormatError(f"{name!r} has {offsets[1] - offsets[0]} bytes instead of {entry.nbytes}")
    return entry


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and 0 <= number <= _LARGEST for number in value)


def index_bytes(files: Mapping[str, Sequence[TensorEntry]]) -> bytes:
    """Return the index of a folder: for each tensor the name of its file, as Hugging Face's libraries read it."""
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    placed = {entry.name: path for path, entries in files.items() for entry in entries}
    return (json.dumps({"metadata": {"total_size": total}, "weight_map": placed}, indent=1) + "\n").encode()


def parse_index(text: bytes) -> dict[str, str]:
    """Return the file of each tensor. Raises `FormatError` also if a file is not directly inside the folder."""
    found = parse_json(text, "index")
    placed = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(placed, dict):
        raise FormatError("it has no map 'weight_map'")
    for name, path in placed.items():
        if not isinstance(path, str) or not path or path in (".", "..") or set(path) & set("/\\\0"):
            raise FormatError(f"{name!r} lies in {path!r}, which is no name of a file of the folder")
    return placed


def parse_json(text: bytes, what: str) -> Any:
    """Return the value of a JSON text, in which no name may occur twice in one object. Raises `FormatError`."""

    def pairs(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(entries)
        if len(result) != len(entries):
            twice, _ = Counter(name for name, _ in entries).most_common(1)[0]
            raise FormatError(f"its {what} has {twice!r} twice")
        return result

    def constant(name: str) -> NoReturn:
        raise FormatError(f"its {what} has {name}, which JSON does not know")

    try:
        found = json.loads(text.decode(), object_pairs_hook=pairs, parse_constant=constant, parse_int=_whole)
        if b"\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # raises for a lone surrogate, which is no text
        return found
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:  # among them bad UTF-8, and a number of thousands of digits
        raise FormatError(f"its {what} is not JSON ({error})") from error


def _whole(digits: str) -> int | float:
    """Return a number without a fraction. "-0" is the float -0.0, as it is for safetensors' own reader."""
    return -0.0 if digits == "-0" else int(digits)


BLOCK_BYTES = 4 << 20
_POLYNOMIAL = 0xEDB88320  # of CRC-32, with the bits reversed: bit 31 is the coefficient of x^0
_ONE = 1 << 31
_X_TO_8 = 1 << 23


@dataclass(frozen=True, order=True)
class Fragment:
    """The CRC-32 of the bytes ``[begin, begin + length)`` of a file.

    ``rank``: which rank has written them. ``place``: how many bytes it had written before.
    """

    begin: int
    length: int
    crc32: int
    rank: int = 0
    place: int = 0


def split(begin: int, end: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of ``[begin, end)`` between borders of blocks, in order."""
    while begin < end:
        border = min((begin // block_bytes + 1) * block_bytes, end)
        yield begin, border
        begin = border


def combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two neighbours. ``length``: the bytes of the second one."""
    return _product(_power(length), first) ^ second


def block_sums(fragments: Iterable[Fragment], nbytes: int, block_bytes: int) -> list[int]:
    """Return the CRC-32 of each block of a file of ``nbytes``.

    Raises `ValueError` if the fragments do not cover every byte once, or cross a border of blocks.
    """
    sums: list[int] = []
    end = 0
    for fragment in sorted(fragments):
        if fragment.length == 0:
            continue
        if fragment.begin != end:
            how = "not written" if end < fragment.begin else "written twice"
            raise ValueError(f"bytes {min(end, fragment.begin)} to {max(end, fragment.begin)} were {how}")
        if end % block_bytes == 0:
            sums.append(fragment.crc32)
        else:
            sums[-1] = combine(sums[-1], fragment.crc32, fragment.length)
        end += fragment.length
        if (end - 1) // block_bytes != fragment.begin // block_bytes:
            raise ValueError(f"the fragment at byte {fragment.begin} crosses a border of blocks")
    if end != nbytes:
        raise ValueError(f"{end} bytes were written instead of {nbytes}")
    return sums


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the CRC's."""
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


def _powers() -> tuple[int, ...]:
    """Return x to the powers of 8, 16, 32, ..., modulo the CRC's polynomial: one for each bit of a length."""
    found = [_X_TO_8]
    for _ in range(62):
        found.append(_product(found[-1], found[-1]))
    return tuple(found)


_POWERS = _powers()


def _power(length: int) -> int:
    """Return x to the power of ``8 * length``, modulo the CRC's polynomial."""
    result = _ONE
    for bit in range(length.bit_length()):
        if length >> bit & 1:
            result = _product(result, _POWERS[bit])
    return result
