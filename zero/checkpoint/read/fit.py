"""Whether a checkpoint is one of this model and this optimizer, and what it has for each parameter.

Knows: names, shapes, dtypes, param groups. Does not know: bytes, memory, ranks. Nothing changes here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...core.layout import ParameterSpec
from ...core.names import remark_on_prefix
from ...core.statetree import DTYPES, N_AVERAGED, NO_OPTIONS, encode_inline, tensor_names
from ...state.plain_dicts import fitted, lies_flat
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
        self._names = allowed.names(dict.fromkeys([*saved, *listed]), self._known)
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

    def _renamed(self, values: Mapping[str, _Value]) -> dict[str, _Value]:
        return {self._names[name]: value for name, value in values.items() if name in self._names}

    def digest(self) -> str:
        """Return a text that two ranks have in common if they read the same tensors."""
        taken = [sorted(self._names.items()), self.missing, self.mismatched, self.resized]
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
            raise ValueError(f"{name!r} is {dtype} in the checkpoint, but {stored.dtype} in the model")
        if entry.shape == stored.shape:
            return
        if self._allowed.has_rows(name, entry.shape, stored.shape):
            number, slot = stored.place or (0, 0)
            if stored.place is not None and not is_row_major(self._contents.buckets[number].specs[slot]):
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
                if stored.name not in found or found[stored.name][1].shape != self.model[stored.name][1].shape:
                    raise ValueError(
                        f"the checkpoint's averages {name!r} have no {stored.name!r} of this model's shape: give the "
                        "ShardedAverage another name=, and it begins anew"
                    )

    def _check_states(self, contents: Contents, checkpoint: Checkpoint) -> None:
        """Compare the states and the options as `load_state_dict` does."""
        user_optimizers = contents.parts.classes
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
        if self._allowed.strict:
            for number, (group, mine) in enumerate(zip(saved, classes, strict=False)):
                if group.get("optimizer_class") not in (mine, None):  # None: imported from a dict, which has no class
                    raise ValueError(
                        f"param group {number} of the checkpoint was trained by {group.get('optimizer_class')}, but "
                        f"this optimizer is {mine}"
                    )
        by_class = {name: group.get("optimizer_class") for group in saved for name in group["params"]}
        for mine, names in zip(classes, contents.names, strict=True):
            for name in names:
                if name in self.model and by_class.get(name) not in (mine, None):
                    self.anew[name] = f"its states are those of {by_class[name]}"
        for name in self.resized:
            shape = self.model[name][1].shape
            if any(entry.shape != shape and entry.numel > 1 for _, entry in self.states.get(name, {}).values()):
                self.anew[name] = "its states do not have its rows"
        kept = {name for names in contents.names for name in names if name in self.model and name not in self.anew}
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
                self.own_options.append(number)
            found.append({**options, "optimizer_class": mine, "params": names})
        return found

    def _without_values(self, parameter: str, entry: TensorEntry) -> Tensor:
        """Return a tensor of a parameter's states on the meta device, with the shape that it has here."""
        shape = entry.shape
        if parameter in self.resized and shape == self.model[parameter][1].shape:
            shape = next(stored.shape for stored in self._contents.model if stored.name == parameter)
        return torch.empty(shape, dtype=DTYPES[entry.dtype], device="meta")


def _shape_alone(_: Any, __: Any, shape: torch.Size, ___: Any) -> Tensor:
    return torch.empty(shape, device="meta")
