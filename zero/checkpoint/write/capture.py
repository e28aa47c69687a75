"""The values of one moment on one rank: copies, and the memory that a step will change.

Knows: which memory holds which source of a plan. Does not know: files, threads, folders on a disk.

Of parameters and scalars a rank takes a copy, of optimizer states and master weights the memory itself, which
`Snapshot` guards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collectives import Kind, Tag

from ...core.bits import as_bytes, noted_stride
from ...core.cuts import PartOfCuts
from ...core.statetree import NAMES
from ...runtime.bucket import Bucket
from ...runtime.flat_buffer import FlatBuffer
from ...runtime.master_weights import MasterWeights
from ...state.gather import gather_to
from ..contents import Contents
from ..format.extents import Chunk, FilePlan, Part, chunks
from ..format.names import MASTERS
from ..format.tensorfile import TensorEntry, header_bytes
from .plan import AVERAGE, COUNT, SCALARS, WEIGHTS, WHOLE, BucketTensor, WritePlan
from .snapshot import Snapshot, Source


@dataclass(frozen=True)
class TreeFile:
    """A file of one tree of values: the JSON in its header, the tensors as its tensors. ``plan``: that of the file."""

    path: str
    tree: Any
    tensors: Mapping[str, Tensor]
    plan: FilePlan = field(init=False, compare=False)

    def __post_init__(self) -> None:
        entries, end = [], 0
        for name, tensor in self.tensors.items():
            entries.append(TensorEntry(name, NAMES[tensor.dtype], tuple(tensor.shape), end, noted_stride(tensor)))
            end = entries[-1].end
        header = header_bytes(entries, {"tree": json.dumps(self.tree)})
        object.__setattr__(self, "plan", FilePlan(self.path, header, tuple(entries)))


class Capture:
    """The values of one moment on one rank, as a plan asks for them. Made on the main thread, between two steps."""

    def __init__(self, contents: Contents, permuted: Sequence[BucketTensor], room: dict[Source, Tensor]) -> None:
        """Collective if ``permuted`` is not empty: ranks gather these tensors. `stage` is the rest.

        ``room``: memory of an earlier capture, which is used again; it is extended.
        """
        self._contents, self._room = contents, room
        self._own_parts: dict[tuple[str, str], list[Part]] = {}
        self.staged: dict[Source, Tensor] = {}
        self.live: dict[Source, tuple[int, Callable[[], Tensor]]] = {}
        for number in contents.updated:
            contents.buckets[number].states.wait_for_copies()
        for tensor in permuted:
            self._capture_permuted(tensor)

    def stage(self, plan: WritePlan) -> None:
        """Take all that needs no other rank. Local."""
        self._capture_buckets(plan)
        self._capture_wholes(plan)
        self._capture_scalars(plan)
        for name, average in self._contents.averages.with_values():
            self._stage((f"{COUNT} {name}", 0), torch.tensor([average.n_averaged]))

    # -- what a rank writes -------------------------------------------------------------------------------------------

    def add_tree(self, file: TreeFile) -> None:
        """Add a file of which this rank writes all. Its tensors are copied."""
        for number, (name, tensor) in enumerate(file.tensors.items()):
            source = (file.path, number)
            self.staged[source] = as_bytes(tensor.cpu().contiguous()).clone()
            part = Part(source, 0, 0, self.staged[source].numel())
            self._own_parts[file.path.rpartition("/")[0], name] = [part]

    def own_chunks(self, files: Sequence[FilePlan], block_bytes: int, first: int) -> list[Chunk]:
        """Return the chunks of the files of `add_tree`. ``first``: the number of the first one."""
        return [replace(chunk, file=first + chunk.file) for chunk in chunks(files, self._own_parts, block_bytes)]

    def snapshot(self, found: Sequence[Chunk]) -> Snapshot:
        """Return the sources of these chunks."""
        return Snapshot(self.staged, self.live, found)

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
            self._stage((WEIGHTS, number), bucket.weights.interval(low, high).detach())
            if number not in self._contents.updated:
                continue
            for name, flat in bucket.states.flat.items():
                self._keep_live((f"state {name}", number), flat.interval(low, high))
            if number in plan.mastered:
                self._capture_masters(number, bucket, low, high)
            for name, average in self._contents.averages.with_values():  # an update of theirs may come at any time
                self._stage((f"{AVERAGE} {name}", number), average.values(bucket).interval(low, high))

    def _capture_masters(self, number: int, bucket: Bucket, low: int, high: int) -> None:
        """Note the master weights, as a step would begin with them: they follow the parameters of this moment."""
        states = bucket.states
        assert states.master is not None
        begin = low - states.begin
        wide = states.master.master[begin : begin + high - low] if states.master.exists else None
        dtypes = bucket.spec.dtypes
        parameters = self.staged[WEIGHTS, number].view(dtypes.param_dtype)
        now = MasterWeights(parameters, dtypes.master_dtype, None if wide is None else wide.cpu())
        self.live[MASTERS, number] = (number, lambda: as_bytes(now.synced()))

    # -- tensors ------------------------------------------------------------------------------------------------------

    def _capture_permuted(self, tensor: BucketTensor) -> None:
        """Bring a tensor whose memory is not row-major to the rank that writes its first element. Collective."""
        contents, (number, slot) = self._contents, tensor.place
        bucket, shards = contents.buckets[number], contents.parts.shard_group
        place, spec = bucket.spec.slots[slot], bucket.specs[slot]
        writers = (r for r in range(contents.transport.world_size) if slot in contents.writers.first_of(bucket.spec, r))
        writer, mine = next(writers), contents.transport.rank
        if mine // shards.world_size != writer // shards.world_size:
            return
        held = self._held(tensor)
        if held.begin <= place.offset and place.end <= held.end:
            flat = held.interval(place.offset, place.end)
        else:
            cuts = PartOfCuts(bucket.spec.cuts, place.offset, place.end)
            low, high = cuts.owned(shards.rank)
            tag = Tag(Kind.GATHER, f"saving {tensor.key}"[:70], index=number)
            own = held.interval(place.offset + low, place.offset + high)
            found = gather_to(own, cuts, shards, [writer % shards.world_size], tag)
            if found is None:
                return
            flat = found
        if mine == writer:
            whole = flat.as_strided(spec.shape, spec.stride).cpu().contiguous()
            self.staged[tensor.source] = as_bytes(whole).clone()

    def _held(self, tensor: BucketTensor) -> FlatBuffer:
        """Return what this rank holds of the bucket: weights, states of a name, or master weights."""
        bucket = self._contents.buckets[tensor.place[0]]
        if tensor.kind == WEIGHTS:
            return bucket.weights
        if tensor.kind == MASTERS:
            return FlatBuffer(bucket.states.synced_weights(), bucket.weights.placement, bucket.states.begin)
        if tensor.kind.startswith(f"{AVERAGE} "):
            return self._contents.averages.by_name[tensor.kind.removeprefix(f"{AVERAGE} ")].values(bucket)
        states, name = bucket.states, tensor.kind.removeprefix("state ")
        if name in states.flat:
            return states.flat[name]
        nothing = torch.empty(0, dtype=tensor.dtype, device=bucket.spec.device)  # no piece of this rank has the state
        return FlatBuffer(nothing, bucket.weights.placement, states.begin)

    def _capture_wholes(self, plan: WritePlan) -> None:
        """Copy this rank's parts of the tensors that every rank has, side by side."""
        if plan.wholes:
            found = [
                as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())[begin:end].cpu()
                for tensor, begin, end in plan.wholes
            ]
            torch.cat(found, out=self._room_for((WHOLE, 0), sum(end - begin for _, begin, end in plan.wholes)))

    def _capture_scalars(self, plan: WritePlan) -> None:
        """Copy the states that are not as large as their parameter, of the parameters whose first element is here."""
        values = [value for _, _, _, value in self._contents.own_scalars()]
        for nbytes, numbers in plan.scalars.items():
            rows = [as_bytes(v.detach().cpu().contiguous()) for v in values if v.numel() * v.itemsize == nbytes]
            self.staged[SCALARS, nbytes] = torch.stack(rows).index_select(0, numbers).view(-1)
