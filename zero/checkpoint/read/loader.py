"""Loads a checkpoint into an optimizer: each rank reads the bytes of its shards into the memory that holds them.

Knows: which saved tensor becomes which weights and states, also at another precision. Does not know: which checkpoint
is chosen, how ranks agree.

    saved                               becomes
    masters/ if there is one, else      the widest weights: the master weights, or without them the parameter itself
    model/
    model/                              the parameter, if it has this dtype; else it is the widest weights, rounded
    optimizer/                          the states; a state in the dtype of the widest weights follows their new dtype

Files are read in their order, each block once, by several threads, and compared with its checksum again. Where every
rank has the whole of a bucket, the shards are gathered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from collectives import Kind, Tag

from ...core.bits import as_bytes, in_stride_order, laid_out, memory_of
from ...core.layout import Piece
from ...core.rounding import STEPS
from ...core.runs import PieceState, part_of
from ...core.stage import Placement, step_device
from ...core.statetree import DTYPES, N_AVERAGED, decode_states
from ...runtime.bucket import Bucket
from ...runtime.flat_buffer import FlatBuffer, redistribute
from ...runtime.flat_states import BucketStates
from ...runtime.master_weights import MastersAlone
from ...state.plain_dicts import scalar_state
from ..contents import Contents, StoredTensor
from ..format.extents import Part, is_row_major, slot_part
from ..format.names import MASTERS, MODEL, OPTIMIZER, averages_folder
from ..format.tensorfile import TensorEntry
from .file_reader import threads_of_rank
from .fit import Fit, Saved
from .part_reader import PartReader
from .reader import Checkpoint

_SCALARS = ("scalars", 0)


class Loader:
    """The loading of one checkpoint into one optimizer, on one rank."""

    def __init__(self, contents: Contents, checkpoint: Checkpoint, fit: Fit, *, with_states: bool) -> None:
        """``fit``: of these two. ``with_states``: load also the states and the options of the param groups."""
        self._contents, self._checkpoint, self.fit, self._with_states = contents, checkpoint, fit, with_states
        self._rank = contents.parts.shard_group.rank
        self._parts = PartReader(checkpoint)
        self._old: dict[str, FlatBuffer] = {}  # memory of the states of the bucket that is begun
        self._later: list[Callable[[], None]] = []  # what follows when everything was read
        self._scalars = bytearray()  # of all pieces, one after the other
        self._places: dict[tuple[int, int], dict[str, tuple[int, TensorEntry]]] = {}  # of scalars, by bucket and slot
        self._wide: dict[int, set[int]] = {}  # slots of a bucket whose master weights are read
        self._rounded: dict[int, set[int]] = {}  # those whose parameters are these, rounded
        self._partial: set[int] = set()  # buckets some of whose master weights stay
        self._pieces = [
            {piece.slot: piece for piece in bucket.spec.pieces(*self._interval(bucket))} for bucket in contents.buckets
        ]
        self._saved_ends = {  # of each slot, the element of its bucket behind the last one that was saved
            stored.place: contents.buckets[stored.place[0]].spec.slots[stored.place[1]].offset + fit.numel(stored)
            for stored in contents.model
            if stored.place is not None
        }

    def load(self) -> None:
        """Read everything. Collective."""
        contents = self._contents
        stored_in: dict[int, list[StoredTensor]] = {}
        for stored in contents.model:
            if stored.place is not None:
                stored_in.setdefault(stored.place[0], []).append(stored)
        for number, bucket in enumerate(contents.buckets):
            with_states = self._with_states and number in contents.updated
            here = stored_in.get(number, ())
            if number in contents.updated:
                bucket.states.wait_for_copies()
                if bucket.states.master is not None:
                    bucket.states.snapshot()
                    if all(self.fit.numel(stored) == math.prod(stored.shape) for stored in here):
                        bucket.states.master.forget()
                    elif bucket.states.master.exists:
                        self._partial.add(number)
            if with_states:
                bucket.states.snapshot()
                self._old = dict(bucket.states.flat)
                bucket.states.flat.clear()
            for stored in here:
                if stored.name not in self.fit.model:
                    continue
                self._expect_weights(stored, number, bucket)
                if with_states:
                    self._expect_states(stored, number, bucket)
                    self._expect_averages(stored, number, bucket)
        self._read()
        for action in self._later:
            action()
        for number, bucket in enumerate(contents.buckets):
            self._finish(number, bucket)
            if self._with_states and number in contents.updated:
                self._set_states(number, bucket, stored_in.get(number, ()))
        for stored in contents.model:
            if stored.tensor is not None and stored.name in self.fit.model:
                values = self._checkpoint.read(*self.fit.model[stored.name])
                if stored.name in self.fit.resized:
                    rows = min(len(values), len(stored.tensor))
                    stored.tensor[:rows].copy_(values[:rows])
                else:
                    stored.tensor.copy_(values)
        for group, options in zip(contents.groups, self.fit.groups, strict=False):
            group.pop(STEPS, None)
            group.update(options)
        if self._with_states:
            self._begin_states(stored_in)
        for number, names in self.fit.elementwise.items():
            contents.parts.classes[number].note_elementwise(names)
        for name, average in contents.averages.by_name.items() if self._with_states else ():
            saved = self.fit.averages.get(name, {}).get(N_AVERAGED)
            count = 1 if name in self.fit.averages else 0  # averages that were imported have no count
            average.n_averaged = count if saved is None else int(self._checkpoint.read(*saved))

    # -- which saved tensor becomes what ------------------------------------------------------------------------------

    def _interval(self, bucket: Bucket) -> tuple[int, int]:
        """Return the elements of a bucket that this rank reads."""
        return bucket.spec.owned(self._rank)

    def _expect_weights(self, stored: StoredTensor, number: int, bucket: Bucket) -> None:
        low, high = self._interval(bucket)
        dtypes, fit = bucket.spec.dtypes, self.fit
        weights = bucket.weights.interval(low, high).detach()
        narrow, widest = fit.model[stored.name], fit.widest(stored)
        has_dtype = DTYPES[narrow[1].dtype] is dtypes.param_dtype
        master = bucket.states.master if number in self._contents.updated else None
        if master is None:
            self._expect(stored, number, bucket, MODEL if widest is narrow else MASTERS, widest, "weights", weights)
            return
        if has_dtype:
            self._expect(stored, number, bucket, MODEL, narrow, "weights", weights)
            if widest is narrow:
                return  # the master weights are equal to the parameter
        begin = bucket.states.begin
        wide = master.master[low - begin : high - begin]
        self._expect(stored, number, bucket, MODEL if widest is narrow else MASTERS, widest, MASTERS, wide)
        assert stored.place is not None
        self._wide.setdefault(number, set()).add(stored.place[1])
        if not has_dtype:
            self._rounded.setdefault(number, set()).add(stored.place[1])

    def _expect_states(self, stored: StoredTensor, number: int, bucket: Bucket) -> None:
        assert stored.place is not None
        states, slot = bucket.states, stored.place[1]
        for name, saved in self.fit.states.get(stored.name, {}).items():
            if self.fit.lies_flat(name, saved, stored, bucket.specs[slot]):
                follows = saved[1].dtype == self.fit.widest(stored)[1].dtype
                dtype = bucket.spec.dtypes.master_dtype if follows else DTYPES[saved[1].dtype]
                flat = self._flat(states, name, dtype)
                into = flat.interval(*self._interval(bucket))
                self._expect(stored, number, bucket, OPTIMIZER, saved, f"state {name}", into)
            elif states.pieces_of(slot):
                place = len(self._scalars)
                self._places.setdefault((number, slot), {})[name] = (place, saved[1])
                self._parts.want(OPTIMIZER, saved[1].name, Part(_SCALARS, place, 0, saved[1].nbytes))
                self._scalars += bytes(saved[1].nbytes)

    def _expect_averages(self, stored: StoredTensor, number: int, bucket: Bucket) -> None:
        for name, tensors in self.fit.averages.items():
            if stored.name in tensors:
                into = self._contents.averages.by_name[name].room(bucket).interval(*self._interval(bucket))
                folder, kind = averages_folder(name), f"average {name}"
                self._expect(stored, number, bucket, folder, tensors[stored.name], kind, into)

    def _flat(self, states: BucketStates, name: str, dtype: torch.dtype) -> FlatBuffer:
        """Return the memory of a state: that which it had, if it fits."""
        if name not in states.flat:
            old = self._old.get(name)
            states.flat[name] = old if old is not None and old.data.dtype is dtype else states.allocate(name, dtype)
        return states.flat[name]

    def _expect(
        self, stored: StoredTensor, number: int, bucket: Bucket, folder: str, saved: Saved, kind: str, into: Tensor
    ) -> None:
        """Read this rank's piece of a saved tensor into ``into``, which is 1-D and holds its interval of the bucket."""
        assert stored.place is not None
        slot, (low, high), dtype = stored.place[1], self._interval(bucket), DTYPES[saved[1].dtype]
        piece = self._pieces[number].get(slot)
        if piece is None or not piece.numel:
            return
        whole, piece = piece, self._saved_part(number, piece)
        if folder == OPTIMIZER and piece.end < whole.end:
            into[piece.end - low : whole.end - low].zero_()  # new rows
        if not piece.numel:
            return
        target = into[piece.begin - low : piece.end - low]
        if not is_row_major(bucket.specs[slot]):
            begin = bucket.spec.slots[slot].offset

            def read_permuted() -> None:
                whole = in_stride_order(self._checkpoint.read(*saved), bucket.specs[slot].stride)
                target.copy_(whole[piece.begin - begin : piece.end - begin])

            self._later.append(read_permuted)
            return
        key = (f"{kind} {dtype}", number)
        direct = dtype is into.dtype and into.device.type == "cpu"
        memory = self._parts.memory(key, lambda: into if direct else torch.empty(high - low, dtype=dtype))
        then = None if direct else functools.partial(target.copy_, memory[piece.begin - low : piece.end - low])
        self._parts.want(folder, saved[1].name, slot_part(key, piece, bucket.spec, (low, high), dtype.itemsize), then)

    def _saved_part(self, number: int, piece: Piece) -> Piece:
        """Return the part of a piece of which the checkpoint has values."""
        end = max(piece.begin, min(piece.end, self._saved_ends[number, piece.slot]))
        return replace(piece, end=end)

    def _begin_averages(self, number: int, bucket: Bucket) -> None:
        """Let the averages of what the checkpoint lacks be the weights."""
        master, weights = bucket.states.master, bucket.weights
        if master is not None and master.exists:
            weights = FlatBuffer(master.master, weights.placement, bucket.states.begin)
        for name in self.fit.averages:
            room, begun = self._contents.averages.by_name[name].room(bucket), self.fit.new_averages.get(name, ())
            for piece in self._pieces[number].values():
                is_new = bucket.specs[piece.slot].name in begun
                new = piece if is_new else replace(piece, begin=self._saved_part(number, piece).end)
                if new.numel:
                    room.piece(new).copy_(weights.piece(new))

    def _read(self) -> None:
        """Read all that is expected."""
        self._parts.memory(_SCALARS, lambda: torch.frombuffer(self._scalars or bytearray(1), dtype=torch.uint8))
        on_host = all(torch.device(bucket.spec.device).type == "cpu" for bucket in self._contents.buckets)
        self._parts.read(threads_of_rank(self._contents.transport.world_size) if on_host else 1)

    # -- the end of a bucket ------------------------------------------------------------------------------------------

    def _finish(self, number: int, bucket: Bucket) -> None:
        """Round what must be rounded, and gather what every rank has whole. Collective."""
        parts = self._contents.parts
        wide = self._wide.get(number, set())
        if wide or number in self._partial:
            assert bucket.states.master is not None
            master = FlatBuffer(bucket.states.master.master, bucket.weights.placement, bucket.states.begin)
            for piece in self._pieces[number].values():
                if piece.slot in self._rounded.get(number, ()):
                    bucket.weights.piece(piece).copy_(master.piece(piece))
                elif piece.slot not in wide:
                    read = self._saved_part(number, piece) if number in self._partial else piece
                    master.piece(read).copy_(bucket.weights.piece(read))
        if number in self._contents.updated and self._with_states:
            self._begin_averages(number, bucket)
        if parts.shard_group.world_size > 1:
            held = [bucket.weights] if bucket.weights.placement is Placement.WHOLE else []
            if parts.stage.states is Placement.WHOLE and number in self._contents.updated:
                held += [flat for _, flat in sorted(bucket.states.flat.items())] if self._with_states else []
                held += [self._contents.averages.by_name[name].room(bucket) for name in sorted(self.fit.averages)]
                if wide or number in self._partial:
                    assert bucket.states.master is not None
                    held.append(FlatBuffer(bucket.states.master.master, Placement.WHOLE))
            for place, whole in enumerate(held):
                tag = Tag(Kind.ALL_GATHER, f"loading bucket {number}, tensor {place}", index=number)
                cuts = bucket.spec.cuts
                redistribute(whole.shard(cuts, parts.shard_group.rank), whole, cuts, parts.collective, tag).wait()
        if number in self._contents.updated:
            if isinstance(bucket.states.master, MastersAlone):
                bucket.states.master.sync_from_param()  # what was read is kept once
            bucket.states.evict()

    def _set_states(self, number: int, bucket: Bucket, stored: Sequence[StoredTensor]) -> None:
        """Note which states the pieces of a bucket have. Neighbours with equal ones share the note."""
        by_slot = {each.place[1]: each for each in stored if each.place is not None}
        states, before, shared = bucket.states, None, None
        for index, piece in enumerate(states.pieces):
            each = by_slot[piece.slot]
            found, spec = sorted(self.fit.states.get(each.name, {}).items()), bucket.specs[piece.slot]
            names = tuple(n for n, saved in found if self.fit.lies_flat(n, saved, each, spec))
            scalars = {
                name: (entry, bytes(self._scalars[place : place + entry.nbytes]))
                for name, (place, entry) in self._places.get((number, piece.slot), {}).items()
            }
            values = self.fit.values.get(each.name, {})
            facts = [(name, entry.dtype, entry.shape, entry.stride, data) for name, (entry, data) in scalars.items()]
            now = (names, facts, repr(values), states.groups[index])
            if now != before:
                before, shared = now, self._state(names, scalars, values, states.groups[index], bucket)
            state = shared
            if shared is not None and bucket.specs[piece.slot].divided:
                state, before = self._part_of(shared, piece, bucket), None
            states.set_state(index, state)

    def _begin_states(self, stored_in: Mapping[int, Sequence[StoredTensor]]) -> None:
        """Let a class that creates its states in the constructor create those that begin anew."""
        new = {*self.fit.missing, *self.fit.mismatched, *self.fit.anew}
        for number in self._contents.updated:
            bucket, classes = self._contents.buckets[number], self._contents.parts.classes
            slots = {each.place[1] for each in stored_in.get(number, ()) if each.place and each.name in new}
            if slots:
                of_class = bucket.specs[0].optimizer_class
                flags = bytes(piece.slot in slots for piece in bucket.states.pieces)
                groups = classes.groups_of(of_class, self._contents.groups)
                classes[of_class].create_states(bucket.states, groups, flags)
                bucket.states.evict()

    def _part_of(self, whole: PieceState, piece: Piece, bucket: Bucket) -> PieceState:
        """Return the state of a piece of a parameter that is cut between blocks."""
        slot, spec = bucket.spec.slots[piece.slot], bucket.specs[piece.slot]
        place = piece.begin - slot.offset, piece.end - slot.offset
        part = part_of(whole.scalars, *place, spec.numel, self._contents.parts.classes.rules_of(spec))
        scalars = {name: scalar_state("", value, False, step_device(bucket.spec)) for name, value in part.items()}
        return PieceState(whole.elementwise, scalars)

    def _state(
        self,
        names: tuple[str, ...],
        scalars: Mapping[str, tuple[TensorEntry, bytes]],
        values: Mapping[str, Any],
        group: int,
        bucket: Bucket,
    ) -> PieceState | None:
        if not names and not scalars and not values:
            return None
        options = self._contents.groups[group] | self.fit.groups[group]
        on_device = bool(options.get("fused") or options.get("capturable"))
        device = step_device(bucket.spec)
        tensors: dict[str, Tensor] = {}
        for name, (entry, data) in scalars.items():
            tensors[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            memory_of(as_bytes(tensors[name]))[:] = data
            if entry.stride is not None:
                tensors[name] = laid_out(tensors[name], entry.stride)
        kinds = self._contents.parts.classes[bucket.specs[0].optimizer_class].kinds
        found = decode_states(values, tensors, kinds)
        return PieceState(names, {name: scalar_state(name, v, on_device, device) for name, v in found.items()})
