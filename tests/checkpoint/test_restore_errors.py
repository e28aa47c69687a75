"""What cannot be restored is one error on every rank that names what and where, and nothing changes."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zero
from collectives import Transport, on_threads
from zero import CheckpointError, CheckpointManager, ZeroOptimizer
from zero.checkpoint.format.manifest import NAME
from zero.checkpoint.read import restorer
from zero.checkpoint.write.save_folder import SaveError

from ..support.models import Odd
from ..support.programs import locked_build
from ..support.warned import own
from .saved import MODEL, OPTIMIZER
from .saves import Training, small_blocks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checkpoints 100 and 200, written by three ranks in small blocks."""
    folder = tmp_path_factory.mktemp("run")

    def program(transport: Transport) -> None:
        training = Training(transport, 2)
        with CheckpointManager(folder, training.optimizer) as checkpoints:
            for step in (100, 200):
                training.step(step)
                checkpoints.save(step, {"n": step}, {"rank": transport.rank}, blocking=True)

    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, 4096)
        on_threads(3, program)
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copied"))


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "newer version": (NAME, lambda data: data.replace(b'"version": 1', b'"version": 2'), r"\.json: .*version 2"),
    "one bit": (
        OPTIMIZER,
        lambda data: data[:-200] + bytes([data[-200] ^ 4]) + data[-199:],
        r"optimizer-00001-of-00001\.safetensors is broken at block [1-9]\d* \(",
    ),
    "cut off": (MODEL, lambda data: data[:-1], r"model-00001-of-00001\.safetensors has [\d,]+ bytes instead of "),
    "a file is gone": ("state.safetensors", None, r"state\.safetensors cannot be read \(No such file"),
}


def same(transport: Transport) -> ZeroOptimizer:
    return Training(transport, 1).optimizer


def changed(change: Callable[[Odd], object]) -> Callable[[Transport], ZeroOptimizer]:
    """Return what builds an optimizer of another model."""

    def build(transport: Transport) -> ZeroOptimizer:
        model = locked_build(0)
        change(model)
        return ZeroOptimizer(model, torch.optim.AdamW, process_group=transport, lr=1e-2)

    return build


def two_groups(transport: Transport) -> ZeroOptimizer:
    first, *rest = (model := locked_build(0)).parameters()
    groups = [{"params": [first]}, {"params": rest}]
    return ZeroOptimizer(groups, torch.optim.AdamW, module=model, process_group=transport, lr=1e-2)


def other_class(transport: Transport) -> ZeroOptimizer:
    return Training(transport, 1, torch.optim.SGD).optimizer


shape = changed(lambda model: setattr(model, "last", nn.Linear(13, 5)))
without = changed(lambda model: delattr(model, "unused"))
dtype = changed(lambda model: model.register_buffer("offset", torch.zeros(13, dtype=torch.int64)))
OTHER_MODEL = r"it is that of another model\. To load what both have, pass strict=False; rename= .* number of rows$"
OTHERS: dict[str, tuple[Callable[[Transport], ZeroOptimizer], dict[str, Any], str]] = {
    "shape": (shape, {}, rf"'last\.weight' has shape \(7, 13\) .*, but \(5, 13\) in the model: {OTHER_MODEL}"),
    "model": (without, {}, rf"the model has no 'unused', which the checkpoint has: {OTHER_MODEL}"),
    "class": (other_class, {}, r"was trained by torch\.optim\.adamw\.AdamW, but this optimizer is"),
    "dtype": (dtype, {}, r"'offset' is torch\.float32 in the checkpoint, but torch\.int64 in the model"),
    "groups": (two_groups, {}, r"the state dict has 1 param groups, this optimizer 2"),
    "ranks": (same, {"rank_state": {"rank": 0}}, r"saved for 3 ranks, and this run has 2: pass reshard="),
    "a key": (same, {"state": {"scaler": 1}}, r"state\['scaler'\] was not saved: the checkpoint has 'n'"),
}


@pytest.mark.parametrize("case", [*DAMAGES, *OTHERS])
def test_what_cannot_be_restored_is_named_on_every_rank_and_nothing_changes(case: str, copied: Path) -> None:
    build, arguments, words = OTHERS.get(case, (same, {}, ""))
    if case in DAMAGES:
        name, change, words = DAMAGES[case]
        words += ".*; older steps: 100"
        data = (copied / "step-00000200" / name).read_bytes()
        (copied / "step-00000200" / name).unlink()
        if change is not None:
            (copied / "step-00000200" / name).write_bytes(change(data))

    def program(transport: Transport) -> str:
        optimizer = build(transport)
        before = optimizer.check_replicas()
        with CheckpointManager(copied, optimizer) as checkpoints:
            with pytest.raises(ValueError, match=words) as caught:
                checkpoints.restore(200, **arguments)
            assert (optimizer.check_replicas(), len(optimizer.state)) == (before, 0)
            assert case in OTHERS or isinstance(caught.value, CheckpointError)
        return str(caught.value)

    first, second = on_threads(2, program)
    assert first.removeprefix("rank 0: ") == second.removeprefix("rank 0: ")
    if case in DAMAGES and case != "newer version":
        with CheckpointManager(copied, Training(None, 0).optimizer) as checkpoints:
            with pytest.warns(RuntimeWarning, match=r"step-00000200.*; step-00000100 is tried instead") as warned:
                restored = checkpoints.restore()
            assert restored is not None
            assert (restored.step, restored.state) == (100, {"n": 100})
        assert {found.filename for found in own(warned)} == {__file__}


def test_a_folder_that_was_given_another_number_is_told_and_changes_nothing(copied: Path) -> None:
    (copied / "step-00000200").rename(copied / "step-00000300")
    training = Training(None, 2)
    before = training.optimizer.check_replicas()
    with (
        CheckpointManager(copied, training.optimizer) as checkpoints,
        pytest.raises(ValueError, match="step-00000300 was saved as step 200: give its folder that name again"),
    ):
        checkpoints.restore()
    assert training.optimizer.check_replicas() == before
    assert zero.load(copied / "step-00000300", training.optimizer, rng=False).step == 200


@pytest.mark.parametrize("step", ["200", np.int64(200), None], ids=["text", "NumPy", "a disk that fails"])
def test_what_rank_0_alone_finds_before_it_has_chosen_a_checkpoint_ends_the_restore_on_all_ranks(
    step: Any, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(directory: Path) -> dict[int, Path]:
        raise OSError(errno.EIO, "it fails")

    def program(transport: Transport) -> str:
        optimizer = same(transport)
        with CheckpointManager(copied, optimizer) as checkpoints:
            with pytest.raises(ValueError, match=r"step must be an int|cannot be read") as caught:
                checkpoints.restore(step)
            optimizer.check_replicas()  # no rank is left behind in the restore
        return str(caught.value)

    words = [f"step must be an int of 0 or more, not {step!r}"] * 2
    if step is None:
        monkeypatch.setattr(restorer, "steps_in", fails)
        words = [f"{copied} cannot be read (it fails)", f"rank 0: {copied} cannot be read (it fails)"]
    assert on_threads(2, program) == words


@pytest.mark.parametrize("name", ["$note", 7, "optimizer_module"])
def test_an_option_that_no_restore_would_find_is_refused(name: Any, tmp_path: Path) -> None:
    training = Training(None, 1)
    training.optimizer.param_groups[0][name] = 1
    words = re.escape(f"optimizer.param_groups[0] has the option {name!r}: a saved option has")
    with pytest.raises(TypeError, match=words):
        zero.save(tmp_path / "one", training.optimizer)
    assert not list(tmp_path.iterdir())


def test_a_state_whose_key_could_be_that_of_another_parameter_is_refused(tmp_path: Path) -> None:
    class Dotted(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["b.c"] = torch.zeros_like(parameter)

    pairs = [("a", nn.Parameter(torch.ones(3))), ("a.b", nn.Parameter(torch.ones(2)))]
    optimizer = ZeroOptimizer(pairs, Dotted, lr=0.1)
    pairs[0][1].sum().backward()  # type: ignore[no-untyped-call]
    pairs[1][1].sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with pytest.raises(SaveError, match=r"state 'b\.c' of 'a' could be taken for one of another parameter"):
        zero.save(tmp_path / "saved", optimizer)
    assert list(tmp_path.iterdir()) == []
