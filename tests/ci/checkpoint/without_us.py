"""Reads a checkpoint and trains on with nothing but torch, safetensors and JSON. Run as a program: FOLDER STEPS FIRST.

``zero`` and ``collectives`` cannot be imported here. Prints the SHA-256 of the trained parameters.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

sys.modules["zero"] = sys.modules["collectives"] = None  # type: ignore[assignment]

from tests.support.models import build, odd_batches, odd_loss  # noqa: E402

MICRO_BATCHES = 12


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder, found by its index."""
    index = json.loads((folder / f"{folder.name}.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for name, file in index.items():
        with safe_open(folder / file, framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


def metadata(folder: Path) -> dict[str, str]:
    with safe_open(next(iter(sorted(folder.glob("*.safetensors")))), framework="pt") as opened:
        return opened.metadata() or {}


def optimizer_dict(folder: Path) -> dict[str, Any]:
    """Return the plain torch.optim dict."""
    groups = json.loads(metadata(folder)["param_groups"])
    names = [name for group in groups for name in group["params"]]
    states: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors(folder).items():
        name, _, state = key.removeprefix("state.").rpartition(".")
        states.setdefault(names.index(name), {})[state] = tensor
    made = []
    for group in groups:
        options = {key: _plain(value) for key, value in group.items() if not key.startswith("optimizer_")}
        made.append({**options, "params": [names.index(name) for name in group["params"]]})
    return {"state": states, "param_groups": made}


def _plain(value: Any) -> Any:
    return tuple(value["$tuple"]) if isinstance(value, dict) and "$tuple" in value else value


def main() -> None:
    torch.set_num_threads(1)
    folder, steps, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    assert json.loads((folder / "checkpoint.json").read_text())["step"] == first
    model = build(1)
    found = tensors(folder / "model")
    for alias, name in metadata(folder / "model").items():
        if alias != "format":
            found[alias] = found[name]
    model.load_state_dict(found)
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    optimizer.load_state_dict(optimizer_dict(folder / "optimizer"))
    for step in range(first, first + steps):
        for batch in odd_batches(MICRO_BATCHES, seed=step):
            odd_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
    digests = [hashlib.sha256(p.detach().contiguous().numpy().tobytes()).digest() for p in model.parameters()]
    print(hashlib.sha256(b"".join(digests)).hexdigest())


if __name__ == "__main__":
    main()
