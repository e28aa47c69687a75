"""The example `zero.examples.train` trains the plain loop's bits, and takes GPUs only where each rank has its own.

Wrong input of an example is one line.
"""

from __future__ import annotations

import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

import zero
from collectives import Transport, on_threads
from zero.checkpoint.read.reader import Checkpoint
from zero.examples import finetune_lora, train

from ..support.example import plain_example, samples_of
from ..support.plain import assert_same_bits
from ..support.rows import rows

MICRO_BATCHES, BATCH, EPOCHS = 3, 4, 2


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(100)))
    return path


def run(monkeypatch: pytest.MonkeyPatch, text: Path, folder: Path, *more: str) -> dict[int, Checkpoint]:
    """Run the example on one rank in this process. Return its checkpoints, by step."""
    sizes = (f"--micro-batches={MICRO_BATCHES}", f"--batch={BATCH}", f"--epochs={EPOCHS}", "--save-every=3")
    where = ("--device=cpu", f"--data={text}", f"--checkpoint={folder}", f"--out={folder.parent / 'model.pt'}")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *where, *sizes, *more])
        train.main()
    return {int(path.name[5:]): zero.open_checkpoint(path) for path in sorted(folder.glob("step-*"))}


def plain(text: Path, precision: torch.dtype | None) -> nn.Module:
    steps = EPOCHS * (samples_of(text) // (BATCH * MICRO_BATCHES))
    return plain_example(text, steps, MICRO_BATCHES, BATCH, precision=precision)


@pytest.mark.parametrize("more", rows([("--stage=3",)], [("--stage=1", "--bf16")]))
def test_the_example_has_the_bits_of_the_plain_loop_also_after_it_was_resumed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    saved = run(monkeypatch, text, tmp_path / "saved", *more)
    *_, before, last = saved
    expected = plain(text, torch.bfloat16 if "--bf16" in more else None)
    weights = saved[last].model_state_dict()
    plainly_saved = torch.load(tmp_path / "model.pt", weights_only=True)  # it has plain tensors alone
    assert list(plainly_saved) == list(expected.state_dict())
    for name, parameter in expected.named_parameters():
        assert_same_bits(parameter, weights[name], name)
        assert_same_bits(plainly_saved[name], parameter if "--bf16" not in more else parameter.bfloat16(), name)
    shutil.rmtree(tmp_path / "saved" / f"step-{last:08d}")
    resumed = run(monkeypatch, text, tmp_path / "saved", "--stage=0", *more[1:])
    assert max(resumed) == last > before
    assert resumed[last].content == saved[last].content


@pytest.mark.parametrize("other", ["--epochs=3", "--steps=5", "--micro-batches=2"])
def test_a_run_does_not_go_on_with_other_steps_than_it_began_with(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    saved = run(monkeypatch, text, tmp_path / "saved")
    with pytest.raises(SystemExit, match=rf"has a run of {max(saved)} steps, not \d+: give the --steps, --epochs"):
        run(monkeypatch, text, tmp_path / "saved", other)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("--lr=0.01", "--lr is 0.01, but {} has a run with 0.003: give the same"),
        ("--clip=0.5", "--clip is 0.5, but {} has a run with 1.0: give the same"),
        ("--bf16", "--bf16 is True, but {} has a run with False: give the same"),
        ("--data=other", "--data is text of SHA-256 "),
    ],
)
def test_a_run_does_not_go_on_with_what_would_change_its_bits(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text(text.read_text().replace("beer", "wine"))
    run(monkeypatch, text, tmp_path / "saved")
    with pytest.raises(SystemExit, match=re.escape(said.format(tmp_path / "saved"))):
        run(monkeypatch, text, tmp_path / "saved", other)


def test_ranks_that_read_other_text_are_an_error_on_each(text: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text(text.read_text().replace("beer", "wine"))

    def program(transport: Transport) -> str:
        data = str((text, text, tmp_path / "other")[transport.rank])
        args = Namespace(data=data, batch=BATCH, micro_batches=MICRO_BATCHES, lr=1e-3, clip=1.0, steps=1)
        model = train.ByteModel(8, 1)
        optimizer = train.build(args, model, process_group=transport)
        with pytest.raises(SystemExit) as caught:
            train.train(args, "cpu", model, optimizer)
        return str(caught.value)

    remedy = "give every host the same file"
    assert on_threads(3, program) == [
        f"rank {other} reads another --data than rank {rank}: {remedy}" for rank, other in ((0, 2), (1, 2), (2, 0))
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data="], "--data '' must be a file that is not empty"),
        (["--data={}/empty"], "--data '{}/empty' must be a file that is not empty"),
        (["--data={}/short"], "--data {}/short has 1000 bytes, so 13 samples to train on, and a step needs 64: give a"),
        (["--epochs=0"], "--epochs is 0: it must be at least 1"),
        (["--steps=0"], "--steps is 0: it must be at least 1"),
        (["--micro-batches=-1"], "--micro-batches is -1: it must be at least 1"),
        (["--checkpoint="], "--checkpoint '': name a folder"),
        (["--out="], "--out '': name a file in a folder that exists"),
        (["--out={}/no/model.pt"], "--out '{}/no/model.pt': name a file in a folder that exists"),
        (
            ["--device=cuda"],
            "--device cuda needs one GPU per rank that torch finds, and this host has 0 GPU(s) for 1 rank(s): start",
        ),
    ],
)
def test_wrong_input_ends_with_one_line_that_names_the_flag(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"x" * 1000)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["train.py", *(flag.format(tmp_path) for flag in flags)])
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert str(ended.value).startswith(said.format(*[tmp_path] * 2))
    assert "\n" not in str(ended.value)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--epochs=0", "--epochs is 0: it must be at least 1"),
        ("--adapters=", "--adapters '': name a file in a folder that exists"),
        ("--adapters={}/no/adapters.pt", "--adapters '{}/no/adapters.pt': name a file in a folder that exists"),
    ],
)
def test_wrong_input_of_the_fine_tuning_is_one_line(
    flag: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["finetune_lora.py", flag.format(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        finetune_lora.main()
    assert str(ended.value) == said.format(tmp_path)


@pytest.mark.parametrize(
    ("asked", "ranks", "gpus", "device"),
    [
        (None, 1, 0, "cpu"),
        (None, 2, 0, "cpu"),
        (None, 1, 1, "cuda"),
        (None, 8, 8, "cuda"),
        (None, 2, 8, "cuda"),
        (None, 2, 1, "cpu"),
        ("cpu", 2, 8, "cpu"),
        ("cuda", 2, 2, "cuda"),
    ],
)
def test_ranks_train_on_gpus_if_each_has_its_own_unless_asked_otherwise(
    asked: str | None, ranks: int, gpus: int, device: str
) -> None:
    found, remark = train.choose_device(asked, ranks, gpus)
    assert found == device
    assert bool(remark) == (asked is None and 0 < gpus < ranks)
    if remark:
        assert remark.startswith("this host has 1 GPU(s) for 2 rank(s), so they compute on the CPU, over gloo; at")
