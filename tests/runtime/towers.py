"""Training whose parts run on streams by name, for the tests that no access is unordered.

The CPU takes the place of a device (`support/stream_checker.py`), collectives run on a stream of their own
(`support/stream_backend.py`), and autograd runs each node on the stream of its forward (`support/stream_autograd.py`).
The programs wait where a plain loop must, and nowhere else: at stages 0 to 2 a forward waits for the step that wrote
its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from collectives import Transport, solo
from zero import ZeroOptimizer, setup
from zero.step import partition

from .stream_backend import on_streams
from .stream_checker import Stream, StreamChecker, off, pretend

WIDTH = 8
BATCH = torch.ones(2, WIDTH)
CAP = 0.0008  # MiB: buckets of two layers


class Towers(nn.Module):
    """Two towers whose layers are registered, and run, in turn: a bucket has gradients of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, batch: Tensor, here: Stream, beside: Stream) -> Tensor:
        """``here``: the current stream; ``beside``: that of the second tower."""
        left = right = batch
        beside.wait_stream(here)
        for number in range(0, len(self.layers), 2):
            left = torch.tanh(self.layers[number](left))
            with beside:
                right = torch.tanh(self.layers[number + 1](right))
        here.wait_stream(beside)
        return ((left + right) * self.scale).square().mean()


@dataclass(frozen=True)
class Pattern:
    """The streams of the parts of a step, by name."""

    forwards: tuple[str, str]  # of two micro-batches
    backwards: tuple[str, str]
    beside: str
    clip: str
    step: str
    clear: str


PATTERNS = {
    "each part": Pattern(("f", "f2"), ("b", "b2"), "f", "clip", "step", "clear"),
    "two towers": Pattern(("s", "s"), ("default", "default"), "t", "default", "default", "default"),
    "side stream": Pattern(("s", "s"), ("s", "s"), "s", "default", "default", "default"),
    "in turn": Pattern(("s", "t"), ("s", "t"), "t", "u", "s", "t"),
}
TOWERS, EACH, IN_TURN = PATTERNS["two towers"], PATTERNS["each part"], PATTERNS["in turn"]


def watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checker take the CPU for a device, but for the tensors of trials, which are thrown away."""
    pretend(monkeypatch)
    choose = partition.choose_partitions

    def choose_unwatched(*arguments: Any) -> Any:
        with _disable_current_modes(), off():
            return choose(*arguments)

    monkeypatch.setattr(setup, "choose_partitions", choose_unwatched)


class Training:
    """A model and its optimizer on one rank's device, with streams by name."""

    def __init__(self, device: StreamChecker, transport: Transport, stage: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.device, self.stage = device, stage
        self._streams = {"default": device.default}
        self.model = Towers()
        options = {"bucket_cap_mb": CAP, "collective": "all_to_all", "lr": 0.01, "fused": True, **options}
        self.optimizer = ZeroOptimizer(self.model, torch.optim.AdamW, stage=stage, process_group=transport, **options)
        self.written_on = "default"

    def on(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = self.device.stream(name)
        return self._streams[name]

    def forward(self, here: str, beside: str) -> Tensor:
        if self.stage < 3:
            self.on(here).wait_stream(self.on(self.written_on))
        with self.on(here):
            loss: Tensor = self.model(BATCH, self.on(here), self.on(beside))
        return loss

    def backwards(self, pattern: Pattern) -> None:
        for forward, backward in zip(pattern.forwards, pattern.backwards, strict=True):
            loss = self.forward(forward, pattern.beside)
            with self.on(backward):
                self.device.backward(loss)

    def step(self, pattern: Pattern) -> None:
        with self.on(pattern.clip):
            self.optimizer.clip_grad_norm_(0.1)
        with self.on(pattern.step):
            self.optimizer.step()
        self.written_on = pattern.step
        with self.on(pattern.clear):
            self.optimizer.zero_grad()

    def steps(self, *patterns: Pattern) -> None:
        for pattern in patterns:
            self.backwards(pattern)
            self.step(pattern)


def check(world_size: int, stage: int, program: Callable[[Training], None], **options: Any) -> None:
    """Run a program on every rank, and raise what the rank's checker has found."""

    def run(transport: Transport) -> None:
        with StreamChecker() as device:
            training = Training(device, transport, stage, **options)
            program(training)
            with training.on("end"):
                training.optimizer.close()

    run(solo()) if world_size == 1 else on_streams(world_size, run)
