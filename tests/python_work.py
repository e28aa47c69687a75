"""Counts the Python of a step beyond that of a plain loop: bytecodes, Python calls and C calls, by what causes them.

On GPUs the host's Python decides the time of a small step. Counts depend on no machine and on no load, so
`test_python_work` compares them with a table. Four models, which differ in one number each, give the slopes:

    units  buckets and parameters of a unit    a step runs what one step needs, and what these need
      4          1            4                4 units   4 buckets   16 parameters
      4          1            8                4         4           32
      4          2            4                4         8           16
      8          1            4                8         8           32

A rank is a thread over `Loopback`. The last one's thread is counted, and every thread that is no rank's; waits inside
`Loopback` are not. Headers and meetings are sent, but no values: `_Known` needs none. The counts are exact: nothing
that could change one occurs, such as garbage collections, first steps, other weights, or saved tensors with memory.

Tests count in a process of their own, since what a session has imported changes what a step calls.

`python -m tests.python_work` prints the rows of the table, with `--devices` those of the paths for devices, which are
then taken on the CPU, without the kernels.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Chain, Loopback, Tag, Transport, Work
from zero import ZeroOptimizer

from .support.limits import PATIENT

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or not torch.__version__.startswith("2.13."),
    reason="the figures are those of Python 3.11 and torch 2.13",
)
MARGIN = 0.02
KINDS = ("bytecodes", "Python calls", "C calls")
CAUSES = ("step", "unit", "bucket", "parameter")
WIDTH, VALUE = 512, 0.5  # the elements of a parameter, and the value of each
WARM = 3  # steps before the one that is counted
NOT_COUNTED = (__file__, sys.modules[Loopback.__module__].__file__)


@dataclass(frozen=True)
class Shape:
    """``buckets`` and ``parameters`` are those of a unit."""

    units: int = 4
    buckets: int = 1
    parameters: int = 4


class _Unit(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((WIDTH,), VALUE) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + weight.square()
        return x + x[:0].exp().sum()


class _Known:
    """A collective among ranks with equal gradients, whose weights never change."""

    name, exact = "known", True

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def reduce_scatter(
        self, source: Tensor, bounds: Sequence[int], out: Tensor, *, start: Tensor | None, tag: Tag
    ) -> Work:
        out.copy_(source[bounds[self.transport.rank] : bounds[self.transport.rank + 1]])
        return self.transport.announce_round(tag)

    def all_gather(self, buffer: Tensor, bounds: Sequence[int], *, tag: Tag) -> Work:
        buffer.fill_(VALUE)
        return Chain(())


@dataclass
class _Counter:
    counting: bool = False
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])

    def called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not self.counting or _is_left_out(frame):
            return None
        self.counts[1] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._inside

    def _inside(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        self.counts[0] += event == "opcode"
        return self._inside

    def profiled(self, frame: FrameType, event: str, _: Any) -> None:
        self.counts[2] += event == "c_call" and self.counting and not _is_left_out(frame)


def _is_left_out(frame: FrameType | None) -> bool:
    """Return whether a function belongs to this module or to `Loopback`, or is a lock's that one of them holds."""
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename in NOT_COUNTED


def _optimizer(model: nn.Module, shape: Shape, stage: int | None, transport: Transport) -> tuple[Any, Any]:
    """Return the optimizer of a stage, or if it is None that of the plain loop, and what clips."""
    if stage is None:
        parameters = list(model.parameters())
        return torch.optim.AdamW(parameters, lr=0.0, fused=True), lambda: nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=stage,
        process_group=transport,
        collective="auto" if transport.world_size == 1 else _Known,
        bucket_cap_mb=shape.parameters // shape.buckets * WIDTH * 4 / 2**20,
        lr=0.0,
        fused=True,
    )
    assert len(optimizer.describe().buckets) == shape.units * shape.buckets
    return optimizer, lambda: optimizer.clip_grad_norm_(1.0)


@cache
def _counts(world: int, stage: int | None, shape: Shape) -> list[int]:
    counter = _Counter()

    def train(transport: Transport) -> None:
        is_last = transport.rank == world - 1
        sys.settrace(None)
        sys.setprofile(None)
        model = nn.Sequential(*(_Unit(shape.parameters) for _ in range(shape.units)))
        optimizer, clip = _optimizer(model, shape, stage, transport)
        for number in range(WARM + 1):
            if is_last and number == WARM:
                counter.counting = True
                sys.settrace(counter.called)
                sys.setprofile(counter.profiled)
            model(torch.ones(WIDTH)).sum().backward()
            clip()
            optimizer.step()
            optimizer.zero_grad()
        if is_last:
            counter.counting = False

    threading.settrace(counter.called)
    threading.setprofile(counter.profiled)
    Loopback[None](world).run(train)
    return counter.counts


def slopes(world: int, stage: int) -> list[tuple[float, ...]]:
    """Count what the last of ``world`` ranks runs in a step beyond the plain loop: by cause, and then by kind."""
    shapes = Shape(), Shape(parameters=8), Shape(buckets=2), Shape(units=8)
    ours, plain = ([_counts(*of, shape) for shape in shapes] for of in ((world, stage), (1, None)))
    found = []
    for kind in range(len(KINDS)):
        least, parameters, buckets, units = (a[kind] - b[kind] for a, b in zip(ours, plain, strict=True))
        parameter, bucket = (parameters - least) / 16, (buckets - least) / 4
        unit = (units - least - 16 * parameter - 4 * bucket) / 4
        found.append((least - 16 * parameter - 4 * bucket - 4 * unit, unit, bucket, parameter))
    return list(zip(*found, strict=True))


@cache
def measured(rows: Sequence[tuple[int, int]], *, devices: bool = False) -> dict[tuple[int, int], Any]:
    """Return `slopes` by ranks and stage, counted in a process of their own."""
    words = [*(["--devices"] if devices else []), *(f"{world},{stage}" for world, stage in rows)]
    command = [sys.executable, "-m", f"{__package__}.{Path(__file__).stem}", "--json", *words]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=PATIENT, cwd=ROOT).stdout
    return dict(zip(rows, json.loads(printed), strict=True))


def excess(figures: Sequence[Sequence[float]], found: Sequence[Sequence[float]]) -> list[str]:
    """Return the slopes that are above the figures by more than the margin."""
    return [
        f"{kind} by {cause}: {now:,}, at most {known + MARGIN * abs(known):,.2f} ({known:,} in the table)"
        for cause, row, by_kind in zip(CAUSES, figures, found, strict=True)
        for kind, known, now in zip(KINDS, row, by_kind, strict=True)
        if now > known + MARGIN * abs(known)
    ]


def main(words: Sequence[str]) -> None:
    from benchmarks.gpu_short.peers import device_paths

    torch.set_num_threads(1)
    gc.disable()
    rows = [word.split(",") for word in words if "," in word] or [(w, s) for w in (1, 8) for s in range(4)]
    with device_paths() if "--devices" in words else nullcontext():
        found = [slopes(int(world), int(stage)) for world, stage in rows]
    if "--json" in words:
        print(json.dumps(found))
        return
    for (world, stage), by_cause in zip(rows, found, strict=True):
        figures = (f"({', '.join(f'{each:_.9g}' for each in by_kind)})" for by_kind in by_cause)
        print(f"    ({world}, {stage}): ({', '.join(figures)}),")


if __name__ == "__main__":
    main(sys.argv[1:])
