"""The training step that zero/TOUR.md follows: two layers, two ranks that are threads, and numbers that stay short.

It reads the buffers of a rank where the library keeps them, and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from collectives import Kind, Pairwise, Tag, Transport, Work, on_threads
from zero import ZeroOptimizer

from ..support.parts import parts_of

CAP_MB = 128 / 2**20  # two slots of 64 bytes: a bucket for each layer
OPTIMIZER: dict[str, Any] = {"optimizer_class": torch.optim.SGD, "lr": 0.5, "momentum": 0.9}
WEIGHTS = ([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], [0.0, 0.0], [[1.0, 2.0]], [0.0])
BATCHES = ([1.0, 2.0, 3.0], [3.0, -2.0, -1.0])


def build() -> nn.Sequential:
    """Return the model. Each of its layers is a unit at stage 3."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), WEIGHTS, strict=True):
            parameter.copy_(torch.tensor(values))
    return model


def step(model: nn.Module, optimizer: ZeroOptimizer) -> Iterator[str]:
    x = torch.tensor(BATCHES[optimizer.rank])
    loss = model(x).sum()
    yield "forward"
    loss.backward()
    yield "backward"
    assert optimizer.clip_grad_norm_(math.inf) == 6.0  # sums become means; nothing is clipped
    yield "mean"
    optimizer.clip_grad_norm_(3.0)
    yield "clip"
    optimizer.step()
    yield "step"
    optimizer.zero_grad()


class Noted(Pairwise):
    """The direct exchange, which also notes its launches."""

    def __init__(self, transport: Transport, launches: list[str]) -> None:
        super().__init__(transport)
        self._launches = launches

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        self._launches.append(f"{_words(tag.kind)} of bucket {tag.index}")
        return super().reduce_scatter(source, bounds, out, start=start, tag=tag)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        self._launches.append(f"{_words(tag.kind)} of bucket {tag.index}")
        return super().all_gather(buffer, bounds, tag=tag)


def _words(kind: Kind) -> str:
    return kind.name.lower().replace("_", "-")


@dataclass
class Seen:
    """What one rank had at the moments of the step, as text.

    ``slots`` and ``held``: of each bucket's slots, the name, and P, G and S if the rank holds parameters, gradients and
    states there.
    """

    rows: dict[str, str] = field(default_factory=dict)
    launches: dict[str, list[str]] = field(default_factory=dict)
    slots: list[list[str]] = field(default_factory=list)
    held: list[list[str]] = field(default_factory=list)


def numbers(*tensors: Tensor) -> str:
    return " ".join(f"{value:.4g}" for tensor in tensors for value in tensor.flatten().tolist())


def values(parameter: Tensor) -> str:
    return "released" if ", released" in repr(parameter) else numbers(parameter)


def seen(transport: Transport, stage: int) -> Seen:
    """Take the step on one rank, and note what it has at each moment."""
    model, launches, gradients = build(), list[str](), list[Tensor]()
    weight = model.get_parameter("0.weight")
    weight.register_hook(lambda gradient: gradients.append(gradient.clone()))  # type: ignore[no-untyped-call]
    optimizer = ZeroOptimizer(
        model,
        stage=stage,
        process_group=transport,
        bucket_cap_mb=CAP_MB,
        collective=lambda transport: Noted(transport, launches),
        **OPTIMIZER,
    )
    buckets, found = parts_of(optimizer).storage.buckets, Seen()
    rows, bucket = found.rows, buckets[1]

    def shard(buffer: Any) -> str:
        return numbers(*(buffer.piece(piece) for piece in bucket.states.pieces))

    rows["0.weight before"] = values(weight)
    for moment in step(model, optimizer):
        found.launches[moment], launches[:] = launches[:], []
        match moment:
            case "backward":
                rows["gradient of 0.weight"] = numbers(*gradients)
                rows["sum in the shard"] = shard(bucket.grad.final_grad())
            case "mean":
                rows["mean"] = shard(bucket.grad.final_grad())
            case "clip":
                rows["clipped mean"] = shard(bucket.grad.final_grad())
            case "step":
                rows["momentum_buffer"] = shard(bucket.states.flat["momentum_buffer"])
                rows["shard of the weights"] = shard(bucket.weights)
                rows["0.weight after"] = values(weight)
                sizes = optimizer.describe().bytes
                rows["bytes of P, G, S"] = f"{sizes['parameters']} {sizes['gradients']} {sizes['optimizer']}"
                found.slots = [[spec.name for spec in each.specs] for each in buckets]
                found.held = [held(each) for each in buckets]
    optimizer.close()
    return found


def held(bucket: Any) -> list[str]:
    flat = {"P": bucket.weights, "G": bucket.grad.final_grad(), "S": bucket.states.flat["momentum_buffer"]}
    return [
        "".join(letter for letter, buffer in flat.items() if buffer.begin <= slot.offset < buffer.end)
        for slot in bucket.spec.slots
    ]


def both(stage: int) -> list[Seen]:
    return on_threads(2, lambda transport: seen(transport, stage))


def table(ranks: Sequence[Seen], known: Sequence[Seen] = ()) -> str:
    """Return the rows of both ranks side by side, and their launches. Rows that are equal in ``known`` are left out."""
    assert ranks[0].launches == ranks[1].launches
    rows = [["", "rank 0", "rank 1"]]
    for name in ranks[0].rows:
        row = [each.rows[name] for each in ranks]
        if row != [each.rows[name] for each in known]:
            rows.append([name, *row])
    width = max(len(row[1]) for row in rows) + 3
    lines = [f"{name:22}{first:{width}}{second}" for name, first, second in rows]
    lines += [f"launched in {moment}: {', '.join(names)}" for moment, names in ranks[0].launches.items() if names]
    return "".join(f"{line}\n" for line in lines)


def drawing(by_stage: Mapping[int, Sequence[Seen]]) -> str:
    """Return which rank holds parameters, gradients and states of which slot."""

    def line(begin: str, cells: Sequence[Sequence[str]]) -> str:
        buckets = ["".join(f"{cell or '.':10}" for cell in of_bucket) for of_bucket in cells]
        return f"{begin:16}| {' | '.join(buckets)}|\n"

    slots = next(iter(by_stage.values()))[0].slots
    lines = [line("", [[f"bucket {number}", " "] for number in range(len(slots))]), line("", slots)]
    for stage, ranks in by_stage.items():
        lines += [line(f"stage {stage}, rank {rank}", each.held) for rank, each in enumerate(ranks)]
    return "".join(lines)
