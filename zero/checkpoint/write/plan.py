"""The plan of a save on one rank: the files, which bytes of them this rank writes, and from which memory.

Knows: folders and keys of the format, which memory holds which tensor. Does not know: values, folders on a disk.

Nothing here depends on a value but the options of param groups, which are in the headers of `optimizer/`. So a plan
serves the next save, too, unless the model or the kinds of its states have changed: `Saver` has the rule.

    source               memory of this rank
    (WEIGHTS, n)         the parameters of bucket n
    ("state s", n)       the state s of bucket n
    (MASTERS, n)         the master weights of bucket n
    ("whole", 0)         the rank's parts of all tensors that every rank has whole, side by side
    ("average a", n)     the average a of bucket n
    ("count a", 0)       how many weights the average a has seen
    ("scalars", 0)       the states that are not as large as their parameter, side by side
    (folder/key, n)      a tensor whose memory is not row-major
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.bits import other_stride
from ...core.layout import ParameterSpec
from ...core.statetree import DTYPES, N_AVERAGED, NAMES
from ..contents import AVERAGE, STATE, WEIGHTS, Contents, Place, StateFacts, StoredTensor
from ..format.extents import Chunk, FilePlan, Part, chunks, even_part, is_row_major, plan_files, slot_part
from ..format.names import MASTERS, MODEL, OPTIMIZER, averages_folder, index_file, split_key, state_key
from ..format.tensorfile import TensorEntry, header_of, index_bytes, strides_note, tensors_text
from .snapshot import Source

WHOLE, SCALARS, COUNT = "whole", "scalars", "count"


@dataclass(frozen=True)
class BucketTensor:
    """A tensor of the files whose elements lie in a bucket: where, in which kind of memory, and its dtype."""

    folder: str
    key: str
    kind: str
    place: Place
    dtype: torch.dtype

    @property
    def source(self) -> Source:
        """Its own memory, if that of the bucket is not row-major."""
        return f"{self.folder}/{self.key}", self.place[0]


def bucket_tensors(contents: Contents, facts: StateFacts, stored: StoredTensor, place: Place) -> list[BucketTensor]:
    """Return the tensors of the files that are as large as a parameter, of one parameter."""
    found = [BucketTensor(MODEL, stored.name, WEIGHTS, place, stored.dtype)]
    states = facts.states.get(place)
    for name, dtype in {} if states is None else states.elementwise.items():
        found.append(BucketTensor(OPTIMIZER, state_key(stored.name, name), f"{STATE} {name}", place, DTYPES[dtype]))
    if place in facts.masters:
        dtypes = contents.buckets[place[0]].spec.dtypes
        found.append(BucketTensor(MASTERS, stored.name, MASTERS, place, dtypes.master_dtype))
    if place[0] in contents.updated:
        wide = contents.buckets[place[0]].spec.dtypes.master_dtype
        for name, _ in contents.averages.with_values():
            found.append(BucketTensor(averages_folder(name), stored.name, f"{AVERAGE} {name}", place, wide))
    return found


def permuted_tensors(contents: Contents, facts: StateFacts) -> list[BucketTensor]:
    """Return the tensors whose memory is not row-major, in order. Equal on all ranks, which gather them."""
    return [
        tensor
        for stored in contents.model
        if stored.place is not None and not is_row_major(_spec(contents, stored.place))
        for tensor in bucket_tensors(contents, facts, stored, stored.place)
    ]


def _spec(contents: Contents, place: Place) -> ParameterSpec:
    number, slot = place
    return contents.buckets[number].specs[slot]


class WritePlan:
    """What all saves of one layout with the same kinds of states have in common, on one rank.

    Attributes:
        indices: of the folders, by path; equal on all ranks.
        intervals: of each bucket, the elements that this rank writes.
        mastered: the numbers of the buckets with master weights in `masters/`.
        wholes: numbers in `Contents.model` of tensors that every rank has, with the bytes of each that this rank
            writes.
    """

    def __init__(self, contents: Contents, facts: StateFacts, max_shard_bytes: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._parts: dict[tuple[str, str], list[Part]] = {}
        self.wholes: list[tuple[int, int, int]] = []
        self._lay_out(contents, facts, max_shard_bytes)
        self._plan_parts(contents, facts)
        self._chunks: tuple[list[int], list[Chunk]] = ([], [])

    def _lay_out(self, contents: Contents, facts: StateFacts, max_shard_bytes: int) -> None:
        """Lay out the files of all folders. States without dimensions come last."""
        model = [TensorEntry(stored.name, NAMES[stored.dtype], stored.shape) for stored in contents.model]
        aliases = {alias: stored.name for stored in contents.model for alias in stored.aliases}
        states: list[TensorEntry] = []
        masters: list[TensorEntry] = []
        values: dict[str, Any] = {}
        averages = {
            name: [TensorEntry(N_AVERAGED, NAMES[torch.int64], ())] for name, _ in contents.averages.with_values()
        }
        listed = {stored.name for stored in contents.model if stored.index is not None}

        def key(parameter: str, name: str) -> str:
            made = state_key(parameter, name)
            if split_key(made, listed) != (parameter, name):
                raise ValueError(f"the state {name!r} of {parameter!r} could be taken for one of another parameter")
            return made

        for stored in contents.model:
            if stored.index is None or stored.place is None:
                continue
            wide = NAMES[contents.buckets[stored.place[0]].spec.dtypes.master_dtype]
            stride = other_stride(stored.shape, _spec(contents, stored.place).stride)
            for averaged in averages.values():
                averaged.append(TensorEntry(stored.name, wide, stored.shape, stride=stride))
            found = facts.states.get(stored.place)
            if found is not None:
                shapes = {name: (dtype, stored.shape) for name, dtype in found.elementwise.items()}
                strides = {**dict.fromkeys(found.elementwise, stride), **found.strides}
                for name, (kind, shape) in sorted((shapes | dict(found.tensors)).items()):
                    states.append(TensorEntry(key(stored.name, name), kind, shape, stride=strides.get(name)))
                values.update((key(stored.name, name), value) for name, value in sorted(found.values.items()))
            if stored.place in facts.masters:
                masters.append(TensorEntry(stored.name, wide, stored.shape, stride=stride))
        states.sort(key=lambda entry: not entry.shape)
        of_folder: dict[str, list[TensorEntry]] = {MODEL: model, OPTIMIZER: states}
        if masters:
            of_folder[MASTERS] = masters
        of_folder.update((averages_folder(name), tensors) for name, tensors in sorted(averages.items()))
        self._folders = {
            folder: plan_files(folder, tensors, aliases if folder == MODEL else {}, max_shard_bytes)
            for folder, tensors in of_folder.items()
        }
        self.indices = {
            index_file(folder): index_bytes({file.path.rpartition("/")[2]: file.tensors for file in files})
            for folder, files in self._folders.items()
        }
        self._texts = [tensors_text(file.tensors) for file in self._folders[OPTIMIZER]]
        self._values = json.dumps(values)

    def files(self, param_groups: Sequence[Any]) -> list[FilePlan]:
        """Return the files of all ranks. Those of `optimizer/` hold the options of these param groups."""
        metadata = {"param_groups": json.dumps(param_groups), "values": self._values}
        optimizer = [
            FilePlan.of(
                file.path,
                header_of(text, len(file.tensors), {**metadata, **strides_note(file.tensors)}),
                file.tensors,
            )
            for file, text in zip(self._folders[OPTIMIZER], self._texts, strict=True)
        ]
        found = {**self._folders, OPTIMIZER: optimizer}
        return [file for files in found.values() for file in files]

    def chunks(self, files: Sequence[FilePlan]) -> list[Chunk]:
        """Return the chunks of this rank in ``files``, which have the options of this save.

        They are those of before if no header has another length now.
        """
        data = [file.data for file in files]
        if data != self._chunks[0]:
            self._chunks = data, chunks(files, self._parts, self._block_bytes)
        return self._chunks[1]

    # -- parts --------------------------------------------------------------------------------------------------------

    def _plan_parts(self, contents: Contents, facts: StateFacts) -> None:
        """Note which part of each tensor this rank writes, and where it lies."""
        rank = contents.transport.rank
        pieces = [
            {piece.slot: piece for piece in contents.writers.pieces(bucket.spec, rank)} for bucket in contents.buckets
        ]
        self.intervals = [contents.writers.interval(bucket.spec, rank) for bucket in contents.buckets]
        self.mastered = frozenset(number for number, _ in facts.masters)
        end = 0
        for index, stored in enumerate(contents.model):
            if stored.place is None:
                end = self._plan_whole(contents, index, end)
                continue
            number, slot = stored.place
            spec, piece = contents.buckets[number].spec, pieces[number].get(slot)
            row_major = is_row_major(_spec(contents, stored.place))
            for tensor in bucket_tensors(contents, facts, stored, stored.place):
                if not row_major and slot in contents.first_slots[number]:
                    nbytes = _spec(contents, tensor.place).numel * tensor.dtype.itemsize
                    self._parts[tensor.folder, tensor.key] = [Part(tensor.source, 0, 0, nbytes)]
                elif row_major and piece is not None and piece.numel:
                    source, itemsize = (tensor.kind, number), tensor.dtype.itemsize
                    part = slot_part(source, piece, spec, self.intervals[number], itemsize)
                    self._parts[tensor.folder, tensor.key] = [part]
        self._plan_scalars(contents)
        for name, _ in contents.averages.with_values() if rank == 0 else ():
            self._parts[averages_folder(name), N_AVERAGED] = [Part((f"{COUNT} {name}", 0), 0, 0, torch.int64.itemsize)]

    def _plan_whole(self, contents: Contents, index: int, offset: int) -> int:
        """Plan this rank's part of a tensor that every rank has; of a buffer, rank 0 writes all. Return the end of the
        part in its source."""
        stored = contents.model[index]
        assert stored.tensor is not None
        rank, world = contents.transport.rank, contents.transport.world_size
        nbytes = stored.tensor.numel() * stored.tensor.itemsize
        begin, end = (0, nbytes if rank == 0 else 0) if stored.is_buffer else even_part(nbytes, world, rank)
        if begin < end:
            self.wholes.append((index, begin, end))
            self._parts[MODEL, stored.name] = [Part((WHOLE, 0), offset, begin, end - begin)]
            offset += end - begin
        return offset

    def _plan_scalars(self, contents: Contents) -> None:
        """Plan the states that are not as large as their parameter. Equal ones of neighbours share their bytes."""
        names = {stored.place: stored.name for stored in contents.model if stored.place is not None}
        end = 0
        for number, slots, name, begin, value in contents.own_scalars():
            nbytes = value.numel() * value.itemsize
            for slot in slots:
                key = OPTIMIZER, state_key(names[number, slot], name)
                self._parts.setdefault(key, []).append(Part((SCALARS, 0), end, begin, nbytes))  # one of each block here
            end += nbytes
