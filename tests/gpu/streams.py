"""A training on a GPU whose parts run on streams of their own.

The loop waits where a plain loop on one stream for all forwards must: a forward waits for the step before it. Each part
begins with a kernel that does nothing for about a millisecond, so that an access which does not wait for an earlier
part comes too early.

Knows: streams, a model of two towers. Does not know: with what it is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero import ZeroOptimizer, clip_grad_norm_

WIDTH = 64
CYCLES = 2_000_000  # of a GPU's clock: about a millisecond
MAX_NORM = 0.01
ADAMW: dict[str, Any] = {"lr": 1e-2, "fused": True}


class Streams:
    """Streams of a device by name. On the CPU there are none."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._made: dict[str, torch.cuda.Stream] = {}

    def on(self, name: str, behind: str | None = None) -> AbstractContextManager[Any]:
        """Use a stream, which waits for what is on ``behind`` now; "" is the stream of the caller."""
        if self._device == "cpu":
            return nullcontext()
        stream = self._of(name)
        if behind is not None:
            stream.wait_stream(self._of(behind))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
        return torch.cuda.stream(stream)

    def wait_for(self, name: str) -> None:
        if self._device != "cpu":
            torch.cuda.current_stream(self._device).wait_stream(self._of(name))

    def _of(self, name: str) -> torch.cuda.Stream:
        if not name:
            return torch.cuda.current_stream(self._device)
        if name not in self._made:
            self._made[name] = torch.cuda.Stream(self._device)
        return self._made[name]


class Towers(nn.Module):
    """Two towers, of which one runs on a stream of its own. A bucket has layers of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, batch: Tensor, streams: Streams) -> Tensor:
        left = right = batch
        with streams.on("tower", behind=""):  # behind the stream of this forward
            for layer in self.layers[1::2]:
                right = torch.tanh(layer(right))
        for layer in self.layers[::2]:
            left = torch.tanh(layer(left))
        streams.wait_for("tower")
        return (left + right).square().mean()


def towers(device: str) -> tuple[Towers, list[Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model, batches = Towers(), [torch.randn(16, WIDTH) for _ in range(12)]
    return model.to(device), [batch.to(device) for batch in batches]


FORWARDS, BACKWARDS = ("forward", "forward 2"), ("backward", "backward 2")
PATTERNS = {  # the streams of the parts of a step, by name: two forwards, two backwards, the clip and the step
    "each part": (*FORWARDS, *BACKWARDS, "clip", "step"),
    "forwards apart": ("forward", "forward", "", "", "", ""),
    "step apart": ("", "", "", "", "", "step"),
}


def train(device: str, pattern: str, **options: Any) -> tuple[nn.Module, list[Tensor]]:
    """Train on one rank alone, two micro-batches a step. Return the model, and the norms before clipping."""
    model, batches = towers(device)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, **options, **ADAMW)
    norms = _steps(model, batches, optimizer, optimizer.clip_grad_norm_, Streams(device), PATTERNS[pattern])
    optimizer.close()
    if device != "cpu":
        torch.cuda.synchronize()  # each norm lies on the stream of its clip
    return model.cpu(), [norm.cpu() for norm in norms]


def train_plainly(device: str) -> tuple[nn.Module, list[Tensor]]:
    model, batches = towers(device)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    clip = partial(clip_grad_norm_, list(model.parameters()))
    norms = _steps(model, batches, optimizer, clip, Streams("cpu"), ("",) * 6)
    return model.cpu(), [norm.cpu() for norm in norms]


def _steps(
    model: Towers,
    batches: list[Tensor],
    optimizer: torch.optim.Optimizer,
    clip: Callable[[float], Tensor],
    streams: Streams,
    names: tuple[str, ...],
) -> list[Tensor]:
    norms = []
    for number, first in enumerate(range(0, len(batches), 2)):
        for turn in range(2):
            with streams.on(names[turn], behind=names[5] if number else ""):
                loss = model(batches[first + turn], streams)
            with streams.on(names[2 + turn]):
                loss.backward()
        with streams.on(names[4]):
            norms.append(clip(MAX_NORM))
        with streams.on(names[5]):
            optimizer.step()
            optimizer.zero_grad()
    return norms
