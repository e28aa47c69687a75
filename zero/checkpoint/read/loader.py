"""Loads a checkpoint into an optimizer: each rank reads the bytes of its shards into the memory that holds them.

    saved                               becomes
    masters/ if there is one, else      the widest weights: the master weights, or without them the parameter itself
    model/
    model/                              the parameter, if it has this dtype; else it is the widest weights, rounded
    optimizer/                          the states; a state in the dtype of the widest weights follows their new dtype

Files are read in their order, each block once, by several threads, and compared with its checksum again. Where every
rank has the whole of a bucket, the shards are gathered.

A checkpoint may differ from the model in names, in rows, in precision, and in tensors that only one of the two has, as
far as the caller allows it (`Differences`). `Fit` says what it has for each parameter.

Does not know: which checkpoint is chosen, how ranks agree.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from collectives import Kind, Tag

from ...core.bits import as_bytes, in_stride_order, laid_out, memory_of, row_major_stride
from ...core.layout import ParameterSpec, Piece
from ...core.parameter_specs import Rename, call_given, known_as, new_name, remark_on_prefix, renamed
from ...core.rounding import STEPS
from ...core.runs import PieceState, lies_flat, part_of
from ...core.stage import Placement, step_device
from ...core.statetree import BLOCKS, DTYPES, N_AVERAGED, NO_OPTIONS, decode_states, encode_inline, tensor_names
from ...runtime.flat_buffer import FlatBuffer, redistribute
from ...state.plain_dicts import fitted, scalar_state
from ...step.arguments import same
from ...step.classes import TRAIN_MODE
from ...step.partition import begin_at_zero, stack_of
from ..contents import AVERAGE, STATE, WEIGHTS, Contents, StoredTensor
from ..format.extents import Part, is_row_major, slot_part
from ..format.manifest import MASTERS, MODEL, OPTIMIZER, averages_folder
from ..format.tensorfile import TensorEntry
from .reader import Checkpoint, PartReader, plain_dict, threads_of_rank

Shape = tuple[int, ...]
Resize = Callable[[str, Shape, Shape], bool]


@dataclass(frozen=True)
class Differences:
    """What a caller allows.

    Attributes:
        strict: whether each tensor of the model must be in the checkpoint, and vice versa.
        rename: saved name -> the model's name, or None to leave it out; a mapping has only the names that change.
        resize: called with the model's name, the saved shape and the model's, if these differ; True: read the leading
            rows that both have.
    """

    strict: bool = True
    rename: Rename | None = None
    resize: Resize | None = None

    def names(self, saved: Iterable[str], known: Set[str], ties: Mapping[str, str]) -> dict[str, str]:
        """Return saved name -> the model's name, without what is left out.

        ``known``: the names of the model; ``ties``: further saved names, of which a mapping may speak.

        Raises:
            ValueError: a mapping has a name that was not saved, two saved names become one, or a function raises.
            TypeError: a new name is no text, or an argument is of another kind.
        """
        if not isinstance(self.strict, bool):
            raise TypeError(f"strict must be True or False, not {self.strict!r}")
        if self.resize is not None and not callable(self.resize):
            raise TypeError(f"resize must be a function of a name and two shapes, not {self.resize!r}")
        return renamed(self.rename, saved, known, "the checkpoint", ties)

    def further_name(self, saved: str, known: Set[str]) -> str | None:
        """Return the model's name for a further name of a saved tensor; None if it is left out. Raises like `names`."""
        new = new_name(self.rename, saved)
        return None if new is None else known_as(new, known)

    def has_rows(self, name: str, saved: Shape, shape: Shape) -> bool:
        """Return whether the leading rows are read of a tensor with another shape.

        Raises:
            ValueError: the caller wants them, but more than the number of rows differs; or the function raises.
        """
        if self.resize is None:
            return False
        place = f"{name!r}, of shape {saved} in the checkpoint and {shape} in the model"
        if not call_given("resize", self.resize, place, name, saved, shape):
            return False
        if not saved or not shape or saved[1:] != shape[1:]:
            raise ValueError(
                f"resize: {name!r} has shape {saved} in the checkpoint and {shape} in the model, which differ in more "
                "than their first dimension: return False for it"
            )
        return True


Saved = tuple[str, TensorEntry]  # a saved tensor: its file, and its entry there
_Value = TypeVar("_Value")


class Fit:
    """What a checkpoint has for an optimizer that it fits.

    Attributes:
        model, masters: each saved tensor, by its name in the model; so in all others.
        states: the tensors of the states, by the name of a parameter, and by their own.
        values: the states that are no tensors, likewise, as JSON.
        elementwise: names of the states that are as large as their parameter, by the number of the class.
        groups: the options of the param groups.
        averages: the saved tensors of each average that the optimizer has, by name.
        missing: what the model has and the checkpoint does not; it stays as it is, without states.
        unexpected: saved names that the model does not have, or that were left out by name.
        mismatched: what has another shape in the checkpoint, and is not read.
        resized: what has another number of rows there; the leading rows that both have are read.
        anew: parameters whose states are not read, each with the reason.
        new_averages: of each average, what it does not have in the checkpoint; there it begins with the weights.
        own_options: the param groups that keep their options, since the saved ones are not those of the same groups.
    """

    def __init__(self, contents: Contents, checkpoint: Checkpoint, allowed: Differences, *, with_states: bool) -> None:
        """Compare. Local.

        Raises:
            ValueError: the checkpoint is that of another model or optimizer; names the first difference that is not
                ``allowed``.
            CheckpointError: the checkpoint is damaged.
        """
        self._known = frozenset(stored.name for stored in contents.model)
        self._allowed, self._contents = allowed, contents
        saved = checkpoint.tensors(MODEL)
        listed = [name for group in checkpoint.param_groups for name in group["params"]]
        ties = checkpoint.ties()
        self._names = allowed.names(dict.fromkeys([*saved, *listed]), self._known, ties)
        self._tied: dict[str, str] = {}  # what was tied when it was saved and is not now: name -> name of the other
        self._note_ties(ties)
        self.model: dict[str, Saved] = self._renamed(saved)
        self.masters: dict[str, Saved] = self._renamed(checkpoint.tensors(MASTERS))
        self.states: Mapping[str, Mapping[str, Saved]] = {}
        self.values: dict[str, dict[str, Any]] = {}
        self.elementwise: dict[int, frozenset[str]] = {}
        self._inner: dict[str, set[str]] = {}  # names of the tensors inside lists and dicts, by parameter
        self.groups: list[dict[str, Any]] = []
        self.averages: dict[str, Mapping[str, Saved]] = {}
        self.missing: list[str] = []
        self.mismatched: list[str] = []
        self.resized: list[str] = []
        self.anew: dict[str, str] = {}
        self.new_averages: dict[str, list[str]] = {}
        self.own_options: list[int] = []
        self._check_model(
            contents,
            "it is that of another model. To load what both have, pass strict=False; rename= and resize= say which "
            "tensors have another name or another number of rows",
        )
        self.unexpected = [name for name in saved if self._names.get(name) not in self._known]
        self.model = {name: self.model[name] for name in self.model if name in self._known}
        if with_states:
            self._check_averages(contents, checkpoint)
            self._check_states(contents, checkpoint)

    def _note_ties(self, ties: Mapping[str, str]) -> None:
        """Let a tensor that has several names, in the checkpoint or in the model, be found under each.

        ``ties``: further saved names -> the name under which the tensor is saved.
        """
        first_names = {alias: stored.name for stored in self._contents.model for alias in stored.aliases}
        taken = set(self._names.values())
        for saved, name in self._names.items():
            first = first_names.get(name)
            if first is not None and name not in self._known and first not in taken:
                self._names[saved] = first
                taken.add(first)
        for alias, saved in ties.items():
            new = self._allowed.further_name(alias, self._known)
            if new is None or (plain := first_names.get(new, new)) not in self._known or plain in taken:
                continue
            taken.add(plain)
            other = self._names.get(saved)
            if other is not None and other in self._known:
                self._tied[plain] = other
            else:
                self._names[saved] = plain

    def _renamed(self, values: Mapping[str, _Value]) -> dict[str, _Value]:
        found = {self._names[name]: value for name, value in values.items() if name in self._names}
        return found | {name: found[other] for name, other in self._tied.items() if other in found}

    def digest(self) -> str:
        """Return a text that two ranks have in common if they read the same tensors."""
        taken = [sorted(self._names.items()), sorted(self._tied), self.missing, self.mismatched, self.resized]
        return hashlib.sha256(json.dumps(taken).encode()).hexdigest()

    def numel(self, stored: StoredTensor) -> int:
        """Return of how many leading elements of a tensor the checkpoint has values."""
        found = self.model.get(stored.name)
        return 0 if found is None else min(found[1].numel, math.prod(stored.shape))

    def lies_flat(self, name: str, saved: Saved, stored: StoredTensor, spec: ParameterSpec) -> bool:
        """Return whether a tensor of the parameter's states is one of the states that are as large as it."""
        if name in self._inner.get(stored.name, ()):
            return False
        entry, widest = saved[1], self.widest(stored)[1]
        if spec.grain.alone and (entry.dtype != widest.dtype or entry.stride not in (None, spec.stride)):
            return False
        return lies_flat(name, self._without_values(stored.name, entry), spec, self.elementwise)

    def widest(self, stored: StoredTensor) -> Saved:
        """Return the saved weights of a parameter in their widest dtype."""
        return self.masters.get(stored.name, self.model[stored.name])

    def _check_model(self, contents: Contents, remedy: str) -> None:
        ours = {stored.name: stored for stored in contents.model}
        for name, stored in ours.items():
            if name not in self.model:
                if not self._allowed.strict:
                    self.missing.append(name)
                    continue
                way_on = self._remark_on_prefix() or f": {remedy}"
                raise ValueError(f"the checkpoint has no {name!r}, which the model has{way_on}")
            self._check_tensor(stored, remedy)
        for name in self.model:
            if name not in ours and self._allowed.strict:
                raise ValueError(f"the model has no {name!r}, which the checkpoint has: {remedy}")
        for name, (_, entry) in self.masters.items():
            if name not in self.model or entry.shape != self.model[name][1].shape:
                raise ValueError(f"the master weights of {name!r} in the checkpoint belong to another model")
        for name in self.mismatched:
            self.model.pop(name)
            self.masters.pop(name, None)

    def _check_tensor(self, stored: StoredTensor, remedy: str) -> None:
        name, entry = stored.name, self.model[stored.name][1]
        dtype = DTYPES[entry.dtype]
        if dtype is not stored.dtype and not (dtype.is_floating_point and stored.dtype.is_floating_point):
            raise ValueError(
                f"{name!r} is {dtype} in the checkpoint, but {stored.dtype} in the model: give it the saved dtype "
                "before the optimizer is built, or leave it out by strict=False and rename="
            )
        if entry.shape == stored.shape:
            return
        if self._allowed.has_rows(name, entry.shape, stored.shape):
            if stored.place is not None and not is_row_major(self._spec(stored)):
                raise ValueError(f"resize: the rows of {name!r} are not contiguous in memory: return False for it")
            self.resized.append(name)
        elif self._allowed.strict:
            raise ValueError(
                f"{name!r} has shape {entry.shape} in the checkpoint, but {stored.shape} in the model: {remedy}"
            )
        else:
            self.mismatched.append(name)

    def _remark_on_prefix(self) -> str:
        found = remark_on_prefix(self.model, self._known)
        return f"{found}, in the dicts that zero.open_checkpoint reads, and load these" if found else ""

    def _check_averages(self, contents: Contents, checkpoint: Checkpoint) -> None:
        for name in sorted(contents.averages.by_name.keys() & set(checkpoint.average_names)):
            saved = checkpoint.tensors(averages_folder(name))
            found = self.averages[name] = self._renamed(saved) | {
                key: value for key, value in saved.items() if key == N_AVERAGED
            }
            for stored in contents.model:
                if stored.place is None or stored.place[0] not in contents.updated or stored.name not in self.model:
                    continue
                if stored.name in found and found[stored.name][1].shape == self.model[stored.name][1].shape:
                    continue
                if self._allowed.strict or stored.name in found:
                    raise ValueError(
                        f"the checkpoint's averages {name!r} have no {stored.name!r} of this model's shape: give the "
                        "ShardedAverage another name=, and it begins anew"
                    )
                self.new_averages.setdefault(name, []).append(stored.name)

    def _check_states(self, contents: Contents, checkpoint: Checkpoint) -> None:
        """Compare the states and the options as `load_state_dict` does."""
        user_optimizers = contents.parts.classes
        self.elementwise = {number: inner.elementwise for number, inner in user_optimizers.used()}
        self.states, self.values = self._renamed(checkpoint.states()), self._renamed(checkpoint.state_values())
        self._inner = {parameter: tensor_names(values) for parameter, values in self.values.items()}
        saved_groups = self._groups(contents, checkpoint)
        order = [name for group in saved_groups for name in group["params"]]
        kinds = {name: _shape_alone for inner in user_optimizers for name in inner.kinds}
        tensors = {
            parameter: {name: self._without_values(parameter, entry) for name, (_, entry) in states.items()}
            for parameter, states in self.states.items()
        }
        with checkpoint.parsing(OPTIMIZER):
            plain = plain_dict(saved_groups, tensors, self.values, kinds)
        before = plain["state"]
        plain, self.elementwise, _ = fitted(plain, contents.groups, user_optimizers, contents.storage)
        for index, states in plain["state"].items():
            for name, value in states.items():
                if value is not before[index].get(name):
                    self.values.setdefault(order[index], {})[name] = encode_inline(value, name)
        self.groups = [
            {key: value for key, value in group.items() if key not in (*NO_OPTIONS, "param_names")}
            for group in plain["param_groups"]
        ]

    def _groups(self, contents: Contents, checkpoint: Checkpoint) -> list[dict[str, Any]]:
        """Return the saved param groups as this optimizer has them, and drop the states that its parameters do not
        take over."""
        user_optimizers = contents.parts.classes
        saved = [
            {**group, "params": [self._names[name] for name in group["params"] if name in self._names]}
            for group in checkpoint.param_groups
        ]
        classes = [user_optimizers.of(number).qualified_name for number in range(len(contents.groups))]
        listed = {name for names in contents.names for name in names}
        tied = {name: other for name, other in self._tied.items() if name in self.model and name in listed}
        if self._allowed.strict:
            for name, other in tied.items():
                raise ValueError(
                    f"{name!r} was tied to {other!r} when it was saved, so it has no states of its own: pass "
                    "strict=False, and they begin anew"
                )
            for number, (group, mine) in enumerate(zip(saved, classes, strict=False)):
                if group.get("optimizer_class") not in (mine, None):  # None: imported from a dict, which has no class
                    raise ValueError(
                        f"param group {number} of the checkpoint was trained by {group.get('optimizer_class')}, but "
                        f"this optimizer is {mine}"
                    )
        group_of = {name: group for group in saved for name in group["params"]}
        by_class = {name: group.get("optimizer_class") for name, group in group_of.items()}
        for mine, names in zip(classes, contents.names, strict=True):
            for name in names:
                if name in self.model and by_class.get(name) not in (mine, None):
                    self.anew[name] = f"its states are those of {by_class[name]}"
        self.anew |= {name: f"it was tied to {other!r} when it was saved" for name, other in tied.items()}
        for stored in (stored for stored in contents.model if stored.place is not None):
            if stored.name in self.resized:
                why = self._why_not_by_rows(stored)
            else:
                why = self._other_blocks(stored, group_of.get(stored.name, {}).get(BLOCKS))
            if why is not None:
                self.anew[stored.name] = why
        kept = {name for name in listed if name in self.model and name not in self.anew}
        self.states = {name: found for name, found in self.states.items() if name in kept}
        self.values = {name: found for name, found in self.values.items() if name in kept}
        if self._allowed.strict:
            return saved
        number_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
        found = []
        for number, (mine, names) in enumerate(zip(classes, contents.names, strict=True)):
            options = saved[number] if len(saved) == len(classes) else {}
            elsewhere = any(number_of.get(name, number) != number for name in names)  # groups in another order, say
            if not options or elsewhere or options.get("optimizer_class") not in (mine, None):
                options = {key: value for key, value in contents.groups[number].items() if key not in NO_OPTIONS}
                options |= self._mode_of(number, [group for group in saved if kept & {*names} & {*group["params"]}])
                self.own_options.append(number)
            found.append({**options, "optimizer_class": mine, "params": names})
        return found

    def _mode_of(self, number: int, saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the option that holds the mode in which weights and states were saved, if the class has one.

        ``saved``: the groups from which the states of param group ``number`` come.
        """
        modes = {group[TRAIN_MODE] for group in saved if TRAIN_MODE in group}
        if not modes or TRAIN_MODE not in self._contents.groups[number]:
            return {}
        if len(modes) > 1:
            raise ValueError(
                f"the parameters of param group {number} were saved in train mode and in eval mode: call "
                "optimizer.train() before the save"
            )
        return {TRAIN_MODE: modes.pop()}

    def _why_not_by_rows(self, stored: StoredTensor) -> str | None:
        """Return why the states of a resized parameter are not read row by row; None if they are."""
        found, spec, shape = self.states.get(stored.name, {}), self._spec(stored), self.model[stored.name][1].shape
        rules = self._contents.parts.classes.rules_of(spec)
        for name, saved in found.items():
            entry = saved[1]
            divided = entry.numel > 1 or name in rules  # of one block it may be a single value
            if divided and (entry.shape != shape or not self.lies_flat(name, saved, stored, spec)):
                return "its states do not have its rows"
        if stored.shape[0] > shape[0]:
            inner = self._contents.parts.classes[spec.optimizer_class]
            large = {name for name, saved in found.items() if saved[1].shape == shape}
            for name in sorted(large - begin_at_zero(inner, self._contents.groups, spec)):
                return f"its state {name!r} does not begin at 0, which new rows would have"
        return None

    def _other_blocks(self, stored: StoredTensor, blocks: Any) -> str | None:
        """Return why states with values for blocks are not read: these blocks have other sizes. None if they are read.

        ``blocks``: that the saved param group asked for. Raises `ValueError` instead if the caller is strict.
        """
        spec = self._spec(stored)
        rules, large = self._contents.parts.classes.rules_of(spec), self.elementwise.get(spec.optimizer_class, ())
        saved = (
            stack_of(replace(spec, stride=row_major_stride(spec.shape)), blocks) if stored.name in self.model else ()
        )
        for name, (_, entry) in self.states.get(stored.name, {}).items():
            why = None
            if name in rules and not rules[name].fits(torch.empty(entry.shape, device="meta"), spec.numel):
                why = f"its state {name!r} has {entry.numel} values in the checkpoint, and another number here"
            elif saved in ((), spec.grain.stack):
                continue
            elif name not in large if entry.shape == spec.shape else entry.shape[:1] == (len(saved),):
                why = f"in the checkpoint its state {name!r} has a value for each block of blocks={blocks!r}"
            if why is not None:
                if self._allowed.strict:
                    raise ValueError(
                        f"{stored.name!r} has states for blocks of another size: {why}. Build the optimizer with the "
                        "blocks of the checkpoint, or pass strict=False, and these states begin anew"
                    )
                return why
        return None

    def _spec(self, stored: StoredTensor) -> ParameterSpec:
        assert stored.place is not None
        number, slot = stored.place
        return self._contents.buckets[number].specs[slot]

    def _without_values(self, parameter: str, entry: TensorEntry) -> Tensor:
        """Return a tensor of a parameter's states on the meta device, with the shape that it has here."""
        shape = entry.shape
        if parameter in self.resized and shape == self.model[parameter][1].shape:
            shape = next(stored.shape for stored in self._contents.model if stored.name == parameter)
        return torch.empty(shape, dtype=DTYPES[entry.dtype], device="meta")


def _shape_alone(_: Any, __: Any, shape: torch.Size, ___: Any) -> Tensor:
    return torch.empty(shape, device="meta")


_SCALARS = ("scalars", 0)


@dataclass(frozen=True)
class _Common:
    """What the buckets of one loading have in common, on one rank.

    Attributes:
        reader: of parts of tensors.
        scalars: the bytes of states that do not lie flat, of all buckets, one after the other.
        later: what follows when everything was read.
    """

    contents: Contents
    checkpoint: Checkpoint
    fit: Fit
    with_states: bool
    reader: PartReader
    scalars: bytearray = field(default_factory=bytearray)
    later: list[Callable[[], None]] = field(default_factory=list)


class _BucketLoader:
    """The loading of one bucket, on one rank: `begin`, then all is read, then `finish`.

    Then, when the options of the param groups are there, `create_states`.
    """

    def __init__(self, common: _Common, number: int, stored: Mapping[int, StoredTensor]) -> None:
        """``number``: of the bucket in `Contents.buckets`; ``stored``: the tensors in it, by slot."""
        contents = common.contents
        self._common, self._fit, self._number, self._stored = common, common.fit, number, stored
        self._bucket = bucket = contents.buckets[number]
        self._rank = contents.parts.shard_group.rank
        self._is_updated = number in contents.updated
        self._with_states = common.with_states and self._is_updated
        self._interval = bucket.spec.owned(self._rank)  # the elements that this rank reads
        self._pieces = {piece.slot: piece for piece in bucket.spec.pieces(*self._interval)}
        self._scalars: dict[int, dict[str, tuple[int, TensorEntry]]] = {}  # by slot and name: first byte, entry
        self._wide: set[int] = set()  # the slots whose master weights are read
        self._rounded: set[int] = set()  # those whose parameters are these, rounded
        self._filled: dict[str, FlatBuffer] = {}  # what gets values in this rank's interval, by kind

    def begin(self) -> None:
        """Say what is to be read, and drop the states that there are."""
        old = dict[str, FlatBuffer]()
        if self._is_updated:
            states = self._bucket.states
            states.wait_for_copies()
            states.snapshot()
            if all(self._fit.numel(stored) == math.prod(stored.shape) for stored in self._stored.values()):
                states.master.forget()
            if (masters := states.masters()) is not None:
                self._filled[MASTERS] = masters  # some of them stay
            if self._with_states:
                old, states.flat = states.flat, {}
        for slot, stored in self._stored.items():
            if stored.name in self._fit.model:
                self._expect_weights(slot)
                if self._with_states:
                    self._expect_states(slot, old)
                    self._expect_averages(slot)

    # -- which saved tensor becomes what ------------------------------------------------------------------------------

    def _expect_weights(self, slot: int) -> None:
        bucket, stored = self._bucket, self._stored[slot]
        narrow, widest = self._fit.model[stored.name], self._fit.widest(stored)
        dtypes, folder = bucket.spec.dtypes, MODEL if widest is narrow else MASTERS
        if not self._is_updated or not dtypes.has_master:
            self._expect(slot, folder, widest, WEIGHTS, bucket.weights)
            return
        has_dtype = DTYPES[narrow[1].dtype] is dtypes.param_dtype
        self._filled[WEIGHTS] = bucket.weights  # by what is read, or by master weights, rounded
        if has_dtype:
            self._expect(slot, MODEL, narrow, WEIGHTS, bucket.weights)
            if widest is narrow:
                return  # the master weights are equal to the parameter
        self._expect(slot, folder, widest, MASTERS, bucket.states.over(bucket.states.weights))
        self._wide.add(slot)
        if not has_dtype:
            self._rounded.add(slot)

    def _expect_states(self, slot: int, old: Mapping[str, FlatBuffer]) -> None:
        """``old``: the memory that states had, by name: it is used again where it fits."""
        states, common, stored = self._bucket.states, self._common, self._stored[slot]
        for name, saved in self._fit.states.get(stored.name, {}).items():
            if self._fit.lies_flat(name, saved, stored, self._bucket.specs[slot]):
                follows = saved[1].dtype == self._fit.widest(stored)[1].dtype
                dtype = self._bucket.spec.dtypes.master_dtype if follows else DTYPES[saved[1].dtype]
                if name not in states.flat and name in old and old[name].data.dtype is dtype:
                    states.flat[name] = old[name]
                flat = states.flat[name] if name in states.flat else states.allocate(name, dtype)
                self._expect(slot, OPTIMIZER, saved, f"{STATE} {name}", flat)
            elif states.pieces_of(slot):
                place = len(common.scalars)
                self._scalars.setdefault(slot, {})[name] = (place, saved[1])
                common.reader.want(OPTIMIZER, saved[1].name, Part(_SCALARS, place, 0, saved[1].nbytes))
                common.scalars.extend(bytes(saved[1].nbytes))

    def _expect_averages(self, slot: int) -> None:
        of_parameter = self._stored[slot].name
        for name, tensors in self._fit.averages.items():
            if of_parameter in tensors:
                room = self._common.contents.averages.by_name[name].room(self._bucket)
                self._expect(slot, averages_folder(name), tensors[of_parameter], f"{AVERAGE} {name}", room)

    def _expect(self, slot: int, folder: str, saved: Saved, kind: str, flat: FlatBuffer) -> None:
        """Read this rank's piece of a saved tensor into what it holds of the bucket."""
        self._filled[kind] = flat
        spec, (low, high), dtype = self._bucket.spec, self._interval, DTYPES[saved[1].dtype]
        into, whole = flat.interval(low, high).detach(), self._pieces.get(slot)
        if whole is None or not whole.numel:
            return
        piece = self._saved_part(whole)
        if folder == OPTIMIZER and piece.end < whole.end:
            into[piece.end - low : whole.end - low].zero_()  # new rows
        if not piece.numel:
            return
        target = into[piece.begin - low : piece.end - low]
        if not is_row_major(self._bucket.specs[slot]):

            def read_permuted() -> None:
                values = in_stride_order(self._common.checkpoint.read(*saved), self._bucket.specs[slot].stride)
                target.copy_(values[spec.within(piece)])

            self._common.later.append(read_permuted)
            return
        reader, key = self._common.reader, (f"{kind} {dtype}", self._number)
        direct = dtype is into.dtype and into.device.type == "cpu"
        memory = reader.memory(key, lambda: into if direct else torch.empty(high - low, dtype=dtype))
        then = None if direct else functools.partial(target.copy_, memory[piece.begin - low : piece.end - low])
        reader.want(folder, saved[1].name, slot_part(key, piece, spec, (low, high), dtype.itemsize), then)

    def _saved_part(self, piece: Piece) -> Piece:
        """Return the part of a piece of which the checkpoint has values."""
        saved_end = self._bucket.spec.slots[piece.slot].offset + self._fit.numel(self._stored[piece.slot])
        return replace(piece, end=max(piece.begin, min(piece.end, saved_end)))

    # -- when everything was read -------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Round what must be rounded, gather what every rank has whole, and note the states. Collective."""
        bucket, filled = self._bucket, self._filled
        for piece in self._pieces.values() if MASTERS in filled else ():
            if piece.slot in self._rounded:
                bucket.weights.piece(piece).copy_(filled[MASTERS].piece(piece))
            elif piece.slot not in self._wide:
                read = self._saved_part(piece)
                filled[MASTERS].piece(read).copy_(bucket.weights.piece(read))
        if self._with_states:
            self._begin_averages()
        self._gather()
        if self._is_updated:
            bucket.states.master.settle()
            bucket.states.evict()
        if self._with_states:
            self._set_states()

    def _begin_averages(self) -> None:
        """Let the averages of what the checkpoint lacks be the weights."""
        weights = self._bucket.states.masters() or self._bucket.weights
        for name in self._fit.averages:
            room = self._common.contents.averages.by_name[name].room(self._bucket)
            begun = self._fit.new_averages.get(name, ())
            self._filled[f"{AVERAGE} {name}"] = room
            for piece in self._pieces.values():
                is_new = self._bucket.specs[piece.slot].name in begun
                new = piece if is_new else replace(piece, begin=self._saved_part(piece).end)
                if new.numel:
                    room.piece(new).copy_(weights.piece(new))

    def _gather(self) -> None:
        """Bring what every rank has whole to all. Collective."""
        cuts, collective = self._bucket.spec.cuts, self._common.contents.parts.collective
        for kind, flat in sorted(self._filled.items()):
            if flat.placement is Placement.WHOLE and cuts.world_size > 1:
                tag = Tag(Kind.ALL_GATHER, f"loading bucket {self._number}, {kind}"[:70], index=self._number)
                redistribute(flat.shard(cuts, self._rank), flat, cuts, collective, tag).wait()

    def _set_states(self) -> None:
        """Note which states the pieces have. Neighbours with equal ones share the note."""
        states, before, shared = self._bucket.states, None, None
        for index, piece in enumerate(states.pieces):
            each, spec = self._stored[piece.slot], self._bucket.specs[piece.slot]
            found = sorted(self._fit.states.get(each.name, {}).items())
            names = tuple(n for n, saved in found if self._fit.lies_flat(n, saved, each, spec))
            scalars = {
                name: (entry, bytes(self._common.scalars[place : place + entry.nbytes]))
                for name, (place, entry) in self._scalars.get(piece.slot, {}).items()
            }
            values = self._fit.values.get(each.name, {})
            facts = [(name, entry.dtype, entry.shape, entry.stride, data) for name, (entry, data) in scalars.items()]
            now = (names, facts, repr(values), states.groups[index])
            if now != before:
                before, shared = now, self._state(names, scalars, values, states.groups[index])
            state = shared
            if shared is not None and spec.grain.divided:
                state, before = self._part_of(shared, piece), None
            states.set_state(index, state)

    def _part_of(self, whole: PieceState, piece: Piece) -> PieceState:
        """Return the state of a piece of a parameter that is cut between blocks."""
        spec, rules = self._bucket.specs[piece.slot], self._common.contents.parts.classes.rules_of
        part = part_of(whole.scalars, self._bucket.spec.within(piece), spec.numel, rules(spec))
        device = step_device(self._bucket.spec)
        return PieceState(whole.elementwise, {n: scalar_state("", value, False, device) for n, value in part.items()})

    def _state(
        self,
        names: tuple[str, ...],
        scalars: Mapping[str, tuple[TensorEntry, bytes]],
        values: Mapping[str, Any],
        group: int,
    ) -> PieceState | None:
        if not names and not scalars and not values:
            return None
        contents = self._common.contents
        options = contents.groups[group] | self._fit.groups[group]
        on_device = bool(options.get("fused") or options.get("capturable"))
        device = step_device(self._bucket.spec)
        tensors: dict[str, Tensor] = {}
        for name, (entry, data) in scalars.items():
            tensors[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            memory_of(as_bytes(tensors[name]))[:] = data
            if entry.stride is not None:
                tensors[name] = laid_out(tensors[name], entry.stride)
        kinds = contents.parts.classes[self._bucket.specs[0].optimizer_class].kinds
        found = decode_states(values, tensors, kinds)
        return PieceState(names, {name: scalar_state(name, v, on_device, device) for name, v in found.items()})

    def create_states(self) -> None:
        """Let a class that creates its states in the constructor create those that begin anew."""
        if not self._with_states:
            return
        new, states = {*self._fit.missing, *self._fit.mismatched, *self._fit.anew}, self._bucket.states
        flags = bytes(self._stored[piece.slot].name in new for piece in states.pieces)
        if any(stored.name in new for stored in self._stored.values()):
            contents, of_class = self._common.contents, self._bucket.specs[0].optimizer_class
            classes = contents.parts.classes
            classes[of_class].create_states(states, classes.groups_of(of_class, contents.groups), flags)
            states.evict()


class Loader:
    """The loading of one checkpoint into one optimizer, on one rank."""

    def __init__(self, contents: Contents, checkpoint: Checkpoint, fit: Fit, *, with_states: bool) -> None:
        """``fit``: of these two. ``with_states``: load also the states and the options of the param groups."""
        self.fit = fit
        self._common = _Common(contents, checkpoint, fit, with_states, PartReader(checkpoint))
        stored_in: dict[int, dict[int, StoredTensor]] = {}
        for stored in contents.model:
            if stored.place is not None:
                stored_in.setdefault(stored.place[0], {})[stored.place[1]] = stored
        self._buckets = [
            _BucketLoader(self._common, number, stored_in.get(number, {})) for number in range(len(contents.buckets))
        ]

    def load(self) -> None:
        """Read everything. Collective."""
        for bucket in self._buckets:
            bucket.begin()
        self._read()
        for bucket in self._buckets:
            bucket.finish()
        self._load_whole_tensors()
        self._load_groups()
        for bucket in self._buckets:
            bucket.create_states()
        classes = self._common.contents.parts.classes
        for number, names in self.fit.elementwise.items():
            classes[number].note_elementwise(names)
        if self._common.with_states:
            self._load_counts()

    def _read(self) -> None:
        """Read all that is expected."""
        common, contents = self._common, self._common.contents
        common.reader.memory(_SCALARS, lambda: torch.frombuffer(common.scalars or bytearray(1), dtype=torch.uint8))
        on_host = all(torch.device(bucket.spec.device).type == "cpu" for bucket in contents.buckets)
        common.reader.read(threads_of_rank(contents.transport.world_size) if on_host else 1)
        for action in common.later:
            action()

    def _load_whole_tensors(self) -> None:
        """Read the tensors that every rank has whole."""
        for stored in self._common.contents.model:
            if stored.tensor is not None and stored.name in self.fit.model:
                values = self._common.checkpoint.read(*self.fit.model[stored.name])
                if stored.name in self.fit.resized:
                    rows = min(len(values), len(stored.tensor))
                    stored.tensor[:rows].copy_(values[:rows])
                else:
                    stored.tensor.copy_(values)

    def _load_groups(self) -> None:
        """Take over the options of the param groups."""
        shared: dict[int, Any] = {}  # id of a tensor in live groups, which they may share -> the one loaded for it
        for group, options in zip(self._common.contents.groups, self.fit.groups, strict=False):
            for key, value in options.items():
                live = group.get(key)
                if isinstance(live, Tensor) and same(value, first := shared.setdefault(id(live), value)):
                    options[key] = first
            group.pop(STEPS, None)
            group.update(options)

    def _load_counts(self) -> None:
        """Take over how often each average was updated."""
        for name, average in self._common.contents.averages.by_name.items():
            saved = self.fit.averages.get(name, {}).get(N_AVERAGED)
            count = 1 if name in self.fit.averages else 0  # averages that were imported have no count
            average.n_averaged = count if saved is None else int(self._common.checkpoint.read(*saved))
