"""Programs that change streams between, and inside, the parts of a step: no access is unordered.

The CPU takes the place of a device (`stream_checker.py`), collectives run on a stream of their own
(`stream_backend.py`), and autograd runs each node on the stream of its forward (`stream_autograd.py`). The programs
wait where a plain loop must, and nowhere else: at stages 0 to 2 a forward waits for the step that wrote its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from collectives import Transport, solo
from zero import Offload, ShardedAverage, ZeroOptimizer, load, save, setup
from zero.runtime.offload import HostOffload, OffloadedStates
from zero.step import partition

from ..support.narrowed import PRECISIONS
from .stream_backend import on_streams
from .stream_checker import Stream, StreamChecker, off, pretend

ALL = pytest.mark.parametrize("stage", [0, 1, 2, 3])
RANKS = pytest.mark.parametrize("world_size", [1, 2])
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
TOWERS = PATTERNS["two towers"]


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    choose = partition.choose_partitions

    def choose_unwatched(*arguments: Any) -> Any:
        with _disable_current_modes(), off():
            return choose(*arguments)

    monkeypatch.setattr(setup, "choose_partitions", choose_unwatched)  # its tensors are thrown away


class Training:
    """A model and its optimizer on one rank's device, with streams by name."""

    def __init__(self, device: StreamChecker, transport: Transport, stage: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.device, self.stage = device, stage
        self._streams = {"default": device.default}
        self.model = Towers()
        options = {"bucket_cap_mb": CAP, "collective": "all_to_all", "lr": 0.01, "fused": True, **options}
        self.optimizer = ZeroOptimizer(self.model, torch.optim.AdamW, stage=stage, process_group=transport, **options)
        self._written_on = "default"

    def on(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = self.device.stream(name)
        return self._streams[name]

    def forward(self, here: str, beside: str) -> Tensor:
        if self.stage < 3:
            self.on(here).wait_stream(self.on(self._written_on))
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
        self._written_on = pattern.step
        with self.on(pattern.clear):
            self.optimizer.zero_grad()


def check(world_size: int, stage: int, program: Callable[[Training], None], **options: Any) -> None:
    """Run a program on every rank, and raise what the rank's checker has found."""

    def run(transport: Transport) -> None:
        with StreamChecker() as device:
            training = Training(device, transport, stage, **options)
            program(training)
            with training.on("end"):
                training.optimizer.close()

    run(solo()) if world_size == 1 else on_streams(world_size, run)


def two_steps(pattern: Pattern) -> Callable[[Training], None]:
    def program(training: Training) -> None:
        for _ in range(2):
            training.backwards(pattern)
            training.step(pattern)

    return program


@ALL
@RANKS
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.by_default(
    "each part-1-0",
    "each part-2-0",
    "each part-2-3",
    "two towers-1-1",
    "two towers-2-2",
    "in turn-1-3",
    "side stream-2-1",
)
def test_parts_of_a_step_are_ordered_on_whatever_streams_they_are(pattern: str, world_size: int, stage: int) -> None:
    check(world_size, stage, two_steps(PATTERNS[pattern]))


@ALL
@pytest.mark.parametrize("collective", ["pairwise", "native"])
@pytest.mark.by_default("pairwise-2", "native-3")
def test_so_are_those_of_other_collectives(collective: str, stage: int) -> None:
    check(2, stage, two_steps(PATTERNS["each part"]), collective=collective)


@ALL
@RANKS
@pytest.mark.parametrize("precision", ["bf16", "fp32, sent in bf16"])
@pytest.mark.by_default("bf16-1-3", "fp32, sent in bf16-2-1")
def test_so_are_those_in_mixed_precision(precision: str, world_size: int, stage: int) -> None:
    check(world_size, stage, two_steps(TOWERS), mixed_precision=PRECISIONS[precision])


@ALL
@RANKS
@pytest.mark.by_default("1-0", "2-3")
def test_so_are_gradients_that_no_sync_left(world_size: int, stage: int) -> None:
    def program(training: Training) -> None:
        for pattern in (TOWERS, PATTERNS["each part"]):
            with training.optimizer.no_sync():
                training.backwards(pattern)
            training.step(pattern)

    check(world_size, stage, program)


@RANKS
@pytest.mark.by_default("2")
def test_so_are_gradients_that_a_scaler_unscales(world_size: int) -> None:
    def program(training: Training) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for _ in range(2):
            loss = training.forward("s", "t")
            with training.on("s"):
                scaled = scaler.scale(loss)
            training.on("unscale").wait_stream(training.on("s"))
            training.device.backward(scaled)
            with training.on("unscale"):
                scaler.unscale_(training.optimizer)
                scaler.step(training.optimizer)
                scaler.update()
            training._written_on = "unscale"
            with training.on("clear"):
                training.optimizer.zero_grad()

    check(world_size, 1, program)


# -- states in the host's memory ---------------------------------------------------------------------------------------


class Apart(HostOffload):
    """Gives each tensor memory of its own: the checker takes a block for one thing."""

    def reserve(self, wanted: Iterable[tuple[int, torch.dtype]]) -> None:
        listed = list(wanted)
        if len(listed) == 1:
            super().reserve(listed)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep states in memory from which they must be copied."""
    monkeypatch.setattr(OffloadedStates, "_is_elsewhere", lambda self, flat: True)
    monkeypatch.setattr(setup, "backend_for", lambda offload, device: Apart(device))


@pytest.mark.usefixtures("elsewhere")
@ALL
@RANKS
@pytest.mark.by_default("1-1", "2-3")
def test_copies_of_offloaded_states_are_ordered(world_size: int, stage: int, tmp_path: Path) -> None:
    def program(training: Training) -> None:
        optimizer = training.optimizer
        for pattern in (PATTERNS["each part"], PATTERNS["in turn"]):
            training.backwards(pattern)
            training.step(pattern)
        with training.on("reader"):
            optimizer.consolidate_state_dict(None)
            save(tmp_path / "saved", optimizer)
        two_steps(TOWERS)(training)

    check(world_size, stage, program, offload=Offload("cpu"))


# -- whole tensors -----------------------------------------------------------------------------------------------------


@ALL
@RANKS
@pytest.mark.by_default("1-0", "2-3")
def test_whole_tensors_are_read_and_written_in_order(world_size: int, stage: int, tmp_path: Path) -> None:
    def program(training: Training) -> None:
        optimizer, model, on = training.optimizer, training.model, training.on
        average = ShardedAverage(optimizer)
        for pattern in (TOWERS, PATTERNS["each part"]):
            training.backwards(pattern)
            with on("gradient"):
                gradient = optimizer.full_grad(model.scale)
                assert gradient is not None
                gradient.mul_(2)
            training.step(pattern)
            with on("average"):
                average.update_parameters()
            with on("reader"):
                save(tmp_path / "saved", optimizer, overwrite=True)
                optimizer.consolidate_state_dict(None)
                average.gather(None)
                optimizer.check_replicas()
            with on("writer"), optimizer.gathered(write=True), torch.no_grad():
                model.scale.mul_(0.5)
            training._written_on = "writer"

    check(world_size, stage, program)


def test_a_block_of_gathered_parameters_that_ends_on_another_stream_is_left_when_they_were_read() -> None:
    def program(training: Training) -> None:
        optimizer, on = training.optimizer, training.on
        for _ in range(2):
            block = optimizer.gathered()
            with on("enters"):
                block.__enter__()
            on("reads").wait_stream(on("enters"))
            with on("reads"):
                torch.stack([each for name, each in training.model.named_parameters() if name.endswith("weight")])
                block.__exit__(None, None, None)

    check(2, 3, program)


@ALL
@RANKS
@pytest.mark.by_default("1-3", "2-2")
def test_weights_come_back_in_order_when_the_block_of_an_average_ends_on_another_stream(
    world_size: int, stage: int
) -> None:
    def program(training: Training) -> None:
        on, average = training.on, ShardedAverage(training.optimizer)
        two_steps(TOWERS)(training)
        average.update_parameters()
        block = average.applied()
        with on("enters"):
            block.__enter__()
        training._written_on = "enters"
        with torch.no_grad():
            training.forward("enters", "enters")
        with on("leaves"):
            block.__exit__(None, None, None)

    check(world_size, stage, program)


@ALL
@pytest.mark.by_default("1", "3")
def test_a_rank_without_batches_follows_in_order_on_the_stream_on_which_join_ends(stage: int) -> None:
    def program(training: Training) -> None:
        block = training.optimizer.join()
        with training.on("enters"):
            block.__enter__()
        for _ in range(2 - training.optimizer.rank):
            training.backwards(TOWERS)
            training.step(PATTERNS["each part"])
        with training.on("leaves"):
            block.__exit__(None, None, None)
        training._written_on = "leaves"
        two_steps(TOWERS)(training)

    check(2, stage, program)


@ALL
@RANKS
@pytest.mark.by_default("1-3")
def test_loaded_values_are_in_order(world_size: int, stage: int, tmp_path: Path) -> None:
    def program(training: Training) -> None:
        optimizer, model, on = training.optimizer, training.model, training.on
        two_steps(TOWERS)(training)
        with on("saves"):
            save(tmp_path / "saved", optimizer)
            optimizer.consolidate_state_dict(None)
            states = optimizer.state_dict()
        two_steps(PATTERNS["each part"])(training)
        with on("loads states"):
            optimizer.load_state_dict(states)
        training.backwards(PATTERNS["each part"])
        with on("masters"):
            for parameter in model.parameters():
                optimizer.full_master(parameter)
        training.step(TOWERS)
        with on("loads"):
            load(tmp_path / "saved", optimizer)
        training._written_on = "loads"
        training.backwards(TOWERS)
        with on("zero"):
            optimizer.zero_grad(set_to_none=False)
        two_steps(TOWERS)(training)

    check(world_size, stage, program)


def test_a_units_memory_is_not_used_again_before_its_last_reader_whatever_unit_ran_between() -> None:
    """The forward reads a parameter of its own after another stream ran the last of its units."""

    def program(training: Training) -> None:
        with torch.no_grad():
            for here, beside in (("s", "t"), ("t", "u"), ("u", "s")):
                training.forward(here, beside)

    check(2, 3, program)
