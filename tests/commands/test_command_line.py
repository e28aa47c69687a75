"""Wrong input of every command is one line on what to change, exit code 2, and nothing is started or written."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

import zero
from zero import ZeroOptimizer, save
from zero.commands import cli, runner
from zero.commands.plan.settings import PlanConfig
from zero.commands.runner import _first_failure, record_error
from zero.commands.train.settings import TrainConfig
from zero.commands.verify.command import VerifyConfig
from zero.examples.train import choose_device
from zero.planning.hardware import presets

from ..planning.configs import SMALL
from ..support.errors import assert_in_order

TRAIN = ("--width=4", "--layers=1", "--batch=1", "--data={}/text", "--out={}/out")
VERIFIED = "tests.commands.verified"
MADE = "plan --module=zero.examples.train:ByteModel --sequence=64"
RIGHT = f"{VERIFIED}:right_arguments"
WRONG = {  # words with gaps
    "trian": "No such command 'trian'. Did you mean 'train'? See `zero --help`",
    "train --stepz=5": "No such option: --stepz … --steps … See `zero train --help`",
    "train --steps": "Option '--steps' requires an argument. See `zero train --help`",
    "train --steps=many": "Invalid value for '--steps': it must be a whole number, not 'many'. See `zero train --help`",
    "train --elastic=2:4": "No such option: --elastic",
    "train --precision=int8": "Invalid value for '--precision': it must be one of 'fp32', 'bf16', 'fp16', not 'int8'.",
    "train --bucket-cap-mb=all": "'--bucket-cap-mb': it must be a number of MiB or auto, not 'all'",
    "train 5": "Got unexpected extra argument … 5 … See `zero train --help`",
    "train --device=tpu": "Invalid value for '--device': … 'cpu', 'cuda'",
    "train --device=cuda --ranks=1000": "--device cuda",
    "train --data=": "error: Invalid value for '--data': it must be a path (the current folder is .), not ''. See",
    "train --offload=": "it must be a path … parameters=cpu,step=cpu, not ''",
    "train --offload=disk,parameters=cpu": "it must be a path … parameters=cpu,step=cpu, not 'disk,parameters=cpu'",
    "train --reshard-after-forward=some": "'--reshard-after-forward': it must be true, false or a number",
    "train --lr=nan": "--lr is nan: it must be finite",
    "train --checkpoint=/proc/folder": "error: --checkpoint /proc/folder: cannot write there (",
    "train --out={}/file/below": "--out {}/file/below: cannot write there ( … Name a folder that can be written\n",
    "train --width=30": "error: --width is 30: it must be a multiple of 4\n",
    "train --rounding=1": "rounding",
    "train --data={}/short": "--data {}/short has 169 bytes, so 1 samples to train on, and a step needs 4: give a",
    "verify": "Missing argument 'MODULE:FUNCTION'. See `zero verify --help`",
    f"verify {VERIFIED}": f"'{VERIFIED}' must be MODULE:FUNCTION, as in `zero verify my_model:arguments`",
    "verify no_such_module:f": "no_such_module:f() failed in {}: ModuleNotFoundError: No module named",
    f"verify {VERIFIED}:no_such": f"AttributeError: module '{VERIFIED}' has no attribute 'no_such'",
    f"verify {VERIFIED}:leaves": ": SystemExit: 0",
    "verify os:getcwd": "must return a dict of zero.verify's arguments, not str",
    "verify builtins:dict": "builtins:dict() returned no 'build_model', the function that builds the model",
    f"verify {VERIFIED}:build_misnamed": "returned no 'build_model', … (did you mean that by 'build'?)\n",
    f"verify {RIGHT} --stages=0-3": "'--stages': it must be whole numbers with commas between",
    "plan": "the model needs exactly one of --config, --parameters, --module, here none",
    "plan --module=a:b --config=config.json": "here --config and --module",
    "plan --config=config.json --global-batch=12": "not divisible by 8 ranks with micro-batches of 1: use 8 or 16",
    "plan --config=config.json --micro=0": "--micro is 0: it must be a number above 0",
    "plan --module=nowhere:model": "--module nowhere:model: ModuleNotFoundError",
    "plan --module=": "--module '' must be PKG:CALLABLE, as in --module my_model:build",
    "plan --config=config.json --fp32-modules=": "--fp32-modules is empty: it must be patterns with commas between",
    f"{MADE} --fp32-modules norms": "mixed_precision: the pattern 'norms' decides about no",
    f"{MADE} --fp32-modules norms --precision fp32": "--fp32-modules: with --precision fp32 every module",
    "checkpoint": "Missing command. See `zero checkpoint --help`",
    "checkpoint list ''": "error: Invalid value for 'DIR': it must be a path (the current folder is .), not ''",
    "checkpoint list {}/no": "error: {}/no is not a folder\n",
    "checkpoint verify {}/no": "error: {}/no is not a checkpoint: it has no checkpoint.json\n",
    "checkpoint export a b --to=zip": "Invalid value for '--to': … See `zero checkpoint export --help`",
    "checkpoint export {}/runs --to=torch {}/out": "and the newest is {}/runs/step-00000003\n",
    "checkpoint export {}/runs/step-00000003 --to=hf {}/file/out": "error: ",
    "checkpoint export {}/runs/step-00000003 --to=hf {}/file": "error: {}/file exists: name another path\n",
}


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_one_line_and_exit_code_2(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "folder").mkdir()
    for name, size in (("empty", 0), ("file", 10), ("short", 169), ("text", 1000)):
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    if "step-" in line + WRONG[line]:
        (tmp_path / "runs").mkdir()
        save(tmp_path / "runs" / "step-00000003", ZeroOptimizer(nn.Linear(3, 3)), step=3)
    command, *flags = shlex.split(line)
    more = {"train": TRAIN, "plan": ("--out={}/out",)}.get(command, ())
    assert cli.main([word.replace("{}", str(tmp_path)) for word in (command, *more, *flags)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert_in_order(WRONG[line].replace("{}", str(tmp_path)), shown.err)
    assert command == "plan" or not (tmp_path / "out").exists()


HELP = ("", "train", "plan", "verify", "checkpoint", "checkpoint list", "checkpoint verify", "checkpoint export")


@pytest.mark.parametrize("words", HELP)
def test_help_ends_with_commands_that_it_can_parse(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*words.split(), "-h"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.partition("  Examples:\n")[2].splitlines()]
    assert words in ("", "checkpoint") or any(line.startswith(f"zero {words} ") for line in lines)
    for program, *arguments in filter(None, (shlex.split(line, comments=True) for line in lines)):
        given = parse(arguments) if program == "zero" else {}
        assert "cluster" not in given or presets().cluster(given["cluster"]).ranks > 0


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parse a line of `zero`, run nothing, and return its flags. Raises an error for a wrong one."""
    command: Any = typer.main.get_command(cli.application(arguments[0]))
    while hasattr(command, "commands"):
        _, command, arguments = command.resolve_command(typer.Context(command), arguments)
    found: dict[str, Any] = command.make_context("zero", arguments).params
    return found


def test_every_flag_is_in_one_group_and_help_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    for name, config in (("train", TrainConfig), ("plan", PlanConfig), ("verify", VerifyConfig)):
        names = [flag for group in config.GROUPS.values() for flag in group]
        flags = {item.name for item in fields(config) if item.default is not MISSING}
        assert flags - set(names) == ({"units", "partition"} if config is TrainConfig else set()), config
        assert len(names) == len(set(names))
        assert cli.main([name, "-h"]) == 0
        shown = capsys.readouterr().out
        assert not [flag for flag in names if f"--{flag.replace('mixed_', '').replace('_', '-')}" not in shown]


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"zero {zero.__version__}\n"


def test_a_gpu_for_each_rank_is_used_unless_the_cpu_is_asked_for() -> None:
    for asked, gpus, device in ((None, 0, "cpu"), (None, 2, "cuda"), ("cpu", 8, "cpu"), ("cuda", 2, "cuda")):
        assert choose_device(asked, 2, gpus) == (device, "")
    device, remark = choose_device(None, 2, 1)
    assert device == "cpu"
    assert remark.startswith("this host has 1 GPU(s) for 2 rank(s), so they compute on the CPU, over gloo; at most 1")


def test_ranks_that_contradict_the_launcher_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main([f"--out={tmp_path}", "--ranks=2"], "train") == 2
    assert "--ranks 2, but the launcher started 4 (WORLD_SIZE)" in capsys.readouterr().err


def test_the_command_line_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "zero.commands.cli")
    with pytest.raises(SystemExit, match=r"^error: .* needs typer: pip install 'zero-optimizer\[cli\]'$"):
        importlib.import_module("zero.commands.cli")


def test_the_first_error_of_a_rank_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    for error in (ValueError("the first\nerror"), ValueError("what came of it")):
        record_error(error)
    assert json.loads((tmp_path / "error").read_text())["message"]["extraInfo"]["line"] == "the first error"


ENDED = "the process was ended by {} and left no message"


@pytest.mark.parametrize(
    ("codes", "first", "rank", "line"),
    [
        ([1, 1], 1, 1, "its line"),
        ([1, -15], 1, 1, "its line"),  # was ended while it left its group
        (
            [1, -9],
            0,
            1,
            "the process was ended by SIGKILL and left no message: often a lack of memory; rank 0: its line",
        ),
        ([-11, 1], 0, 0, "its line"),
        ([-15, 3], None, 1, "the process ended with code 3 and left no message"),
        ([0, -15], None, 1, ENDED.format("SIGTERM")),
    ],
)
def test_a_crash_or_else_the_first_error_is_the_cause_of_the_others(
    codes: list[int], first: int | None, rank: int, line: str
) -> None:
    """``first``: the rank whose error was written first."""
    found = _first_failure(codes, None if first is None else {"rank": first, "line": "its line", "py_callstack": ""})
    assert (str(found), found.line) == (f"rank {rank}: {line}", line)


def test_a_rank_that_does_not_end_when_asked_is_killed_and_told_apart_from_one_that_crashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "PATIENCE", 0.1)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert runner._end([process]) == [process]


EXAMPLES = {  # flags of the scripts of `zero.examples`
    "train --data=": "--data '' must be a file that is not empty",
    "train --data={}/short": "--data {}/short has 1000 bytes, so 13 samples to train on, and a step needs 64: give a",
    "train --steps=0": "--steps is 0: it must be at least 1",
    "train --micro-batches=-1": "--micro-batches is -1: it must be at least 1",
    "train --checkpoint=": "--checkpoint '': name a folder",
    "train --out={}/no/model.pt": "--out '{}/no/model.pt': name a file in a folder that exists",
    "train --device=cuda": "--device cuda needs one GPU per rank that torch finds, and this host has 0 GPU(s) for",
    "finetune_lora --epochs=0": "--epochs is 0: it must be at least 1",
    "finetune_lora --adapters=": "--adapters '': name a file in a folder that exists",
    "finetune_lora --adapters={}/no/a.pt": "--adapters '{}/no/a.pt': name a file in a folder that exists",
    "accelerate_loop --epochs=0": "--epochs is 0: it must be at least 1",
    "accelerate_loop --folder=": "--folder '': name a folder",
    "accelerate_loop --resume=": "--resume '': name a folder that an earlier run has saved by --folder",
    "accelerate_loop --resume={}/no": "--resume '{}/no': name a folder that an earlier run has saved by --folder",
    "accelerate_loop --stage=9": "2",  # after a line of argparse
    "resume_on_other_ranks ''": "the folder has an empty name",
}


@pytest.mark.parametrize("line", EXAMPLES)
def test_wrong_input_of_an_example_is_one_line_that_names_the_flag(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"x" * 1000)
    script, *flags = shlex.split(line.replace("{}", str(tmp_path)))
    if script == "accelerate_loop":
        pytest.importorskip("accelerate")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"zero.examples.{script}").main()
    assert str(ended.value).startswith(EXAMPLES[line].replace("{}", str(tmp_path)))
    assert "\n" not in str(ended.value)
