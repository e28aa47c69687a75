"""Saves at a wrong moment, with wrong arguments or into wrong folders are errors on every rank, and nothing changes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager, ZeroOptimizer
from zero.checkpoint import files

from ..support.limits import PATIENT
from ..support.plain import assert_same_states
from ..support.rows import without
from .disk import Disk
from .saved import Training, entries, names, plain_dict

# -- wrong moments -----------------------------------------------------------------------------------------------------


def within(block: Any, call: Callable[[], object]) -> None:
    with block:
        call()


IN_FORWARD = r"inside gathered\(\) or inside a forward: leave it first"
IN_BACKWARD = r"inside a backward or inside join\(\): leave it first"
GRADIENTS = r"call it after step\(\) or zero_grad\(\)"
Moment = tuple[int, Callable[[Any, Callable[[], object]], object], str]
MOMENTS: dict[str, Moment] = {
    "a forward": (
        3,
        lambda at, save: within(at.model.first.register_forward_hook(lambda *_: save()), lambda: at.backward(1)),
        IN_FORWARD,
    ),
    "a backward": (
        0,
        lambda at, save: within(at.model.last.bias.register_hook(lambda _: save()), lambda: at.backward(1)),
        IN_BACKWARD,
    ),
    "gathered": (1, lambda at, save: within(at.optimizer.gathered(write=True), save), IN_FORWARD),
    "gathered units": (3, lambda at, save: within(at.optimizer.gathered(write=True), save), IN_FORWARD),
    "join": (2, lambda at, save: within(at.optimizer.join(), save), IN_BACKWARD),
    "gradients": (0, lambda at, save: (at.backward(1), save()), GRADIENTS),
    "gradients of units": (3, lambda at, save: (at.backward(1), save()), GRADIENTS),
    "sums": (2, lambda at, save: (within(at.optimizer.no_sync(), lambda: at.backward(1)), save()), GRADIENTS),
    "clipped": (2, lambda at, save: (at.backward(1), at.optimizer.clip_grad_norm_(1.0), save()), GRADIENTS),
}


@pytest.mark.parametrize(
    "moment", without(MOMENTS, "a forward", "gathered units", "gradients", "gradients of units", "clipped")
)
def test_a_save_at_a_wrong_moment_says_what_to_do(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does a restore with gradients that no step has used; after a step they may stay."""
    stage, at, words = MOMENTS[moment]
    training = Training(None, stage)
    with CheckpointManager(tmp_path, training.optimizer) as checkpoints:
        training.backward(0)
        training.optimizer.step()
        checkpoints.save(0, blocking=True)
        training.optimizer.zero_grad()
        training.step(1)
        before = plain_dict(training.optimizer)

        def refused() -> None:
            with pytest.raises(RuntimeError, match=rf"save\(\).*{words}"):
                checkpoints.save(1)
            restores = (checkpoints.restore, lambda: zero.load(tmp_path / "step-00000000", training.optimizer))
            for call in restores if words == GRADIENTS else ():
                with pytest.raises(RuntimeError, match=r"\(\) with gradients that no step .* zero_grad\(\)"):
                    call()

        at(training, refused)
        if moment == "a backward":
            with monkeypatch.context() as patch:  # the first backward of a process, as torch counts them
                patch.setattr("zero.engine.current_graph_task_id", lambda: 0)
                refused()
        assert entries(tmp_path) == names(0)
        training.optimizer.zero_grad()
        assert_same_states(plain_dict(training.optimizer), before)
        training.step(2)
        checkpoints.save(2, blocking=True)
        zero.open_checkpoint(tmp_path / "step-00000002").verify()
        training.optimizer.close()
        with pytest.raises(RuntimeError, match="this optimizer is closed"):
            checkpoints.save(3)
    for call in (lambda: checkpoints.save(1), checkpoints.restore):
        with pytest.raises(RuntimeError, match="this CheckpointManager is closed: build a new one"):
            call()


# -- wrong arguments ---------------------------------------------------------------------------------------------------


def named_metadata(transport: Transport) -> ZeroOptimizer:
    """Return an optimizer of a parameter that has the name that a safetensors file keeps for itself."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(2)))
    return ZeroOptimizer(model, torch.optim.SGD, process_group=transport)


def manager(folder: Path, optimizer: ZeroOptimizer, name: str = "run", **arguments: Any) -> None:
    CheckpointManager(name and folder / name, optimizer, **arguments).close()


def one_save(
    folder: Path, optimizer: ZeroOptimizer, name: str = "saved", assets: str | None = None, **arguments: Any
) -> None:
    zero.save(folder / name, optimizer, assets=assets and folder / assets, **arguments)


NO_NUMBER = "max_shard_size must be a number of bytes"
WRONG: list[tuple[Callable[..., None], dict[str, Any], str]] = [
    (manager, {"max_to_keep": 0}, "rank 1: max_to_keep is 0: it must be at least 1, or None"),
    (manager, {"max_to_keep": ""}, "rank 1: max_to_keep is '': it must be at least 1, or None"),
    (manager, {"name": ""}, "rank 1: directory is empty: name a folder"),
    (manager, {"keep_period": 0}, "rank 1: keep_period is 0: it must be at least 1, or None"),
    *((manager, {"max_shard_size": size}, f"rank 1: {NO_NUMBER}") for size in ("many", 0)),
    (one_save, {"max_shard_size": "0GB"}, NO_NUMBER),
    *((one_save, {"step": step}, "step must be ") for step in (-1, 1.0, True, 2**63)),
    *((one_save, {"name": name}, "which no checkpoint can have as its name: name a folder") for name in ("/", "..")),
    *((one_save, {"assets": name}, "cannot be the name of a file of a checkpoint") for name in ("back", "bytes")),
    (one_save, {"assets": "missing"}, "/missing': name a folder that exists"),
    (one_save, {"assets": ""}, "assets is '': name a folder that exists"),
    (one_save, {"optimizer": named_metadata}, "of the name '__metadata__', which a safetensors file keeps"),
]


def test_a_wrong_argument_of_one_rank_is_an_error_on_all_and_nothing_is_written(tmp_path: Path) -> None:
    for folder, name in (("back", b"a\\b.json"), ("bytes", b"\xff.json"), ("whole", b"config.json")):
        (tmp_path / folder).mkdir()
        Path(os.fsdecode(os.fsencode(tmp_path / folder) + b"/" + name)).touch()

    def program(transport: Transport) -> None:
        optimizer = Training(transport, 0).optimizer
        for call, arguments, words in WRONG:
            given = {name: value for name, value in arguments.items() if name != "optimizer"}
            of = arguments["optimizer"](transport) if "optimizer" in arguments else optimizer
            with pytest.raises((ValueError, RuntimeError, FileNotFoundError), match=words):
                call(tmp_path, of, **(given if transport.rank else {}))
            optimizer.exchange(b"")
        zero.save(tmp_path / "a" / "b" / "saved", optimizer, assets=tmp_path / "whole")

    on_threads(2, program, timeout=PATIENT)
    assert entries(tmp_path) == ["a", "back", "bytes", "run", "whole"]
    assert (tmp_path / "a" / "b" / "saved" / "model" / "config.json").exists()
    zero.open_checkpoint(tmp_path / "a" / "b" / "saved").verify()


# -- folders that cannot be used ---------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_or_is_not_seen_names_rank_and_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    run = tmp_path / "run"
    disk = Disk(monkeypatch, tmp_path)

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 0)

        def refused(path: Path, words: str, call: Callable[..., Any] = CheckpointManager) -> None:
            with pytest.raises(ValueError, match=words):
                call(path, training.optimizer)
            training.on_rank_0(disk.heal)

        def rank_1_fails(name: str, number: int) -> None:
            training.on_rank_0(partial(disk.fail_when, lambda call: call.rank == 1 and call.name == name, number))

        no_folder = r" cannot be written on host \S+: .*File exists: '.*/file'"
        refused(tmp_path / "file" / "run", rf"rank 0: .*{no_folder}")
        refused(tmp_path / "file" / "b" / "saved", rf"/file/b{no_folder}", zero.save)
        other = r"the folder is '.*/other' on rank 1 \(host \S+\), but '.*/run' on rank 0: every rank"
        refused(tmp_path / "other" if transport.rank else run, other)
        for path, call in ((run, CheckpointManager), (run / "saved", zero.save)):
            rank_1_fails("open", errno.ENOENT)
            refused(path, r"rank 1 \(host \S+, pid \d+\) cannot use this folder: it does not see it", call)
        rank_1_fails("write_at", errno.EROFS)
        refused(run, r"rank 1 \(host .*cannot read or write there \(Read-only file system\)")

    on_threads(2, program)
    assert entries(run) == [".lock"]


@pytest.mark.assumes("pwrite")
def test_a_folder_that_loses_what_a_rank_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_at = files.write_at
    loses = lambda n, data, at: None if at == 3 and len(data) == 1 else write_at(n, data, at)  # noqa: E731
    monkeypatch.setattr(files, "write_at", loses)

    def program(transport: Transport) -> None:
        optimizer = Training(transport, 0).optimizer
        for call in (partial(CheckpointManager, tmp_path), partial(zero.save, tmp_path / "saved")):
            with pytest.raises(
                ValueError, match=r"does not see what other ranks have written there: a file system that"
            ):
                call(optimizer)

    on_threads(2, program)
    assert entries(tmp_path) == [".lock"]
