"""On one GPU, streams, checkpoints, saves, fused Adam and captures keep the plain loop's bits.

Where there is no GPU the tests run on the CPU, which only shows that their code works.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero import CheckpointManager, Offload, ZeroOptimizer, clip_grad_norm_, load, save

from ..support.devices import DEVICE, HAS_GPU, deterministic, deterministic_products, on
from ..support.models import build, odd_batches, seeded, take_steps
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states

ADAMW: dict[str, Any] = {"lr": 1e-2, "fused": True}
WIDTH = 64
CYCLES = 2_000_000  # of a GPU's clock: about a millisecond
MAX_NORM = 0.01


def each(cpu: int, **settings: Sequence[Any]) -> pytest.MarkDecorator:
    """Run a test with every combination of settings on a GPU, and with the last ``cpu`` of them where there is none."""
    rows = [(DEVICE, *row) for row in itertools.product(*settings.values())]
    return pytest.mark.parametrize(("device", *settings), rows if HAS_GPU else rows[-cpu:])


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


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with deterministic_products(), deterministic():
        yield


@each(2, stage=range(4), cap=[0.03, 25.0], offload=[None, Offload("cpu")], pattern=PATTERNS)
@pytest.mark.filterwarnings("ignore:offload")
def test_the_parts_of_a_step_may_have_streams_of_their_own(
    device: str, stage: int, cap: float, offload: Offload | None, pattern: str
) -> None:
    model, norms = train(device, pattern, stage=stage, bucket_cap_mb=cap, offload=offload)
    plain, expected = train_plainly(device)
    assert_same_model(model, plain)
    for ours, theirs in zip(norms, expected, strict=True):
        assert_same_bits(ours, theirs)


@each(1, stage=[1, 3], decay=[0.1, 1e-4])
@pytest.mark.filterwarnings("ignore:Adam is not element-wise")
def test_fused_adam_with_a_decay_gives_the_bits_of_the_plain_loop(device: str, stage: int, decay: float) -> None:
    """On CUDA its kernel rounds the decay otherwise for some lengths: a parameter then has one owner."""
    model = seeded(2, lambda: nn.Linear(701, 901)).to(device)
    plain, batches = copy.deepcopy(model), torch.randn(6, 4, 701, generator=torch.Generator().manual_seed(2)).to(device)
    options = {"lr": 1e-2, "weight_decay": decay, "fused": True}
    optimizer = ZeroOptimizer(model, torch.optim.Adam, stage=stage, **options)
    for side, its_optimizer in ((model, optimizer), (plain, torch.optim.Adam(plain.parameters(), **options))):
        take_steps(side, its_optimizer, batches, lambda side, batch: side(batch).square().mean())  # type: ignore[arg-type]
    optimizer.close()
    assert_same_model(model, plain)


@each(2, pair=[("there", "cpu"), ("cpu", "there"), ("there", "there")], stage=[0, 2, 1, 3])
def test_a_checkpoint_goes_from_a_device_to_another(
    device: str, pair: tuple[str, str], stage: int, tmp_path: Path
) -> None:
    first, second = (device if name == "there" else "cpu" for name in pair)
    options: dict[str, Any] = {"mixed_precision": PRECISIONS["bf16"] if stage % 2 else None, "lr": 1e-2}
    optimizer = ZeroOptimizer(model := build().to(first), stage=stage, **options)
    take_steps(model, optimizer, on(first, odd_batches(3)))
    save(tmp_path / "saved", optimizer)
    drawn = torch.rand(4, device=first)
    optimizer.consolidate_state_dict(0)
    states = optimizer.state_dict()
    optimizer.close()
    following = ZeroOptimizer(again := build(7).to(second), stage=(stage + 1) % 4, **options)
    load(tmp_path / "saved", following)
    if first == second:
        assert_same_bits(torch.rand(4, device=second), drawn)
    following.consolidate_state_dict(0)
    assert_same_states(following.state_dict(), states)
    following.close()
    assert_same_model(again, model)


@each(1)
def test_saves_of_a_running_training_are_of_their_step(device: str, tmp_path: Path) -> None:
    optimizer, expected = ZeroOptimizer(model := build().to(device), stage=3, **ADAMW), list[nn.Module]()
    with CheckpointManager(tmp_path, optimizer) as manager:
        for step, batch in enumerate(on(device, odd_batches(6)), 1):
            take_steps(model, optimizer, [batch])
            with optimizer.gathered():
                expected.append(build(9).to(device))
                expected[-1].load_state_dict(model.state_dict())
            manager.save(step)
    for step, then in enumerate(expected, 1):
        following = ZeroOptimizer(again := build(9).to(device), stage=1, **ADAMW)
        load(tmp_path / f"step-{step:08d}", following)
        following.close()
        assert_same_model(again, then)


@pytest.mark.skipif(not HAS_GPU, reason="the CPU has no CUDA graphs")
@each(1, stage=range(4))
def test_a_capture_for_a_cuda_graph_is_refused(device: str, stage: int) -> None:
    model, batch = nn.Linear(8, 8, device=device), torch.ones(4, 8, device=device)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, **ADAMW)
    take_steps(model, optimizer, [batch] * 2, lambda model, batch: model(batch).sum())
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="CUDA graph"):
        model(batch).sum().backward()
    optimizer.close()
