"""Saves and restores at a wrong moment, of ranks that differ, with wrong arguments or folders: errors on every rank."""

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

from ..support.errors import assert_in_order, error_of
from ..support.limits import PATIENT
from ..support.plain import assert_same_states
from .disk import Disk
from .saved import Training, entries, names, plain_dict, step_folder


class At(Training):
    """A rank, with a folder and its manager, before a call that is refused."""

    def __init__(self, transport: Transport, stage: int, folder: Path) -> None:
        super().__init__(transport, stage)
        self.transport = transport
        self.folder, self.checkpoints = folder, CheckpointManager(folder / "run", self.optimizer)

    def save(self, **of_rank_1: Any) -> None:
        self.checkpoints.save(**{"step": 1, **(of_rank_1 if self.rank else {})})

    def saves(self, key: str, *values: Any) -> None:
        self.checkpoints.save(**{"step": 1, key: values[self.rank]})

    def one(self, name: str = "saved", assets: str | None = None, **of_rank_1: Any) -> None:
        given = {**of_rank_1, "assets": assets and self.folder / assets}
        zero.save(self.folder / (name if self.rank else "saved"), self.optimizer, **(given if self.rank else {}))

    def manager(self, name: str = "other", **of_rank_1: Any) -> None:
        path = name and self.folder / name
        CheckpointManager(
            path if self.rank else self.folder / "other", self.optimizer, **(of_rank_1 if self.rank else {})
        )

    def within(self, block: Any, call: Callable[[], object] | None = None) -> None:
        with block:
            (call or self.save)()

    def after(self, *calls: Callable[[], object]) -> None:
        self.backward(1)
        for call in calls:
            call()


def named_metadata(at: At) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(2)))
    zero.save(at.folder / "saved", ZeroOptimizer(model, torch.optim.SGD, process_group=at.transport))


def states(*of_ranks: Any) -> tuple[str, Any, Any]:
    first, second = ({"s": value, "same": torch.ones(2)} for value in of_ranks)
    return "state", first, second


IN_FORWARD = "save() … inside gathered() or inside a forward: leave it first"
IN_BACKWARD = "save() … inside a backward or inside join(): leave it first"
GRADIENTS = "save() … call it after step() or zero_grad()"
UNUSED = "() with gradients that no step … zero_grad()"
DIFFERS = "state['s'] differs between rank 0 and rank 1"
NO_NUMBER = "max_shard_size must be a number of bytes"
Row = tuple[Callable[[At], object], str]
MOMENTS: list[Row] = [
    (lambda at: at.within(at.optimizer.gathered(write=True)), IN_FORWARD),
    (lambda at: at.within(at.model.last.bias.register_hook(lambda _: at.save()), lambda: at.backward(1)), IN_BACKWARD),
    (lambda at: at.within(at.optimizer.join()), IN_BACKWARD),
    (lambda at: at.after(at.save), GRADIENTS),
    (lambda at: at.after(partial(at.optimizer.clip_grad_norm_, 1.0), at.save), GRADIENTS),
    (lambda at: (at.within(at.optimizer.no_sync(), lambda: at.backward(1)), at.save()), GRADIENTS),
    (lambda at: at.after(at.checkpoints.restore), UNUSED),
    (lambda at: at.after(lambda: zero.load(step_folder(at.folder / "run", 0), at.optimizer)), UNUSED),
]
OF_UNITS: list[Row] = [
    (
        lambda at: at.within(at.model.first.register_forward_hook(lambda *_: at.save()), lambda: at.backward(1)),
        IN_FORWARD,
    ),
    MOMENTS[0],
    MOMENTS[3],
]
ALL: list[Row] = [
    *MOMENTS,
    (lambda at: at.save(step=2), "the step is 2 on rank 1 (host … but 1 on rank 0"),
    (lambda at: at.save(overwrite=True), "overwrite is True on rank 1 … but False on rank 0"),
    (lambda at: at.saves(*states({"last": 0}, {"last": 1})), f"{DIFFERS} … belongs in rank_state"),
    (lambda at: at.saves(*states(torch.zeros(2), torch.tensor([0.0, -0.0]))), DIFFERS),
    (lambda at: at.saves(*states([0.5, 0.0], [0.5, -0.0])), DIFFERS),
    (lambda at: at.saves(*states({"a": [], "b": [0.5]}, {"a": [0.5], "b": []})), DIFFERS),
    (lambda at: at.save(state={"s": 1}), DIFFERS),
    (lambda at: at.save(state={"s": {"f": [print]}}), "state['s']['f'][0] is a function"),
    (lambda at: at.save(rank_state={"f": {1, 2}}), "rank_state … 'f' … is a set"),
    (lambda at: at.one("1"), "the folder is ' … /1' on rank 1 … /saved' on rank 0"),
    (lambda at: at.one("run-1/saved"), "the folder is ' … /run-1' on rank 1 … ' on rank 0"),
    (lambda at: at.manager("1"), "the folder is ' … /1' on rank 1 (host … /other' on rank 0: every rank"),
    (lambda at: at.manager(max_to_keep=0), "max_to_keep is 0: it must be at least 1, or None"),
    (lambda at: at.manager(max_to_keep=""), "max_to_keep is '': it must be at least 1, or None"),
    (lambda at: at.manager(keep_period=0), "keep_period is 0: it must be at least 1, or None"),
    (lambda at: at.manager(""), "rank 1: directory is empty: name a folder"),
    (lambda at: at.manager(max_shard_size="many"), NO_NUMBER),
    (lambda at: at.manager(max_shard_size=0), NO_NUMBER),
    (lambda at: at.one(max_shard_size="0GB"), NO_NUMBER),
    *((lambda at, step=step: at.one(step=step), "step must be ") for step in (-1, 1.0, True, 2**63)),
    *((lambda at, n=n: at.one(n), "which no checkpoint can have as its name: name a folder") for n in ("/", "..")),
    *((lambda at, n=n: at.one(assets=n), "cannot be the name of a file of a") for n in ("back", "bytes")),
    (lambda at: at.one(assets="missing"), "/missing': name a folder that exists"),
    (lambda at: at.one(assets=""), "assets is '': name a folder that exists"),
    (named_metadata, "of the name '__metadata__', which a safetensors file keeps"),
    (
        lambda at: CheckpointManager(at.folder / "file" / "run", at.optimizer),
        "cannot be written on host … File exists: '",
    ),
    (lambda at: zero.save(at.folder / "file" / "b" / "c", at.optimizer), "/file/b cannot be written on host … File ex"),
]


@pytest.mark.parametrize(("stage", "refused"), [(2, ALL), (0, MOMENTS), (3, OF_UNITS)], ids=["2", "0", "3"])
def test_what_is_refused_is_so_on_every_rank_and_nothing_changes(
    stage: int, refused: list[Row], tmp_path: Path
) -> None:
    for folder, name in (("back", b"a\\b.json"), ("bytes", b"\xff.json"), ("whole", b"config.json"), ("run-1", b"a")):
        (tmp_path / folder).mkdir()
        Path(os.fsdecode(os.fsencode(tmp_path / folder) + b"/" + name)).touch()
    (tmp_path / "file").touch()

    def nothing_is_written() -> None:
        assert [name for name in entries(tmp_path / "run") if not name.startswith(".saved-")] == names(0)

    def program(transport: Transport) -> None:
        at = At(transport, stage, tmp_path)
        at.step(0)
        at.checkpoints.save(0, blocking=True)
        before = plain_dict(at.optimizer)
        for call, words in refused:
            assert_in_order(words, error_of(call, at))
            at.optimizer.zero_grad()
            assert_same_states(plain_dict(at.optimizer), before)
            at.on_rank_0(nothing_is_written)
        at.step(1)
        at.checkpoints.save(1, blocking=True)
        zero.save(tmp_path / "a" / "b" / "saved", at.optimizer, assets=tmp_path / "whole")
        at.optimizer.close()
        assert "this optimizer is closed" in error_of(at.checkpoints.save, 2)
        at.checkpoints.close()
        for call in (at.save, at.checkpoints.restore):
            assert "this CheckpointManager is closed: build a new one" in error_of(call)

    on_threads(2, program, timeout=PATIENT)  # for which a rank would wait that is not told
    others = {"a", "back", "bytes", "file", "other", "run", "run-1", "whole"} - (
        {"other"} if refused is not ALL else set()
    )
    assert set(entries(tmp_path)) == others
    assert entries(tmp_path / "run-1") == ["a"]
    assert (tmp_path / "a" / "b" / "saved" / "model" / "config.json").exists()
    for path in (step_folder(tmp_path / "run", 1), tmp_path / "a" / "b" / "saved"):
        zero.open_checkpoint(path).verify()


def test_the_first_backward_of_a_process_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch counts them, from 0."""
    at = Training()
    at.model.last.bias.register_hook(lambda _: zero.save(tmp_path / "saved", at.optimizer) and None)
    monkeypatch.setattr("zero.engine.current_graph_task_id", lambda: 0)
    assert_in_order(IN_BACKWARD, error_of(at.backward, 1))


def test_a_folder_that_a_rank_cannot_use_names_it_and_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, run = Disk(monkeypatch, tmp_path), tmp_path / "run"

    def program(transport: Transport) -> None:
        disk.this_thread_is(transport.rank)
        training = Training(transport, 0)

        def refused(path: Path, words: str, call: Callable[..., Any], name: str, number: int) -> None:
            training.on_rank_0(partial(disk.fail_when, lambda each: each.rank == 1 and each.name == name, number))
            assert_in_order(words, error_of(call, path, training.optimizer))
            training.on_rank_0(disk.failing.clear)

        unseen = "rank 1 (host … pid … ) cannot use this folder: it does not see it"
        refused(run, unseen, CheckpointManager, "open", errno.ENOENT)
        refused(run / "saved", unseen, zero.save, "open", errno.ENOENT)
        words = "rank 1 (host … cannot read or write there (Read-only file system)"
        refused(run, words, CheckpointManager, "write_at", errno.EROFS)

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
            words = "does not see what other ranks have written there: a file system that"
            assert words in error_of(call, optimizer)

    on_threads(2, program)
    assert entries(tmp_path) == [".lock"]
