"""`zero.verify`: equal bits pass, a difference is reported where it is, and any other problem is one clear error.

The loops run in this process if one rank is enough.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import zero
from collectives import Kind, Loopback, Tag
from zero import Verification, verify
from zero.commands import cli, runner
from zero.commands.verify import ranks as verify_ranks
from zero.commands.verify import verification
from zero.commands.verify.spec import reference, resolve

from ..support.narrowed import PRECISIONS
from . import verified


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of a launcher."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "launch_ranks", lambda *_: pytest.fail("processes were started"))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run the program of a single launched process here; its error is returned as a launcher would."""

    def run(module: str, settings: dict[str, str], ranks: int) -> None:
        assert (module, ranks) == ("zero.commands.verify.ranks", 1)
        error_file = tmp_path / f"error-{settings['loop']}.json"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
                patch.setenv(name, value)
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
            patch.setattr(sys, "argv", ["", json.dumps(settings)])
            patch.setattr(sys, "path", list(sys.path))
            code = runner.run_rank(verify_ranks.work)
        assert code == error_file.exists()
        if code:
            details = json.loads(error_file.read_text())["message"]["extraInfo"]
            raise runner.RankError(0, details["line"], details["py_callstack"])

    monkeypatch.setattr(runner, "launch_ranks", run)


def alone(**changes: Any) -> Verification:
    """Run a proof that needs only one process."""
    arguments: dict[str, Any] = {
        "build_model": verified.Squares,
        "batches": verified.pairs(),
        "world_sizes": (1,),
        "micro_batches": 2,
        "lr": 1e-2,
    }
    return verify(**{**arguments, **changes})


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.full
def test_mixed_precision_has_a_plain_loop_of_its_own(precision: str) -> None:
    odd = {"build_model": verified.build_odd, "batches": verified.batches, "loss_fn": verified.odd_loss}
    found = alone(**odd, micro_batches=6, max_norm=0.5, mixed_precision=PRECISIONS[precision])
    assert found.ok, str(found)
    assert [run.stage for run in found.runs] == [0, 1, 2, 3]
    assert all(run.step == verified.STEPS for run in found.runs)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mixed_precision_is_verified_on_ranks() -> None:
    found = alone(
        mixed_precision=PRECISIONS["bf16"], world_sizes=(1, 2, 3), micro_batches=6, batches=verified.pairs(12)
    )
    assert found.ok, str(found)
    assert len(found.runs) == 12


@pytest.mark.usefixtures("in_this_process")
def test_a_loss_that_runs_a_backward_itself_is_told_that_the_order_is_by_rounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = alone(loss_fn=verified.two_losses)
    assert found.ok, "one rank's rounds are the plain loop's"
    assert found.plain.several_backwards
    assert capsys.readouterr().out.splitlines()[-1] == str(found).splitlines()[-1] == verification.BY_ROUNDS
    assert "added up by rounds" in verification.BY_ROUNDS
    mixed = alone(loss_fn=verified.two_losses, stages=(1,), mixed_precision=PRECISIONS["bf16"])
    assert mixed.plain.several_backwards
    for loss_fn in (verified.sum_of_two_losses, verified.penalty, None):
        found = alone(loss_fn=loss_fn, stages=(2,))
        assert found.ok
        assert "rounds" not in str(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_several_ranks_it_is_told_where_the_runs_differ() -> None:
    ranks: dict[str, Any] = {"world_sizes": (2,), "stages": (2,), "batches": verified.pairs(64), "micro_batches": 4}
    found = alone(loss_fn=verified.two_losses, **ranks)
    assert not found.ok
    assert str(found).splitlines()[-2:] == ["1 of 1 runs differ from the plain loop", verification.BY_ROUNDS]
    assert alone(loss_fn=verified.sum_of_two_losses, **ranks).ok


# -- functions by name -------------------------------------------------------------------------------------------------


def test_a_function_or_class_is_found_again_by_its_name() -> None:
    for thing in (verified.batches, verified.Squares, torch.optim.AdamW, nn.Module.train):
        assert resolve(reference(thing, "it")) is thing


def as_main(monkeypatch: pytest.MonkeyPatch, path: Path | None, spec: Any = None) -> Any:
    """Make the file at ``path`` the module `__main__`; return its function `build`."""
    main = ModuleType("__main__")
    main.__spec__ = spec
    if path is not None:
        main.__file__ = str(path)
    exec("def build(): return 'built by main'" if path is None else path.read_text(), vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main.__dict__["build"]


def test_a_script_is_found_by_its_path_and_runs_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "a script.py"
    script.write_text(
        "runs = []\nruns.append(1)\n"
        "def build():\n    return __name__ == '__main__', len(runs)\n"
        "if __name__ == '__main__':\n    runs.append(2)\n"
    )
    text = reference(as_main(monkeypatch, script), "build_model")
    assert text == f"{script}:build"
    monkeypatch.setitem(sys.modules, "__zero_verify_script__", None)  # so that it is removed at the end
    monkeypatch.delitem(sys.modules, "__zero_verify_script__")
    assert resolve(text)() == resolve(text)() == (False, 1)


def test_a_module_that_was_started_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verified.__spec__ is not None
    build = as_main(monkeypatch, None, verified.__spec__)
    assert reference(build, "build_model") == "tests.commands.verified:build"


class Callable_:  # noqa: N801
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda: None, "build_model is <lambda>, which other processes cannot import"),
        (verified.pairs.__get__(1), "build_model is pairs, which other processes"),
        (functools.partial(verified.pairs, 3), "build_model is functools.partial(<function pairs"),
        (Callable_(), "which other processes cannot import by name: define it with def or class at the top level"),
        (3, "build_model must be a function or a class, not 3"),
        (None, "build_model must be a function or a class, not None"),
        (nn.Linear(1, 1), "build_model is Linear("),
    ],
)
@pytest.mark.usefixtures("no_processes")
@pytest.mark.full
def test_what_other_processes_cannot_import_is_an_error(function: Any, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        alone(build_model=function)


@pytest.mark.usefixtures("no_processes")
def test_a_function_inside_a_function_and_one_that_was_typed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def inside() -> None: ...

    with pytest.raises(TypeError, match=r"loss_fn is .*<locals>.inside, which other processes cannot import by name"):
        alone(loss_fn=inside)
    typed = as_main(monkeypatch, None)
    with pytest.raises(
        TypeError,
        match=r"build_model is build, which other processes .* was typed into an interactive session has no such name",
    ):
        alone(build_model=typed)


# -- arguments that cannot be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer_class": torch.optim.LBFGS}, "LBFGS cannot be sharded"),
        ({"optimizer_class": nn.Linear}, "optimizer_class must be a class of optimizers, not <class"),
        (
            {"optimizer_class": torch.optim.SGD([torch.zeros(1)])},
            "not an instance of SGD: give the class torch.optim.SGD, and its arguments here",
        ),
        (
            {"learning_rate": 1.0, "stage": 1},
            "'stage' (what is no argument of verify() goes to AdamW: lr, learning_rate",
        ),
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"stages": (1, 4)}, "stage must be one of [0, 1, 2, 3], not 4"),
        ({"stages": 2}, "stages must be a sequence of whole numbers, not 2"),
        ({"stages": ()}, "stages must hold numbers of at least 0, not ()"),
        ({"world_sizes": (2, 0)}, "world_sizes must hold numbers of at least 1, not (2, 0)"),
        ({"world_sizes": "two"}, "world_sizes must be a sequence of whole numbers, not 'two'"),
        ({"micro_batches": 2.0}, "micro_batches must be a sequence of whole numbers, not [2.0]"),
        (
            {"batches": verified.pairs(7)},
            "batches has 7 micro-batches, and a step takes 2 of them: give a multiple of that, or set micro_batches",
        ),
        ({"batches": verified.pairs(7), "micro_batches": 9}, "a step takes 9 of them: give a multiple of that, or set"),
        ({"batches": []}, "batches has 0 micro-batches"),
        ({"batches": 3}, "batches must be a sequence of micro-batches, or a function that returns one, not int"),
        ({"batches": iter([1])}, "one, not list_iterator"),
        ({"batches": [(object(), 1)] * 2}, "batches must hold only tensors, numbers, text, lists, tuples and dicts"),
        ({"betas": verified.pairs}, "AdamW"),
        ({"max_norm": -1.0}, "max_norm must be at least 0"),
        ({"bucket_cap_mb": 0}, 'bucket_cap_mb must be a positive number of MiB, None or "auto", not 0'),
        ({"threads": 0}, "threads must hold numbers of at least 1, not [0]"),
        ({"timeout": 0}, "timeout must be a positive number of seconds, not 0"),
    ],
)
@pytest.mark.usefixtures("no_processes")
@pytest.mark.full
def test_an_argument_that_cannot_be_is_an_error_before_any_process_is_started(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        alone(**changes)


@pytest.mark.usefixtures("no_processes")
def test_it_starts_ranks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="call it in one process, without torchrun"):
        alone()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", runner.RUN_PREFIX + "1")
    with pytest.raises(RuntimeError, match='put the call under `if __name__ == "__main__":`'):
        alone()


# -- one rank, in this process -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_this_process")
def test_one_line_a_run_and_a_conclusion(capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.random.get_rng_state()
    found = alone(max_norm=0.1)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "AdamW, first in the plain loop, twice; stages: 0, 1, 2, 3; ranks: 1; micro-batches a step: 2",
        "the plain loop, again: same bits, 2 steps, 42 parameters",
        *(f"stage {stage}, 1 rank: same bits, 2 steps, 42 parameters" for stage in range(4)),
        "no bit differs from the plain loop in 4 runs",
    ]
    assert str(found).splitlines() == lines[1:]
    assert found.ok
    assert [(run.stage, run.world_size) for run in found.runs] == [(stage, 1) for stage in range(4)]
    torch.random.set_rng_state(state)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "changes",
    [
        {"batches": verified.pairs},
        {"batches": torch.ones(4, 2, 3)},
        {"batches": [{"scale": 0.5, "inputs": torch.ones(2, 3)}] * 2},
        {"build_model": verified.with_dropout, "loss_fn": verified.seeded_by_the_batch},
        {"optimizer_class": torch.optim.SGD, "lr": torch.tensor(0.1), "momentum": 0.9},
        {"units": verified.is_linear},
        {"build_model": verified.Masked},
    ],
)
@pytest.mark.by_default("changes0")
def test_batches_of_every_kind_and_what_goes_through(
    changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert alone(**changes, stages=[3], quiet=True).ok
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("build_model", "step", "conclusion"),
    [
        (
            verified.with_dropout,
            1,
            "The model is not deterministic by itself, so there is nothing to compare the stages",
        ),
        (verified.other_at_each_call, 0, "build_model() makes other parameters each time, so there is nothing"),
    ],
)
def test_a_model_that_is_not_deterministic_by_itself_is_not_blamed_on_a_stage(
    build_model: Callable[[], nn.Module], step: int, conclusion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = alone(build_model=build_model)
    assert not found.ok
    assert found.runs == ()
    assert found.plain.step == step
    assert found.plain.difference is not None
    when = "after step 1: layers." if step else "as built, before any step: layers.3.bias[1] is "
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"the plain loop, again: DIFFERS {when}")
    assert lines[2].startswith(conclusion)
    assert len(lines) == 3


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"batches": [(torch.ones(2, 3), 1.0)] * 3 + [(torch.ones(2, 4), 1.0)]},
            r"the plain loop, step 2, batches\[3\]: RuntimeError: mat1 .* \(at .*verified.py:\d+, in forward\)",
        ),
        (
            {"batches": [3, 4]},
            r"the plain loop, step 1, batches\[0\]: TypeError: linear\(\): argument 'input' .* not int",
        ),
        ({"batches": verified.seven}, "the plain loop, batches: ValueError: batches has 7 micro-batches, and a step"),
        ({"batches": verified.generator_of_pairs}, "the plain loop, batches: TypeError: batches must be a sequence"),
        (
            {"build_model": verified.no_module},
            r"build_model\(\): TypeError: build_model\(\) must return an nn.Module, not",
        ),
        (
            {"build_model": verified.ends_the_process},
            r"build_model\(\): SystemExit: 0 \(at .*verified.py:\d+, in ends_the",
        ),
        ({"loss_fn": verified.no_loss}, r"loss_fn\(model, batch\) must return the loss, one element .* shape \[\]"),
        ({"loss_fn": verified.predictions}, r"must return the loss, one element with a graph .* shape \[4, 2\]"),
        ({"build_model": verified.Predicts}, r"without loss_fn the model must return the loss, .* not dict"),
        ({"lr": 0.0, "weight_decay": 0.0}, "the plain loop.*: ValueError: no parameter has moved after 2 steps"),
        (
            {"batches": [(torch.full((2, 3), float("inf")), 1.0)] * 4},
            r"the plain loop.*: ValueError: '.*' holds NaN or infinity after step 1",
        ),
        (
            {"build_model": verified.other_on_the_ranks, "loss_fn": verified.sum_of, "batches": torch.ones(4, 2, 3)},
            r"rank 0: stage 0 on 1 rank, .*: ValueError: weight is float32 \[1, 2\] in the plain loop and .* here",
        ),
    ],
)
@pytest.mark.full
def test_what_fails_in_a_process_says_where_it_was(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RuntimeError, match=said) as raised:
        alone(**changes)
    assert "\n" not in str(raised.value)
    assert "Traceback" in str(raised.value.__cause__)


@pytest.mark.usefixtures("in_this_process")
def test_processes_that_end_without_a_result_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "launch_ranks", lambda *_: None)
    with pytest.raises(RuntimeError, match="the processes ended before their runs did, and without an error"):
        alone()


# -- the time limit ----------------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], str | None]:
    """Return a function that waits some seconds for the error that a `Watchdog` records before it ends the process."""
    ended, lines = threading.Event(), list[str]()
    monkeypatch.setattr(verify_ranks, "record_error", lambda error: lines.append(str(error)))
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    return lambda seconds: lines[0] if ended.wait(seconds) else None


def test_a_place_that_takes_too_long_is_told_with_the_line_where_it_hangs(told: Callable[[float], str | None]) -> None:
    watchdog = verify_ranks.Watchdog(0.1)
    watchdog.at("step 3")
    try:
        line = told(20)
    finally:
        watchdog.stop()
    assert line is not None
    assert re.match(r"step 3: not done after 0.1 s \(at .*test_verify.py:\d+, in \S+\); .* longer timeout$", line)


@pytest.mark.full
def test_a_rank_that_waits_for_another_is_not_the_one_that_hangs(told: Callable[[float], str | None]) -> None:
    waits, comes_late = Loopback[None](2, timeout=20).transports
    tag = Tag(Kind.EXCHANGE, "late")

    def step() -> None:
        watchdog = verify_ranks.Watchdog(0.1)
        watchdog.at("step 3")
        try:
            waits.exchange(b"", tag)
        finally:
            watchdog.stop()

    thread = threading.Thread(target=step)  # which nothing of the library has called
    thread.start()
    line = told(1)
    comes_late.exchange(b"", tag)
    thread.join(20)
    assert line is None
    assert not thread.is_alive()


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_this_process")
def test_the_command_ends_with_0_where_no_bit_differs_and_with_1_where_one_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tests.commands.verified:right_arguments"], "verify") == 0
    assert capsys.readouterr().out.endswith("no bit differs from the plain loop in 4 runs\n")
    for function, code in (("right_arguments", 0), ("not_deterministic", 1)):
        monkeypatch.setattr(sys, "argv", ["zero", "verify", f"tests.commands.verified:{function}"])
        assert cli.main() == code
    assert "The model is not deterministic by itself" in capsys.readouterr().out


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            "tests.commands.verified",
            "'tests.commands.verified' must be MODULE:FUNCTION, as in `zero verify my_model:arguments`",
        ),
        ("no_such_module:f", f"no_such_module:f() failed in {os.getcwd()}: ModuleNotFoundError: No module named"),
        (
            "tests.commands.verified:no_such",
            "AttributeError: module 'tests.commands.verified' has no attribute 'no_such'",
        ),
        ("tests.commands.verified:STEPS", "TypeError: 'int' object is not callable"),
        ("sys:no_such", "AttributeError: module 'sys' has no attribute 'no_such'"),
        ("tests.commands.verified:raises", ": KeyError: 'lr'"),
        ("tests.commands.verified:leaves", ": SystemExit: 0"),
        ("tests.commands.verified:nothing_to_verify", "must return a dict of zero.verify's arguments, not NoneType"),
        ("tests.commands.verified:arguments_with_a_gap", "verify() missing 1 required positional argument: 'batches'"),
        (
            "tests.commands.verified:unknown_arguments",
            "(what is no argument of verify() goes to AdamW: lr, stage, learning_rate)",
        ),
        (
            "tests.commands.verified:a_lambda",
            "loss_fn is a_lambda.<locals>.<lambda>, which other processes cannot import by name",
        ),
    ],
)
def test_a_function_that_gives_no_arguments_is_one_line(
    function: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([function], "verify") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.full
def test_the_module_that_is_the_command_is_the_function_to_whoever_imports_it() -> None:
    assert importlib.import_module("zero.verify") is verify
    assert zero.verify is verify
