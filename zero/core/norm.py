"""The global gradient norm, which has the same bits for every partition of the gradients.

Knows: tensors, blocks and exact sums. Does not know: ranks, owners of parameters, communication. Each holder of a piece
of the gradients turns it into a `PowerSum` and sends its bytes to the rank that merges them. The norm is then the same
to the last bit for every way of cutting and every order of merging.

The p-norm of all gradients is Q ** (1/p), where Q is the sum of |x|**p over all elements. An fp64 sum of all elements
would depend on its order. So a parameter's elements, in memory order, are taken in blocks of 64 bytes of fp32 or fp64
(16 elements; 8 of fp64). The last block is filled up with zeros:

    parameter   |0 ........ 15|16 ........ 31|32 ... 40 0 .. 0|
    |x|**p       fp64, in each element
    block sums  |  fixed tree |  fixed tree  |   fixed tree   |        fp64, rounded alike wherever the block lies
    Q           |    + exact integer addition, in any order   |        an integer multiple of 2**-1074

    the tree    lane j + lane j+8, then j + j+4, then j + j+2, then 0 + 1    (8 lanes: from j + j+4 on)

A cut at a multiple of 16 elements (8 of fp64) from the parameter's start falls between blocks and changes nothing. For
p = 2 the squares of fp32, bf16 and fp16 are exact in fp64, so only a block sum's four additions and the final number
are rounded.

Alternatives that were rejected:
- `torch.sum` in fp64 takes half the time, but its order is unspecified and depends on length, stride and thread count.
- `math.fsum` over the block sums makes this step over ten times slower, and its rounded results cannot be merged.
- Exact addition of every element, without blocks, needs three to four more passes over all elements.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .bits import host_readable

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_UNIT_EXPONENT = 1074  # every finite fp64 number is an integer multiple of 2**-1074
_TILE = 4096  # elements that are transposed together from rows of blocks to columns of lanes: they fit the first cache
TILES, DEVICE_TILES = 16, 1024  # in a chunk: on the CPU one that stays in the cache, elsewhere few launches
_MAX_BLOCK = 16
_ROUNDS = 6  # of an exact sum on an accelerator before the host reads anything
_TOO_LARGE = 2.0**900  # 1.5 * 2**(e+k), see `_exact_sum`, might not exist
_WIRE = struct.Struct("<dB7x272s")  # norm type, flags, units: room for 2**64 blocks of the largest fp64 number


@dataclass(frozen=True)
class PowerSum:
    """An exact partial of Q = sum of |x|**p over some elements; for p = inf, their largest magnitude.

    Two partials over disjoint sets of whole blocks merge into the partial over both. `merge` is associative and
    commutative, and `PowerSum(p)` is its identity. Partials are equal if and only if their bytes are.

    Attributes:
        norm_type: p, greater than 0; inf included.
        units: the finite part of Q (or the largest finite magnitude), as a multiple of 2**-1074.
        has_inf: an element was infinite, or its power or its block's sum exceeds fp64.
        has_nan: an element was NaN.
        is_fp64: an element was fp64; so is the norm then.

    Raises:
        ValueError: `norm_type` is not greater than 0.
    """

    norm_type: float
    units: int = 0
    has_inf: bool = False
    has_nan: bool = False
    is_fp64: bool = False

    def __post_init__(self) -> None:
        check_norm_type(self.norm_type)

    @classmethod
    @torch.no_grad()
    def of(cls, pieces: Iterable[Tensor], norm_type: float) -> PowerSum:
        """Return the partial over `pieces`, in any order; an exact zero if there are none.

        Args:
            pieces: 1-D contiguous tensors of fp32, fp64, bf16 or fp16, on any device; empty ones are skipped. Each
                starts at a parameter's start or at a multiple of 16 elements (8 for fp64) from it, and ends likewise or
                at the parameter's end. Short pieces are collected before they are read, so a piece must keep its values
                until this returns.
            norm_type: p.

        Raises:
            ValueError: a piece is not 1-D and contiguous, or `norm_type` is not greater than 0.
            TypeError: a piece has another dtype.
        """
        total = cls(norm_type)
        readers: dict[tuple[torch.dtype, torch.device], _Reader] = {}
        for piece in filter(Tensor.numel, pieces):
            key = (piece.dtype, piece.device)
            reader = readers.get(key)
            if reader is None:
                if piece.dtype not in _FLOATS:
                    raise TypeError(f"a norm needs fp32, fp64, bf16 or fp16 gradients, not {piece.dtype}")
                reader = readers[key] = _Reader(*key, norm_type, at_once=host_readable(piece.device))
            if piece.dim() != 1 or not piece.is_contiguous():
                raise ValueError(
                    "a norm is taken over 1-D contiguous pieces, not over one of shape "
                    f"{tuple(piece.shape)} and stride {piece.stride()}; flatten it in memory order first"
                )
            reader.read(piece)
        for (dtype, _), reader in readers.items():
            total = total.merge(cls(norm_type, *reader.finish(), dtype is torch.float64))
        return total

    def merge(self, other: PowerSum) -> PowerSum:
        """Return the partial over the elements of both.

        Raises:
            ValueError: the two are partials of different norms.
        """
        if self.norm_type != other.norm_type:
            raise ValueError(f"partials of a {self.norm_type}-norm and a {other.norm_type}-norm do not merge")
        units = max(self.units, other.units) if self.norm_type == math.inf else self.units + other.units
        return PowerSum(
            self.norm_type,
            units,
            self.has_inf or other.has_inf,
            self.has_nan or other.has_nan,
            self.is_fp64 or other.is_fp64,
        )

    @property
    def is_finite(self) -> bool:
        """Whether no element was infinite or NaN."""
        return not (self.has_inf or self.has_nan)

    def to_bytes(self) -> bytes:
        """Return the partial as 288 bytes, whatever its value: p (fp64), flags (1 byte, 7 unused), units (272 bytes).

        All are little-endian. Equal partials give equal bytes.
        """
        flags = self.has_inf | self.has_nan << 1 | self.is_fp64 << 2
        return _WIRE.pack(self.norm_type, flags, self.units.to_bytes(272, "little"))

    @classmethod
    def from_bytes(cls, data: bytes) -> PowerSum:
        """Return the partial that `to_bytes` wrote.

        Raises:
            ValueError: `data` is not an output of `to_bytes`.
        """
        if len(data) != _WIRE.size:
            raise ValueError(f"a partial of a norm has {_WIRE.size} bytes, not {len(data)}")
        norm_type, flags, units = _WIRE.unpack(data)
        partial = cls(norm_type, int.from_bytes(units, "little"), bool(flags & 1), bool(flags & 2), bool(flags & 4))
        if partial.to_bytes() != data:
            raise ValueError("these bytes are no partial of a norm: flags or padding have bits that are never set")
        return partial

    def norm(self) -> Tensor:
        """Return Q ** (1/p) as a 0-dim CPU tensor, fp64 if `is_fp64`, else fp32.

        It is NaN if any element was NaN; otherwise inf if any element was inf or Q is. Q is rounded to fp64 once (half
        to even), its root is taken in fp64, and that is rounded to the norm's dtype.
        """
        dtype = torch.float64 if self.is_fp64 else torch.float32
        return torch.tensor(self._root(), dtype=torch.float64, device="cpu").to(dtype)

    def _root(self) -> float:
        if self.has_nan:
            return math.nan
        if self.has_inf:
            return math.inf
        try:
            power_sum = self.units / (1 << _UNIT_EXPONENT)  # Python rounds the quotient of two integers correctly
            if self.norm_type in (1.0, math.inf):
                return power_sum
            return math.sqrt(power_sum) if self.norm_type == 2.0 else power_sum ** (1.0 / self.norm_type)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class _Lanes:
    """fp64 scratch for a number of tiles, with its views.

    The views are made once, since a view costs as much as the work of a tile.

    Attributes:
        whole: contiguous, (tile, lane, block): lane j of block b is the block's element j.
        halvings: pairs of views of `whole`; adding the second to the first halves the number of lanes.
        last: the two lanes that remain after the halvings, each (tile, block).
    """

    whole: Tensor
    halvings: tuple[tuple[Tensor, Tensor], ...]
    last: tuple[Tensor, Tensor]

    @classmethod
    def over(cls, whole: Tensor) -> _Lanes:
        halvings = []
        half = whole.shape[1] // 2
        while half > 1:
            halvings.append((whole[:, :half], whole[:, half : 2 * half]))
            half //= 2
        return cls(whole, tuple(halvings), (whole[:, 0], whole[:, 1]))


class _Reader:
    """Adds up the blocks of pieces of one dtype on one device, a cache-sized chunk at a time.

    Its memory is about 1.5 MB for fp32 on the CPU, however much it reads. On an accelerator, where launches decide and
    not caches, it is 64 times as much. There `_leading_parts` of all chunks are read together, at the end. If that is
    not each sum as a whole, as with numbers that are not finite, the pieces are read again, a chunk at a time.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, norm_type: float, *, at_once: bool) -> None:
        """``at_once``: the host reads each chunk's sum."""
        self._norm_type, self._at_once = norm_type, at_once
        self._block = 8 if dtype == torch.float64 else _MAX_BLOCK
        self._tiles = TILES if device.type == "cpu" else DEVICE_TILES
        self._chunk = self._tiles * _TILE
        self._stage = torch.empty(self._chunk, dtype=dtype, device=device)
        shape = (self._tiles, self._block, _TILE // self._block)
        self._lanes = {self._tiles: _Lanes.over(torch.empty(shape, dtype=torch.float64, device=device))}
        zeros = torch.zeros(_MAX_BLOCK, dtype=dtype, device=device)
        self._zeros = [zeros[:length] for length in range(_MAX_BLOCK)]
        self._gathered, self._sums = list[Tensor](), list[Tensor]()
        self._pieces, self._unread = list[Tensor](), list[Tensor]()  # to be read again; of each chunk, what is not read
        self._gathered_numel = self._units = 0
        self._has_inf = self._has_nan = False

    def read(self, piece: Tensor) -> None:
        """Take one piece. The values of a short one may be read later."""
        numel = piece.numel()
        if not self._at_once:
            self._pieces.append(piece)
        if numel < self._chunk // 2:
            self._gather(piece)
            return
        in_chunks, in_tiles = numel - numel % self._chunk, numel - numel % _TILE
        if in_chunks:
            self._fold(piece[:in_chunks], self._tiles)
        if in_tiles > in_chunks:
            self._fold(piece[in_chunks:in_tiles], (in_tiles - in_chunks) // _TILE)
        if numel > in_tiles:
            self._gather(piece[in_tiles:].clone())  # a view would keep all of the piece alive

    def finish(self) -> tuple[int, bool, bool]:
        """Return units, has_inf and has_nan of all pieces."""
        self._fold_gathered()
        self._drain()
        if self._unread and not self._add_unread():
            again = _Reader(self._stage.dtype, self._stage.device, self._norm_type, at_once=True)
            for piece in self._pieces:
                again.read(piece)
            return again.finish()
        return self._units, self._has_inf, self._has_nan

    def _add_unread(self) -> bool:
        """Add up what was left on the device. Return whether it was all."""
        rows: list[list[float]] = torch.stack(self._unread).tolist()  # host synchronisation: one for all chunks
        if not all(math.isfinite(number) for row in rows for number in row):
            return False
        if self._norm_type == math.inf:
            self._units = max(_in_units(largest) for (largest,) in rows)
            return True
        self._units = sum(_in_units(part) for _, *parts, _ in rows for part in parts)
        return all(largest < _TOO_LARGE and not rest for largest, *_, rest in rows)

    def _gather(self, piece: Tensor) -> None:
        numel = piece.numel()
        padding = -numel % _MAX_BLOCK
        if self._gathered_numel + numel + padding > self._chunk:
            self._fold_gathered()
        self._gathered.append(piece)
        if padding:
            self._gathered.append(self._zeros[padding])
        self._gathered_numel += numel + padding

    def _fold_gathered(self) -> None:
        tiles = -(-self._gathered_numel // _TILE)
        staged = self._stage[: tiles * _TILE]
        if tiles:
            torch.cat(self._gathered, out=staged[: self._gathered_numel])
            staged[self._gathered_numel :].zero_()
            self._fold(staged, tiles)
        self._gathered = []
        self._gathered_numel = 0

    def _fold(self, values: Tensor, tiles: int) -> None:
        """Add up whole tiles, `tiles` of them at a time."""
        if self._norm_type == math.inf:
            self._fold_maximum(values)
            return
        for columns in values.view(-1, tiles, _TILE // self._block, self._block).transpose(2, 3).unbind(0):
            self._add_blocks(columns)

    def _add_blocks(self, columns: Tensor) -> None:
        tiles = columns.shape[0]
        lanes = self._lanes.get(tiles)
        if lanes is None:
            lanes = self._lanes[tiles] = _Lanes.over(self._lanes[self._tiles].whole[:tiles])
        lanes.whole.copy_(columns)
        self._raise_to_power(lanes.whole)
        for kept, added in lanes.halvings:
            kept.add_(added)
        self._sums.append(torch.add(*lanes.last))
        if len(self._sums) == 8:
            self._drain()

    def _raise_to_power(self, lanes: Tensor) -> None:
        if self._norm_type == 2.0:
            lanes.mul_(lanes)
            return
        lanes.abs_()
        if self._norm_type == 1.0:
            return
        # Tile by tile on the CPU: vector and scalar code may round pow differently. If torch splits a long tensor among
        # its threads, the ragged end of a part is computed by scalar code.
        for part in lanes if lanes.device.type == "cpu" else (lanes,):
            if self._norm_type == 3.0:
                part.mul_(part * part)
            else:
                part.pow_(self._norm_type)

    def _fold_maximum(self, values: Tensor) -> None:
        low, high = torch.aminmax(values)
        if not self._at_once:
            self._unread.append(torch.maximum(-low, high).double().unsqueeze(0))
            return
        largest = torch.maximum(-low, high).item()  # host synchronisation: see `_exact_sum`
        if math.isfinite(largest):
            self._units = max(self._units, _in_units(largest))
        else:
            self._note_nonfinite(values)

    def _drain(self) -> None:
        if not self._sums:
            return
        sums = torch.cat(self._sums).flatten()
        self._sums = []
        if not self._at_once:
            self._unread.append(_leading_parts(sums))
            return
        if not math.isfinite(sums.sum().item()):  # host synchronisation: see `_exact_sum`
            self._note_nonfinite(sums)
            sums = sums.where(sums.isfinite(), 0.0)
        self._units += _exact_sum(sums)

    def _note_nonfinite(self, values: Tensor) -> None:
        self._has_inf = self._has_inf or bool(values.isinf().any())
        self._has_nan = self._has_nan or bool(values.isnan().any())


def _in_units(value: float) -> int:
    """Return a finite `value` as a multiple of 2**-1074."""
    numerator, denominator = value.as_integer_ratio()
    return numerator << (_UNIT_EXPONENT + 1 - denominator.bit_length())


def _exact_sum(values: Tensor) -> int:
    """Return the exact sum of finite, non-negative fp64 `values` (1-D, at least one), in units of 2**-1074.

    Each round splits off the leading bits of all values at one common grid (Rump, Ogita and Oishi, "Accurate
    floating-point summation I", 2008, section 3): with n < 2**k values below 2**e, adding and subtracting 1.5 *
    2**(e+k) rounds each to a multiple of u = 2**(e+k-52). The rounded parts are multiples of u and at most 2**e, so any
    sum of them is a multiple of u below 2**(e+k) < 2**53 u: exact in whatever order it is formed. The rest of each
    value is exact as well, at most u/2, and goes to the next round, 52 - k bits further down. Ordinary gradients take
    two or three rounds.

    Host synchronisation: the sum is an integer of up to 2,200 bits, and a round's grid depends on the rest of the
    previous round. On a device each `item` waits for all enqueued work; there are about ten for 32 million fp32
    elements.
    """
    bits, total = values.numel().bit_length(), 0
    rest, leading = values, torch.empty_like(values)
    largest = torch.aminmax(values)[1].item()
    if largest >= _TOO_LARGE:
        large = values.where(values >= _TOO_LARGE, 0.0)
        total = _exact_sum(large * 2.0**-512) << 512
        rest = values - large
        largest = rest.max().item()
    while largest > 0.0:
        shift = math.ldexp(1.5, math.frexp(largest)[1] + bits)
        torch.add(rest, shift, out=leading).sub_(shift)
        total += _in_units(leading.sum().item())
        rest.sub_(leading)
        low, high = torch.aminmax(rest)
        largest = max(-low.item(), high.item())
    return total


def _leading_parts(values: Tensor) -> Tensor:
    """Return the largest of non-negative fp64 `values` (1-D, at least one), the sum of their leading bits in each of
    `_ROUNDS` rounds, and what no round has reached, the largest magnitude of it.

    The result is 1-D, on their device, and the host does not wait. The sums are those of `_exact_sum`, and exact if the
    largest is less than `_TOO_LARGE`. 1.5 * 2**(e+k) is made of its bits: its exponent is the largest's, plus k + 1.
    """
    bits, rest, sums = values.numel().bit_length(), values, []
    first = largest = values.max()
    for _ in range(_ROUNDS):
        exponent = largest.view(torch.int64) & 0x7FF << 52
        shift = (exponent + ((bits + 1) << 52 | 1 << 51)).view(torch.float64)
        leading = (rest + shift).sub_(shift)
        sums.append(leading.sum())
        rest = rest - leading
        largest = torch.linalg.vector_norm(rest, math.inf)
    return torch.stack([first, *sums, largest])


def check_norm_type(norm_type: float) -> float:
    """Return `norm_type` as a float. Raises `ValueError` if it is not greater than 0 (inf is allowed)."""
    norm_type = float(norm_type)
    if not norm_type > 0.0:
        raise ValueError(f"norm_type must be greater than 0 (math.inf for the largest magnitude), not {norm_type}")
    return norm_type
