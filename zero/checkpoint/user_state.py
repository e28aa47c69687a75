"""What a checkpoint holds beside the optimizer: the caller's state, each rank's own state, and random generators.

Knows: objects with ``state_dict`` and ``load_state_dict``, and the generators of torch, NumPy and Python. Does not
know: files, how values are written, ranks.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.bits import as_bytes
from ..core.statetree import encode


def collected(state: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Return the values to save: of an object with ``state_dict``, what that returns."""
    if state is None:
        return {}
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise TypeError(f"{name} must be a dict with text as keys, not {state!r:.80}")
    return {
        key: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        for key, value in state.items()
    }


def restored(state: Mapping[str, Any] | None, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Give every object of ``state`` its saved values. Return those of all other keys.

    `check_keys` finds a key that was not saved before anything changes.
    """
    given = {} if state is None else dict(state)
    for key, value in given.items():
        if callable(getattr(value, "load_state_dict", None)):
            value.load_state_dict(saved[key])
    return {
        key: value for key, value in saved.items() if not callable(getattr(given.get(key), "load_state_dict", None))
    }


def check_keys(state: Mapping[str, Any] | None, saved: Mapping[str, Any], name: str) -> None:
    """Raise `ValueError` naming a key of ``state`` that was not saved."""
    for key in state or {}:
        if key not in saved:
            has = ", ".join(map(repr, saved)) or "nothing"
            raise ValueError(f"{name}[{key!r}] was not saved: the checkpoint has {has}")


def digests(state: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return a digest of each value, which ranks compare."""
    return {key: _digest(*encode(value, f"{name}[{key!r}]")) for key, value in state.items()}


def _digest(tree: Any, tensors: Mapping[str, Tensor]) -> str:
    named = tree if isinstance(tree, dict) else {"": tree}
    floats = {key: value for key, value in named.items() if type(value) is list and {*map(type, value)} == {float}}
    rest = {key: ["floats", len(floats[key])] if key in floats else value for key, value in named.items()}
    digest = hashlib.sha256(json.dumps(rest).encode())
    for found in floats.values():  # text would take ten times as long, while training waits
        digest.update(struct.pack(f"<{len(found)}d", *found))
    for key, tensor in tensors.items():
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(as_bytes(tensor.cpu().contiguous()).numpy().data)
    return digest.hexdigest()[:16]


def generators() -> dict[str, Any]:
    """Return the states of all random generators of this process."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
        **{kind: module.get_rng_state() for kind, module in _accelerators().items()},
    }


def _accelerators() -> dict[str, Any]:
    """Return the module of the accelerator of this process by its type, if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {} if accelerator is None else {accelerator.type: torch.get_device_module(accelerator)}


def check_generators(states: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the generators of this process cannot continue these streams. They are as before then."""
    before = generators()
    try:
        set_generators(states)
    except Exception as error:
        raise ValueError(
            f"the saved states of the random generators cannot be used here ({type(error).__name__}: {error}): "
            "rng=False restores everything else"
        ) from error
    finally:
        set_generators(before)


def set_generators(states: Mapping[str, Any]) -> list[str]:
    """Continue the streams of `generators`. Return the names of those that only one of the two processes has."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["random"])
    accelerators = _accelerators()
    for kind in accelerators.keys() & states.keys():
        accelerators[kind].set_rng_state(states[kind])
    return sorted({"torch", "numpy", "random", *accelerators} ^ states.keys())
