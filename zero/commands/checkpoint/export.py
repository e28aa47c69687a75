"""Writes a checkpoint in formats of other libraries.

Knows: these formats. Does not know: files of checkpoints, which `zero.open_checkpoint` reads.

    torch   one file of torch.save: {"model", "optimizer", "state"}; torch.load(..., weights_only=True) reads it
    hf      the folder of a transformers model: safetensors, index, and what was saved beside them
    dcp     the folder of torch.distributed.checkpoint: {"model": ..., "optimizer": ...}, the optimizer as
            get_optimizer_state_dict gives it with flatten_optimizer_state_dict=True
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...checkpoint.format.manifest import MODEL
from ...checkpoint.read.reader import Checkpoint
from ...core.parameter_specs import MASTERS


def _export_torch(checkpoint: Checkpoint, out: Path) -> list[str]:
    torch.save(
        {
            "model": checkpoint.model_state_dict(),
            "optimizer": checkpoint.optimizer_state_dict(),
            "state": _without_numpy(checkpoint.state),
        },
        out,
    )
    return []


def _without_numpy(value: Any) -> Any:
    """Return a value with tensors and plain numbers for those of NumPy, which ``weights_only`` refuses."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return type(value)(_without_numpy(item) for item in value)
    if isinstance(value, dict):
        return type(value)({key: _without_numpy(item) for key, item in value.items()})
    return value


def _export_hf(checkpoint: Checkpoint, out: Path) -> list[str]:
    out.mkdir(parents=True)
    for path in checkpoint.manifest.files:
        folder, _, name = path.partition("/")
        if folder != MODEL:
            continue
        with checkpoint.file(path) as reader, (out / name).open("xb") as file:
            for block in range(reader.blocks):
                file.write(reader.read(*reader.span(block)))
    return ["optimizer", "state"]


def _export_dcp(checkpoint: Checkpoint, out: Path) -> list[str]:
    from torch.distributed.checkpoint.state_dict_saver import save

    optimizer = checkpoint.whole_state_dict()
    names: dict[int, str] = {}
    flat: dict[str, Any] = {}
    for group in optimizer["param_groups"]:
        names.update(zip(group["params"], group["param_names"], strict=True))
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for name in group["param_names"]:
            flat.update((f"param_groups.{name}.{key}", value) for key, value in options.items())
    for index, states in optimizer["state"].items():
        flat.update((f"state.{names[index]}.{key}", value) for key, value in states.items())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        save({"model": checkpoint.model_state_dict(), "optimizer": flat}, checkpoint_id=out, no_dist=True)
    return ["state", *(["master weights"] if MASTERS in optimizer else [])]


EXPORTS: Mapping[str, Callable[[Checkpoint, Path], list[str]]] = {
    "torch": _export_torch,
    "hf": _export_hf,
    "dcp": _export_dcp,
}
"""By format: writes a checkpoint to a path where nothing is yet, and returns what the format leaves out."""
