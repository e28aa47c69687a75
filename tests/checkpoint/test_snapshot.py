"""What is committed is the state at the save, at any speed of the disk, and every topology writes the same bytes.

What follows a save is compared with what `zero.save` has written before training went on, without the plan of an
earlier save: its content, which names every byte of every file, each rank's own file, and what its manifest says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from benchmarks.rank import live_storages
from collectives import Transport, on_threads
from zero import CheckpointManager, MixedPrecision, Offload
from zero.checkpoint import manager, single
from zero.checkpoint.write.save_thread import Saving
from zero.checkpoint.write.saver import SaveRequest

from ..dials.loops import step, steps
from ..dials.record import config_with
from ..support.limits import PATIENT
from ..support.machine import program as p
from ..support.machine.classes import BY_PARAMETER
from ..support.machine.hosts import ThreadsOnHosts
from ..support.machine.run import run
from ..support.machine.trees import Part
from ..support.rows import only
from ..support.shampoo import Rotated
from ..support.two_modes import ScheduleFree
from .saved import Taker, Training, plain_dict

ALL = 10**6
MANY = [0, 1, 2, 4, 8, 12, 16, 24, ALL]


@pytest.fixture
def taker(monkeypatch: pytest.MonkeyPatch) -> Taker:
    """Let checkpoints have small blocks, so that small models have many chunks."""
    for module in (manager, single):
        monkeypatch.setattr(module, "SaveRequest", partial(SaveRequest, block_bytes=1024))
    return Taker(monkeypatch)


def edits_in_place(training: Training, number: int) -> None:
    with training.optimizer.gathered(write=True), torch.no_grad():
        for parameter in training.model.parameters():
            parameter.add_(number)
        training.model.offset.mul_(2)
    training.step(number)


def loads_a_dict(training: Training, number: int) -> None:
    older = plain_dict(training.optimizer)
    for state in older["state"].values():
        state["exp_avg"] = state["exp_avg"] + number
        state["step"] = state["step"] + number
    training.optimizer.load_state_dict(older)
    training.step(number)


def edits_states(training: Training, number: int) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg"].add_(number)
        state["step"].add_(number)
    training.step(number)


def resets_states(training: Training, number: int) -> None:
    training.optimizer.reset_states(list(training.model.parameters())[number % 2 :: 2])
    training.step(number)


def does_all_on_disk(training: Training, number: int) -> None:
    (Training.step, edits_in_place, loads_a_dict)[number % 3](training, number)


LAYOUTS: Sequence[Callable[[Any, dict[str, Any], int], object]] = (
    lambda model, group, number: group.update(lr=group["lr"] / 3),  # its text has another length
    lambda model, group, number: group.update(note="x" * 6_000),
    lambda model, group, number: model.first.bias.requires_grad_(requires_grad=False),
    lambda model, group, number: model.offset.add_(1),
    lambda model, group, number: setattr(model.offset, "data", torch.full_like(model.offset, number)),
    lambda model, group, number: model.layers.register_buffer("extra", torch.arange(number)),
    lambda model, group, number: model.layers.register_buffer("extra", torch.ones(number % 3, 2, dtype=torch.int64)),
    lambda model, group, number: model._non_persistent_buffers_set.add("offset"),
    lambda model, group, number: model.register_buffer("phase", torch.full((3,), 1 - 2j).conj()),  # conjugated if read
)


def changes_layouts(training: Training, number: int) -> None:
    """Change what the plan of the save before does not fit any more."""
    if number < 3:
        training.backward(number)
        training.optimizer.step()
        training.model.zero_grad()
    else:
        LAYOUTS[(number - 3) % len(LAYOUTS)](training.model, training.optimizer.param_groups[0], number)


ON_DISK = {"offload": "states"}
IN_BF16 = {"mixed_precision": MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)}
ANEW = [0] * (len(LAYOUTS) + 3)
EVENTS: dict[str, tuple[Callable[[Training, int], None], int, int, Sequence[int], dict[str, Any]]] = {
    "steps": (Training.step, 1, 3, MANY, {}),
    "steps at stage 0": (Training.step, 0, 2, MANY, {}),
    "steps of one rank": (Training.step, 2, 1, MANY, {}),
    "steps at stage 3": (Training.step, 3, 2, MANY, {}),
    "edits in gathered": (edits_in_place, 3, 2, [0, 6], {}),
    "load_state_dict": (loads_a_dict, 3, 2, [0, 6], {}),
    "states edited": (edits_states, 2, 2, [0, 6], {}),
    "states reset": (resets_states, 1, 2, [0, 6], {"cls": torch.optim.Adagrad}),  # it makes new states at once
    "modes": (lambda at, n: getattr(at.optimizer, ("train", "eval")[n % 2])(), 1, 2, [0, 6], {"cls": ScheduleFree}),
    "states on disk": (does_all_on_disk, 1, 2, [0, 0, 0, 4], ON_DISK),
    "bf16 on disk": (does_all_on_disk, 3, 2, [0, 0, 0, 4], {**ON_DISK, **IN_BF16}),
    "layouts": (changes_layouts, 2, 2, ANEW, {}),
    "layouts in bf16": (changes_layouts, 3, 2, ANEW, IN_BF16),
}


@pytest.mark.parametrize("event", only(EVENTS, "steps", "states edited"))
def test_whatever_follows_changes_nothing_of_a_save_and_the_next_one_has_it(
    event: str, taker: Taker, tmp_path: Path
) -> None:
    """Of which the disk has taken none, one, some or all chunks of a rank when it follows."""
    follows, stage, world_size, counts, arguments = EVENTS[event]
    if "offload" in arguments:
        (tmp_path / "states").mkdir()
        arguments = {**arguments, "offload": Offload(states=tmp_path / "states")}

    def program(transport: Transport) -> None:
        training, rank = Training(transport, stage, **arguments), transport.rank
        mine_alone = f"ranks/rank-{rank:05d}.safetensors"
        training.step(0)
        with CheckpointManager(tmp_path / "asynchronous", training.optimizer) as checkpoints:
            taker.begin(rank, ALL)
            checkpoints.save(0, {"n": 0, "t": torch.arange(0)}, {"rank": rank}).result(PATIENT)
            total = taker.taken[rank]
            assert total > 8
            for number, count in enumerate(counts, start=1):
                path = tmp_path / f"blocking-{number}"
                state: dict[str, Any] = {"n": number, "t": torch.arange(number)}
                anew = zero.save(path, training.optimizer, state, {"rank": rank}, step=number)
                taker.begin(rank, count)
                saving = checkpoints.save(number, state, {"rank": rank})
                state["t"].fill_(-1)
                taker.wait_until(rank, min(count, total))
                follows(training, number)
                taker.release(rank)
                assert saving.result(PATIENT) == anew.result(), f"{count} of {total} chunks were taken before"
                mine, theirs = (zero.open_checkpoint(each).manifest for each in (saving.path, path))
                for name in ("parameters", "param_groups", "not_saved", "block_bytes"):
                    assert getattr(mine, name) == getattr(theirs, name), name
                assert (saving.path / mine_alone).read_bytes() == (path / mine_alone).read_bytes()

    on_threads(world_size, program)


def test_a_save_that_is_over_holds_nothing_of_what_it_wrote(tmp_path: Path) -> None:
    training = Training(None, 1)
    training.step(0)
    found: list[Saving] = []
    sizes = []
    with CheckpointManager(tmp_path / "a", training.optimizer) as checkpoints:
        for number in range(1, 4):
            found.append(checkpoints.save(number, {"t": torch.zeros(100_000)}))
            training.step(number)
            found[-1].result(PATIENT)
            for thread in threading.enumerate():
                if thread.name.startswith("zero-checkpoint"):
                    thread.join(PATIENT)
            sizes.append(sum(live_storages().values()))
    # the caller's tensor alone has 400,000 bytes; a step makes small states, and what ran before may still be freed
    assert max(sizes[1:]) - sizes[0] < 10_000


SETTINGS = (p.Setting(3, 3), p.Setting(0, 1), p.Setting(3, 2, sharding_factor=1, units="inside units"))
PROGRAMS: dict[str, dict[str, Any]] = {
    "nadam": {"optimizer": "nadam"},
    "fp16 sgd": {"optimizer": "sgd momentum", "precision": "fp16"},
    "by kind": {"precision": "by kind"},
    "bf16 adagrad, accelerated": {"optimizer": "adagrad", "precision": "bf16"},
    "strides": {"optimizer": "rotated", "parts": (Part("linear", 5), Part("matrix"), Part("turned"), Part("norm"))},
}


@pytest.mark.filterwarnings("ignore:.*set aside:RuntimeWarning")
@pytest.mark.first(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_topology_writes_the_same_bytes_and_training_goes_on(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a rollback to a step at which few parameters had states. On an accelerator, shards without parameters
    lie beside their master weights. Strides of states change bits."""
    monkeypatch.setitem(BY_PARAMETER, "rotated", (Rotated, {}))
    if "accelerated" in name:
        request.getfixturevalue("accelerated")
    commands: list[Any] = [*step(1), p.RollBack(3), *steps(2), p.Freeze((2,)), p.Write((0, 2), 6)]
    for setting in SETTINGS:
        way = {} if name == "strides" and setting.stage == 0 else {"folder": p.FOLDER}
        commands += [p.Load(setting, **way), p.Consolidate(0), *steps(1, 60), p.Describe(exact=True)]
    run(config_with({"stage": 2, "world_size": 2, **PROGRAMS[name]}), *commands, backend=ThreadsOnHosts())
