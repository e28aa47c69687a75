"""The values of one moment on one rank: copies, and the memory that a step will change.

Knows: which memory holds which source of a plan. Does not know: files, threads, folders on a disk.

Of parameters and scalars a rank takes a copy, of optimizer states and master weights the memory itself, which
`Snapshot` guards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
from ..contents import STATE, WEIGHTS, Contents
from ..format.extents import FilePlan, Part
from ..format.names import MASTERS
from ..format.tensorfile import TensorEntry, header_bytes
from .plan import COUNT, SCALARS, WHOLE, BucketTensor, WritePlan
from .snapshot import Source


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
        states = bucket.states
        assert states.master is not None
        begin = low - states.begin
        wide = states.master.master[begin : begin + high - low] if states.master.exists else None
        dtypes = bucket.spec.dtypes
        parameters = self.staged[WEIGHTS, number].view(dtypes.param_dtype)
        now = MasterWeights(parameters, dtypes.master_dtype, None if wide is None else wide.cpu())
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
        return FlatBuffer(bucket.states.synced_weights(), bucket.weights.placement, bucket.states.begin)
    nothing = torch.empty(0, dtype=tensor.dtype, device=bucket.spec.device)  # no piece of this rank has the state
    found = contents.flats(tensor.place[0]).get(tensor.kind)
    return FlatBuffer(nothing, bucket.weights.placement, bucket.states.begin) if found is None else found
