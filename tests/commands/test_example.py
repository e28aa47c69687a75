"""The example `zero.examples.train` trains the plain loop's bits, and goes on only with what it began with."""

from __future__ import annotations

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
from zero.examples import train

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


def test_a_run_does_not_go_on_with_other_steps_or_with_what_would_change_its_bits(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text(text.read_text().replace("beer", "wine"))
    steps = max(run(monkeypatch, text, tmp_path / "saved"))
    other_steps = rf"has a run of {steps} steps, not \d+: give the --steps, --epochs"
    for other, said in (
        *((flag, other_steps) for flag in ("--epochs=3", "--steps=5", "--micro-batches=2")),
        ("--lr=0.01", f"--lr is 0.01, but {tmp_path}/saved has a run with 0.003: give the same"),
        ("--clip=0.5", f"--clip is 0.5, but {tmp_path}/saved has a run with 1.0: give the same"),
        ("--bf16", f"--bf16 is True, but {tmp_path}/saved has a run with False: give the same"),
        ("--data=other", "--data is text of SHA-256 "),
    ):
        with pytest.raises(SystemExit, match=said):
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
