"""Writes a checkpoint of tensors that one process has whole, without an optimizer and without ranks.

Knows: how whole tensors become files, and the order of a save. Does not know: where the tensors come from.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.bits import as_bytes, noted_stride
from ...core.statetree import NAMES, NO_OPTIONS, encode, encode_options, encode_states
from ..contents import stride_to_note
from ..files import make_folders
from ..format.checksums import BLOCK_BYTES
from ..format.extents import Part, chunks
from ..format.manifest import FileSums, Manifest, SavedParameter
from ..format.names import MASTERS, MODEL, OPTIMIZER, STATE_FILE, averages_folder, state_key
from ..format.tensorfile import TensorEntry
from .capture import TreeFile
from .one_path import OnePath
from .plan import lay_out
from .save_folder import SaveFolder
from .save_thread import SavePlan, Saving
from .snapshot import Snapshot, Source
from .versions import versions

_MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class WholeContents:
    """What a checkpoint is made of. Tensors are plain and on the CPU.

    Attributes:
        model: by name; ``aliases``: further names, with the names of the same tensors in ``model``.
        groups: the options of the param groups; "params" has the names of the parameters, and "optimizer_class" and
            "optimizer_module", if they are known, those of the class.
        states: by the parameter's name and the state's name, tensors and plain values.
        masters: the master weights, by name.
        averages: by their name, tensors by name.
        state: the caller's state.
    """

    model: Mapping[str, Tensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    masters: Mapping[str, Tensor] = field(default_factory=dict)
    averages: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)


def write_whole(path: Path, contents: WholeContents, step: int = 0) -> str:
    """Write a checkpoint at ``path``, and return its ``content``.

    Raises:
        FileExistsError: there is something at ``path``.
        ValueError: averages have a name that cannot be a folder's.
        TypeError: a value cannot be saved; names it.
        SaveError: a file could not be written. Nothing is left.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists: name another folder")
    tensors = {
        **{(MODEL, name): tensor for name, tensor in contents.model.items()},
        **{(MASTERS, name): tensor for name, tensor in contents.masters.items()},
    }
    for average, found in contents.averages.items():
        tensors.update({(averages_folder(average), name): tensor for name, tensor in found.items()})
    values: dict[str, Any] = {}
    strides = {place: noted_stride(tensor) for place, tensor in tensors.items() if place[0] != MODEL}
    for parameter, states in contents.states.items():
        of_values, of_tensors = encode_states(states, f"optimizer.state[{parameter!r}]")
        weights = contents.model[parameter]
        values.update((state_key(parameter, name), value) for name, value in sorted(of_values.items()))
        for name, tensor in sorted(of_tensors.items()):
            tensors[OPTIMIZER, state_key(parameter, name)] = tensor
            strides[OPTIMIZER, state_key(parameter, name)] = stride_to_note(tensor, weights.shape, weights.stride())
    groups = []
    for number, group in enumerate(contents.groups):
        beside = {key: group[key] for key in NO_OPTIONS if isinstance(group.get(key), str)}
        options = {key: value for key, value in group.items() if key not in (*beside, "params")}
        encoded = encode_options(options, f"optimizer.param_groups[{number}]")
        groups.append({**encoded, **beside, "params": list(group["params"])})
    of_state = TreeFile(STATE_FILE, *encode(dict(contents.state), "state"))
    entries: dict[str, list[TensorEntry]] = {MODEL: [], OPTIMIZER: [], MASTERS: []}
    for (folder, name), tensor in tensors.items():
        entry = TensorEntry(name, NAMES[tensor.dtype], tuple(tensor.shape), stride=strides.get((folder, name)))
        entries.setdefault(folder, []).append(entry)
    averages = {name: entries.get(averages_folder(name), []) for name in contents.averages}
    shared = lay_out(
        entries[MODEL], contents.aliases, entries[OPTIMIZER], values, entries[MASTERS], _MAX_SHARD_BYTES, averages
    )
    files = [*shared.with_options(groups), of_state.plan]
    tensors |= {("", name): tensor for name, tensor in of_state.tensors.items()}
    staged: dict[Source, Tensor] = {}
    parts: dict[tuple[str, str], list[Part]] = {}
    for number, (place, tensor) in enumerate(tensors.items()):
        source = ("whole", number)
        staged[source] = as_bytes(tensor.cpu().contiguous())
        parts[place] = [Part(source, 0, 0, staged[source].numel())]
    planned = chunks(files, parts, BLOCK_BYTES)
    plain = shared.indices
    sizes = {file.path: file.nbytes for file in files} | {name: len(data) for name, data in plain.items()}
    nonce = secrets.token_hex(8)

    def manifest(sums: Mapping[str, FileSums]) -> Manifest:
        written_by = {"nonce": nonce, **versions()}
        return Manifest(step, _parameters(contents), tuple(groups), sums, BLOCK_BYTES, (), written_by)

    save = SaveFolder(path, nonce, rank=0, world_size=1, timeout=1.0)
    make_folders(path.parent)
    save.make()
    heads = {file.path: file.header for file in files} | plain
    snapshot = Snapshot(staged, {}, planned)
    plan = SavePlan([file.path for file in files], heads, planned, sizes, BLOCK_BYTES, snapshot, manifest)
    saving = Saving(step, save, 0, plan, OnePath(path, overwrite=False), lambda _: None)
    saving.start(asynchronous=False)
    saving.remove_rest()
    return saving.result()


def _parameters(contents: WholeContents) -> tuple[SavedParameter, ...]:
    """Return what the manifest says of the parameters: those of the param groups, in the order of the model."""
    groups = {name: number for number, group in enumerate(contents.groups) for name in group["params"]}
    names: dict[str, list[str]] = {name: [name] for name in groups}
    for alias, name in contents.aliases.items():
        names.get(name, []).append(alias)
    return tuple(
        SavedParameter(name, tuple(names[name]), tuple(tensor.shape), NAMES[tensor.dtype], groups[name], True)
        for name, tensor in contents.model.items()
        if name in groups
    )
