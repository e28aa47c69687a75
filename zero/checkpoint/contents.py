"""What of an optimizer a checkpoint holds: the tensors by name, in order of registration, and where this rank has them.

Knows: modules, buckets, states, param groups. Does not know: files, folders, when a save or a load happens.

Ranks find the same model by themselves. Which states a parameter has, only the ranks that hold a piece of it know: each
rank describes those of the parameters whose first element it writes, and all ranks merge the descriptions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.bits import kept_stride, noted_stride, other_stride, same_bits
from ..core.parameter_specs import as_plain, child_name, flattened, named_parts, state_dict_tensors
from ..core.runs import PieceState, Rules, whole_like
from ..core.statetree import BLOCKS, NAMES, encode_options, encode_states
from ..runtime.bucket import Bucket
from ..runtime.flat_buffer import FlatBuffer
from ..step.user_optimizer import NO_OPTIONS
from .format.extents import Writers
from .format.manifest import SavedParameter
from .format.tensorfile import METADATA
from .sharded_optimizer import ShardedOptimizer

WEIGHTS, STATE, AVERAGE = "weights", "state", "average"  # kinds of flat memory; of the last two there are several
Place = tuple[int, int]  # the number of a bucket in `Contents.buckets`, and of a slot in it


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A parameter or a buffer of the model, or a plain tensor inside a subclass.

    Attributes:
        name: the name under which it is saved; ``aliases``: its further names.
        dtype, shape: its own, as the model computes with it.
        place: where its elements lie, if that is in a bucket.
        tensor: the tensor itself, if every rank has it whole; else None. It may have a gradient.
        is_buffer: whether it is a buffer, of which rank 0's values are saved.
        index: its index in torch.optim's dicts; None if it is in no param group.
    """

    name: str
    aliases: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: Place | None = None
    tensor: Tensor | None = None
    is_buffer: bool = False
    index: int | None = None


@dataclass(frozen=True)
class SlotState:
    """The states of a parameter, without the values of tensors.

    Attributes:
        elementwise: the dtypes of those that are as large as the parameter, by name.
        tensors: dtypes and shapes of all other tensors, by name; those inside lists and dicts are among them.
        values: all other states, by name, as JSON.
        strides: of those tensors that a file notes them of.
    """

    elementwise: Mapping[str, str]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    values: Mapping[str, Any]
    strides: Mapping[str, tuple[int, ...]]

    def to_json(self) -> list[Any]:
        return [self.elementwise, self.tensors, self.values, *([self.strides] if self.strides else [])]

    @classmethod
    def from_json(cls, value: list[Any]) -> SlotState:
        elementwise, tensors, values, *rest = value
        shapes = {name: (dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}
        strides = {name: tuple(stride) for found in rest for name, stride in found.items()}
        return cls(elementwise, shapes, values, strides)


@dataclass(frozen=True)
class StateFacts:
    """Which parameters have which states, and which have master weights in `masters/`. Equal on all ranks."""

    states: Mapping[Place, SlotState]
    masters: frozenset[Place]


class Contents:
    """What one optimizer holds, on one rank.

    ``first_slots``: of each bucket, the slots whose first element this rank writes.
    """

    def __init__(self, parts: ShardedOptimizer) -> None:
        self.parts, self.groups = parts, parts.groups
        self.storage, self.transport = parts.storage, parts.transport
        self.writers = Writers(parts.stage, self.transport.world_size, parts.shard_group.world_size)
        rest = cast(list[Bucket], self.storage.unlisted_buckets())  # without states
        self.buckets: list[Bucket] = [*self.storage.buckets, *rest]
        self.updated = range(len(self.storage.buckets))  # the numbers of the buckets that have states
        self.averages = parts.averages
        self.not_saved = list(_extra_states(self.parts.module))
        self.model = list(self._model())
        self.digest = _digest(self.model)  # of what all ranks must have alike
        self._names: dict[int, list[str]] = {}  # of each param group's parameters, in torch.optim's order
        for listed in sorted(self.storage.listed(), key=lambda spec: spec.index):
            self._names.setdefault(listed.group, []).append(listed.name)
        firsts = (self.writers.first_of(bucket.spec, self.transport.rank) for bucket in self.buckets)
        self.first_slots = [range(min(slots), max(slots) + 1) if slots else range(0) for slots in firsts]

    # -- the model ----------------------------------------------------------------------------------------------------

    def _model(self) -> Iterator[StoredTensor]:
        """Yield the tensors of the model, in order of registration."""
        places = {
            id(parameter): (number, slot)
            for number, bucket in enumerate(self.buckets)
            for slot, parameter in enumerate(bucket.parameters)
        }
        listed = {id(parameter): spec for parameter, spec in self._listed()}
        found: dict[int, tuple[list[str], Tensor, bool]] = {}
        for name, tensor, is_buffer in () if self.parts.module is None else state_dict_tensors(self.parts.module):
            if tensor in self.storage.ignored:
                continue
            found.setdefault(id(tensor), ([], tensor, is_buffer))[0].append(name)
        for parameter, spec in self._listed():
            found.setdefault(id(parameter), ([*spec.names] or [spec.name], parameter, False))
        for key, (names, tensor, is_buffer) in found.items():
            index = listed[key].index if key in listed else None
            name, *aliases = sorted(names, key=lambda name: name != "format")  # a header has no alias of this name
            if name == METADATA:
                raise ValueError(
                    f"the model has a parameter or a buffer of the name {name!r}, which a safetensors file keeps for "
                    "itself: give it another name, or put it into a submodule"
                )
            if key in places:
                spec = self.buckets[places[key][0]].specs[places[key][1]]
                yield StoredTensor(name, tuple(aliases), spec.dtypes.param_dtype, spec.shape, places[key], index=index)
            else:
                yield from self._whole(name, tuple(aliases), tensor, is_buffer, index)

    def _listed(self) -> list[tuple[Tensor, Any]]:
        """Return the listed parameters with their specs, in the order of torch.optim's indices."""
        laid_out = zip(self.storage.parameters, self.storage.layout.parameters, strict=True)
        return sorted([*laid_out, *self.storage.replicated.items()], key=lambda pair: pair[1].index)

    def _whole(
        self, name: str, aliases: tuple[str, ...], tensor: Tensor, is_buffer: bool, index: int | None
    ) -> Iterator[StoredTensor]:
        """Yield a tensor that every rank has whole, or the plain ones inside it."""
        inner, _ = flattened(tensor)
        if inner:
            for key in inner:
                part = getattr(tensor, key)
                if isinstance(part, Tensor):
                    yield from self._whole(
                        f"{name}.{key}", tuple(f"{a}.{key}" for a in aliases), part, is_buffer, index
                    )
                else:
                    self.not_saved.append(f"{name}.{key}")
        elif type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.dtype in NAMES:
            shape = tuple(tensor.shape)
            yield StoredTensor(name, aliases, tensor.dtype, shape, None, tensor, is_buffer, index)
        else:
            self.not_saved.append(name)

    def parameters(self) -> tuple[SavedParameter, ...]:
        """Return what the manifest says of the parameters."""
        groups = {spec.index: spec.group for spec in self.storage.listed()}
        found = []
        with as_plain():
            for stored in (stored for stored in self.model if not stored.is_buffer):
                number, slot = stored.place or (0, 0)
                trainable = stored.place is not None and self.buckets[number].parameters[slot].requires_grad
                names, dtype = (stored.name, *stored.aliases), NAMES[stored.dtype]
                group = None if stored.index is None else groups[stored.index]
                found.append(SavedParameter(stored.name, names, stored.shape, dtype, group, trainable))
        return tuple(found)

    @property
    def names(self) -> list[list[str]]:
        """The names of each param group's parameters, in torch.optim's order."""
        return [self._names.get(number, []) for number in range(len(self.groups))]

    def param_groups(self) -> list[Any]:
        """Return the param groups as JSON: options, class, blocks if any, and under "params" the parameters' names.

        Raises `TypeError` naming an option that cannot be saved.
        """
        found = []
        for number, (group, names) in enumerate(zip(self.groups, self.names, strict=True)):
            inner = self.parts.classes.of(number)
            options = {key: value for key, value in group.items() if key not in NO_OPTIONS}
            encoded = encode_options(options, f"optimizer.param_groups[{number}]")
            encoded["optimizer_class"] = inner.qualified_name
            encoded["optimizer_module"] = inner.optimizer_class.__module__
            blocks = self.parts.classes.requested_blocks(number)
            if blocks is not None:
                encoded[BLOCKS] = blocks if isinstance(blocks, int) else [*blocks]
            found.append({**encoded, "params": names})
        return found

    # -- the states ---------------------------------------------------------------------------------------------------

    def flats(self, number: int) -> dict[str, FlatBuffer]:
        """Return what this rank holds of a bucket, but for its master weights, by kind."""
        bucket = self.buckets[number]
        found = {WEIGHTS: bucket.weights.values()}
        if number in self.updated:
            found |= {f"{STATE} {name}": flat for name, flat in bucket.states.flat.items()}
            found |= {f"{AVERAGE} {name}": average.values(bucket) for name, average in self.averages.with_values()}
        return found

    def own_states(self, number: int) -> Iterator[tuple[range, PieceState]]:
        """Yield neighbouring slots of a bucket with one state, of those whose first element this rank writes. Of a
        parameter that is divided it is that of its first piece."""
        own, states = self.first_slots[number], self.buckets[number].states
        for first, last, state in states.spans():
            if first and states.pieces[first - 1].slot == states.pieces[first].slot:
                continue
            slots = range(max(own.start, states.pieces[first].slot), min(own.stop, states.pieces[last - 1].slot + 1))
            if state is not None and slots:
                yield slots, state

    def own_scalars(self) -> list[tuple[int, range, str, int, Tensor]]:
        """Return the tensors of states that are not as large as their parameter: bucket, slots, name, the first byte,
        value.

        They are those of the parameters whose first element this rank writes; where these are cut between blocks, the
        parts that belong to pieces whose first element it writes. The order is the same in two saves with equal facts.
        """
        return [
            (number, slots, name, begin, value)
            for number in self.updated
            for slots, begins, state in self._stepped_pieces(number)
            for name, value in sorted(self._other_states(self.buckets[number], slots.start, state)[1].items())
            if (begin := begins(name, value)) is not None
        ]

    def _stepped_pieces(self, number: int) -> Iterator[tuple[range, Callable[[str, Tensor], int | None], PieceState]]:
        """Yield slots of a bucket, a function, and their state. Given the name of a tensor of the state, and the
        tensor, the function returns the first byte that this rank writes; None if it writes nothing of it."""
        bucket = self.buckets[number]
        if not bucket.specs[0].grain.divided:
            yield from ((slots, lambda *_: 0, state) for slots, state in self.own_states(number))
            return
        low, high = self.writers.interval(bucket.spec, self.transport.rank)
        for index, piece in enumerate(bucket.states.pieces):
            state = bucket.states.state_of(index)
            if state is not None and low <= piece.begin < high:
                first = bucket.spec.within(piece).start
                rules = self.parts.classes.rules_of(bucket.specs[piece.slot])

                def begins(name: str, value: Tensor, first: int = first, rules: Rules = rules) -> int | None:
                    if name not in rules:
                        return None if first else 0
                    return rules[name].before(value, first) * value.itemsize

                yield range(piece.slot, piece.slot + 1), begins, state

    def describe(self) -> bytes:
        """Return this rank's part of the facts: see `merge`. Raises `TypeError` naming a state that cannot be saved."""
        known: dict[str, int] = {}
        runs, masters = [], []
        for number in self.updated:
            bucket = self.buckets[number]
            for slots, state in self.own_states(number):
                text = json.dumps(self._described(bucket, slots.start, state).to_json(), sort_keys=True)
                runs.append([number, slots.start, slots.stop, known.setdefault(text, len(known))])
            masters.append([number, self._saved_masters(bucket)])
        return json.dumps({"kinds": [json.loads(text) for text in known], "runs": runs, "masters": masters}).encode()

    def _described(self, bucket: Bucket, slot: int, state: PieceState) -> SlotState:
        elementwise = {name: NAMES[bucket.states.flat[name].data.dtype] for name in state.elementwise}
        if bucket.specs[slot].grain.divided:
            numel = bucket.states.pieces[bucket.states.pieces_of(slot)[0]].numel
            rules = self.parts.classes.rules_of(bucket.specs[slot])
            state = PieceState(state.elementwise, whole_like(state.scalars, numel, bucket.specs[slot].shape, rules))
        values, tensors = self._other_states(bucket, slot, state)
        shapes = {name: (NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
        spec = bucket.specs[slot]
        found = {name: stride_to_note(tensor, spec.shape, spec.stride) for name, tensor in tensors.items()}
        return SlotState(elementwise, shapes, values, {n: stride for n, stride in found.items() if stride is not None})

    def _other_states(self, bucket: Bucket, slot: int, state: PieceState) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the states that are not as large as their parameter, as `encode_states` does."""
        return encode_states(state.scalars, f"optimizer.state[{bucket.specs[slot].name!r}]", state.elementwise)

    def _saved_masters(self, bucket: Bucket) -> list[int]:
        """Return the slots whose master weights are saved, of those that this rank writes.

        A parameter that is frozen now has master weights of its own only if it was trained, or was wider when the
        optimizer was built. Else they are the parameter, and a run in which it was always frozen has none.
        """
        if not bucket.spec.dtypes.has_master:
            return []
        pieces, states = self.writers.pieces(bucket.spec, self.transport.rank), bucket.states
        found = {piece.slot for piece in pieces if bucket.parameters[piece.slot].requires_grad}
        frozen = [piece for piece in pieces if piece.slot not in found]
        if frozen and states.master.kept():
            synced = states.synced_weights()
            weights = bucket.updated_weights(self.parts.stage, self.parts.shard_group.rank).values()
            for piece in frozen:
                wide = synced.piece(piece)
                if not same_bits(wide, weights.piece(piece).to(wide.dtype)):
                    found.add(piece.slot)
        return sorted(found)

    def merge(self, told: Sequence[bytes]) -> StateFacts:
        """Return the facts that all ranks have described."""
        states: dict[Place, SlotState] = {}
        masters: set[Place] = set()
        for data in told:
            found = json.loads(data)
            kinds = [SlotState.from_json(kind) for kind in found["kinds"]]
            for number, begin, end, kind in found["runs"]:
                states.update(((number, slot), kinds[kind]) for slot in range(begin, end))
            masters.update((number, slot) for number, slots in found["masters"] for slot in slots)
        return StateFacts(states, frozenset(masters))


def stride_to_note(tensor: Tensor, shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of a state that a file notes; None if a reader finds them without a note.

    ``shape``, ``stride``: of the parameter. In files from before strides were noted, a state of this shape lies as the
    parameter does. So, if the parameter is not row-major, it has a note in any case.
    """
    lies_otherwise = tuple(tensor.shape) == tuple(shape) and other_stride(shape, stride) is not None
    return kept_stride(tensor) if lies_otherwise else noted_stride(tensor)


def _digest(model: Sequence[StoredTensor]) -> str:
    lines = [f"{s.name} {s.aliases} {s.dtype} {s.shape} {s.is_buffer} {s.index} {s.place}" for s in model]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _extra_states(module: nn.Module | None) -> Iterator[str]:
    """Yield the names under which a module's ``state_dict`` has what ``get_extra_state`` returns."""
    for prefix, part in () if module is None else named_parts(module, remove_duplicate=False):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield child_name(prefix, "_extra_state")
