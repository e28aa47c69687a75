"""`zero train` has the parameters of the plain loop, and leaves a record, pictures and one line for each error."""

from __future__ import annotations

import hashlib
import io
import math
import os
import sys
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from zero import MixedPrecision, Offload, StochasticRounding
from zero.commands import cli
from zero.commands.console import print_table
from zero.commands.train import command as train
from zero.commands.train.report import next_command
from zero.commands.train.settings import TrainConfig
from zero.examples.train import ByteModel
from zero.job import load, save

from ..support.rows import rows
from .conftest import LAYERS, STEPS, WIDTH, RunOutput, Train, flags, plain_sha256

KINDS = ("parameters", "gradients", "optimizer")


@pytest.mark.parametrize(
    ("more", "plain"),
    rows(
        [
            (("--stage=0", "--bucket-cap-mb=0.01", "--lr=0.002"), {"lr": 0.002}),
            (("--stage=1", "--clip=inf", "--offload=cpu"), {"clip": math.inf}),  # where states are in the host's memory
        ],
        [
            (("--precision=bf16", "--stage=3"), {"precision": torch.bfloat16}),
            (("--precision=fp16", "--stage=0", "--clip=0.5"), {"precision": torch.float16, "clip": 0.5}),
        ],
    ),
)
def test_one_rank_gives_the_parameters_of_the_plain_loop_and_holds_the_bytes_of_its_stage(
    text: Path, trained: Train, more: tuple[str, ...], plain: dict[str, Any]
) -> None:
    record = trained(*more)
    assert record["params_sha256"] == plain_sha256(text, **plain)
    held = {kind: record["ranks"][0]["measured"][kind] for kind in KINDS}
    assert record["formula_bytes_by_stage"][f"stage {record['stage']}"] == held


def test_a_run_leaves_the_hash_of_the_plain_loop_its_record_and_its_pictures(text: Path, one_rank: RunOutput) -> None:
    record, shown = one_rank.record, one_rank.shown
    assert record["params_sha256"] == plain_sha256(text)
    parameters = [parameter.numel() for parameter in ByteModel(WIDTH, LAYERS).parameters()]
    whole = 4 * sum(parameters)
    assert record["parameters"] * 4 == whole
    assert (record["world_size"], record["stage"]) == (1, 2)
    assert list(record["losses"]) == ["1", str(STEPS)]
    assert record["losses"]["1"] == pytest.approx(math.log(256), abs=0.5)
    assert record["losses"][str(STEPS)] < record["losses"]["1"]
    assert 0 < record["validation_loss"] < math.log(300)
    (facts,) = record["ranks"]
    assert set(facts["measured"]) == set(facts["formula"]) == {*KINDS, "gathered_peak", "scratch_peak"}
    slack = 64 * len(parameters)
    for kind, size in zip(KINDS, (whole, whole, 2 * whole), strict=True):
        assert size <= facts["measured"][kind] <= size + slack
    assert record["config"]["out"] == str(one_rank.out)
    assert record["versions"]["torch"] == torch.__version__
    for name in ("loss.png", "memory.png"):
        assert (one_rank.out / name).read_bytes().startswith(b"\x89PNG")
    assert f"step {STEPS}/{STEPS}  loss {record['losses'][str(STEPS)]:.3f}" in shown
    table = [line.split() for line in shown.splitlines() if line.startswith(("parameters  ", "gradients", "optimizer"))]
    sizes = {row[0]: row[-3:] for row in table}
    held = facts["measured"], facts["formula"], record["formula_bytes_by_stage"]["plain loop"]
    for kind in KINDS:
        assert sizes[kind] == [f"{size[kind]:,}" for size in held]
    assert f"SHA-256 {record['params_sha256']}\n" in shown


def test_its_first_line_says_what_is_trained_and_its_last_one_what_to_try_next(text: Path, one_rank: RunOutput) -> None:
    first, *_, last = one_rank.shown.splitlines()
    numel = one_rank.record["parameters"]
    assert first == f"training {numel:,} parameters on 1 CPU rank, stage 2, on the bytes of {text}"
    head, _, tail = last.partition("; ")
    words = head.removeprefix("try next: zero ").split()
    assert tail == "for your own model: zero verify --help"
    assert ("--stage", "3") in pairwise(words)
    assert next_command(["train"], 2) == "zero train --stage 3 --ranks 4"
    given = ["--stage=1", "--ranks", "4", "--checkpoint", "a b", "--steps=5", "--data", "a b"]
    assert next_command(given, 4) == "zero train --steps=5 --data 'a b' --stage 3 --ranks 2"


def test_without_matplotlib_it_trains_and_says_what_to_install(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(flags(text, tmp_path / "out", "--ranks=1"), "train") == 0
    shown = capsys.readouterr().out
    assert shown.count("pip install 'zero-optimizer[cli]'") == 1
    assert f"step {STEPS}/{STEPS}" in shown
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run.json"]


def test_an_error_in_the_middle_is_one_line_and_an_interrupt_one_word(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed, interrupted = RuntimeError("the loss is\nnot what it was"), KeyboardInterrupt()
    for error, code, said in (
        (failed, 1, "error: the loss is not what it was\n"),
        (interrupted, 130, "interrupted\n"),
    ):
        monkeypatch.setattr(ByteModel, "forward", Mock(side_effect=error))
        assert cli.main(flags(text, tmp_path / "out", "--ranks=1"), "train") == code
        assert capsys.readouterr().err == said


# -- flags, the hash and what is printed -------------------------------------------------------------------------------


ALL = "--precision=bf16 --rounding=5 --reshard-after-forward=1 --stage=3 --checkpoint=c --bucket-cap-mb=auto"
IN_BF16: dict[str, Any] = {"mixed_precision": MixedPrecision(torch.bfloat16), "rounding": StochasticRounding(5)}
OFFLOADS = {
    "cpu": Offload("cpu"),
    "cpu,parameters=cpu": Offload("cpu", parameters="cpu"),
    "cpu,parameters=cpu,step=cpu": Offload("cpu", parameters="cpu", step="cpu"),
    "./cpu": Offload(Path("./cpu")),
    "a,b": Offload(Path("a,b")),
}
CONFIGS = {
    "": TrainConfig(),
    "--stage 1": TrainConfig(stage=1),
    "--ranks=3 --clip 0.5 --data=-x --layers=1 --lr=1e-7": TrainConfig(
        ranks=3, clip=0.5, data=Path("-x"), layers=1, lr=1e-7
    ),
    ALL: TrainConfig(stage=3, reshard_after_forward=1, checkpoint=Path("c"), bucket_cap_mb="auto", **IN_BF16),
    **{f"--stage=3 --offload={text}": TrainConfig(stage=3, offload=offload) for text, offload in OFFLOADS.items()},
}


@pytest.mark.parametrize("line", CONFIGS)
def test_both_command_lines_have_the_flags_of_the_configuration_which_ranks_read_as_it_was_written(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[TrainConfig] = []
    monkeypatch.setattr(train, "run", lambda config: given.append(config) or 7)
    assert cli.main(line.split(), "train") == 7
    monkeypatch.setattr(sys, "argv", ["zero", "train", *line.split()])
    assert cli.main() == 7
    assert given == [CONFIGS[line]] * 2
    save(given[0], written := io.BytesIO())
    assert load(io.BytesIO(written.getvalue())) == CONFIGS[line]


def test_help_names_every_flag_and_run_json_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-h"], "train") == 0
    shown = capsys.readouterr().out
    flags = chain(*TrainConfig.GROUPS.values())
    assert all(f"--{flag.replace('mixed_', '').replace('_', '-')}" in shown for flag in flags)
    narrow = TrainConfig(**IN_BF16).written()
    assert (narrow["mixed_precision"], narrow["rounding"], narrow["offload"]) == ("bf16", 5, None)
    relative = TrainConfig(offload=Offload(Path("cpu"))).written()
    assert relative["offload"]["states"] == os.path.abspath("cpu")


def test_the_hash_is_of_whole_float32_parameters_in_order_with_ties_once() -> None:
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, -0.0]]).T)
    model.b = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.bfloat16))
    model.c = model.a
    expected = hashlib.sha256(torch.tensor([1.0, 3.0, 2.0, -0.0, 0.5]).numpy().astype("<f4").tobytes())
    assert train.parameters_sha256(model) == expected.hexdigest()


def test_a_table_is_plain_and_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    print_table("[bold] :snake:", ["bytes", "measured"], [["sent by all ranks", "1,234"]])
    line, rows = "-" * 17, ["bytes              measured", "sent by all ranks     1,234"]
    assert capsys.readouterr().out.splitlines() == ["[bold] :snake:", rows[0], f"{line}  --------", rows[1]]
