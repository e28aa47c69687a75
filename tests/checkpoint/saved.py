"""Small checkpoints of a small model, and forged ones, whose manifest fits although their bytes were changed."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zero import ZeroOptimizer
from zero.checkpoint.folder.directory import check_visible
from zero.checkpoint.format.manifest import NAME, FileSums, Manifest, index_file
from zero.checkpoint.format.tensorfile import TensorEntry, header_bytes, header_length, parse_header
from zero.checkpoint.single import save_one
from zero.checkpoint.write.saver import SaveRequest

BLOCK = 4096
MODEL, OPTIMIZER = "model/model-00001-of-00001.safetensors", "optimizer/optimizer-00001-of-00001.safetensors"
INDEX = "model/model.safetensors.index.json"


class TiedModel(nn.Module):
    """A model with tied weights, a buffer, a frozen parameter of another dtype, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.inner(self.embedding(tokens)))) * self.scale
        return found


def built(cls: type[nn.Module] = TiedModel, **arguments: Any) -> nn.Module:
    """Return a model that is the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cls(**arguments)


def train(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    """Run steps, each on tokens of its own."""
    for step in steps:
        optimizer.zero_grad()
        model(torch.tensor([step % 5, (step + 2) % 5])).square().sum().backward()
        optimizer.step()


def save_small(path: Path, optimizer: ZeroOptimizer, **request: Any) -> None:
    """Save one checkpoint with blocks of 4 kB."""
    whole = {"step": 3, "state": {"epoch": 1}, "rank_state": None, "blocking": True, "block_bytes": BLOCK, **request}
    whole["in_parts"] = check_visible(optimizer, path.parent, None)
    save_one(optimizer, SaveRequest(path, **whole))


def save_trained(path: Path) -> Path:
    """Save a checkpoint of less than 32 kB."""
    model = built()
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
    train(model, optimizer, range(2))
    save_small(path, optimizer)
    return path


def files_of(folder: Path) -> list[str]:
    """Return the paths of all files of a checkpoint, in order."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def forge(folder: Path, **changes: Any) -> None:
    """Make the manifest that of the files as they are now, and change its fields."""
    manifest = replace(Manifest.from_bytes((folder / NAME).read_bytes()), **changes)
    files = {}
    for path in changes.get("files", manifest.files):
        data = (folder / path).read_bytes()
        blocks = range(0, len(data), manifest.block_bytes)
        files[path] = FileSums(len(data), tuple(zlib.crc32(data[i : i + manifest.block_bytes]) for i in blocks))
    (folder / NAME).write_bytes(replace(manifest, files=files).to_bytes())


def add_averages(folder: Path, averages: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Give a checkpoint further whole tensors, by name."""
    paths = list(Manifest.from_bytes((folder / NAME).read_bytes()).files)
    for name, tensors in averages.items():
        path = f"averages/{name}/{name}-00001-of-00001.safetensors"
        (folder / path).parent.mkdir(parents=True)
        save_file(dict(tensors), folder / path)
        index = folder / index_file(f"averages/{name}")
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, path.rpartition("/")[2])}))
        paths += [path, f"averages/{name}/{index.name}"]
    forge(folder, files=dict.fromkeys(paths))


def rewrite_header(path: Path, entries: list[TensorEntry] | None = None, **metadata: str) -> None:
    """Give a safetensors file other entries and further metadata."""
    data = path.read_bytes()
    length = header_length(data[:8], len(data))
    found = parse_header(data[8 : 8 + length], len(data))
    head = header_bytes(found.tensors if entries is None else entries, {**found.metadata, **metadata})
    path.write_bytes(head + data[found.data :])


def edit_manifest(folder: Path, **changes: Any) -> None:
    """Change keys of the manifest's JSON. Its SHA-256 fits."""
    found = {**json.loads((folder / NAME).read_bytes()), **changes}
    found.pop("sha256")
    digest = hashlib.sha256(json.dumps(found, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (folder / NAME).write_bytes(manifest_text({**found, "sha256": digest}))


def manifest_text(found: dict[str, Any]) -> bytes:
    """Return these keys as a manifest has them: a line for each."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()
