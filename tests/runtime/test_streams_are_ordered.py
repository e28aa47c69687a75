"""Whatever streams the parts of a step, of a save or of an average are on, no access is unordered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives import Chain, Choice, Collective, Transport, solo
from collectives.algorithms.base import Launched
from collectives.algorithms.ordered_sum import AddedAside, Aside
from collectives.topology import _fold_by_nccl, _replicas_by_nccl
from zero import Offload, ShardedAverage, load, save, setup
from zero.core.layout import BucketSpec
from zero.gradients import reducer
from zero.gradients.reducer import Division
from zero.parameters.gathered.units import GatheredBuffer, GatheredUnit, GatheredUnits
from zero.runtime.offload import HostOffload, OffloadedStates
from zero.state import device_memory
from zero.state.device_memory import DeviceMemory
from zero.step import update
from zero.step.classes import UserOptimizers
from zero.step.update import Update

from ..support.carried import CPU, equal_hosts
from ..support.narrowed import PRECISIONS
from ..support.programs import Program, Round, Step, compare, run_rank
from ..support.rows import only, rows
from .stream_backend import on_streams
from .stream_checker import Stream, StreamChecker, here
from .towers import BATCH, EACH, IN_TURN, PATTERNS, TOWERS, Training, check, watch


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch, unseen: None) -> None:
    watch(monkeypatch)


STEPS = (Step((Round(), Round()), clips=((0.1, 2.0),)), Step((Round(sync=False), Round()), clear="zeros"))
BF16 = {"mixed_precision": PRECISIONS["bf16"]}
ROWS: list[tuple[str, int, int, dict[str, Any]]] = rows(  # pattern, ranks, stage, options
    [
        ("two towers", 2, 2, {}),
        ("each part", 1, 0, {}),
        ("each part", 2, 0, {}),
    ],
    [
        ("each part", 2, 0, {"collective": "pairwise"}),
        ("in turn", 2, 1, {}),
        ("each part", 2, 3, {}),
        ("in turn", 1, 3, BF16),
        ("side stream", 2, 1, {"mixed_precision": PRECISIONS["fp32, sent in bf16"]}),
        ("two towers", 1, 1, {"mixed_precision": PRECISIONS["bf16, sent in fp32"]}),
        ("in turn", 2, 2, {"collective": "native"}),
    ],
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_parts_of_a_step_are_ordered_on_whatever_streams_they_are(row: Any) -> None:
    pattern, world_size, stage, options = row

    def program(training: Training) -> None:
        training.steps(PATTERNS[pattern])
        with training.optimizer.no_sync():
            training.backwards(PATTERNS[pattern])
        training.step(PATTERNS[pattern])
        if world_size > 1 and "collective" not in options:
            adds_aside(training)

    check(world_size, stage, program, **options)


def adds_aside(training: Training) -> None:
    """Assert that sums were formed on one stream beside all others."""
    (aside,) = (stream for stream in training.device.streams if stream.name == "aside")
    assert aside.clock[aside]


@pytest.mark.first(1)
@pytest.mark.parametrize("stage", only(range(4), 0, 3))
def test_programs_that_add_aside_have_the_bits_of_the_plain_loop(stage: int) -> None:
    program = Program(2, stage, "adamw fused", collective="all_to_all", steps=STEPS)

    def rank(transport: Transport) -> Any:
        with StreamChecker() as device:
            result = run_rank(program, transport)
        assert "aside" in map(repr, device.streams)
        return result

    compare(program, on_streams(2, rank))


class Adds:
    """A work that adds on the current stream."""

    def __init__(self, source: Tensor, out: Tensor) -> None:
        self._source, self._out = source, out

    def wait(self) -> None:
        torch.add(self._source, 1, out=self._out)


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_sum_aside_lies_between_its_launch_and_its_wait_or_end(is_awaited: bool) -> None:
    with StreamChecker() as device:
        source, out, stream = torch.ones(4), torch.ones(4), Aside().of(CPU)
        assert stream is not None
        adds: Any = Adds(source, out)
        work = AddedAside(solo(), Launched(Chain(()), adds), stream, CPU, (source, out))
        assert stream not in device.default.clock, "the current stream has not waited"
        if is_awaited:
            work.wait()
        del work
        source.zero_()
        out.zero_()


def on_two_hosts(transport: Transport) -> Collective:
    """Return `fold` by process groups of two hosts."""
    return _fold_by_nccl(transport, equal_hosts(transport), CPU)


@pytest.mark.parametrize(
    ("pattern", "stage"), rows([("side stream", 2)], [("two towers", 2), ("each part", 0), ("in turn", 3)])
)
def test_sums_that_go_from_host_to_host_beside_a_backward_are_ordered(pattern: str, stage: int) -> None:
    def program(training: Training) -> None:
        training.steps(PATTERNS[pattern], PATTERNS[pattern])
        adds_aside(training)

    check(4, stage, program, collective=on_two_hosts)


def test_sums_that_go_from_replica_to_replica_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are formed in the wait: the sum of the replicas before comes after the launch."""

    def build(group: Transport, *_: Any) -> Choice:
        return _replicas_by_nccl(group, [range(2), range(2, 4)])

    monkeypatch.setattr(setup, "build_collective", build)
    check(4, 2, lambda training: training.steps(EACH), sharding_factor=2)


class Apart(HostOffload):
    """Gives each tensor memory of its own: the checker takes a block for one thing."""

    def reserve(self, wanted: Iterable[tuple[int, torch.dtype]]) -> None:
        listed = list(wanted)
        if len(listed) == 1:
            super().reserve(listed)


@pytest.mark.parametrize(("world_size", "stage"), rows([(1, 3)], [(2, 1)]))
def test_copies_of_offloaded_states_are_ordered(
    world_size: int, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OffloadedStates, "_is_elsewhere", lambda self, flat: True)
    monkeypatch.setattr(setup, "backend_for", lambda offload, device: Apart(device))

    def program(training: Training) -> None:
        training.steps(EACH)
        with training.on("reader"):
            training.optimizer.consolidate_state_dict(None)
            save(tmp_path / "saved", training.optimizer)
        training.steps(IN_TURN)

    check(world_size, stage, program, offload=Offload("cpu"))


@pytest.fixture
def parameters_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host divides sums, clips, and, where it is asked to, steps."""
    monkeypatch.setattr(OffloadedStates, "_is_elsewhere", lambda self, flat: True)
    monkeypatch.setattr(setup, "backend_for", lambda offload, device: Apart(device))
    for module in (reducer, update):
        monkeypatch.setattr(module, "wait_for_host", waits)
    for owner, name in ((Division, "divide"), (Update, "norm_sum"), (Update, "clip"), (UserOptimizers, "step")):
        done_by_the_host(monkeypatch, owner, name)


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


ON_HOST: dict[str, Any] = {"offload": Offload("cpu", parameters="cpu")}
STEPPED_THERE: dict[str, Any] = {"offload": Offload("cpu", parameters="cpu", step="cpu")}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("world_size", "options"),
    rows([(1, {}), (2, BF16)], [(1, BF16), (2, {}), (2, {"prefetch_depth": 2}), (4, {"reshard_after_forward": 2})]),
)
@pytest.mark.usefixtures("parameters_on_the_host")
def test_copies_of_parameters_on_the_host_are_ordered(world_size: int, options: dict[str, Any]) -> None:
    def program(training: Training) -> None:
        training.steps(EACH, IN_TURN)
        with training.on("reader"):
            training.optimizer.consolidate_state_dict(None)
        training.steps(EACH)

    check(world_size, 3, program, **ON_HOST, **options)


@pytest.mark.first(1)
@pytest.mark.parametrize(("world_size", "options"), rows([(1, {}), (2, BF16)], [(1, BF16), (2, {})]))
@pytest.mark.usefixtures("parameters_on_the_host")
def test_a_step_on_the_host_comes_behind_every_copy_and_before_the_next(
    world_size: int, options: dict[str, Any]
) -> None:
    """Behind those of gradients, and those of weights for an evaluation that is under way."""

    def program(training: Training) -> None:
        training.steps(EACH, IN_TURN)
        training.backwards(EACH)
        with training.on("evaluation"), torch.no_grad():
            training.model(BATCH, training.on("evaluation"), training.on("beside"))
        training.step(EACH)
        with training.on("reader"):
            training.optimizer.consolidate_state_dict(None)
        training.steps(TOWERS)

    check(world_size, 3, program, **STEPPED_THERE, **options)


@pytest.mark.parametrize(("world_size", "depth"), rows([(1, 1)], [(2, 1), (1, 2), (1, 0)]))
@pytest.mark.usefixtures("parameters_on_the_host")
def test_a_unit_waits_for_the_copy_of_its_own_shard_alone(
    world_size: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the copies for the next units run beside it."""
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


@pytest.mark.usefixtures("parameters_on_the_host")
def test_memory_of_a_copy_that_is_given_up_is_used_behind_it() -> None:
    def program(training: Training) -> None:
        manager = training.optimizer._storage.manager
        (buffer,) = manager.units[1].gathered.buffers
        buffer.begin_gather(torch.empty)
        with manager.gathered._copying(buffer):
            buffer.copy_kept()
        buffer.end_gather()
        torch.ones(1)  # in its memory

    check(1, 3, program, **ON_HOST)


@pytest.mark.parametrize(("world_size", "stage"), rows([(1, 3), (2, 1)], [(2, 3), (1, 0)]))
def test_copies_of_memory_that_is_lent_are_ordered(
    world_size: int, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "is_on_device", lambda tensor: True)
    monkeypatch.setattr(device_memory, "HostOffload", Apart)
    monkeypatch.setattr(DeviceMemory, "_wait", lambda self: here().synchronize())

    def program(training: Training) -> None:
        training.on("takes back")  # the host's wait orders the streams that there are
        for pattern in (EACH, IN_TURN):
            training.steps(pattern)
            with training.on("lends"):
                training.optimizer.offload()
            with training.on("takes back"):
                training.optimizer.reload()
            training.written_on = "takes back"
        training.steps(EACH)

    check(world_size, stage, program)


# -- calls beside the parts of a step ----------------------------------------------------------------------------------


def scaled(training: Training, path: Path) -> None:
    """A scaler unscales gradients on a stream of its own."""
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
    """Whole tensors are read, saved, loaded and edited."""
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
    """Weights come back when an average's block ends."""
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


CALLS: list[tuple[Callable[[Training, Path], None], int, int]] = [  # program, ranks, stage
    (scaled, 2, 1),
    *[(read_and_written, 1, 0), (read_and_written, 2, 3)],
    (gathered, 2, 3),
    *[(averaged, 1, 3), (averaged, 2, 2)],
    (joined, 2, 1),
]
FIRST_CALLS = [(scaled, 2, 1), (read_and_written, 1, 0), (gathered, 2, 3), (averaged, 1, 3)]


@pytest.mark.parametrize("row", only(CALLS, *FIRST_CALLS), ids=lambda row: f"{row[0].__name__}-{row[1]}-{row[2]}")
def test_calls_beside_the_parts_of_a_step_are_ordered(row: Any, tmp_path: Path) -> None:
    program, world_size, stage = row
    check(world_size, stage, lambda training: program(training, tmp_path / "saved"))
