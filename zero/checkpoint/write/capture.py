"""The plan of a save on one rank (`WritePlan`), and the values of one moment for it (`Capture`, `Snapshot`), while the
memory that holds them goes on to change.

    source      staged at `save`      a copy: parameters (a user may edit them at any time), scalars, the caller's state
                live                  the memory itself: optimizer states and master weights, which only a step changes

    the writer's thread    take(chunk): copies the chunk's bytes out of the sources, live or staged
    the step               before_update(bucket): if a live source of the bucket has bytes that were not taken yet, it
                           is copied now; if a chunk of it is being taken, this waits for that copy alone

So a step never waits for the disk.

The plan says which bytes of which files this rank writes, and from which memory. It depends on no value but the options
of param groups, which are in the headers of `optimizer/`. So it serves the next save, too, unless the model or the
kinds of its states have changed: `Saver` has the rule.

    source               memory of this rank
    (WEIGHTS, n)         the parameters of bucket n
    ("state s", n)       the state s of bucket n
    (MASTERS, n)         the master weights of bucket n
    ("whole", 0)         the rank's parts of all tensors that every rank has whole, side by side
    ("average a", n)     the average a of bucket n
    ("count a", 0)       how many weights the average a has seen
    ("scalars", 0)       the states that are not as large as their parameter, side by side
    (folder/key, n)      a tensor whose memory is not row-major

Knows: the files of a save, which memory holds which of their bytes. Does not know: folders on a disk.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collectives import Kind, Tag

from ...core.bits import as_bytes, noted_stride, other_stride
from ...core.layout import ParameterSpec, PartOfCuts
from ...core.statetree import DTYPES, N_AVERAGED, NAMES
from ...runtime.bucket import Bucket
from ...runtime.flat_buffer import FlatBuffer
from ...runtime.flat_states import MasterWeights
from ...state.gather import gather_to
from ..contents import AVERAGE, STATE, WEIGHTS, Contents, Place, StateFacts, StoredTensor
from ..format.extents import Chunk, FilePlan, Part, chunks, even_part, is_row_major, plan_files, slot_part
from ..format.manifest import MASTERS, MODEL, OPTIMIZER, averages_folder, index_file, split_key, state_key
from ..format.tensorfile import TensorEntry, header_bytes, header_of, index_bytes, strides_note, tensors_text

Source = tuple[str, int]


class Snapshot:
    """The sources of one save on one rank. Two threads use it: the one that steps, and the one that writes."""

    def __init__(
        self,
        staged: Mapping[Source, Tensor],
        live: Mapping[Source, tuple[int, Callable[[], Tensor]]],
        chunks: Sequence[Chunk],
    ) -> None:
        """Begin a snapshot.

        Args:
            staged: by source, copies that nobody else changes, 1-D, uint8.
            live: by source, the number of the bucket whose update changes it, and a function that returns its bytes,
                1-D, uint8: a view, or a copy of its own.
            chunks: all that will be taken.
        """
        self._staged = dict(staged)
        self._live = dict(live)
        self._of_bucket: dict[int, list[Source]] = {}
        for source, (bucket, _) in live.items():
            self._of_bucket.setdefault(bucket, []).append(source)
        self._left: Counter[Source] = Counter()
        for chunk in chunks:
            self._left.update(chunk.sources)
        self._open: dict[Source, Tensor] = {}  # bytes of live sources that the thread uses
        self._taking: frozenset[int] = frozenset()  # buckets of the chunk that is being copied
        self._changed = threading.Condition()
        self._over = False

    def take(self, chunk: Chunk, out: Tensor) -> None:
        """Copy the bytes of a chunk to ``out``, 1-D, uint8. Called by the thread that writes, once for each chunk."""
        import numpy as np  # here, because an import of the library needs torch alone

        sources = chunk.sources
        with self._changed:
            for source in sources:
                if source not in self._staged and source not in self._open:
                    self._open[source] = self._live[source][1]()
            found = {source: self._staged.get(source, self._open.get(source)) for source in sources}
            self._taking = frozenset(self._live[source][0] for source in sources if source not in self._staged)
        try:
            # NumPy, because a view of a tensor takes five times as long: many parts have a few hundred bytes
            memory = {source: tensor.numpy() for source, tensor in found.items() if tensor is not None}
            np.concatenate([memory[p.source][p.offset : p.offset + p.nbytes] for p in chunk.parts], out=out.numpy())
        finally:
            with self._changed:
                self._taking = frozenset()
                self._left.subtract(sources)
                for source in sources:
                    if not self._left[source]:
                        self._open.pop(source, None)
                        self._staged.pop(source, None)
                self._changed.notify_all()

    def before_update(self, bucket: int) -> None:
        """Keep the bytes of a bucket's live sources that were not taken yet. Called by the thread that steps."""
        with self._changed:
            for source in self._of_bucket.get(bucket, ()):
                if not self._over and self._left[source] and source not in self._staged:
                    memory = self._open.pop(source, None)
                    self._staged[source] = (self._live[source][1]() if memory is None else memory).clone()
            self._changed.wait_for(lambda: self._over or bucket not in self._taking)

    def end(self) -> None:
        """Drop everything: all was written, or the save has failed. Updates wait for nothing any more."""
        with self._changed:
            self._over = True
            self._staged.clear()
            self._open.clear()
            self._changed.notify_all()


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


class TreeFile:
    """A file of one tree of values: the JSON in its header, the tensors as its tensors.

    Attributes:
        tensors: each of them is a source.
        plan: of the file.
        parts: of the tensors.
    """

    def __init__(self, path: str, tree: Any, tensors: Mapping[str, Tensor]) -> None:
        entries: list[TensorEntry] = []
        for name, tensor in tensors.items():
            end = entries[-1].end if entries else 0
            entries.append(TensorEntry(name, NAMES[tensor.dtype], tuple(tensor.shape), end, noted_stride(tensor)))
        self.tensors = tensors
        self.plan = FilePlan.of(path, header_bytes(entries, {"tree": json.dumps(tree)}), entries)
        self.parts = {
            (self.plan.folder, entry.name): [Part((path, number), 0, 0, entry.nbytes)]
            for number, entry in enumerate(entries)
        }


def gather_permuted(contents: Contents, permuted: Sequence[BucketTensor]) -> dict[Source, Tensor]:
    """Bring tensors whose memory is not row-major to the ranks that write their first elements. Collective.

    Returns the bytes of those that this rank writes.
    """
    for number in contents.updated:
        contents.buckets[number].states.wait_for_copies()
    found = {tensor.source: _whole_of(contents, tensor) for tensor in permuted}
    return {source: whole for source, whole in found.items() if whole is not None}


class Capture:
    """The values of one moment on one rank, as a plan asks for them. Made on the main thread, between two steps.

    Attributes:
        staged, live: the sources, as a `Snapshot` has them.
    """

    def __init__(
        self,
        contents: Contents,
        plan: WritePlan,
        gathered: Mapping[Source, Tensor],
        trees: Sequence[TreeFile],
        room: dict[Source, Tensor],
    ) -> None:
        """Take all that the plan asks for. Local.

        Args:
            contents: what the optimizer holds.
            plan: of its files.
            gathered: the result of `gather_permuted`.
            trees: files of which this rank writes all. Their tensors are copied.
            room: memory of an earlier capture, which is used again; it is extended.
        """
        self._contents, self._room = contents, room
        self.staged: dict[Source, Tensor] = dict(gathered)
        self.live: dict[Source, tuple[int, Callable[[], Tensor]]] = {}
        self._capture_buckets(plan)
        self._capture_wholes(plan)
        self._capture_scalars()
        for name, average in contents.averages.with_values():
            self._stage((f"{COUNT} {name}", 0), torch.tensor([average.n_averaged]))
        for tree in trees:
            for number, tensor in enumerate(tree.tensors.values()):
                self.staged[tree.plan.path, number] = as_bytes(tensor.cpu().contiguous()).clone()

    # -- memory -------------------------------------------------------------------------------------------------------

    def _room_for(self, source: Source, nbytes: int) -> Tensor:
        """Return memory of an earlier capture if there is any of this size."""
        room = self._room.get(source)
        if room is None or room.numel() != nbytes:
            room = self._room[source] = torch.empty(nbytes, dtype=torch.uint8)
        self.staged[source] = room
        return room

    def _stage(self, source: Source, tensor: Tensor) -> None:
        """Copy a 1-D tensor."""
        self._room_for(source, tensor.numel() * tensor.itemsize).view(tensor.dtype).copy_(tensor)

    def _keep_live(self, source: Source, tensor: Tensor) -> None:
        """Keep memory that only a step changes; of an accelerator, copy it to the host."""
        if tensor.device.type == "cpu":
            self.live[source] = (source[1], partial(as_bytes, tensor))
        else:
            self._stage(source, tensor)

    def _capture_buckets(self, plan: WritePlan) -> None:
        for number, bucket in enumerate(self._contents.buckets):
            low, high = plan.intervals[number]
            for kind, flat in self._contents.flats(number).items():
                keep = self._keep_live if kind.startswith(f"{STATE} ") else self._stage
                keep((kind, number), flat.interval(low, high).detach())
            if number in plan.mastered:
                self._capture_masters(number, bucket, low, high)

    def _capture_masters(self, number: int, bucket: Bucket, low: int, high: int) -> None:
        """Note the master weights, as a step would begin with them: they follow the parameters of this moment."""
        states, dtypes = bucket.states, bucket.spec.dtypes
        parameters = self.staged[WEIGHTS, number].view(dtypes.param_dtype)
        masters = states.masters()
        wide = None if masters is None else masters.interval(low, high).cpu()
        now = MasterWeights(parameters, dtypes.master_dtype, wide)
        self.live[MASTERS, number] = (number, lambda: as_bytes(now.synced()))

    def _capture_wholes(self, plan: WritePlan) -> None:
        """Copy this rank's parts of the tensors that every rank has, side by side."""
        found = []
        for number, begin, end in plan.wholes:
            tensor = self._contents.model[number].tensor
            assert tensor is not None
            found.append(as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())[begin:end].cpu())
        if found:
            torch.cat(found, out=self._room_for((WHOLE, 0), sum(end - begin for _, begin, end in plan.wholes)))

    def _capture_scalars(self) -> None:
        """Copy the states that are not as large as their parameter, of the parameters whose first element is here."""
        rows = [as_bytes(value.detach().cpu().contiguous()) for *_, value in self._contents.own_scalars()]
        if rows:
            self.staged[SCALARS, 0] = torch.cat(rows)


def _whole_of(contents: Contents, tensor: BucketTensor) -> Tensor | None:
    """Return the bytes of a tensor, row-major, on the rank that writes its first element. Collective."""
    number, slot = tensor.place
    bucket, shards = contents.buckets[number], contents.parts.shard_group
    place, spec = bucket.spec.slots[slot], bucket.specs[slot]
    writers = (r for r in range(contents.transport.world_size) if slot in contents.writers.first_of(bucket.spec, r))
    writer, mine = next(writers), contents.transport.rank
    if mine // shards.world_size != writer // shards.world_size:
        return None
    held = _held(contents, tensor)
    flat: Tensor | None
    if held.begin <= place.offset and place.end <= held.end:
        flat = held.interval(place.offset, place.end)
    else:
        cuts = PartOfCuts(bucket.spec.cuts, place.offset, place.end)
        low, high = cuts.owned(shards.rank)
        tag = Tag(Kind.GATHER, f"saving {tensor.key}"[:70], index=number)
        own = held.interval(place.offset + low, place.offset + high)
        flat = gather_to(own, cuts, shards, [writer % shards.world_size], tag)
    if flat is None or mine != writer:
        return None
    return as_bytes(flat.as_strided(spec.shape, spec.stride).cpu().contiguous()).clone()


def _held(contents: Contents, tensor: BucketTensor) -> FlatBuffer:
    """Return what this rank holds of the bucket: weights, states of a name, or master weights."""
    bucket = contents.buckets[tensor.place[0]]
    if tensor.kind == MASTERS:
        return bucket.states.over(bucket.states.master.synced())
    found = contents.flats(tensor.place[0]).get(tensor.kind)
    if found is not None:
        return found
    return bucket.states.over(torch.empty(0, dtype=tensor.dtype, device=bucket.spec.device))  # no piece has the state
