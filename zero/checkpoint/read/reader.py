"""What a checkpoint holds, as values: the plain dicts, the states by name, the caller's state.

Knows: the folders and keys of the format. Does not know: blocks, ranks, how an optimizer is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ...core.names import MASTERS
from ...core.statetree import NO_OPTIONS, FormatError, Rebuild, decode, decode_states
from ...state.by_class import split
from ..format.manifest import NAME
from ..format.names import AVERAGES, MODEL, OPTIMIZER, STATE_FILE, rank_file, split_key
from ..format.tensorfile import TensorEntry, parse_json
from .file_reader import CheckpointError
from .tensor_folder import TensorFolder

_Value = TypeVar("_Value")


class Checkpoint(TensorFolder):
    """A checkpoint on a disk. `zero.open_checkpoint` returns it. Needs no ranks; tensors are read when asked for.

    Attributes:
        path: the folder.
        manifest: what it holds.
    """

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step {self.step}, content {self.content[:12]})"

    @property
    def step(self) -> int:
        """The number under which it was saved."""
        return self.manifest.step

    @property
    def content(self) -> str:
        """The SHA-256 that every topology which saves this state writes."""
        return self.manifest.content

    @property
    def not_saved(self) -> tuple[str, ...]:
        """The names of what could not be saved."""
        return self.manifest.not_saved

    # -- values -------------------------------------------------------------------------------------------------------

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return the model's tensors by name, aliases included, as ``module.load_state_dict`` takes them."""
        found = self.read_folder(MODEL)
        for alias, name in self._aliases().items():
            if name not in found:
                raise CheckpointError(f"{self.path}: {alias!r} is another name of {name!r}, which is in no file")
            found[alias] = found[name]
        return found

    def _aliases(self) -> dict[str, str]:
        paths = self.paths(MODEL)
        known = dict(self.header(paths[0]).metadata) if paths else {}
        known.pop("format", None)
        return known

    def masters(self) -> dict[str, Tensor]:
        """Return the master weights by name; none without mixed precision."""
        return self.read_folder(MASTERS)

    def averages(self, name: str) -> dict[str, Tensor]:
        """Return the averages of this name, by the names of the tensors. Raises `CheckpointError` if there are none."""
        if name not in self.average_names:
            raise CheckpointError(f"{self.path} has no averages {name!r}, but {self.average_names}")
        return self.read_folder(f"{AVERAGES}/{name}")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The options of the param groups; "params" has the names of the parameters."""
        with self.parsing(NAME):
            return [decode(group, {}) for group in self.manifest.param_groups]

    def state_values(self) -> dict[str, dict[str, Any]]:
        """Return the states that are no tensors, as JSON: by the parameter's name, by the state's name.

        Tensors inside them are among `states`: `decode_states` brings them together.
        """
        for path in self.paths(OPTIMIZER)[:1]:  # each of them has all values
            with self.parsing(path):
                values = parse_json(self.header(path).metadata.get("values", "{}").encode(), "values")
                if not isinstance(values, dict):
                    raise FormatError("its values have no names")
                return self._by_parameter(values)
        return {}

    def states(self) -> dict[str, dict[str, tuple[str, TensorEntry]]]:
        """Return the tensors of each parameter's states: by the parameter's name, by their names, file and entry."""
        return self._by_parameter(self.tensors(OPTIMIZER))

    def _by_parameter(self, values: Mapping[str, _Value]) -> dict[str, dict[str, _Value]]:
        """Return what has the keys of states by the parameter's name, and by the state's."""
        parameters = {name for group in self.param_groups for name in group["params"]}
        found: dict[str, dict[str, _Value]] = {}
        for key, value in values.items():
            names = split_key(key, parameters)
            if names is None:
                raise CheckpointError(f"{self.path}: {key!r} is the state of no parameter of a param group")
            found.setdefault(names[0], {})[names[1]] = value
        return found

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the plain torch.optim dict, with "masters" if there are master weights.

        If param groups have several classes, it is one such dict for each class, by the class's name.
        """
        names = [group.get("optimizer_class", "") for group in self.param_groups]
        whole = self.whole_state_dict()
        return split(whole, names) if len(set(names)) > 1 else whole

    def whole_state_dict(self) -> dict[str, Any]:
        """Return one dict of all param groups, whatever their classes, with "masters" if there are master weights."""
        tensors = self._by_parameter(self.read_folder(OPTIMIZER))
        with self.parsing(OPTIMIZER):
            whole = plain_dict(self.param_groups, tensors, self.state_values())
        order = [name for group in whole["param_groups"] for name in group["param_names"]]
        indices = {name: index for index, name in enumerate(order)}
        masters: dict[int, Tensor] = {}
        for name, tensor in self.masters().items():
            if name not in indices:
                raise CheckpointError(f"{self.path}: {name!r} has master weights, but is in no param group")
            masters[indices[name]] = tensor
        return {**whole, MASTERS: masters} if masters else whole

    @property
    def state(self) -> dict[str, Any]:
        """The caller's state that all ranks had."""
        return self.tree(STATE_FILE)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Return a rank's own state, with its random generators: "rng" and "rank_state"."""
        path = rank_file(rank)
        found = self.tree(path)
        if not all(isinstance(found.get(key), dict) for key in ("rng", "rank_state")):
            raise CheckpointError(f"{self.path / path}: it has no 'rng' and 'rank_state' by name")
        return found

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote it."""
        return len(self.paths("ranks"))

    def tree(self, path: str) -> dict[str, Any]:
        """Return the values of a file of one tree."""
        tensors = self.read_all(path)
        with self.parsing(path):
            found = decode(parse_json(self.header(path).metadata.get("tree", "null").encode(), "tree"), tensors)
            if not isinstance(found, dict):
                raise FormatError("it has no tree of values by name")
            return found


def plain_dict(
    groups: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, Mapping[str, Tensor]],
    values: Mapping[str, Mapping[str, Any]],
    kinds: Mapping[str, Rebuild] | None = None,
) -> dict[str, Any]:
    """Return the torch.optim dict of saved param groups and states, which are given by the parameters' names.

    ``tensors``, ``values``, ``kinds``: of `decode_states`. Raises `FormatError` as that does.
    """
    indices = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    states = {
        indices[name]: dict(sorted(decode_states(values.get(name, {}), tensors.get(name, {}), kinds).items()))
        for name in tensors.keys() | values.keys()
    }
    packed = [
        {
            **{key: value for key, value in group.items() if key not in NO_OPTIONS},
            "param_names": list(group["params"]),
            "params": [indices[name] for name in group["params"]],
        }
        for group in groups
    ]
    return {"state": dict(sorted(states.items())), "param_groups": packed}


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open one checkpoint to read it. Needs no ranks and no process group.

    Raises `CheckpointError` if ``path`` is not the folder of a checkpoint, or its manifest is damaged.
    """
    return Checkpoint(path)
