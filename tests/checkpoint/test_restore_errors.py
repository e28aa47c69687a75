"""What cannot be restored is one error on every rank that names what and where, and nothing changes."""

from __future__ import annotations

import errno
import json
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
from zero import CheckpointError, CheckpointManager, ZeroOptimizer, open_checkpoint
from zero.checkpoint.read import restorer
from zero.checkpoint.write.save_folder import SaveError
from zero.core.bits import same_bits

from ..support.models import Odd
from ..support.warned import own
from .saved import BLOCK, OPTIMIZER, save_small
from .saves import Training


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the checkpoints 100 and 200, written by three ranks."""
    folder = tmp_path_factory.mktemp("run")

    def program(transport: Transport) -> None:
        training = Training(transport, 2)
        with CheckpointManager(folder, training.optimizer) as checkpoints:
            for step in (100, 200):
                training.step(step)
                checkpoints.save(step, {"n": step}, {"rank": transport.rank}, blocking=True)

    on_threads(3, program)
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copied"))


def no_change(path: Path) -> None:
    pass


def newer(path: Path) -> None:
    manifest = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**manifest, "version": 2}))


def flipped(path: Path) -> None:
    file = path / "optimizer" / "optimizer-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-200] ^= 4
    file.write_bytes(data)


def cut_off(path: Path) -> None:
    file = path / "model" / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def gone(path: Path) -> None:
    (path / "state.safetensors").unlink()


def same(transport: Transport) -> ZeroOptimizer:
    return Training(transport, 1).optimizer


def changed(change: Callable[[Odd], object]) -> Callable[[Transport], ZeroOptimizer]:
    """Return what builds an optimizer of another model."""

    def build(transport: Transport) -> ZeroOptimizer:
        model = Training(None, 0).model
        change(model)
        return ZeroOptimizer(model, torch.optim.AdamW, process_group=transport, lr=1e-2)

    return build


def two_groups(transport: Transport) -> ZeroOptimizer:
    first, *rest = (model := Training(None, 0).model).parameters()
    groups = [{"params": [first]}, {"params": rest}]
    return ZeroOptimizer(groups, torch.optim.AdamW, module=model, process_group=transport, lr=1e-2)


def other_class(transport: Transport) -> ZeroOptimizer:
    return Training(transport, 1, torch.optim.SGD).optimizer


WEIGHTS_ALONE = (
    r"\. To begin with its weights: weights = zero\.open_checkpoint\('/.*/step-00000200'\)\.model_state_dict\(\); "
    r"rename, .*; model\.load_state_dict\(weights, strict=False\), before the optimizer is built$"
)
CASES: dict[str, tuple[Callable[[Path], None], Callable[[Transport], ZeroOptimizer], dict[str, Any], str]] = {
    "newer version": (newer, same, {}, r"checkpoint\.json: .*version 2.*; older steps: 100"),
    "one bit": (
        flipped,
        same,
        {},
        r"optimizer-00001-of-00001\.safetensors is broken at block 0 \(.*\); older steps: 100",
    ),
    "cut off": (
        cut_off,
        same,
        {},
        r"model-00001-of-00001\.safetensors has [\d,]+ bytes instead of .*; older steps: 100",
    ),
    "a file is gone": (gone, same, {}, r"state\.safetensors cannot be read \(No such file.*; older steps: 100"),
    "another shape": (
        no_change,
        changed(lambda model: setattr(model, "last", nn.Linear(13, 5))),
        {},
        r"'last\.weight' has shape \(7, 13\) in the checkpoint, but \(5, 13\) in the model: it is that of another model"
        rf"{WEIGHTS_ALONE}",
    ),
    "another model": (
        no_change,
        changed(lambda model: delattr(model, "unused")),
        {},
        rf"the model has no 'unused', which the checkpoint has: it is that of another model{WEIGHTS_ALONE}",
    ),
    "another class": (no_change, other_class, {}, r"was trained by torch\.optim\.adamw\.AdamW, but this optimizer is"),
    "another dtype": (
        no_change,
        changed(lambda model: model.register_buffer("offset", torch.zeros(13, dtype=torch.int64))),
        {},
        r"'offset' is torch\.float32 in the checkpoint, but torch\.int64 in the model",
    ),
    "other groups": (no_change, two_groups, {}, r"the state dict has 1 param groups, this optimizer 2"),
    "other ranks": (
        no_change,
        same,
        {"rank_state": {"rank": 0}},
        r"rank_state was saved for 3 ranks, and this run has 2: pass reshard=",
    ),
    "a key": (no_change, same, {"state": {"scaler": 1}}, r"state\['scaler'\] was not saved: the checkpoint has 'n'"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_restored_is_named_on_every_rank_and_nothing_changes(case: str, copied: Path) -> None:
    damage, build, arguments, words = CASES[case]
    damage(copied / "step-00000200")

    def program(transport: Transport) -> str:
        optimizer = build(transport)
        before = optimizer.check_replicas()
        with CheckpointManager(copied, optimizer) as checkpoints:
            with pytest.raises(ValueError, match=words) as caught:
                checkpoints.restore(200, **arguments)
            assert (optimizer.check_replicas(), len(optimizer.state)) == (before, 0)
            assert damage is no_change or isinstance(caught.value, CheckpointError)
        return str(caught.value)

    first, second = on_threads(2, program)
    assert first.removeprefix("rank 0: ") == second.removeprefix("rank 0: ")
    if damage in (flipped, cut_off, gone):
        training = Training(None, 0)
        with CheckpointManager(copied, training.optimizer) as checkpoints:
            with pytest.warns(RuntimeWarning, match=r"step-00000200.*; step-00000100 is tried instead") as warned:
                restored = checkpoints.restore()
            assert restored is not None
            assert (restored.step, restored.state) == (100, {"n": 100})
        assert {found.filename for found in own(warned)} == {__file__}


def test_a_broken_block_behind_the_header_is_found_before_anything_changes(tmp_path: Path) -> None:
    training = Training(None, 0)
    training.step(0)
    save_small(tmp_path / "a", training.optimizer)
    file = tmp_path / "a" / OPTIMIZER
    data = bytearray(file.read_bytes())
    header = open_checkpoint(tmp_path / "a").header(OPTIMIZER).data
    assert len(data) // BLOCK > header // BLOCK
    data[-1] ^= 1
    file.write_bytes(data)

    def program(transport: Transport) -> None:
        optimizer = same(transport)
        before = optimizer.check_replicas()
        with pytest.raises(CheckpointError, match=f"is broken at block {len(data) // BLOCK} "):
            zero.load(tmp_path / "a", optimizer)
        assert (optimizer.check_replicas(), len(optimizer.state)) == (before, 0)

    on_threads(2, program)


def test_a_folder_that_was_given_another_number_is_told_and_changes_nothing(copied: Path) -> None:
    (copied / "step-00000200").rename(copied / "step-00000300")
    training = Training(None, 2)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    with (
        CheckpointManager(copied, training.optimizer) as checkpoints,
        pytest.raises(ValueError, match="step-00000300 was saved as step 200: give its folder that name again"),
    ):
        checkpoints.restore()
    for parameter, old in zip(training.model.parameters(), before, strict=True):
        assert same_bits(parameter.detach().reshape(-1), old.reshape(-1))
    assert zero.load(copied / "step-00000300", training.optimizer, rng=False).step == 200


@pytest.mark.parametrize("what", ["a number as text", "a NumPy number", "a disk that fails"])
def test_what_rank_0_alone_finds_before_it_has_chosen_a_checkpoint_ends_the_restore_on_all_ranks(
    what: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step: Any = {"a number as text": "200", "a NumPy number": np.int64(200)}.get(what)

    def fails(directory: Path) -> dict[int, Path]:
        raise OSError(errno.EIO, "it fails")

    def program(transport: Transport) -> str:
        optimizer = same(transport)
        with CheckpointManager(copied, optimizer) as checkpoints:
            with pytest.raises(ValueError, match=r"step must be an int|cannot be read") as caught:
                checkpoints.restore(step)
            optimizer.check_replicas()  # no rank is left behind in the restore
        return str(caught.value)

    if step is None:
        monkeypatch.setattr(restorer, "steps_in", fails)
    words = on_threads(2, program)
    if step is None:
        assert words == [f"{copied} cannot be read (it fails)", f"rank 0: {copied} cannot be read (it fails)"]
    else:
        assert words == [f"step must be an int of 0 or more, not {step!r}"] * 2


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
