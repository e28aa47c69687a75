"""`zero train` has the parameters of the plain loop, and leaves a record, pictures and one line for each error."""

from __future__ import annotations

import hashlib
import io
import math
import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import zero
from collectives import Transport, on_threads
from zero import MixedPrecision, Offload, StochasticRounding
from zero.checkpoint.read.reader import Checkpoint
from zero.commands import cli
from zero.commands.train import command as train
from zero.commands.train.settings import TrainConfig
from zero.examples import train as example
from zero.examples.train import ByteModel
from zero.job import load, save

from ..support.example import plain_example, samples_of
from ..support.plain import assert_same_value
from ..support.rows import rows
from .conftest import LAYERS, STEPS, WIDTH, Train, flags, plain_sha256, run_json

Flags = tuple[str, ...]
KINDS = ("parameters", "gradients", "optimizer")


@pytest.mark.parametrize(
    ("first", "then", "both", "plain"),
    rows(
        [
            (("--stage=0", "--bucket-cap-mb=0.01"), ("--stage=3",), ("--lr=0.002",), {"lr": 0.002}),
            (("--stage=1", "--offload=cpu"), (), ("--clip=inf",), {"clip": math.inf}),  # in the host's memory
        ],
        [
            (("--stage=3",), ("--stage=1", "--collective=ring"), ("--precision=bf16",), {"precision": torch.bfloat16}),
            (("--stage=0",), (), ("--precision=fp16", "--clip=0.5"), {"precision": torch.float16, "clip": 0.5}),
        ],
    ),
)
def test_a_run_has_the_parameters_of_the_plain_loop_and_the_bytes_of_its_stage_and_goes_on_at_another(
    text: Path, trained: Train, tmp_path: Path, first: Flags, then: Flags, both: Flags, plain: dict[str, Any]
) -> None:
    saves, last = (f"--checkpoint={tmp_path / 'saved'}", "--save-every=2"), tmp_path / f"saved/step-{STEPS:08d}"
    record = trained(*both, *saves, *first)
    assert record["params_sha256"] == plain_sha256(text, **plain)
    held = {kind: record["ranks"][0]["measured"][kind] for kind in KINDS}
    assert record["formula_bytes_by_stage"][f"stage {record['stage']}"] == held
    content = zero.open_checkpoint(last).content
    shutil.rmtree(last)
    after = trained(*both, *saves, *then)
    assert (after["params_sha256"], after["validation_loss"]) == (record["params_sha256"], record["validation_loss"])
    assert after["losses"] == {str(STEPS): record["losses"][str(STEPS)]}
    assert zero.open_checkpoint(last).content == content


def test_a_run_leaves_the_hash_of_the_plain_loop_its_record_and_its_pictures(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out"
    assert cli.main(flags(text, out, "--ranks=1"), "train") == 0
    record, shown = run_json(out), capsys.readouterr().out
    assert record["params_sha256"] == plain_sha256(text)
    assert record["parameters"] == sum(parameter.numel() for parameter in ByteModel(WIDTH, LAYERS).parameters())
    assert (record["world_size"], record["stage"]) == (1, 2)
    assert list(record["losses"]) == ["1", str(STEPS)]
    assert record["losses"]["1"] == pytest.approx(math.log(256), abs=0.5)
    assert record["losses"][str(STEPS)] < record["losses"]["1"]
    assert 0 < record["validation_loss"] < math.log(300)
    (facts,) = record["ranks"]
    assert set(facts["measured"]) == set(facts["formula"]) == {*KINDS, "gathered_peak", "scratch_peak"}
    assert record["config"]["out"] == str(out)
    assert record["versions"]["torch"] == torch.__version__
    for name in ("loss.png", "memory.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert f"step {STEPS}/{STEPS}  loss {record['losses'][str(STEPS)]:.3f}" in shown
    table = [line.split() for line in shown.splitlines() if line.startswith(("parameters  ", "gradients", "optimizer"))]
    held = facts["measured"], facts["formula"], record["formula_bytes_by_stage"]["plain loop"]
    assert {row[0]: row[-3:] for row in table} == {kind: [f"{size[kind]:,}" for size in held] for kind in KINDS}
    assert f"SHA-256 {record['params_sha256']}\n" in shown


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
    monkeypatch.setattr(ByteModel, "forward", Mock(side_effect=RuntimeError("the loss is\nnot what it was")))
    monkeypatch.setattr(train, "launch_ranks", Mock(side_effect=KeyboardInterrupt))
    for ranks, code, said in ((1, 1, "error: the loss is not what it was\n"), (2, 130, "interrupted\n")):
        assert cli.main(flags(text, tmp_path / "out", f"--ranks={ranks}"), "train") == code
        assert capsys.readouterr().err == said


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


def test_run_json_has_every_flag() -> None:
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


MICRO_BATCHES, BATCH, EPOCHS = 3, 4, 2  # of the example


def run_example(monkeypatch: pytest.MonkeyPatch, text: Path, folder: Path, *more: str) -> dict[int, Checkpoint]:
    """Run the example on one rank in this process. Return its checkpoints, by step."""
    sizes = (f"--micro-batches={MICRO_BATCHES}", f"--batch={BATCH}", f"--epochs={EPOCHS}", "--save-every=3")
    where = ("--device=cpu", f"--data={text}", f"--checkpoint={folder}", f"--out={folder.parent / 'model.pt'}")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *where, *sizes, *more])
        example.main()
    return {int(path.name[5:]): zero.open_checkpoint(path) for path in sorted(folder.glob("step-*"))}


@pytest.mark.parametrize("more", rows([("--stage=3",)], [("--stage=1", "--bf16")]))
def test_the_example_has_the_bits_of_the_plain_loop_also_after_it_was_resumed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    saved = run_example(monkeypatch, text, tmp_path / "saved", *more)
    last, precision = max(saved), torch.bfloat16 if "--bf16" in more else None
    assert last == EPOCHS * (samples_of(text) // (BATCH * MICRO_BATCHES))
    expected = plain_example(text, last, MICRO_BATCHES, BATCH, precision=precision)
    weights = {name: saved[last].model_state_dict()[name] for name, _ in expected.named_parameters()}
    assert_same_value(weights, dict(expected.named_parameters()), "the checkpoint")
    plainly_saved = torch.load(tmp_path / "model.pt", weights_only=True)  # it has plain tensors alone
    assert_same_value(plainly_saved, dict(expected.to(precision).state_dict()), "model.pt")
    shutil.rmtree(tmp_path / "saved" / f"step-{last:08d}")
    resumed = run_example(monkeypatch, text, tmp_path / "saved", "--stage=0", *more[1:])
    assert resumed[last].content == saved[last].content


def test_a_run_does_not_go_on_with_other_steps_or_with_what_would_change_its_bits(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text(text.read_text().replace("beer", "wine"))
    steps = max(run_example(monkeypatch, text, tmp_path / "saved"))
    other_steps = rf"has a run of {steps} steps, not \d+: give the --steps, --epochs"
    for other, said in (
        *((flag, other_steps) for flag in ("--epochs=3", "--steps=5", "--micro-batches=2")),
        ("--lr=0.01", f"--lr is 0.01, but {tmp_path}/saved has a run with 0.003: give the same"),
        ("--clip=0.5", f"--clip is 0.5, but {tmp_path}/saved has a run with 1.0: give the same"),
        ("--bf16", f"--bf16 is True, but {tmp_path}/saved has a run with False: give the same"),
        ("--data=other", "--data is text of SHA-256 "),
    ):
        with pytest.raises(SystemExit, match=said):
            run_example(monkeypatch, text, tmp_path / "saved", other)


def test_ranks_that_read_other_text_are_an_error_on_each(text: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text(text.read_text().replace("beer", "wine"))

    def program(transport: Transport) -> str:
        data = str((text, text, tmp_path / "other")[transport.rank])
        args = Namespace(data=data, batch=BATCH, micro_batches=MICRO_BATCHES, lr=1e-3, clip=1.0, steps=1)
        model = ByteModel(8, 1)
        optimizer = example.build(args, model, process_group=transport)
        with pytest.raises(SystemExit) as caught:
            example.train(args, "cpu", model, optimizer)
        return str(caught.value)

    remedy = "give every host the same file"
    assert on_threads(3, program) == [
        f"rank {other} reads another --data than rank {rank}: {remedy}" for rank, other in ((0, 2), (1, 2), (2, 0))
    ]
