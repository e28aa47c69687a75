"""`zero train` has the parameters of the plain loop, and leaves a record, pictures and one line for each error."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.launcher import api

from collectives import Transport, on_threads
from zero import Offload, ZeroOptimizer
from zero.commands import cli, plots, runner
from zero.commands.console import Console
from zero.commands.flags import from_flags, to_flags
from zero.commands.train import command as train
from zero.commands.train.data import Batch, load_corpus
from zero.commands.train.model import build_model, parameters_sha256
from zero.commands.train.rank import RankTraining, check_same_text
from zero.commands.train.report import next_command
from zero.commands.train.settings import TrainConfig

from ..support.rows import rows
from .conftest import SEQUENCE, STEPS, RunOutput, Train, flags, plain_sha256

KINDS = ("parameters", "gradients", "optimizer")


@pytest.mark.parametrize(
    ("more", "plain"),
    rows(
        [
            (("--stage=0", "--bucket-cap-mb=0.01", "--lr=0.003"), {"lr": 0.003}),
            (("--stage=1", "--fused"), {"fused": True}),
            (
                ("--optimizer=muon", "--weight-decay=0.3", "--clip=0.5"),
                {"muon": True, "weight_decay": 0.3, "clip": 0.5},
            ),
        ],
        [
            (("--precision=bf16", "--stage=3"), {"precision": "bf16"}),
            (("--precision=fp16", "--stage=0", "--clip=0.5"), {"precision": "fp16", "clip": 0.5}),
        ],
    ),
)
def test_one_rank_gives_the_parameters_of_the_plain_loop(
    text: Path, trained: Train, more: tuple[str, ...], plain: dict[str, Any]
) -> None:
    assert trained(*more)["params_sha256"] == plain_sha256(text, **plain)


def test_a_run_leaves_the_hash_of_the_plain_loop_its_record_and_its_pictures(text: Path, one_rank: RunOutput) -> None:
    record, shown = one_rank.record, one_rank.shown
    assert record["params_sha256"] == plain_sha256(text)
    model = build_model("tiny", SEQUENCE, 0)
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert record["parameters"] * 4 == whole
    assert (record["world_size"], record["stage"], record["steps"], record["micro_batches"]) == (1, 2, STEPS, 4)
    assert len(record["losses"]) == STEPS
    assert record["losses"][0] == pytest.approx(math.log(256), abs=0.2)
    assert record["losses"][-1] < record["losses"][0]
    assert 0 < record["validation_loss"] < math.log(300)
    assert record["loss_unit"] == "nats per byte"
    assert record["step_ms_median"] > 0
    assert set(record["bytes_per_rank"]) == {*KINDS, "gathered_peak", "scratch_peak"}
    assert set(record["formula_bytes_per_rank"]) == set(record["bytes_per_rank"])
    slack = 64 * len(list(model.parameters()))
    for kind, size in zip(KINDS, (whole, whole, 2 * whole), strict=True):
        assert size <= record["bytes_per_rank"][kind] <= size + slack
    assert record["traffic_bytes_per_step"] == record["formula_traffic_bytes_per_step"] == 0
    assert record["config"]["out"] == str(one_rank.out)
    assert record["versions"]["torch"] == torch.__version__
    for name in ("loss.png", "memory.png"):
        assert (one_rank.out / name).read_bytes().startswith(b"\x89PNG")
    assert f"step {STEPS}/{STEPS}  loss {record['losses'][-1]:.3f}" in shown
    table = [line.split() for line in shown.splitlines() if line.startswith(("parameters  ", "gradients", "optimizer"))]
    sizes = {row[0]: row[-3:] for row in table}
    held = record["bytes_per_rank"], record["formula_bytes_per_rank"], record["formula_bytes_by_stage"]["plain loop"]
    for kind in KINDS:
        assert sizes[kind] == [f"{size[kind]:,}" for size in held]
    assert f"SHA-256 {record['params_sha256']}\n" in shown


def test_its_first_line_says_what_is_trained_and_its_last_one_what_to_try_next(text: Path, one_rank: RunOutput) -> None:
    first, *_, last = one_rank.shown.splitlines()
    numel, size = one_rank.record["parameters"], text.stat().st_size / 1e6
    assert first == f"training tiny ({numel:,} parameters) on 1 CPU rank, stage 2, on {text} ({size:.1f} MB of text)"
    head, _, tail = last.partition(" (the same SHA-256); ")
    words = head.removeprefix("try next: zero train ").split()
    assert tail == "for your own model: zero verify --help"
    assert ("--stage", "3") in pairwise(words)
    assert "--checkpoint" not in words
    given = TrainConfig(stage=3, reshard_after_forward=False, fused=True, bucket_cap_mb=0.01, device="cpu", ranks=4)
    assert next_command(given, 4) == "zero train --stage 3 --bucket-cap-mb 0.01 --ranks 2 --fused"
    assert next_command(TrainConfig(device="cpu"), 2) == "zero train --stage 3"
    assert next_command(TrainConfig(device="cpu", ranks=1), 1) == "zero train --stage 3 --ranks 2", "one shards nothing"
    launched = TrainConfig(device="cpu", sharding_factor=2, stage=1)
    assert next_command(launched, 4) == "zero train --stage 3 --sharding-factor 2 --ranks 4"


@pytest.mark.parametrize(
    "flag",
    rows(
        ["--optimizer=muon"],
        ["--optimizer=adamw", "--optimizer=sgd", "--optimizer=asgd", "--precision=bf16", "--precision=fp16", "--fused"],
    ),
)
def test_the_bytes_of_each_stage_by_formula_are_those_of_a_run_at_that_stage(trained: Train, flag: str) -> None:
    for stage in range(4):
        record = trained(flag, f"--stage={stage}", steps=2)
        held = {kind: record["bytes_per_rank"][kind] for kind in KINDS}
        assert record["formula_bytes_by_stage"][f"stage {stage}"] == held


def test_without_matplotlib_it_trains_and_says_what_to_install(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(flags(text, tmp_path / "out", "--ranks=1"), "train") == 0
    shown = capsys.readouterr().out
    assert shown.count("pip install 'zero-optimizer[cli]'") == 1
    assert f"step {STEPS}/{STEPS}" in shown
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run.json"]


def test_a_long_run_is_drawn_with_a_running_mean(tmp_path: Path) -> None:
    assert plots._windows([0.0, 3.0, 6.0, 9.0], 3) == [[0.0, 3.0], [0.0, 3.0, 6.0], [3.0, 6.0, 9.0], [6.0, 9.0]]
    plots.draw_loss(tmp_path / "loss.png", "a long run", [float(step) for step in range(60)], 8.0)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


# -- the text ----------------------------------------------------------------------------------------------------------


def write(path: Path, size: int) -> Path:
    """Write a file of bytes in which any 4 in a row occur once (for size up to 256 * 256)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(bytes([i // 256 + 1, i % 256]) for i in range(size))[:size])
    return path


def text_of(row: torch.Tensor) -> bytes:
    return bytes(row.tolist())


def test_a_folder_is_read_in_order_of_its_paths_without_what_is_hidden(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/c/y.bin", "c", ".git/config", "a/.secret", "a/__pycache__/m.pyc"):
        write(tmp_path / name, 100).write_bytes(name.encode() * 20)
    corpus = load_corpus(tmp_path, 16)
    expected = b"".join(name.encode() * 20 for name in ("a/c/y.bin", "a/z.txt", "b.txt", "c"))
    assert text_of(corpus.train) + text_of(corpus.validation) == expected


def test_a_known_micro_batch_stays_what_it_is_and_its_targets_are_the_next_bytes(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "text", 1000), 16)
    assert (len(corpus.train), len(corpus.validation)) == (900, 100)
    corpus.micro_batch(seed=1, step=7, index=0, batch=2, sequence=4)
    batch = corpus.micro_batch(seed=1, step=2, index=3, batch=2, sequence=4)
    train = text_of(corpus.train)
    assert [train.index(text_of(row)) for row in batch.inputs] == [863, 600]
    assert [train.index(text_of(row)) for row in batch.targets] == [864, 601]
    validation = corpus.validation_batches(batch=2, sequence=16, windows=4)
    places = [text_of(corpus.validation).index(text_of(row)) for found in validation for row in found.targets]
    assert places == [1, 28, 56, 84], "from its first byte on, without overlap"


# -- errors ------------------------------------------------------------------------------------------------------------


def test_ranks_that_read_other_text_are_an_error_on_each() -> None:
    def program(transport: Transport) -> str:
        optimizer = ZeroOptimizer(torch.nn.Linear(1, 1), torch.optim.SGD, lr=0.1, process_group=transport)
        check_same_text(optimizer, "0a" * 32)
        with pytest.raises(ValueError, match="--data") as caught:
            check_same_text(optimizer, f"{transport.rank // 2}a" * 32)
        return str(caught.value)

    words = (
        "rank 2 reads other text than rank 0 (SHA-256 1a1a1a1a1a1a and 0a0a0a0a0a0a): give every host the same files"
    )
    assert on_threads(3, program) == [f"{words} with --data"] * 3


def test_an_error_in_the_middle_is_one_line_and_its_traceback_a_file_where_it_can_be(
    trained: Train, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: RankTraining, batch: Batch) -> None:
        raise RuntimeError("the loss is\nnot what it was")

    out, error = tmp_path / "out", "error: the loss is not what it was"
    with monkeypatch.context() as patch:
        patch.setattr(RankTraining, "_loss_of", fail)
        assert cli.main(flags(text, out, "--ranks=1"), "train") == 1
        assert capsys.readouterr().err == f"{error} (traceback in {out}/error.txt)\n"
        assert "in _take_steps" in (out / "error.txt").read_text()
        patch.setattr(train, "TRACEBACK", "none/error.txt")
        assert cli.main(flags(text, out, "--ranks=1"), "train") == 1
        assert capsys.readouterr().err == f"{error}\n"
    trained()
    assert not (out / "error.txt").exists()


def test_an_interrupt_is_one_word_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "launch_ranks", interrupted)
    assert cli.main([f"--out={tmp_path}", "--ranks=2"], "train") == 130
    assert capsys.readouterr().err == "interrupted\n"


# -- flags, the hash and what is printed -------------------------------------------------------------------------------


def test_both_command_lines_have_the_flags_of_the_configuration_also_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[TrainConfig] = []
    monkeypatch.setattr(train, "run", lambda config: given.append(config) or 7)
    assert cli.main(["--ranks=3", "--fused", "--clip", "0.5", "--data=-x", "--preset=tiny", "--lr=1e-7"], "train") == 7
    assert given.pop() == TrainConfig(ranks=3, fused=True, clip=0.5, data=Path("-x"), preset="tiny", lr=1e-7)
    monkeypatch.setattr(sys, "argv", ["zero", "train", "--stage", "1"])
    assert cli.main() == 7
    assert given.pop() == TrainConfig(stage=1)
    for arguments, name in ((["train"], None), ([], "train")):
        assert cli.main(arguments, name) == 7
        assert given.pop() == TrainConfig()
        assert cli.main([*arguments, "-h"], name) == 0
        shown = capsys.readouterr().out
        assert all(f"--{field.replace('_', '-')}" in shown for field in to_flags(TrainConfig()))
    config = TrainConfig(ranks=3, fused=True, data=Path("-x"), offload=Offload(Path("disk")), checkpoint=Path("c"))
    places = (
        *(Offload("cpu"), Offload("cpu", parameters="cpu"), Offload("cpu", parameters="cpu", step="cpu")),
        *(Offload(Path("./cpu") / "states"), Offload(Path("a,b"))),
    )
    for sent in (config, TrainConfig(), *(TrainConfig(stage=3, offload=place) for place in places)):
        assert from_flags(TrainConfig, json.loads(json.dumps(to_flags(sent)))) == sent


def test_the_hash_is_of_whole_float32_parameters_in_order_with_ties_once() -> None:
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, -0.0]]).T)
    model.b = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.bfloat16))
    model.c = model.a
    expected = hashlib.sha256(torch.tensor([1.0, 3.0, 2.0, -0.0, 0.5]).numpy().astype("<f4").tobytes())
    assert parameters_sha256(model) == expected.hexdigest()


def test_in_a_file_progress_is_the_first_step_and_about_ten_lines_and_a_table_is_plain_and_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    console = Console(steps=250)
    for step in range(1, 251):
        console.advance(step, "loss 1.000")
    console.finish()
    assert capsys.readouterr().out.splitlines() == [f"step {step}/250  loss 1.000" for step in (1, *range(25, 251, 25))]
    console.table("[bold] :snake:", ["bytes", "measured"], [["sent by all ranks", "1,234"]])
    line, rows = "-" * 17, ["bytes              measured", "sent by all ranks     1,234"]
    assert capsys.readouterr().out.splitlines() == ["[bold] :snake:", rows[0], f"{line}  --------", rows[1]]


def test_ranks_start_also_where_the_launcher_has_no_time_for_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [field.name for field in dataclasses.fields(api.LaunchConfig) if field.name != "shutdown_timeout"]
    older = dataclasses.make_dataclass("LaunchConfig", [(name, Any, None) for name in names])
    started: list[Any] = []
    monkeypatch.setattr(api, "LaunchConfig", older)
    monkeypatch.setattr(api, "elastic_launch", lambda config, _: lambda *_: started.append(config))
    runner.launch_ranks("zero.commands.train.rank", {}, 2)
    (config,) = started
    assert config.nproc_per_node == 2
