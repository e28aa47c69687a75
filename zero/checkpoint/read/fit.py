"""Whether a checkpoint is one of this model and this optimizer, and what it has for each parameter.

Knows: names, shapes, dtypes, param groups. Does not know: bytes, memory, ranks. Nothing changes here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...core.bits import row_major_stride
from ...core.layout import ParameterSpec
from ...core.names import remark_on_prefix
from ...core.runs import lies_flat
from ...core.statetree import BLOCKS, DTYPES, N_AVERAGED, NO_OPTIONS, encode_inline, tensor_names
from ...state.plain_dicts import fitted
from ...step.classes import TRAIN_MODE
from ...step.partition import begin_at_zero, stack_of
from ..contents import Contents, StoredTensor
from ..format.extents import is_row_major
from ..format.names import MASTERS, MODEL, OPTIMIZER, averages_folder
from ..format.tensorfile import TensorEntry
from .differences import Differences
from .reader import Checkpoint, plain_dict

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
        anew: what is read without its states, and why.
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
        if spec.alone and (entry.dtype != widest.dtype or entry.stride not in (None, spec.stride)):
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
            elif saved in ((), spec.stack):
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
