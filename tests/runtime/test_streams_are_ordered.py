"""Whatever streams the parts of a step, of a save or of an average are on, no access is unordered.

The CPU takes the place of a device (`stream_checker`), and collectives run on a stream of their own.
The programs wait where a plain loop must, and nowhere else: at stages 0 to 2 a forward waits for the step that wrote
its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from collectives import Chain, Transport, solo
from collectives.algorithms.base import Launched
from collectives.algorithms.ordered_sum import AddedAside, Aside
from collectives.topology import _replicas_by_nccl
from zero import Offload, ShardedAverage, ZeroOptimizer, load, save, setup
from zero.core.layout import BucketSpec
from zero.gradients import reducer
from zero.gradients.reducer import Division
from zero.parameters.gathered.units import GatheredBuffer, GatheredUnit, GatheredUnits
from zero.runtime.offload import HostOffload, OffloadedStates
from zero.state import device_memory
from zero.state.device_memory import DeviceMemory
from zero.step import partition, update
from zero.step.classes import UserOptimizers
from zero.step.update import Update

from ..dials.loops import step
from ..dials.record import config_with
from ..support.carried import CPU
from ..support.late import folded_by_groups
from ..support.machine.program import Backward
from ..support.machine.run import Played, play
from ..support.machine.run import run as run_program
from ..support.narrowed import PRECISIONS
from ..support.parts import parts_of
from ..support.rows import only, rows
from .stream_checker import Stream, StreamChecker, here, off, on_streams, pretend


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch, unseen: None) -> None:
    """Let the checker take the CPU for a device, but for the tensors of trials, which are thrown away."""
    pretend(monkeypatch)
    choose = partition.choose_partitions

    def choose_unwatched(*arguments: Any) -> Any:
        with _disable_current_modes(), off():
            return choose(*arguments)

    monkeypatch.setattr(setup, "choose_partitions", choose_unwatched)


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


class Training:
    def __init__(self, device: StreamChecker, transport: Transport, stage: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.device, self.stage = device, stage
        self._streams = {"default": device.default}
        self.model = Towers()
        options = {"bucket_cap_mb": CAP, "collective": "all_to_all", "lr": 0.01, "fused": True, **options}
        self.optimizer = ZeroOptimizer(self.model, torch.optim.AdamW, stage=stage, process_group=transport, **options)
        self.written_on = "default"
        self.adds_aside = transport.world_size > 1 and options["collective"] not in ("pairwise", "native")

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
    def run(transport: Transport) -> None:
        with StreamChecker() as device:
            training = Training(device, transport, stage, **options)
            program(training)
            with training.on("end"):
                training.optimizer.close()

    run(solo()) if world_size == 1 else on_streams(world_size, run)


Call = Callable[[Training, Path], None]
STEPS = [*step(1, Backward(2)), Backward(3, sync=False), *step(4, clear="zeros"), *step(5)]
BF16 = {"mixed_precision": PRECISIONS["bf16"]}


@pytest.mark.first(0)
@pytest.mark.parametrize("stage", only(range(4), 0, 3))
def test_programs_that_add_aside_have_the_bits_of_the_plain_loop(stage: int) -> None:
    changes = {"stage": stage, "world_size": 2, "optimizer": "adamw fused", "collective": "all_to_all"}
    config = config_with(changes)

    def rank(transport: Transport) -> Any:
        with StreamChecker() as device:
            result = play(config, STEPS, transport)
        assert "aside" in map(repr, device.streams)
        return result

    run_program(config, *STEPS, backend=Played(on_streams(2, rank)))


@pytest.mark.parametrize("end", ["awaited", "given up", "given up by another thread"])
def test_a_sum_aside_lies_between_its_launch_and_its_wait_or_end(end: str) -> None:
    with StreamChecker() as device:
        source, out, stream = torch.ones(4), torch.ones(4), Aside().of(CPU)
        assert stream is not None
        adds: Any = SimpleNamespace(wait=lambda: torch.add(source, 1, out=out))
        work = AddedAside(solo(), Launched(Chain(()), adds), stream, CPU, (source, out))
        assert stream not in device.default.clock, "the current stream has not waited"
        if end == "awaited":
            work.wait()
        with device.stream("another thread's") if end.endswith("thread") else nullcontext():
            del work
        source.zero_()
        out.zero_()


class Apart(HostOffload):
    """Gives each tensor memory of its own: the checker takes a block for one thing."""

    def reserve(self, wanted: Iterable[tuple[int, torch.dtype]]) -> None:
        listed = list(wanted)
        if len(listed) == 1:
            super().reserve(listed)


def states_on_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OffloadedStates, "_is_elsewhere", lambda self, flat: True)
    patch.setattr(setup, "backend_for", lambda offload, device: Apart(device))


def parameters_on_the_host(patch: pytest.MonkeyPatch) -> None:
    """The host divides sums, clips, and, where it is asked to, steps."""
    states_on_the_host(patch)
    for module in (reducer, update):
        patch.setattr(module, "wait_for_host", waits)
    for owner, name in ((Division, "divide"), (Update, "norm_sum"), (Update, "clip"), (UserOptimizers, "step")):
        done_by_the_host(patch, owner, name)


def lent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_memory, "is_on_device", lambda tensor: True)
    patch.setattr(device_memory, "HostOffload", Apart)
    patch.setattr(DeviceMemory, "_wait", lambda self: here().synchronize())


def replicas_of_two(patch: pytest.MonkeyPatch) -> None:
    """Sums are formed in the wait: the sum of the replicas before comes after the launch."""
    patch.setattr(setup, "build_collective", lambda group, *_: _replicas_by_nccl(group, [range(2), range(2, 4)]))


def on_the_device(patch: pytest.MonkeyPatch) -> None:
    """All is on the device."""


def waits(buckets: Iterable[BucketSpec]) -> None:
    if any(bucket.offloaded for bucket in buckets):
        here().synchronize()


def done_by_the_host(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    done = getattr(owner, name)

    def on_host(self: Any, *arguments: Any) -> Any:
        is_step = name == "step"
        if is_step and not all(update.states.bucket.stepped_on_host for update in arguments[0]):
            return done(self, *arguments)
        with here().on_host():
            return done(self, *arguments)

    monkeypatch.setattr(owner, name, on_host)


@pytest.mark.parametrize(("world_size", "depth"), rows([(1, 1)], [(2, 1), (1, 2), (1, 0)]))
def test_a_unit_waits_for_the_copy_of_its_own_shard_alone(
    world_size: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters_on_the_host(monkeypatch)
    under_way: dict[tuple[int, int], tuple[Stream, int]] = {}  # by rank and unit: the copy's stream, and its number
    beside: list[tuple[int, int]] = []
    copy, install, reshard = GatheredBuffer.copy_kept, GatheredUnits.install, GatheredUnits.reshard

    def copied(self: GatheredBuffer) -> None:
        copy(self)
        stream = here().current()
        under_way[id(here()), self.spec(0).unit] = stream, stream.clock[stream]

    def installed(self: GatheredUnits, unit: GatheredUnit) -> None:
        known = here().current().clock
        for (checker, number), (stream, time) in under_way.items():
            if checker == id(here()) and number != unit.number and known.get(stream, 0) < time:
                beside.append((unit.number, number))
        stream, time = under_way[id(here()), unit.number]
        assert known[stream] >= time, "it has waited for its own"
        install(self, unit)

    def resharded(self: GatheredUnits, unit: GatheredUnit, after_forward: bool) -> None:
        reshard(self, unit, after_forward)
        del under_way[id(here()), unit.number]

    monkeypatch.setattr(GatheredBuffer, "copy_kept", copied)
    monkeypatch.setattr(GatheredUnits, "install", installed)
    monkeypatch.setattr(GatheredUnits, "reshard", resharded)
    check(world_size, 3, lambda training: training.backwards(TOWERS), **ON_HOST, prefetch_depth=depth)
    forward = [(unit, unit + ahead) for unit in range(1, 5) for ahead in range(1, depth + 1) if unit + ahead < 5]
    backward = [(5 - unit, 5 - after) for unit, after in forward]
    assert sorted(set(beside)) == sorted({*forward, *backward})


def parts_of_a_step(pattern: str) -> Call:
    def program(training: Training, path: Path) -> None:
        training.steps(PATTERNS[pattern])
        with training.optimizer.no_sync():
            training.backwards(PATTERNS[pattern])
        training.step(PATTERNS[pattern])
        training.steps(PATTERNS[pattern])
        if training.adds_aside:
            (aside,) = (stream for stream in training.device.streams if stream.name == "aside")
            assert aside.clock[aside]

    return program


def steps(training: Training, path: Path) -> None:
    """With parameters on the host, a step comes behind every copy, also those for an evaluation that is under way."""
    training.steps(EACH, IN_TURN)
    training.backwards(EACH)
    if training.stage == 3:
        with training.on("evaluation"), torch.no_grad():
            training.model(BATCH, training.on("evaluation"), training.on("beside"))
    training.step(EACH)
    with training.on("reader"):
        training.optimizer.consolidate_state_dict(None)
        save(path, training.optimizer)
    training.steps(TOWERS)


def lends(training: Training, path: Path) -> None:
    training.on("takes back")  # the host's wait orders the streams that there are
    for pattern in (EACH, IN_TURN):
        training.steps(pattern)
        with training.on("lends"):
            training.optimizer.offload()
        with training.on("takes back"):
            training.optimizer.reload()
        training.written_on = "takes back"
    training.steps(EACH)


def given_up(training: Training, path: Path) -> None:
    """Memory of a copy that is given up is used behind it."""
    manager = parts_of(training.optimizer).storage.manager
    (buffer,) = manager.units[1].gathered.buffers
    buffer.begin_gather(torch.empty)
    with manager.gathered._copying(buffer):
        buffer.copy_kept()
    buffer.end_gather()
    torch.ones(1)  # in its memory


def scaled(training: Training, path: Path) -> None:
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
        training.written_on = "unscale"
        with training.on("clear"):
            training.optimizer.zero_grad()


def read_and_written(training: Training, path: Path) -> None:
    optimizer, model, on = training.optimizer, training.model, training.on
    average = ShardedAverage(optimizer)
    training.backwards(EACH)
    with on("gradient"):
        gradient = optimizer.full_grad(model.scale)
        assert gradient is not None
        gradient.mul_(2)
    training.step(EACH)
    with on("average"):
        average.update_parameters()
    with on("reader"):
        save(path, optimizer, overwrite=True)
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        average.gather(None)
        optimizer.check_replicas()
    with on("writer"), optimizer.gathered(write=True), torch.no_grad():
        model.scale.mul_(0.5)
    training.written_on = "writer"
    training.backwards(TOWERS)
    with on("masters"):
        for parameter in model.parameters():
            optimizer.full_master(parameter)
    training.step(TOWERS)
    with on("loads states"):
        optimizer.load_state_dict(states)
    with on("loads"):
        load(path, optimizer)
    training.written_on = "loads"
    training.backwards(TOWERS)
    with on("zero"):
        optimizer.zero_grad(set_to_none=False)
    training.steps(TOWERS)


def gathered(training: Training, path: Path) -> None:
    """Then a forward reads a parameter of its own after another stream ran the last of its units."""
    for _ in range(2):
        block = training.optimizer.gathered()
        with training.on("enters"):
            block.__enter__()
        training.on("reads").wait_stream(training.on("enters"))
        with training.on("reads"):
            torch.stack([each for name, each in training.model.named_parameters() if name.endswith("weight")])
            block.__exit__(None, None, None)
    with torch.no_grad():
        for here, beside in (("s", "t"), ("t", "u"), ("u", "s")):
            training.forward(here, beside)


def averaged(training: Training, path: Path) -> None:
    average = ShardedAverage(training.optimizer)
    training.steps(TOWERS)
    average.update_parameters()
    block = average.applied()
    with training.on("enters"):
        block.__enter__()
    training.written_on = "enters"
    with torch.no_grad():
        training.forward("enters", "enters")
    with training.on("leaves"):
        block.__exit__(None, None, None)


def joined(training: Training, path: Path) -> None:
    """A rank without batches follows on the stream on which `join` ends."""
    block = training.optimizer.join()
    with training.on("enters"):
        block.__enter__()
    for _ in range(2 - training.optimizer.rank):
        training.backwards(TOWERS)
        training.step(EACH)
    with training.on("leaves"):
        block.__exit__(None, None, None)
    training.written_on = "leaves"
    training.steps(TOWERS)


FOLDED = {"collective": folded_by_groups}
SENT_IN_BF16 = {"mixed_precision": PRECISIONS["fp32, sent in bf16"]}
SENT_IN_FP32 = {"mixed_precision": PRECISIONS["bf16, sent in fp32"]}
STATES_ON_HOST = {"offload": Offload("cpu")}
ON_HOST = {"offload": Offload("cpu", parameters="cpu")}
STEPPED_THERE = {"offload": Offload("cpu", parameters="cpu", step="cpu")}
CASES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Call]] = {
    **{name: (on_the_device, parts_of_a_step(name)) for name in PATTERNS},
    "replicas": (replicas_of_two, steps),
    "states on the host": (states_on_the_host, steps),
    "parameters on the host": (parameters_on_the_host, steps),
    "given up": (parameters_on_the_host, given_up),
    "lent": (lent, lends),
    **{call.__name__: (on_the_device, call) for call in (scaled, read_and_written, gathered, averaged, joined)},
}
ROWS: list[tuple[str, int, int, dict[str, Any]]] = rows(  # name, ranks, stage, options
    [
        *[("each part", 1, 0, {}), ("each part", 2, 0, {}), ("two towers", 2, 2, {}), ("side stream", 4, 2, FOLDED)],
        *[("replicas", 4, 2, {"sharding_factor": 2}), ("states on the host", 1, 3, STATES_ON_HOST)],
        *[("parameters on the host", 1, 3, ON_HOST), ("parameters on the host", 2, 3, STEPPED_THERE | BF16)],
        *[("given up", 1, 3, ON_HOST), ("lent", 1, 3, {}), ("lent", 2, 1, {}), ("scaled", 2, 1, {})],
        *[("read_and_written", 1, 0, {}), ("gathered", 2, 3, {}), ("averaged", 1, 3, {})],
    ],
    [
        *[("each part", 2, 0, {"collective": "pairwise"}), ("each part", 2, 3, {}), ("each part", 4, 0, FOLDED)],
        *[("two towers", 1, 1, SENT_IN_FP32), ("two towers", 4, 2, FOLDED), ("side stream", 2, 1, SENT_IN_BF16)],
        *[("in turn", 2, 1, {}), ("in turn", 1, 3, BF16), ("in turn", 2, 2, {"collective": "native"})],
        *[("in turn", 4, 3, FOLDED), ("states on the host", 2, 1, STATES_ON_HOST)],
        *[("parameters on the host", 2, 3, ON_HOST | BF16), ("parameters on the host", 1, 3, ON_HOST | BF16)],
        ("parameters on the host", 2, 3, ON_HOST | {"prefetch_depth": 2}),
        ("parameters on the host", 4, 3, ON_HOST | {"reshard_after_forward": 2}),
        *[("parameters on the host", 1, 3, STEPPED_THERE), ("parameters on the host", 2, 3, STEPPED_THERE)],
        *[("lent", 2, 3, {}), ("lent", 1, 0, {}), ("read_and_written", 2, 3, {})],
        *[("averaged", 2, 2, {}), ("joined", 2, 1, {})],
    ],
)


@pytest.mark.first(2)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_no_access_is_unordered_on_whatever_streams_calls_are(
    row: tuple[str, int, int, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, world_size, stage, options = row
    prepare, program = CASES[name]
    prepare(monkeypatch)
    check(world_size, stage, lambda training: program(training, tmp_path / "saved"), **options)
