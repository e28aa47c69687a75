"""Saves at a wrong moment or with wrong arguments are errors that say what to do, and no rank waits long."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager, ZeroOptimizer
from zero.checkpoint import files
from zero.checkpoint.folder.directory import complete_steps

from ..support.limits import PATIENT
from ..support.plain import assert_same_states
from ..support.rows import without
from .disk import Disk
from .saves import Training, entries

# -- wrong moments -----------------------------------------------------------------------------------------------------


def inside(block: AbstractContextManager[Any], call: Callable[[], Any], then: Callable[[], Any] | None = None) -> None:
    with block:
        call()
    if then is not None:
        then()


def hooked(training: Training, handle: Any) -> None:
    try:
        training.backward(1)
    finally:
        handle.remove()


IN_FORWARD = r"inside gathered\(\) or inside a forward: leave it first"
IN_BACKWARD = r"inside a backward or inside join\(\): leave it first"
GRADIENTS = r"call it after step\(\) or zero_grad\(\)"
MOMENTS: dict[str, tuple[int, Callable[[Any, Callable[[], object]], object], str]] = {
    "a forward": (3, lambda at, save: hooked(at, at.model.first.register_forward_hook(lambda *_: save())), IN_FORWARD),
    "a backward": (0, lambda at, save: hooked(at, at.model.last.bias.register_hook(lambda _: save())), IN_BACKWARD),
    "gathered": (1, lambda at, save: inside(at.optimizer.gathered(write=True), save), IN_FORWARD),
    "gathered units": (3, lambda at, save: inside(at.optimizer.gathered(write=True), save), IN_FORWARD),
    "join": (2, lambda at, save: inside(at.optimizer.join(), save), IN_BACKWARD),
    "gradients": (0, lambda at, save: (at.backward(1), save()), GRADIENTS),
    "gradients of units": (3, lambda at, save: (at.backward(1), save()), GRADIENTS),
    "sums": (2, lambda at, save: inside(at.optimizer.no_sync(), lambda: at.backward(1), save), GRADIENTS),
    "clipped": (2, lambda at, save: (at.backward(1), at.optimizer.clip_grad_norm_(1.0), save()), GRADIENTS),
}


@pytest.mark.parametrize(
    "moment", without(MOMENTS, "a forward", "gathered units", "gradients", "gradients of units", "clipped")
)
def test_a_save_at_a_wrong_moment_says_what_to_do(moment: str, tmp_path: Path) -> None:
    """So does a restore with gradients that no step has used; after a step they may stay."""
    stage, at, words = MOMENTS[moment]
    training = Training(None, stage)
    with CheckpointManager(tmp_path, training.optimizer) as checkpoints:
        training.backward(0)
        training.optimizer.step()
        checkpoints.save(0, blocking=True)
        training.optimizer.zero_grad()
        training.step(1)
        before = training.plain()

        def refused() -> None:
            with pytest.raises(RuntimeError, match=rf"save\(\).*{words}"):
                checkpoints.save(1)
            if words == GRADIENTS:
                for call in (checkpoints.restore, lambda: zero.load(tmp_path / "step-00000000", training.optimizer)):
                    with pytest.raises(RuntimeError, match=r"\(\) with gradients that no step .* zero_grad\(\)"):
                        call()

        at(training, refused)
        assert entries(tmp_path) == [".lock", "step-00000000"]
        training.optimizer.zero_grad()
        assert_same_states(training.plain(), before)
        training.step(2)
        checkpoints.save(2, blocking=True)
    zero.open_checkpoint(tmp_path / "step-00000002").verify()


def test_a_save_in_the_first_backward_of_a_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = Training(None, 0).optimizer
    monkeypatch.setattr("zero.engine.current_graph_task_id", lambda: 0)  # as torch counts them
    with pytest.raises(RuntimeError, match=IN_BACKWARD):
        zero.save(tmp_path / "saved", optimizer)


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


STEP = r"step must be "
WRONG: dict[str, tuple[Callable[..., None], dict[str, Any], str]] = {
    "keeps none": (manager, {"max_to_keep": 0}, "rank 1: max_to_keep is 0: it must be at least 1, or None"),
    "keeps text": (manager, {"max_to_keep": ""}, "rank 1: max_to_keep is '': it must be at least 1, or None"),
    "no folder": (manager, {"name": ""}, "rank 1: directory is empty: name a folder"),
    "period of 0": (manager, {"keep_period": 0}, "rank 1: keep_period is 0: it must be at least 1, or None"),
    "size": (manager, {"max_shard_size": "many"}, "rank 1: max_shard_size must be a number of bytes"),
    "size of 0": (manager, {"max_shard_size": 0}, "rank 1: max_shard_size must be a number of bytes"),
    "text of 0": (one_save, {"max_shard_size": "0GB"}, "max_shard_size must be a number of bytes"),
    "negative": (one_save, {"step": -1}, STEP),
    "float": (one_save, {"step": 1.0}, STEP),
    "bool": (one_save, {"step": True}, STEP),
    "too high": (one_save, {"step": 2**63}, STEP),
    "root": (one_save, {"name": "/"}, "which no checkpoint can have as its name: name a folder"),
    "folder above": (one_save, {"name": ".."}, "which no checkpoint can have as its name: name a folder"),
    "backslash": (one_save, {"assets": "back"}, "cannot be the name of a file of a checkpoint"),
    "no text": (one_save, {"assets": "bytes"}, "cannot be the name of a file of a checkpoint"),
    "no assets": (one_save, {"assets": "missing"}, "/missing': name a folder that exists"),
    "an empty name of assets": (one_save, {"assets": ""}, "assets is '': name a folder that exists"),
    "tensor": (one_save, {"optimizer": named_metadata}, "of the name '__metadata__', which a safetensors file keeps"),
}


@pytest.mark.parametrize(
    "row",
    without(
        WRONG, "bool", "folder above", "keeps none", "negative", "no text", "size of 0", "size", "too high", "text of 0"
    ),
)
def test_a_wrong_argument_of_one_rank_is_an_error_on_all_and_nothing_is_written(row: str, tmp_path: Path) -> None:
    call, arguments, words = WRONG[row]
    for folder, name in (("back", b"a\\b.json"), ("bytes", b"\xff.json")):
        (tmp_path / folder).mkdir()
        Path(os.fsdecode(os.fsencode(tmp_path / folder) + b"/" + name)).touch()
    before = entries(tmp_path)

    def program(transport: Transport) -> None:
        given = dict(arguments)
        build = given.pop("optimizer", None)
        optimizer = Training(transport, 0).optimizer if build is None else build(transport)
        with pytest.raises((ValueError, RuntimeError, FileNotFoundError), match=words):
            call(tmp_path, optimizer, **(given if transport.rank else {}))
        optimizer.exchange(b"")
        zero.save(tmp_path / "a" / "b" / "saved", Training(transport, 0).optimizer)

    on_threads(2, program, timeout=PATIENT)
    assert [entry for entry in entries(tmp_path) if entry not in ("a", "run")] == before
    zero.open_checkpoint(tmp_path / "a" / "b" / "saved").verify()


def test_a_closed_manager_and_a_closed_optimizer_say_so(tmp_path: Path) -> None:
    training = Training(None, 1)
    training.step(0)
    checkpoints = CheckpointManager(tmp_path, training.optimizer)
    checkpoints.close()
    checkpoints.close()
    for call in (lambda: checkpoints.save(1), checkpoints.restore):
        with pytest.raises(RuntimeError, match="this CheckpointManager is closed: build a new one"):
            call()
    with CheckpointManager(tmp_path, training.optimizer) as checkpoints:
        training.optimizer.close()
        with pytest.raises(RuntimeError, match="this optimizer is closed"):
            checkpoints.save(1)
    assert entries(tmp_path) == [".lock"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_a_blocking_save_is_no_failed_save(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(number: int) -> None:
        raise error

    training = Training(None, 0)
    with CheckpointManager(tmp_path, training.optimizer) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(files, "sync", interrupted)
        with pytest.raises(error):
            checkpoints.save(1, blocking=True)
        with pytest.raises(error):
            zero.save(tmp_path / "saved", training.optimizer)
    assert complete_steps(tmp_path) == []


# -- folders that cannot be used ---------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_or_is_not_seen_names_rank_and_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    run = tmp_path / "run"
    disk = Disk(monkeypatch, tmp_path)

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        optimizer, rank = Training(transport, 0).optimizer, transport.rank

        def refused(path: Path, words: str, call: Callable[..., Any] = CheckpointManager) -> None:
            with pytest.raises(ValueError, match=words):
                call(path, optimizer)
            optimizer.exchange(b"")

        def rank_1_fails(name: str, number: int) -> None:
            if rank == 0:
                disk.heal()
                disk.fail_when(lambda call: call.rank == 1 and call.name == name, number)
            optimizer.exchange(b"")

        no_folder = r" cannot be written on host \S+: .*File exists: '.*/file'"
        refused(tmp_path / "file" / "run", rf"rank 0: .*{no_folder}")
        refused(tmp_path / "file" / "b" / "saved", rf"/file/b{no_folder}", zero.save)
        other = r"the folder is '.*/other' on rank 1 \(host \S+\), but '.*/run' on rank 0: every rank"
        refused(tmp_path / "other" if rank else run, other)
        not_seen = r"rank 1 \(host \S+, pid \d+\) cannot use this folder: it does not see it"
        rank_1_fails("open", errno.ENOENT)
        refused(run, not_seen)
        refused(run / "saved", not_seen, zero.save)
        rank_1_fails("write_at", errno.EROFS)
        refused(run, r"rank 1 \(host .*cannot read or write there \(Read-only file system\)")

    on_threads(2, program)
    assert entries(run) == [".lock"]


@pytest.mark.assumes("pwrite")
def test_a_folder_that_loses_what_a_rank_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_at = files.write_at
    monkeypatch.setattr(
        files, "write_at", lambda n, data, at: None if at == 3 and len(data) == 1 else write_at(n, data, at)
    )

    def program(transport: Transport) -> None:
        words = r"does not see what other ranks have written there: a file system that"
        with pytest.raises(ValueError, match=words):
            CheckpointManager(tmp_path, Training(transport, 0).optimizer)
        with pytest.raises(ValueError, match=words):
            zero.save(tmp_path / "saved", Training(transport, 0).optimizer)

    on_threads(2, program)
    assert entries(tmp_path) == [".lock"]
