"""The collectives that one rank has launched on devices: how many, a digest of them in their order, and the last ones.

    count     1        2        3
    tag       unit 0   unit 1   bucket 0
    digest    crc(0, unit 0)    crc(digest of 1, unit 1)    crc(digest of 2, bucket 0)

Ranks with equal counts and digests have launched the same. If they have not, the last `KEPT` show which is the first
that differs.

Knows: tags. Does not know: messages, or other ranks.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from ..messages import Tag, describe

KEPT = 256  # tags
_HEAD, _DIGEST = struct.Struct("<q"), struct.Struct("<I")
_TAG_BYTES = len(Tag.pack(Tag(kind=1, label=""), 0))  # type: ignore[arg-type]


def agreed_digest(digest: int, bounds: Sequence[int], dtype: torch.dtype) -> int:
    """Return a digest of a tag's own and of what a collective without headers must have in common."""
    return zlib.crc32(repr((digest, list(bounds), dtype)).encode())


class Ledger:
    """The launches of one rank. The rank's thread adds to it, and the sentinel's reads."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, int, bytes]] = deque(maxlen=KEPT)  # count, digest, packed tag
        self._waited: deque[tuple[int, Callable[[], bool]]] = deque()  # count, and whether the device has ended it
        self._common: dict[tuple[Hashable, torch.dtype], int] = {}

    def agreed(self, digest: int, bounds: Sequence[int], dtype: torch.dtype) -> int:
        """Return a digest as `agreed_digest` does. What bounds and dtype add is formed once for each bucket."""
        key = bounds if isinstance(bounds, Hashable) else tuple(bounds), dtype
        if key not in self._common:
            self._common[key] = agreed_digest(0, bounds, dtype)
        return zlib.crc32(_DIGEST.pack(digest), self._common[key])

    @property
    def state(self) -> tuple[int, int]:
        """How many collectives were launched, and their digest."""
        last = self._last
        return last[-1][:2] if last else (0, 0)

    def add(self, tag: Tag) -> int:
        """Note that a collective is launched. Return its number, from 1 on. ``tag``: with `agreed_digest`."""
        count, digest = self.state
        packed = tag.pack(0)
        self._last.append((count + 1, zlib.crc32(packed, digest), packed))
        return count + 1

    def awaited(self, number: int, ended: Callable[[], bool]) -> None:
        """Note that a stream waits for a collective. ``ended``: whether it has ended; any thread may ask."""
        waited = self._waited
        while waited and waited[0][1]():
            waited.popleft()
        waited.append((number, ended))

    def oldest(self) -> int:
        """Return the number of the first collective that is awaited and has not ended; 0: there is none."""
        return next((number for number, ended in list(self._waited) if not ended()), 0)

    def history(self) -> History:
        return History(tuple(self._last))


@dataclass(frozen=True)
class History:
    """The last launches of a rank: count, digest, packed tag; without the tags if it came as `digests`."""

    launches: Sequence[tuple[int, int, bytes]]

    @property
    def count(self) -> int:
        return self.launches[-1][0] if self.launches else 0

    def digest(self, count: int) -> int | None:
        """Return the digest of the first ``count`` launches; None if it is not known any more."""
        if count == 0:
            return 0
        place = count - self.launches[0][0] if self.launches else -1
        return self.launches[place][1] if 0 <= place < len(self.launches) else None

    def tag(self, count: int) -> str:
        """Return the words for a launch; empty if it is not among these."""
        place = count - self.launches[0][0] if self.launches else -1
        return describe(Tag.unpack(self.launches[place][2])[0]) if 0 <= place < len(self.launches) else ""

    def pack(self, *, tags: bool = True) -> bytes:
        parts = (_DIGEST.pack(digest) + (packed if tags else b"") for _, digest, packed in self.launches)
        return _HEAD.pack(self.count) + b"".join(parts)

    @classmethod
    def unpack(cls, data: bytes, *, tags: bool = True) -> History:
        size = _DIGEST.size + (_TAG_BYTES if tags else 0)
        (count,), rest = _HEAD.unpack_from(data), data[_HEAD.size :]
        parts = [rest[begin : begin + size] for begin in range(0, len(rest), size)]
        first = count - len(parts) + 1
        return cls([(first + n, *_DIGEST.unpack_from(part), part[_DIGEST.size :]) for n, part in enumerate(parts)])
