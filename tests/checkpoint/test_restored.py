"""What training needs comes back from a checkpoint; what cannot is named, or is one error before anything changes."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import AdamW

from collectives import Transport, on_threads
from zero import CheckpointManager, ZeroOptimizer, load, open_checkpoint, save
from zero.checkpoint.read import restorer
from zero.checkpoint.user_state import digests, generators

from ..support.errors import assert_in_order, error_of, warned
from ..support.models import build
from ..support.plain import assert_same_model, assert_same_value
from ..support.pool import GlooPool
from ..support.quantised import assert_same_qlora, qlora
from ..support.warned import own
from .saved import Training, break_one, step_folder


def test_buffers_options_and_schedulers_come_back(tmp_path: Path) -> None:
    def made(transport: Transport, stage: int, seed: int) -> tuple[ZeroOptimizer, Any]:
        model = build(seed)
        model.narrow = nn.Parameter(torch.full((4,), seed, dtype=torch.int8), requires_grad=False)
        model.register_buffer("numbers", torch.arange(5) + seed)
        model.register_buffer("flag", torch.tensor(seed == 0))
        model.register_buffer("passing", torch.ones(2), persistent=False)
        given = {"stage": stage, "process_group": transport, "betas": (0.8 - seed / 2, 0.99)}
        optimizer = ZeroOptimizer(model, AdamW, **given)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5 + seed)

    def seen(optimizer: ZeroOptimizer, scheduler: Any) -> list[Any]:
        (group,) = optimizer.param_groups
        options = {key: value for key, value in group.items() if key != "params"}
        return [optimizer.full_state_dict(None), scheduler.state_dict(), options]

    def write(transport: Transport) -> Any:
        optimizer, scheduler = made(transport, 3, 0)
        optimizer.step()
        scheduler.step()
        save(tmp_path / "saved", optimizer, {"scheduler": scheduler, "epoch": 3}, step=2)
        return seen(optimizer, scheduler)

    def read(transport: Transport) -> Any:
        optimizer, scheduler = made(transport, 1, 1)
        restored = load(tmp_path / "saved", optimizer, {"scheduler": scheduler}, rng=False)
        assert (restored.step, restored.state, restored.not_restored) == (2, {"epoch": 3}, ())
        return seen(optimizer, scheduler)

    expected = on_threads(3, write)[0]
    assert_same_value(on_threads(2, read)[0], expected, "tensors, scheduler and options")


def test_a_narrow_model_has_the_saved_weights_rounded(tmp_path: Path) -> None:
    model, narrow = nn.Linear(3, 5), nn.Linear(3, 5).bfloat16()
    save(tmp_path / "saved", ZeroOptimizer(model, AdamW))
    load(tmp_path / "saved", ZeroOptimizer(narrow, AdamW))
    assert_same_model(narrow, model.bfloat16())


def draws() -> tuple[list[float], float, float]:
    return torch.rand(3).tolist(), float(np.random.rand()), random.random()


def drawn_twice(group: Any, rank: int, folder: str) -> tuple[Any, Any]:
    training = Training(group, 2)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank)
    before = digests(generators(), "rng")
    save(folder, training.optimizer)
    assert digests(generators(), "rng") == before, "a save leaves them as they are"
    expected = draws()
    load(folder, training.optimizer)
    return expected, draws()


def test_random_streams_go_on_with_as_many_ranks_and_are_named_otherwise(tmp_path: Path) -> None:
    expected, found = drawn_twice(None, 5, str(tmp_path / "saved"))
    assert found == expected
    with warned() as told:
        restored = on_threads(2, lambda transport: load(tmp_path / "saved", Training(transport, 1).optimizer))
    assert 1 <= len([each for each in told if "random generators" in each]) <= 2
    for each in restored:
        assert each.not_restored == ("random generators (saved by 1 ranks, and this run has 2)",)


@pytest.mark.first(0)
def test_each_process_has_its_own_random_streams_back(gloo: GlooPool, tmp_path: Path) -> None:
    found = gloo.run(drawn_twice, str(tmp_path / "saved"), ranks=(0, 1, 2))
    assert all(drawn == expected for expected, drawn in found)
    assert len({str(expected) for expected, _ in found}) == 3


def test_each_rank_has_its_own_state_back_or_one_made_from_all(tmp_path: Path) -> None:
    def write(transport: Transport) -> None:
        save(tmp_path / "saved", Training(transport, 2).optimizer, rank_state={"place": 10 + transport.rank})

    def reshard(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> Mapping[str, Any]:
        return {"place": [state["place"] for state in states][rank::world_size]}

    def read(transport: Transport, how: Any = None) -> Any:
        return load(tmp_path / "saved", Training(transport, 1).optimizer, rng=False, reshard=how).rank_state["place"]

    on_threads(3, write)
    assert on_threads(3, read) == [10, 11, 12]
    assert on_threads(2, lambda transport: read(transport, reshard)) == [[10, 12], [11]]


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scale": 2}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("it was not saved")


def test_the_inner_tensors_of_a_subclass_are_saved_and_what_cannot_be_is_named(tmp_path: Path) -> None:
    def built(seed: int) -> Any:
        model = qlora(seed=seed)
        model.extra = Extra(2, 2)
        return model

    model, *others = built(0), built(1), built(1)
    save(tmp_path / "saved", ZeroOptimizer(model, torch.optim.SGD, lr=0.1))
    missing = {"blocks.5.weight", "extra._extra_state"}
    assert set(open_checkpoint(tmp_path / "saved").not_saved) == missing

    def program(transport: Transport) -> Sequence[str]:
        other = others[transport.rank]
        other.blocks[5].weight = model.blocks[5].weight  # every rank has it from elsewhere
        restored = load(tmp_path / "saved", ZeroOptimizer(other, torch.optim.SGD, lr=0.1, process_group=transport))
        assert_same_qlora(other, model)
        return restored.not_restored

    with warned() as told:
        found = on_threads(2, program)
    assert any("not restored from" in text and "_extra_state (it could not be saved)" in text for text in told)
    for each in found:
        assert {f"{name} (it could not be saved)" for name in missing} <= set(each)


def test_an_option_or_a_state_that_no_restore_would_find_is_refused(tmp_path: Path) -> None:
    class Dotted(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["b.c"] = torch.zeros_like(parameter)

    pairs = [("a", nn.Parameter(torch.ones(3))), ("a.b", nn.Parameter(torch.ones(2)))]
    optimizer = ZeroOptimizer(pairs, Dotted, lr=0.1)
    torch.cat([each for _, each in pairs]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    words = "SaveError: … state 'b.c' of 'a' could be taken for one of another parameter"
    assert_in_order(words, error_of(save, tmp_path / "saved", optimizer))
    for name in ("$note", 7, "optimizer_module"):
        optimizer.param_groups[0][name] = 1
        words = f"TypeError: … optimizer.param_groups[0] has the option {name!r}: a saved option has"
        assert_in_order(words, error_of(save, tmp_path / "saved", optimizer))
        del optimizer.param_groups[0][name]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_a_damaged_file_is_named_on_every_rank_and_the_checkpoint_before_is_restored(copied: Path) -> None:
    break_one(copied, 200)

    def program(transport: Transport) -> None:
        optimizer = Training(transport, 1).optimizer
        before = optimizer.check_replicas()
        with CheckpointManager(copied, optimizer) as checkpoints:
            words = "CheckpointError: … safetensors is broken at block … older steps: 100"
            assert_in_order(words, error_of(checkpoints.restore, 200))
            assert (optimizer.check_replicas(), len(optimizer.state)) == (before, 0)

    on_threads(2, program)
    with CheckpointManager(copied, Training().optimizer) as checkpoints:
        with pytest.warns(RuntimeWarning, match=r"step-00000200.*; step-00000100 is tried instead") as told:
            restored = checkpoints.restore()
        assert restored is not None
        assert (restored.step, restored.state) == (100, {"n": 100})
    assert {found.filename for found in own(told)} == {__file__}


OTHER_MODEL = "it is that of another model. To load what both have, pass strict=False; rename= … number of rows"
SHAPE = "'last.weight' has shape (7, 13) … but (5, 13) in the model: "
DTYPE = "'offset' is torch.float32 in the checkpoint, but torch.int64 in the model: give it the saved"
OTHERS: list[tuple[Callable[[Any], Any], dict[str, Any], str]] = [
    (lambda model: setattr(model, "last", nn.Linear(13, 5)), {}, SHAPE + OTHER_MODEL),
    (lambda model: model.register_buffer("offset", torch.zeros(13).long()), {}, DTYPE),
    (lambda model: delattr(model, "unused"), {}, f"no 'unused', which the checkpoint has: {OTHER_MODEL}"),
    (lambda model: torch.optim.SGD, {}, "was trained by torch.optim.adamw.AdamW, but this optimizer is"),
    (lambda model: [{"params": [model.scale]}, {"params": [model.one]}], {}, "the state dict has 1 param groups, this"),
    (lambda _: None, {"rank_state": {"rank": 0}}, "saved for 3 ranks, and this run has 2: pass reshard="),
    (lambda _: None, {"state": {"scaler": 1}}, "state['scaler'] was not saved: the checkpoint has 'n'"),
]


def test_what_does_not_fit_is_named_on_every_rank_and_nothing_changes(run: Path) -> None:
    def program(transport: Transport) -> None:
        for change, arguments, words in OTHERS:
            model = build(0)
            given = change(model)
            cls = given if isinstance(given, type) else torch.optim.AdamW
            groups = given if isinstance(given, list) else model
            optimizer = ZeroOptimizer(groups, cls, module=model, process_group=transport)
            before = optimizer.check_replicas()
            assert_in_order(words, error_of(load, step_folder(run, 200), optimizer, **arguments))
            assert (optimizer.check_replicas(), len(optimizer.state)) == (before, 0)

    on_threads(2, program)


def test_a_folder_that_was_given_another_number_is_told_and_changes_nothing(copied: Path) -> None:
    step_folder(copied, 200).rename(step_folder(copied, 300))
    optimizer = Training(None, 2).optimizer
    before = optimizer.check_replicas()
    with CheckpointManager(copied, optimizer) as checkpoints:
        words = "step-00000300 was saved as step 200: give its folder that name again"
        assert words in error_of(checkpoints.restore)
    assert optimizer.check_replicas() == before
    with pytest.warns(RuntimeWarning, match=r"rank_state \(saved by 3 ranks, and here are 1: pass reshard=\)"):
        assert load(step_folder(copied, 300), optimizer, rng=False).step == 200


def test_what_rank_0_alone_finds_before_it_has_chosen_a_checkpoint_ends_the_restore_on_all_ranks(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(directory: Path) -> dict[int, Path]:
        raise OSError(errno.EIO, "it fails")

    def program(transport: Transport) -> None:
        optimizer = Training(transport, 1).optimizer
        with CheckpointManager(copied, optimizer) as checkpoints:
            for step in ("200", np.int64(200)):
                assert f"step must be an int of 0 or more, not {step!r}" in error_of(checkpoints.restore, step)
            optimizer.exchange(b"")
            monkeypatch.setattr(restorer, "steps_in", fails)
            assert f"{copied} cannot be read (it fails)" in error_of(checkpoints.restore)
            optimizer.check_replicas()  # no rank is left behind in the restore

    on_threads(2, program)
