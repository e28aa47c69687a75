"""`zero.verify` accepts what has the plain loop's bits, and says where bits differ, what failed, or what cannot be."""

from __future__ import annotations

import functools
import importlib
import io
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Kind, Loopback, Pairwise, Tag
from zero import verify
from zero.commands import cli, runner
from zero.commands.verify import ranks as verify_ranks
from zero.commands.verify import verification
from zero.commands.verify.bit_diff import Difference, Run, first_difference
from zero.job import load, reference, resolve, save

from ..support.by_module import BY_MODULE
from ..support.models import odd_loss
from ..support.narrowed import PRECISIONS
from ..support.rows import placed
from . import verified
from .verified import alone

ODD = {"build_model": verified.build_odd, "batches": verified.batches, "loss_fn": odd_loss, "micro_batches": 6}
SGD = torch.optim.SGD
IN_BF16 = {"mixed_precision": PRECISIONS["bf16"]}
ALIKE: tuple[dict[str, Any], ...] = (
    {"batches": [{"scale": 0.5, "inputs": torch.ones(2, 3)}] * 2},
    {"build_model": verified.with_dropout, "loss_fn": verified.seeded_by_the_batch, "batches": verified.pairs},
    {"units": verified.is_linear, "reshard_after_forward": verified.is_linear, "prefetch_depth": 2},
    {"batches": torch.ones(4, 2, 3), "collective": Pairwise, "bucket_cap_mb": "auto", "device": "cpu"},
    {**ODD, "max_norm": 0.5, "mixed_precision": BY_MODULE["by kind"]},
    {**ODD, "ignored": verified.the_scale, "max_norm": 0.5, "rounding": zero.StochasticRounding(3), **IN_BF16},
    {"build_model": verified.Experts, "param_groups": verified.in_blocks, **IN_BF16},
    {"param_groups": verified.the_last_layer_alone, "max_norm": 0.1, "optimizer_class": SGD, "lr": 0.5, **IN_BF16},
    {"optimizer_class": SGD, "lr": torch.tensor(0.1), "optimizer_kwargs": {"momentum": 0.9}},
    {"batches": [list(pair) for pair in verified.pairs()], "loss_fn": verified.changes_its_batch},
    {"param_groups": verified.in_blocks_of_the_main_class, **IN_BF16},
)
FAILURES: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"batches": [(torch.ones(2, 3), 1.0)] * 3 + [(torch.ones(2, 4), 1.0)]},
        r"the plain loop, step 2, batches\[3\]: RuntimeError: mat1 .* \(at .*verified.py:\d+, in forward\)",
    ),
    ({"batches": [3, 4]}, r"the plain loop, step 1, batches\[0\]: TypeError: linear\(\): argument 'input' .* not int"),
    (
        {"batches": verified.pairs, "micro_batches": 3},
        "the plain loop, batches: ValueError: batches has 4 micro-batches, and a step",
    ),
    (
        {"units": verified.is_linear, "reshard_after_forward": verified.answers_nothing},
        r"stage 3 on 1 rank, ZeroOptimizer\(\.\.\.\): TypeError: reshard_after_forward: the function must return",
    ),
    ({"batches": dict}, "the plain loop, batches: TypeError: batches must be a sequence"),
    ({"build_model": dict}, r"build_model\(\): TypeError: build_model\(\) must return an nn.Module, not"),
    ({"build_model": verified.leaves}, r"build_model\(\): SystemExit: 0 \(at .*verified.py:\d+, in leaves\)"),
    ({"loss_fn": verified.no_loss}, r"loss_fn\(model, batch\) must return the loss, one element .* shape \[\]"),
    ({"build_model": verified.Predicts}, r"without loss_fn the model must return the loss, .* not dict"),
    ({"lr": 0.0, "weight_decay": 0.0}, "the plain loop.*: ValueError: no parameter has moved after 2 steps"),
    (
        {"batches": [(torch.full((2, 3), float("inf")), 1.0)] * 4},
        r"the plain loop.*: ValueError: '.*' holds NaN or infinity after step 1",
    ),
)


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"build_model": lambda: None}, "build_model is <lambda>, which other processes cannot import by name: define it"),
    ({"build_model": functools.partial(verified.pairs, 3)}, "build_model is functools.partial(<function pairs"),
    ({"loss_fn": "loss"}, "loss_fn must be a function or a class, not 'loss'"),
    ({"learning_rate": 1.0, "stage": 1}, "'learning_rate' (what is no argument of verify() goes to AdamW: lr, "),
    ({"stages": 2}, "stages must be a sequence of whole numbers, not 2"),
    ({"mesh": (2, 2, 2)}, "mesh must be (shard,) or (replicate, shard), of numbers of at least 1, not (2, 2, 2)"),
    ({"mesh": "2x2"}, "mesh must be one or two whole numbers, not '2x2'"),
    ({"mesh": (2, 2), "world_sizes": (2,)}, "mesh (2, 2) is of 4 ranks: leave world_sizes=(2,) out"),
    ({"world_sizes": (2, 0)}, "world_sizes must hold numbers of at least 1, not (2, 0)"),
    ({"batches": verified.pairs(7)}, "batches has 7 micro-batches, and a step takes 2 of them: give a multiple of"),
    ({"batches": 3}, "batches must be a sequence of micro-batches, or a function that returns one, not int"),
    ({"batches": [(object(), 1)] * 2}, "batches must hold only tensors, numbers, text, lists, tuples and dicts"),
    (
        {"optimizer_kwargs": {"foreach": object()}},
        "the optimizer's arguments must hold only tensors, numbers, text, lists, tuples and",
    ),
    ({"mesh": (1, 1), "sharding_factor": 1}, "mesh= with sharding_factor=: both say which ranks share a copy"),
    ({"max_norm": -1.0}, "max_norm must be at least 0"),
    ({"prefetch_depth": 2, "stages": (1, 2)}, "prefetch_depth=2 with stage 2: no unit is gathered: leave it out"),
    ({"units": 3}, "units must be a function of a module that returns a bool, not 3"),
    ({"device": "tpu"}, "device must be 'cpu' or 'cuda', not 'tpu'"),
    ({"timeout": 0}, "timeout must be a positive number of seconds, not 0"),
)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("changes", placed("changes", ALIKE, 0, 2, 5, 6, 7, 9, 10))
def test_a_deterministic_model_of_any_batches_and_precision_is_alike(
    changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = alone(**changes, stages=[0, 3], quiet=True)
    assert found.ok, str(found)
    assert [(run.stage, run.step) for run in found.runs] == [(stage, found.plain.step) for stage in (0, 3)]
    assert capsys.readouterr().out == ""


def told(stages: Sequence[int], micro_batches: str, steps: str) -> list[str]:
    """Return the lines of a verification without a difference."""
    numbers, same = ", ".join(map(str, stages)), f"same bits, {steps}, 47 parameters"
    return [
        f"AdamW, first in the plain loop, twice; stages: {numbers}; ranks: 1; micro-batches a step: {micro_batches}",
        f"the plain loop, again: {same}",
        *(f"stage {stage}, 1 rank: {same}" for stage in stages),
        f"no bit differs from the plain loop in {len(stages)} runs",
    ]


@pytest.mark.usefixtures("in_this_process")
def test_one_line_a_run_and_a_conclusion_and_the_exit_code_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, lines = alone(max_norm=0.1), told(range(4), "2", "2 steps")
    assert capsys.readouterr().out.splitlines() == lines
    assert str(found).splitlines() == lines[1:]
    assert cli.main([RIGHT], "verify") == 0
    assert capsys.readouterr().out.splitlines() == lines
    monkeypatch.setattr(sys, "argv", ["zero", "verify", "tests.commands.verified:not_deterministic"])
    assert cli.main() == 1
    assert "The model itself is not deterministic" in capsys.readouterr().out


RIGHT = "tests.commands.verified:right_arguments"


@pytest.mark.usefixtures("in_this_process", "copied_from_the_host")
def test_flags_of_the_command_replace_what_the_function_returns(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--collective=pairwise", "--micro-batches=4", "--max-norm=0.1", "--device=cpu", "--threads=1")
    assert cli.main([RIGHT, "--stages=3,1", *flags], "verify") == 0
    assert capsys.readouterr().out.splitlines() == told((3, 1), "4; collective: pairwise", "1 step")
    for more in ("", ",step=cpu"):  # then the plain loop steps copies, too
        assert cli.main([RIGHT, "--stages=3", f"--offload=cpu,parameters=cpu{more}"], "verify") == 0
        there = ", stepped there" if more else ""
        assert f"; states and parameters in the host's memory{there}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("build_model", "step", "when", "conclusion"),
    [
        (verified.with_dropout, 1, "after step 1: layers.", verification.NOT_DETERMINISTIC),
        (verified.other_at_each_call, 0, "as built, before any step: layers.3.bias[1] is ", verification.BUILT_TWICE),
    ],
)
def test_a_model_that_is_not_deterministic_by_itself_is_not_blamed_on_a_stage(
    build_model: Any, step: int, when: str, conclusion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = alone(build_model=build_model)
    assert (found.ok, found.runs, found.plain.step) == (False, (), step)
    _, again, last = capsys.readouterr().out.splitlines()
    assert again.startswith(f"the plain loop, again: DIFFERS {when}")
    assert last == conclusion


@pytest.mark.usefixtures("in_this_process")
def test_a_loss_that_runs_a_backward_itself_is_told_that_the_order_is_by_rounds() -> None:
    for precision in (None, PRECISIONS["bf16"]):
        found = alone(loss_fn=verified.two_losses, stages=(1,), mixed_precision=precision)
        assert found.ok or precision, "one rank's rounds are the plain loop's"
        assert found.plain.several_backwards
    assert str(found).splitlines()[-1] == verification.BY_ROUNDS
    assert "added up by rounds" in verification.BY_ROUNDS
    for loss_fn in (verified.sum_of_two_losses, verified.penalty):
        found = alone(loss_fn=loss_fn, stages=(2,))
        assert found.ok
        assert "rounds" not in str(found)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_an_argument_that_cannot_be_is_an_error_before_any_process_is_started(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        alone(**changes)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("changes", "said"), FAILURES)
def test_what_fails_in_a_process_says_where_it_was(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RuntimeError, match=said) as raised:
        alone(**changes)
    assert "\n" not in str(raised.value)
    assert "Traceback" in str(raised.value.__cause__)


@pytest.mark.usefixtures("no_processes")
def test_it_starts_ranks_of_its_own_which_end_with_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "launch_ranks", lambda *_: None)
    with pytest.raises(RuntimeError, match="the processes ended without an error, but before their runs"):
        alone()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="call it in one process, without torchrun"):
        alone()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", runner.RUN_PREFIX + "1")
    with pytest.raises(RuntimeError, match='put the call under `if __name__ == "__main__":`'):
        alone()


def test_a_place_that_takes_too_long_is_told_and_a_rank_that_waits_for_another_is_not_the_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended, lines = threading.Event(), list[str]()
    monkeypatch.setattr(verify_ranks, "record_error", lambda error: lines.append(str(error)))
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    waits, comes_late = Loopback[None](2, timeout=20).transports
    tag = Tag(Kind.EXCHANGE, "late")

    def step(wait: Callable[[], object]) -> None:
        watchdog = verify_ranks.Watchdog(0.1)
        watchdog.at("step 3")
        try:
            wait()
        finally:
            watchdog.stop()

    thread = threading.Thread(target=step, args=[lambda: waits.exchange(b"", tag)])
    thread.start()  # which nothing of the library has called
    assert not ended.wait(1)
    comes_late.exchange(b"", tag)
    thread.join(20)
    assert not thread.is_alive()
    assert lines == []
    step(lambda: ended.wait(20))
    assert re.match(r"step 3: not done after 0.1 s \(at .*\d+, in \S+\); .* longer timeout$", lines[0])


def test_a_function_or_class_is_found_again_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for thing in (verified.batches, verified.Squares, torch.optim.AdamW, nn.Module.train):
        assert resolve(reference(thing, "it")) is thing
    main: Any = ModuleType("__main__")
    exec("def build(): pass", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(TypeError, match=r"is build, which other .* was typed into an interactive session has no such"):
        reference(main.build, "build_model")
    main.__spec__ = verified.__spec__
    assert reference(main.build, "build_model") == "tests.commands.verified:build"
    assert importlib.import_module("zero.verify") is zero.verify is verify, "the module that is the command"


def from_bits(pattern: int, dtype: torch.dtype) -> Tensor:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.tensor([pattern], dtype=torch.uint64).view(whole)[0].view(dtype)


FP32 = torch.float32


@pytest.mark.parametrize(
    ("one", "other", "dtype", "said"),
    [
        (0x3F800000, 0x3F800001, FP32, "is 1 in the plain loop and 1.00000012 here (1 ulp apart)"),
        (0x3F800000, 0x3F7FFFFF, FP32, "(1 ulp apart)"),  # across a power of two
        (0x80000000, 0x00000000, FP32, "is -0 in the plain loop and 0 here (zeros of different sign)"),
        (0x80000001, 0x00000001, FP32, "(2 ulps apart)"),  # the smallest numbers of both signs
        (0xFF800000, 0x7F800000, FP32, f"({2 * 0x7F800000:,} ulps apart)"),  # both infinities
        (0x7FC00000, 0x3F800000, FP32, "(one of them is NaN)"),
        (0x7FC00000, 0x7FC00001, FP32, "(NaNs of different bits)"),
        (0x3F80, 0x3F82, torch.bfloat16, "(2 ulps apart)"),
        (0x3C00, 0xBC00, torch.float16, f"({2 * 0x3C00:,} ulps apart)"),  # 1 and -1
        (0xFFEFFFFFFFFFFFFF, 0x7FEFFFFFFFFFFFFF, torch.float64, f"({2 * 0x7FEFFFFFFFFFFFFF:,} ulps"),  # beyond 2**63
    ],
)
def test_a_difference_is_told_in_values_and_ulps(one: int, other: int, dtype: torch.dtype, said: str) -> None:
    a, b = from_bits(one, dtype), from_bits(other, dtype)
    found, back = first_difference({"p": a}, {"p": b}), first_difference({"p": b}, {"p": a})
    assert None not in (found, back)
    assert said in str(found)
    assert found.ulps == back.ulps
    assert (found.parameter, found.index, found.count, found.numel) == ("p", (), 1, 1)
    assert first_difference({"p": a}, {"p": a.clone()}) is None


@pytest.mark.parametrize(("name", "index"), [("turned", (2, 1)), ("cut", (3, 2)), ("scalar", ())])
def test_the_first_of_the_elements_that_differ_is_named_by_its_index_and_another_model_is_not_compared(
    name: str, index: tuple[int, ...]
) -> None:
    values = torch.randn(59)
    plain = {"empty": torch.zeros(0, 3), "turned": values[:35].view(5, 7).t(), "cut": values[35:].view(4, 6)[:, ::2]}
    plain["scalar"] = values[0]
    other = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in plain.items()}
    assert first_difference(plain, other) is None, "another order in memory is no difference"
    later = list(plain)[list(plain).index(name) :]
    for key in later:
        other[key].view(-1)[-1] += 1
    other[name][index] += 1
    found = first_difference(plain, other)
    assert found is not None
    assert (found.parameter, found.index, found.numel) == (name, index, 35 + 12 + 1)
    assert (found.plain, found.other) == (plain[name][index].item(), other[name][index].item())
    assert found.count == len(later) + (name == "turned")
    for change, said in (
        ({"cut": torch.zeros(4, 4)}, r"cut is float32 \[4, 3\] in the plain loop and float32 \[4, 4\] here"),
        ({"more": torch.zeros(1)}, r"more is none in the plain loop and float32 \[1\] here"),
    ):
        with pytest.raises(ValueError, match=said + r".*build_model\(\) must build one model"):
            first_difference(plain, {**plain, **change})


def test_a_run_is_told_in_words_and_goes_between_processes() -> None:
    difference = Difference("w", (3, 1), "float32", 0.1, math.nan, None, 1234, 5678)
    run = Run(2, 3, 4, 5678, (1,), difference)
    assert str(run) == f"stage 2, 3 ranks: DIFFERS after step 4 on rank 1 alone: {difference}"
    assert str(difference).startswith("w[3, 1] is 0.1 in the plain loop and nan here ")
    assert str(difference).endswith("; 1,234 of 5,678 elements differ")
    save(run, written := io.BytesIO())
    assert repr(load(io.BytesIO(written.getvalue()))) == repr(run)
