"""The plan of a checkpoint: which tensor lies where in which file, and which bytes of a file a rank writes or reads.

Knows: names, shapes, the layout, numbers of ranks. Does not know: values, files on a disk, running ranks, torch's
optimizers. Everything here is computed alike on every rank, without a message.

    layout (reversed)    bucket  | c c c c | b b . | a a a a |        rank 0 owns [0, 5), rank 1 the rest
    file (registration)  header  a a a a b b c c c c                   no padding, no gaps
                                 1 1 1 1 1 0 0 0 0 0                   who writes it: runs of bytes

An element interval of a slot is a run of bytes of its file, because both are in row-major order. A tensor with another
memory order has one writer, the rank with its first element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...core.layout import ALIGNMENT_BYTES, BucketSpec, EvenCuts, ParameterSpec, Piece
from ...core.stage import Placement, Stage
from .tensorfile import TensorEntry, header_bytes, split


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file, whether it is written or read.

    Attributes:
        path: relative to the checkpoint, with "/".
        data: the first byte of the data.
        tensors: in the order of their bytes.
    """

    path: str
    data: int
    tensors: tuple[TensorEntry, ...]

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def nbytes(self) -> int:
        return self.data + (self.tensors[-1].end if self.tensors else 0)


@dataclass(frozen=True)
class FilePlan(TensorFile):
    """A safetensors file before it is written. ``header``: the bytes before the data."""

    header: bytes

    @classmethod
    def of(cls, path: str, header: bytes, tensors: Sequence[TensorEntry]) -> FilePlan:
        return cls(path, len(header), tuple(tensors), header)


@dataclass(frozen=True)
class Part:
    """Bytes ``[begin, begin + nbytes)`` of one tensor, which lie at ``offset`` of a source.

    A source is flat memory of one rank: a key that the caller gave.
    """

    source: tuple[str, int]
    offset: int
    begin: int
    nbytes: int


@dataclass(frozen=True)
class Chunk:
    """Bytes of a file that a rank writes or reads at once, between two borders of blocks.

    Attributes:
        path: of the file.
        begin: the first byte, counted from the beginning of the file.
        parts: their bytes in the sources, one after the other. ``Part.begin`` counts from the beginning of the file.
        nbytes: their bytes.
        sources: how many parts each source has, in the order of their first ones.
    """

    path: str
    begin: int
    parts: tuple[Part, ...]
    nbytes: int = field(init=False, compare=False)
    sources: Mapping[tuple[str, int], int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum(part.nbytes for part in self.parts))
        object.__setattr__(self, "sources", Counter(part.source for part in self.parts))


def plan_files(
    folder: str, tensors: Sequence[TensorEntry], metadata: Mapping[str, str], max_bytes: int
) -> list[FilePlan]:
    """Lay out the tensors of a folder, in this order, in files of at most ``max_bytes`` each.

    A tensor is never divided, so a larger one has a file of its own. Each file has ``metadata``, and there is at least
    one, also without any tensor.
    """
    groups: list[list[TensorEntry]] = [[]]
    end = 0
    for entry in tensors:
        if groups[-1] and end + entry.nbytes > max_bytes:
            groups.append([])
            end = 0
        groups[-1].append(replace(entry, begin=end))
        end += entry.nbytes
    stem = folder.rpartition("/")[2]
    return [
        FilePlan.of(
            f"{folder}/{stem}-{number:05d}-of-{len(groups):05d}.safetensors", header_bytes(group, metadata), group
        )
        for number, group in enumerate(groups, start=1)
    ]


def is_row_major(spec: ParameterSpec) -> bool:
    """Return whether a parameter's memory has the order of its dimensions, as a file has."""
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1 and stride != expected and spec.numel:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Writers:
    """The interval of a bucket that each rank writes, although several may hold it.

    Ranks that hold the same interval write equal parts of it: all ranks at stage 0, replicas with a sharding factor.
    """

    stage: Stage
    world_size: int
    shards: int  # ranks that share one copy

    def interval(self, bucket: BucketSpec, rank: int) -> tuple[int, int]:
        """Return the elements of a bucket that ``rank`` writes."""
        number, holders = rank, self.world_size
        begin, end = self.stage.update_interval(bucket, rank % self.shards)
        if self.stage.states is Placement.SHARD:
            number, holders = rank // self.shards, self.world_size // self.shards
        low, high = EvenCuts(end - begin, holders, bucket.dtypes.alignment).owned(number)
        return begin + low, begin + high

    def pieces(self, bucket: BucketSpec, rank: int) -> tuple[Piece, ...]:
        """Return the pieces of a bucket that ``rank`` writes. A slot without elements has one writer, too."""
        return bucket.pieces(*self.interval(bucket, rank))

    def first_of(self, bucket: BucketSpec, rank: int) -> set[int]:
        """Return the slots whose first element, or whose place if they have none, ``rank`` writes."""
        return {piece.slot for piece in self.pieces(bucket, rank) if piece.begin == bucket.slots[piece.slot].offset}


def even_part(nbytes: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the bytes of a tensor that every rank holds whole which ``rank`` writes."""
    low, high = EvenCuts(-(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, world_size, ALIGNMENT_BYTES).owned(rank)
    return min(low, nbytes), min(high, nbytes)


def slot_part(
    source: tuple[str, int], piece: Piece, bucket: BucketSpec, interval: tuple[int, int], itemsize: int
) -> Part:
    """Map a piece of a slot to the byte range of its row-major tensor. ``interval``: the source's, in elements."""
    begin = bucket.within(piece).start
    return Part(source, (piece.begin - interval[0]) * itemsize, begin * itemsize, piece.numel * itemsize)


def chunks(
    files: Sequence[TensorFile], parts: Mapping[tuple[str, str], Sequence[Part]], block_bytes: int
) -> list[Chunk]:
    """Return the chunks of one rank, in the order of the files.

    ``parts``: the rank's parts of each tensor, in order, by the tensor's folder and name. Parts that are neighbours in
    the file and in their source become one.
    """
    found: list[Chunk] = []
    run: list[Part] = []

    def flush(path: str) -> None:
        if run:
            found.append(Chunk(path, run[0].begin, tuple(run)))
            run.clear()

    for file in files:
        for entry in file.tensors:
            for part in parts.get((file.folder, entry.name), ()):
                start = file.data + entry.begin + part.begin
                for low, high in split(start, start + part.nbytes, block_bytes):
                    if run and (low % block_bytes == 0 or low != run[-1].begin + run[-1].nbytes):
                        flush(file.path)
                    offset = part.offset + low - start
                    last = run[-1] if run else None
                    if last is not None and last.source == part.source and last.offset + last.nbytes == offset:
                        run[-1] = Part(part.source, last.offset, last.begin, last.nbytes + high - low)
                    else:
                        run.append(Part(part.source, offset, low, high - low))
        flush(file.path)
    return found
