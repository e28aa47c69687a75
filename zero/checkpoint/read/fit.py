"""Whether a checkpoint is one of this model and this optimizer, and what it has for each parameter.

Knows: names, shapes, dtypes, param groups. Does not know: bytes, memory, ranks. Nothing changes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.layout import ParameterSpec
from ...core.names import by_known_name, known_as, remark_on_prefix
from ...core.statetree import DTYPES, NO_OPTIONS, encode_inline, tensor_names
from ...state.plain_dicts import fitted, lies_flat
from ..contents import Contents, StoredTensor
from ..format.names import MASTERS, MODEL, OPTIMIZER, averages_folder
from ..format.tensorfile import TensorEntry
from .reader import Checkpoint, plain_dict

Saved = tuple[str, TensorEntry]  # a saved tensor: its file, and its entry there


class Fit:
    """What a checkpoint has for an optimizer that it fits.

    Attributes:
        model, masters: each saved tensor, by its name in the model; so in all others.
        states: the tensors of the states, by the name of a parameter, and by their own.
        values: the states that are no tensors, likewise, as JSON.
        elementwise: names of the states that are as large as their parameter, by the number of the class.
        groups: the options of the param groups.
        averages: the saved tensors of each average that the optimizer has, by name.
    """

    def __init__(self, contents: Contents, checkpoint: Checkpoint, *, with_states: bool) -> None:
        """Compare. Local.

        Raises:
            ValueError: the checkpoint is that of another model or optimizer; names the first difference.
            CheckpointError: the checkpoint is damaged.
        """
        self._known = frozenset(stored.name for stored in contents.model)
        self.model: Mapping[str, Saved] = by_known_name(checkpoint.tensors(MODEL), self._known)
        self.masters: Mapping[str, Saved] = by_known_name(checkpoint.tensors(MASTERS), self._known)
        self.states: Mapping[str, Mapping[str, Saved]] = {}
        self.values: dict[str, dict[str, Any]] = {}
        self.elementwise: dict[int, frozenset[str]] = {}
        self._inner: dict[str, set[str]] = {}  # names of the tensors inside lists and dicts, by parameter
        self.groups: list[dict[str, Any]] = []
        self.averages: dict[str, Mapping[str, Saved]] = {}
        self._check_model(
            contents,
            "it is that of another model. To begin with its weights: weights = "
            f"zero.open_checkpoint({str(checkpoint.path)!r}).model_state_dict(); rename, resize or leave out tensors "
            "there; model.load_state_dict(weights, strict=False), before the optimizer is built",
        )
        if with_states:
            self._check_averages(contents, checkpoint)
            self._check_states(contents, checkpoint)

    def lies_flat(self, name: str, saved: Saved, stored: StoredTensor, spec: ParameterSpec) -> bool:
        """Return whether a tensor of the parameter's states is one of the states that are as large as it."""
        if name in self._inner.get(stored.name, ()):
            return False
        entry, widest = saved[1], self.widest(stored)[1]
        if spec.one_owner and (entry.dtype != widest.dtype or entry.stride not in (None, spec.stride)):
            return False
        return lies_flat(name, _without_values(entry), spec, self.elementwise)

    def widest(self, stored: StoredTensor) -> Saved:
        """Return the saved weights of a parameter in their widest dtype."""
        return self.masters.get(stored.name, self.model[stored.name])

    def _check_model(self, contents: Contents, remedy: str) -> None:
        ours = {stored.name: stored for stored in contents.model}
        for name, stored in ours.items():
            if name not in self.model:
                way_on = self._remark_on_prefix() or f": {remedy}"
                raise ValueError(f"the checkpoint has no {name!r}, which the model has{way_on}")
            entry = self.model[name][1]
            if entry.shape != stored.shape:
                raise ValueError(
                    f"{name!r} has shape {entry.shape} in the checkpoint, but {stored.shape} in the model: {remedy}"
                )
            dtype = DTYPES[entry.dtype]
            if dtype is not stored.dtype and not (dtype.is_floating_point and stored.dtype.is_floating_point):
                raise ValueError(f"{name!r} is {dtype} in the checkpoint, but {stored.dtype} in the model")
        for name in self.model:
            if name not in ours:
                raise ValueError(f"the model has no {name!r}, which the checkpoint has: {remedy}")
        for name, (_, entry) in self.masters.items():
            if name not in self.model or entry.shape != self.model[name][1].shape:
                raise ValueError(f"the master weights of {name!r} in the checkpoint belong to another model")

    def _remark_on_prefix(self) -> str:
        found = remark_on_prefix(self.model, self._known)
        return f"{found}, in the dicts that zero.open_checkpoint reads, and load these" if found else ""

    def _check_averages(self, contents: Contents, checkpoint: Checkpoint) -> None:
        for name in sorted(contents.averages.by_name.keys() & set(checkpoint.average_names)):
            found = self.averages[name] = by_known_name(checkpoint.tensors(averages_folder(name)), self._known)
            for stored in contents.model:
                if stored.place is None or stored.place[0] not in contents.updated:
                    continue
                if stored.name not in found or found[stored.name][1].shape != stored.shape:
                    raise ValueError(
                        f"the checkpoint's averages {name!r} have no {stored.name!r} of this model's shape"
                    )

    def _check_states(self, contents: Contents, checkpoint: Checkpoint) -> None:
        """Compare the states and the options as `load_state_dict` does."""
        user_optimizers = contents.parts.classes
        saved_groups = [
            {**group, "params": [known_as(name, self._known) for name in group["params"]]}
            for group in checkpoint.param_groups
        ]
        for number, (group, _) in enumerate(zip(saved_groups, contents.groups, strict=False)):
            mine = user_optimizers.of(number).qualified_name
            if group.get("optimizer_class") not in (mine, None):  # None: imported from a dict, which has no class
                raise ValueError(
                    f"param group {number} of the checkpoint was trained by {group.get('optimizer_class')}, but this "
                    f"optimizer is {mine}"
                )
        order = [name for group in saved_groups for name in group["params"]]
        self.states = by_known_name(checkpoint.states(), self._known)
        self.values = by_known_name(checkpoint.state_values(), self._known)
        self._inner = {parameter: tensor_names(values) for parameter, values in self.values.items()}
        kinds = {name: _shape_alone for inner in user_optimizers for name in inner.kinds}
        tensors = {
            parameter: {name: _without_values(entry) for name, (_, entry) in states.items()}
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


def _shape_alone(_: Any, __: Any, shape: torch.Size, ___: Any) -> Tensor:
    return torch.empty(shape, device="meta")


def _without_values(entry: TensorEntry) -> Tensor:
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
