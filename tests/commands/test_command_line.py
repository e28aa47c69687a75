"""Wrong input of every command is one line on what to change, exit code 2, and nothing is started or written."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest
import typer
from torch import nn

import zero
from zero import ZeroOptimizer, save
from zero.commands import cli
from zero.commands.application import application
from zero.commands.flags import flags_of
from zero.commands.plan.settings import PlanConfig
from zero.commands.runner import choose_device, record_error
from zero.commands.train import data
from zero.commands.train.settings import TrainConfig
from zero.commands.verify.settings import VerifyConfig

from ..planning.configs import SMALL
from ..support.rows import only

TRAIN = ("--preset=tiny", "--sequence=24", "--data={}/text", "--out={}/out")
VERIFIED = "tests.commands.verified"
RIGHT = f"{VERIFIED}:right_arguments"
WRONG = {  # words with gaps
    "trian": "No such command 'trian'. Did you mean 'train'? See `zero --help`",
    "export saved": "No such command 'export'. It is `zero checkpoint export`",
    "train --stepz=5": "No such option: --stepz … --steps … See `zero train --help`",
    "train --steps": "Option '--steps' requires an argument. See `zero train --help`",
    "train --steps=many": "Invalid value for '--steps': … integer … See `zero train --help`",
    "train --steps=0": "--steps is 0: it must be at least 1",
    "train --resume=saved": "Invalid value for '--resume': … 'none', 'auto'",
    "train --elastic=2:4": "No such option: --elastic",
    "train --precision=int8": "error: Invalid value for '--precision': 'int8' is not one of 'fp32', 'bf16', 'fp16'.",
    "train --bucket-cap-mb=all": "--bucket-cap-mb is all: it must be a number of MiB or auto",
    "train --preset=huge": "Invalid value for '--preset': … 'tiny', 'small', 'medium'",
    "train 5": "Got unexpected extra argument … 5 … See `zero train --help`",
    "train --ranks=0": "--ranks is 0: it must be at least 1",
    "train --stage=4": "stage must be one of [0, 1, 2, 3], not 4",
    "train --device=tpu": "Invalid value for '--device': … 'cpu', 'cuda'",
    "train --device=cuda --ranks=1000": "--device cuda",
    "train --optimizer=adamu": "--optimizer adamu: torch.optim has no such class. It has adadelta",
    "train --optimizer=lbfgs": "LBFGS",
    "train --optimizer=rprop --fused": "error: --fused: torch.optim.Rprop has no such argument. Omit it, or take",
    "train --optimizer=rprop --weight-decay=0.1": "error: --weight-decay: torch.optim.Rprop has no such argument.",
    "train --weight-decay=-1": "error: --weight-decay is -1.0: it must be finite and not negative\n",
    "train --data=": "error: --data is empty: it must be a path (the current folder is .)\n",
    "train --out=": "error: --out is empty: it must be a path",
    "train --offload=": "error: --offload is empty: it must be a path",
    "train --offload=disk,parameters=cpu": "--offload is disk,parameters=cpu: it must be a path … cpu, cpu,",
    "train --offload=cpu,step=cpu": "--offload is cpu,step=cpu: it must be a path … or cpu,parameters=cpu,step=cpu",
    "train --offload=cpu,parameters=disk": "--offload is cpu,parameters=disk: it must be a path",
    "train --offload=cpu,parameters=cpu": "parameters='cpu' with stage 2, where forwards use whole parameters in place",
    "train --checkpoint=": "error: --checkpoint is empty: it must be a path",
    "train --collective=telepathy": "telepathy",
    "train --sharding-factor=3": "sharding_factor must divide the number of ranks, 2, so be one of [1, 2], not 3",
    "train --sharding-factor=1 --stage=0": "stage 0 shards nothing: leave sharding_factor=1 out",
    "train --reshard-after-forward=false": "reshard_after_forward=False with stage 2, where every rank holds whole",
    "train --reshard-after-forward=3 --stage=3": "so one of [1, 2], not 3",
    "train --reshard-after-forward=some": "--reshard-after-forward is some: it must be true, false or a number",
    "train --lr=nan": "--lr is nan: it must be finite",
    "train --seed=-1": "--seed is -1",
    "train --clip=0": "--clip is 0.0: it must be above 0",
    "train --checkpoint=c --checkpoint-every=0": "--checkpoint-every is 0: it must be at least 1",
    "train --checkpoint-every=5": "error: --checkpoint-every needs --checkpoint DIR\n",
    "train --resume=auto": "error: --resume auto needs --checkpoint DIR\n",
    "train --checkpoint=/proc/folder": "error: --checkpoint /proc/folder: cannot write there (",
    "train --out={}/file": "error: --out {}/file: cannot write there ( … Name a folder that can be written\n",
    "train --out={}/file/below": "--out {}/file/below: cannot write there ( … Name a folder that can be written\n",
    "train --data={}/no": "--data {}/no: there is no such file or folder",
    "train --data={}/empty": "no text in {}/empty: it is empty. Give --data",
    "train --data={}/folder": "no text in {}/folder: it is empty",
    "train --data={}/short --sequence=17": "short has 169 bytes, of which 17 … one sequence of 17 bytes … --sequence",
    "verify": "Missing argument 'MODULE:FUNCTION'. See `zero verify --help`",
    f"verify {VERIFIED}": f"'{VERIFIED}' must be MODULE:FUNCTION, as in `zero verify my_model:arguments`",
    "verify no_such_module:f": "no_such_module:f() failed in {}: ModuleNotFoundError: No module named",
    f"verify {VERIFIED}:no_such": f"AttributeError: module '{VERIFIED}' has no attribute 'no_such'",
    f"verify {VERIFIED}:STEPS": "TypeError: 'int' object is not callable",
    f"verify {VERIFIED}:rank_one_of_two": ": KeyError: 'RANK'",
    f"verify {VERIFIED}:leaves": ": SystemExit: 0",
    "verify os:getcwd": "must return a dict of zero.verify's arguments, not str",
    "verify builtins:dict": "verify() missing 2 required positional arguments: 'build_model' and 'batches'",
    f"verify {VERIFIED}:unknown_arguments": "(what is no argument of verify() goes to AdamW: lr, stage, learning_rate)",
    f"verify {VERIFIED}:a_lambda": "loss_fn is a_lambda.<locals>.<lambda>, which other processes cannot import by name",
    f"verify {RIGHT} --stages=0-3": "--stages is 0-3: it must be whole numbers with commas between",
    f"verify {RIGHT} --stages=7": "stage must be one of [0, 1, 2, 3], not 7",
    f"verify {RIGHT} --world-sizes=1,0": "world_sizes must hold numbers of at least 1, not (1, 0)",
    f"verify {RIGHT} --bucket-cap-mb=all": "--bucket-cap-mb is all: it must be a number of MiB or auto",
    f"verify {RIGHT} --collective=telepathy": "collective must be one of auto, pairwise, … 'telepathy'",
    f"verify {RIGHT} --device=tpu": "Invalid value for '--device': 'tpu' is not one of 'cpu', 'cuda'",
    f"verify {RIGHT} --world-sizes=9999 --device=cuda": "--device cuda",
    "plan": "the model needs exactly one of --config, --parameters, --module, --preset, here none",
    "plan --preset=tiny --config=config.json": "here --config and --preset",
    "plan --config=config.json --global-batch=12": "not divisible by 8 ranks with micro-batches of 1: use 8 or 16",
    "plan --config=config.json --micro=0": "--micro 0 and --sequence 2048 must both be at least 1",
    "plan --module=nowhere:model": "--module nowhere:model: ModuleNotFoundError",
    "plan --module=": "--module '' must be PKG:CALLABLE, as in --module my_model:build",
    "plan --preset=tiny --fp32-modules=": "--fp32-modules is '', of which a pattern is empty",
    "plan --preset=tiny --fp32-modules=*norm*,": "--fp32-modules is '*norm*,', of which a pattern is empty",
    "plan --preset=tiny --recompute=full": "leave it out with --preset",
    "plan --checkpoint=full --preset=tiny": "error: No such option: --checkpoint. It is --recompute\n",
    "plan --preset=tiny --cluster=h10:8": "did you mean 'h100'",
    "checkpoint": "Missing command. See `zero checkpoint --help`",
    "checkpoint lost": "No such command 'lost'. … See `zero checkpoint --help`",
    "checkpoint list": "Missing argument 'DIR'. See `zero checkpoint list --help`",
    "checkpoint list ''": "error: Invalid value for 'DIR': it is empty: it must be a path (the current folder is .)",
    "checkpoint list {}/no": "error: {}/no is not a folder\n",
    "checkpoint verify a b": "Got unexpected extra argument … b … See `zero checkpoint verify --help`",
    "checkpoint verify ''": "error: Invalid value for 'PATH': it is empty: it must be a path",
    "checkpoint verify {}/no": "error: {}/no is not a checkpoint: it has no checkpoint.json\n",
    "checkpoint verify {}/file": "{}/file",
    "checkpoint export a b": "Missing option '--to'. … torch, hf, dcp. See `zero checkpoint export --help`",
    "checkpoint export a b --to=zip": "Invalid value for '--to': … See `zero checkpoint export --help`",
    "checkpoint export a --to=hf": "Missing argument 'OUT'. See `zero checkpoint export --help`",
    "checkpoint export {}/runs/step-00000003 --to=hf ''": "error: Invalid value for 'OUT': it is empty: it must be",
    "checkpoint export {}/runs --to=torch {}/out": "and the newest is {}/runs/step-00000003\n",
    "checkpoint export {}/runs/step-00000003 --to=hf {}/file/out": "error: ",
    "checkpoint export {}/runs/step-00000003 --to=hf {}/file": "error: {}/file exists: name another path\n",
}

AFTER_THE_FIRST_LINE = ("train --optimizer=lbfgs",)

FIRST = (
    "checkpoint export {}/runs/step-00000003 --to=hf {}/file",
    "checkpoint list ''",
    "checkpoint list {}/no",
    "checkpoint lost",
    "checkpoint verify {}/file",
    "export saved",
    "plan",
    "plan --config=config.json --global-batch=12",
    "plan --config=config.json --micro=0",
    "plan --module=nowhere:model",
    "plan --preset=tiny --fp32-modules=",
    "plan --preset=tiny --recompute=full",
    "plan --checkpoint=full --preset=tiny",
    "train --data={}/folder",
    "train --data={}/no",
    "train --data={}/short --sequence=17",
    "train --optimizer=adamu",
    "train --optimizer=rprop --fused",
    "train --weight-decay=-1",
    "train --data=",
    "train --offload=",
    "train --precision=int8",
    "train --device=cuda --ranks=1000",
    "train --out={}/file/below",
    "train --reshard-after-forward=3 --stage=3",
    "train --reshard-after-forward=some",
    "train --resume=auto",
    "verify os:getcwd",
    "verify tests.commands.verified",
    "verify tests.commands.verified:leaves",
    f"verify {RIGHT} --collective=telepathy",
    f"verify {RIGHT} --stages=0-3",
    f"verify {RIGHT} --world-sizes=9999 --device=cuda",
    "verify tests.commands.verified:unknown_arguments",
)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("line", only(WRONG, *FIRST))
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
    assert shown.out.startswith("training tiny (") if line in AFTER_THE_FIRST_LINE else shown.out == ""
    place = 0
    for part in WRONG[line].replace("{}", str(tmp_path)).split(" … "):
        place = shown.err.index(part, place)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("words", "groups", "example"),
    [
        ("", ["Options", "Commands"], None),
        ("train", ["Model", "Training", "Sharding", "Checkpoints", "Output"], "zero train --ranks 4 --stage 3"),
        ("plan", ["Model", "Cluster", "Training", "Cost", "Output"], "zero plan --module my_model:build "),
        (
            "verify",
            ["Arguments", "What is run", "Where"],
            "zero verify my_model:arguments --stages 3 --world-sizes 2,4 ",
        ),
        ("checkpoint", ["Options", "Commands"], None),
        ("checkpoint list", ["Arguments", "Options"], "zero checkpoint list checkpoints"),
        ("checkpoint verify", ["Arguments", "Options"], "zero checkpoint verify checkpoints"),
        ("checkpoint export", ["Arguments", "Options"], "zero checkpoint export "),
    ],
)
def test_help_has_the_flags_in_groups_and_ends_with_commands_that_it_can_parse(
    words: str,
    groups: list[str],
    example: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*words.split(), "-h"]) == 0
    shown = capsys.readouterr().out
    more = [] if "Options" in groups else ["Other options"]
    found = re.findall(r"^(\w.*):$", shown, re.MULTILINE)
    assert found == [*groups, *more, *([] if example is None else ["Examples"])]
    if example is not None:
        lines = [line.strip() for line in shown.partition("\nExamples:\n")[2].splitlines()]
        assert any(line.startswith(example) for line in lines)
        for line in lines:
            program, *arguments = shlex.split(line, comments=True) or [""]
            if program == "zero":
                parse(arguments)


def parse(arguments: list[str]) -> None:
    """Parse a line of `zero`, and run nothing. Raises an error for a wrong one."""
    command: Any = typer.main.get_command(application(arguments[0]))
    while hasattr(command, "commands"):
        _, command, arguments = command.resolve_command(typer.Context(command), arguments)
    command.make_context("zero", arguments)


def test_every_flag_is_in_one_group() -> None:
    for config in (TrainConfig, PlanConfig, VerifyConfig):
        names = [name for group in config.GROUPS.values() for name in group]
        fields = [flag.field for flag in flags_of(config) if flag.default is not MISSING]
        assert set(fields) <= set(names), config
        assert len(names) == len(set(names))


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"zero {zero.__version__}\n"


ON_CPU = ", so they compute on the CPU, over gloo; with at most"
# asked, ranks of the host, its GPUs -> device, what is said
DEVICES = {
    (None, 2, 0): ("cpu", None),
    (None, 2, 1): (
        "cpu",
        "this host has 1 GPU for 2 ranks, so they compute on the CPU, over gloo; with at most 1 rank",
    ),
    (None, 3, 2): (
        "cpu",
        "this host has 2 GPUs for 3 ranks, so they compute on the CPU, over gloo; with at most 2 ranks",
    ),
    (None, 2, 2): ("cuda", None),
    (None, 1, 8): ("cuda", None),
    ("cpu", 2, 8): ("cpu", None),
    ("cuda", 2, 2): ("cuda", None),
    ("cuda", 1, 0): (None, "--device cuda: this torch finds no GPU. Install a build of torch with CUDA, on a host"),
    ("cuda", 4, 3): (None, "--device cuda needs one GPU per rank, and this host has 3 GPUs for 4 ranks: start fewer"),
    ("tpu", 1, 8): (None, "device must be 'cpu' or 'cuda', not 'tpu'"),
}


@pytest.mark.parametrize("given", DEVICES)
def test_a_gpu_for_each_rank_is_used_unless_the_cpu_is_asked_for(given: tuple[str | None, int, int]) -> None:
    device, said = DEVICES[given]
    try:
        found, note = choose_device(*given)
    except ValueError as error:
        found, note = None, str(error)
    assert found == device
    assert note is None if said is None else str(note).startswith(said)


def test_ranks_that_contradict_the_launcher_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main([f"--out={tmp_path}", "--ranks=2"], "train") == 2
    assert "--ranks 2, but the launcher started 4 (WORLD_SIZE)" in capsys.readouterr().err


def test_where_there_is_no_library_source_the_error_says_what_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_stdlib", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match="name a file or a folder of text with --data"):
        data.load_corpus(None, 16)


@pytest.mark.parametrize(
    ("command", "program"),
    [(None, "zero"), ("train", "python -m zero.train"), ("verify", "python -m zero.verify")],
)
def test_a_command_without_the_extra_says_what_to_install(
    command: str | None, program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    assert cli.main(["--help"], command) == 1
    assert capsys.readouterr().err == f"error: {program} needs typer: pip install 'zero-optimizer[cli]'\n"
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["--help"], command) == 1
    assert f"{program} needs typer and rich: " in capsys.readouterr().err


def test_the_first_error_of_a_rank_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    for error in (ValueError("the first\nerror"), ValueError("what came of it")):
        record_error(error)
    assert json.loads((tmp_path / "error").read_text())["message"]["extraInfo"]["line"] == "the first error"
