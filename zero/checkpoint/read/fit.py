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
from ...core.statetree import DTYPES, NO_OPTIONS, decode_states, tensor_names
from ...state.plain_dicts import check, lies_flat
from ...step.partition import check_classes
from ..contents import Contents, StoredTensor
from ..format.names import MASTERS, MODEL, OPTIMIZER, averages_folder
from ..format.tensorfile import TensorEntry
from .reader import Checkpoint

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
        self._check_model(contents)
        if with_states:
            self._check_averages(contents, checkpoint)
            self._check_states(contents, checkpoint)

    def lies_flat(self, name: str, saved: Saved, stored: StoredTensor, spec: ParameterSpec) -> bool:
        """Return whether a tensor of the parameter's states is one of the states that are as large as it."""
        if name in self._inner.get(stored.name, ()) or (spec.whole and saved[1].dtype != self.widest(stored)[1].dtype):
            return False
        return lies_flat(name, _without_values(saved[1]), spec, self.elementwise)

    def widest(self, stored: StoredTensor) -> Saved:
        """Return the saved weights of a parameter in their widest dtype."""
        return self.masters.get(stored.name, self.model[stored.name])

    def _check_model(self, contents: Contents) -> None:
        ours = {stored.name: stored for stored in contents.model}
        for name, stored in ours.items():
            if name not in self.model:
                raise ValueError(
                    f"the checkpoint has no {name!r}, which the model has: it is that of another model"
                    f"{self._remark_on_prefix()}"
                )
            entry = self.model[name][1]
            if entry.shape != stored.shape:
                raise ValueError(
                    f"{name!r} has shape {entry.shape} in the checkpoint, but {stored.shape} in the model: it is "
                    "that of another model"
                )
            dtype = DTYPES[entry.dtype]
            if dtype is not stored.dtype and not (dtype.is_floating_point and stored.dtype.is_floating_point):
                raise ValueError(f"{name!r} is {dtype} in the checkpoint, but {stored.dtype} in the model")
        for name in self.model:
            if name not in ours:
                raise ValueError(f"the model has no {name!r}, which the checkpoint has: it is that of another model")
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
        inners = contents.parts.inners
        saved_groups = [
            {**group, "params": [known_as(name, self._known) for name in group["params"]]}
            for group in checkpoint.param_groups
        ]
        for number, (group, _) in enumerate(zip(saved_groups, contents.groups, strict=False)):
            mine = inners.of(number).qualified_name
            if group.get("optimizer_class") not in (mine, None):  # None: imported from a dict, which has no class
                raise ValueError(
                    f"param group {number} of the checkpoint was trained by {group.get('optimizer_class')}, but this "
                    f"optimizer is {mine}"
                )
        order = [name for group in saved_groups for name in group["params"]]
        indices = {name: index for index, name in enumerate(order)}
        self.groups = [{k: v for k, v in group.items() if k not in NO_OPTIONS} for group in saved_groups]
        self.states = by_known_name(checkpoint.states(), self._known)
        self.values = by_known_name(checkpoint.state_values(), self._known)
        layout = contents.storage.layout
        known = [spec for spec in layout.parameters if spec.group < len(saved_groups)]
        self.elementwise = check_classes(inners, self.groups, known)
        meta: dict[int, dict[str, Any]] = {}
        self._inner = {parameter: tensor_names(values) for parameter, values in self.values.items()}
        with checkpoint.parsing(OPTIMIZER):
            for parameter in self.states.keys() | self.values.keys():
                tensors = {name: _without_values(entry) for name, (_, entry) in self.states.get(parameter, {}).items()}
                meta[indices[parameter]] = decode_states(self.values.get(parameter, {}), tensors)
        named = [
            {**options, "param_names": group["params"], "params": [indices[name] for name in group["params"]]}
            for options, group in zip(self.groups, saved_groups, strict=True)
        ]
        check({"state": meta, "param_groups": named}, contents.groups, contents.storage.listed(), self.elementwise)


def _without_values(entry: TensorEntry) -> Tensor:
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
