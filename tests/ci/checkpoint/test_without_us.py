"""A checkpoint is read, and trained on, in a process that has nothing but torch, safetensors and JSON.

Run as a program (FOLDER STEPS FIRST) it does so. It prints the SHA-256 of the trained parameters.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

if __name__ == "__main__":
    sys.modules["zero"] = sys.modules["collectives"] = None  # type: ignore[assignment]

from tests.support.models import build, odd_batches, odd_loss

ROOT = Path(__file__).resolve().parents[3]
STEPS, SAVED, RANKS = 5, 2, 3


def train(model: Any, optimizer: Any, steps: range, ranks: range) -> None:
    """Take steps of two micro-batches a rank."""
    for step in steps:
        batches = odd_batches(2 * RANKS, seed=step)
        for turn in range(2):
            for rank in ranks:
                odd_loss(model, batches[2 * rank + turn]).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters() if len(ranks) > 1 else ():
            if parameter.grad is not None:
                parameter.grad.div_(RANKS)
        optimizer.step()
        optimizer.zero_grad()


def digest(model: Any) -> str:
    digests = [hashlib.sha256(p.detach().contiguous().numpy().tobytes()).digest() for p in model.parameters()]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all tensors of a folder, found by its index, and the metadata."""
    index = json.loads((folder / f"{folder.name}.safetensors.index.json").read_text())["weight_map"]
    found, metadata = {}, {}
    for name, file in index.items():
        with safe_open(folder / file, framework="pt") as opened:
            found[name], metadata = opened.get_tensor(name), opened.metadata()
    return found, metadata


def optimizer_dict(folder: Path) -> dict[str, Any]:
    """Return the plain torch.optim dict."""

    def plain(value: Any) -> Any:
        return tuple(value["$tuple"]) if isinstance(value, dict) and "$tuple" in value else value

    found, metadata = tensors(folder)
    groups = json.loads(metadata["param_groups"])
    names = [name for group in groups for name in group["params"]]
    states: dict[int, dict[str, Tensor]] = {}
    for key, tensor in found.items():
        name, _, state = key.removeprefix("state.").rpartition(".")
        states.setdefault(names.index(name), {})[state] = tensor
    for group in groups:
        group["params"] = [names.index(name) for name in group["params"]]
    known = [{key: plain(value) for key, value in group.items() if "optimizer_" not in key} for group in groups]
    return {"state": states, "param_groups": known}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    assert json.loads((folder / "checkpoint.json").read_text())["step"] == SAVED
    model = build(1)
    found, metadata = tensors(folder / "model")
    aliases = {alias: found[name] for alias, name in metadata.items() if alias != "format"}
    model.load_state_dict({**found, **aliases})
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    optimizer.load_state_dict(optimizer_dict(folder / "optimizer"))
    train(model, optimizer, range(SAVED, STEPS), range(RANKS))
    print(digest(model))


def test_plain_torch_trains_on_with_our_bits(tmp_path: Path) -> None:
    from collectives import Transport, on_threads
    from zero import ZeroOptimizer, save

    def program(transport: Transport) -> str:
        model = build(0)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=3, process_group=transport, lr=1e-2)
        ranks = range(transport.rank, transport.rank + 1)
        train(model, optimizer, range(SAVED), ranks)
        save(tmp_path / "saved", optimizer, step=SAVED)
        train(model, optimizer, range(SAVED, STEPS), ranks)
        optimizer.close()
        return digest(model)

    expected = on_threads(RANKS, program)[0]
    command = [sys.executable, "-m", "tests.ci.checkpoint.test_without_us", str(tmp_path / "saved")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected


if __name__ == "__main__":
    main(Path(sys.argv[1]))
