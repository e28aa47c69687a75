"""What a checkpoint holds, as values: the plain dicts, the states by name, the caller's state.

Knows: the folders and keys of the format. Does not know: blocks, ranks, how an optimizer is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Container
from typing import Any

from torch import Tensor

from ...core.names import MASTERS
from ...core.statetree import NO_OPTIONS, FormatError, decode, decode_states
from ...state.by_class import split
from ..format.manifest import NAME
from ..format.names import AVERAGES, MODEL, OPTIMIZER, STATE_FILE, rank_file, split_key
from ..format.tensorfile import TensorEntry, parse_json
from .file_reader import CheckpointError
from .tensor_folder import TensorFolder


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
        found: dict[str, dict[str, Any]] = {}
        names = self._indices()
        for path in self.paths(OPTIMIZER)[:1]:  # each of them has all values
            with self.parsing(path):
                values = parse_json(self.header(path).metadata.get("values", "{}").encode(), "values")
                if not isinstance(values, dict):
                    raise FormatError("its values have no names")
                for key, value in values.items():
                    parameter, name = self._split(key, names)
                    found.setdefault(parameter, {})[name] = value
        return found

    def states(self) -> dict[str, dict[str, tuple[str, TensorEntry]]]:
        """Return the tensors of each parameter's states: by the parameter's name, by their names, file and entry."""
        found: dict[str, dict[str, tuple[str, TensorEntry]]] = {}
        names = self._indices()
        for key, place in self.tensors(OPTIMIZER).items():
            parameter, name = self._split(key, names)
            found.setdefault(parameter, {})[name] = place
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
        indices = self._indices()
        tensors: dict[str, dict[str, Tensor]] = {}
        for key, tensor in self.read_folder(OPTIMIZER).items():
            parameter, name = self._split(key, indices)
            tensors.setdefault(parameter, {})[name] = tensor
        values = self.state_values()
        states: dict[int, dict[str, Any]] = {}
        with self.parsing(OPTIMIZER):
            for parameter in tensors.keys() | values.keys():
                found = decode_states(values.get(parameter, {}), tensors.get(parameter, {}))
                states[indices[parameter]] = found
        groups = []
        for group in self.param_groups:
            options = {k: v for k, v in group.items() if k not in NO_OPTIONS}
            params = [indices[name] for name in group["params"]]
            groups.append({**options, "param_names": list(group["params"]), "params": params})
        masters: dict[int, Tensor] = {}
        for name, tensor in self.masters().items():
            if name not in indices:
                raise CheckpointError(f"{self.path}: {name!r} has master weights, but is in no param group")
            masters[indices[name]] = tensor
        ordered = {index: dict(sorted(states[index].items())) for index in sorted(states)}
        return {"state": ordered, "param_groups": groups, **({MASTERS: masters} if masters else {})}

    def _indices(self) -> dict[str, int]:
        """Return the index of each parameter that is in a param group, as torch.optim counts."""
        names = (name for group in self.param_groups for name in group["params"])
        return {name: index for index, name in enumerate(names)}

    def _split(self, key: str, names: Container[str]) -> tuple[str, str]:
        found = split_key(key, names)
        if found is None:
            raise CheckpointError(f"{self.path}: {key!r} is the state of no parameter of a param group")
        return found

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


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open one checkpoint to read it. Needs no ranks and no process group.

    Raises `CheckpointError` if ``path`` is not the folder of a checkpoint, or its manifest is damaged.
    """
    return Checkpoint(path)
