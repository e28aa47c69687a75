"""The example `zero.examples.train` trains the plain loop's bits, and takes GPUs only where each rank has its own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import zero
from zero.checkpoint.read.reader import Checkpoint
from zero.examples import train

from ..support.loops import PlainLoop
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
    where = ("--device=cpu", f"--data={text}", f"--checkpoint={folder}")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *where, *sizes, *more])
        train.main()
    return {int(path.name[5:]): zero.open_checkpoint(path) for path in sorted(folder.glob("step-*"))}


def plain(text: Path, precision: zero.MixedPrecision | None) -> nn.Module:
    """Train with a loop without the optimizer of this library: torch's AdamW, and micro-batches of one process."""
    length = train.LENGTH
    found = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    samples = found[: len(found) // (length + 1) * (length + 1)].view(-1, length + 1)
    data = TensorDataset(samples[:, :-1], samples[:, 1:])
    sampler = zero.MicroBatchSampler(len(samples) * 9 // 10, BATCH, 0, 1, per_step=MICRO_BATCHES, drop_last=True)
    batches = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        batches += [tuple(batch) for batch in DataLoader(data, batch_sampler=sampler)]
    torch.manual_seed(0)
    model = train.ByteModel()

    def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
        decayed = [p for p in parameters if p.ndim > 1]
        others = [p for p in parameters if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=3e-3)

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())

    total = len(batches) // MICRO_BATCHES
    PlainLoop(
        loss_of,
        MICRO_BATCHES,
        precision=precision,
        scheduler=lambda optimizer: OneCycleLR(optimizer, 3e-3, total),
        optimizer_of=optimizer_of,
    ).run(model, batches)
    return model


@pytest.mark.parametrize("more", rows([("--stage=3",)], [("--stage=1", "--bf16")]))
def test_the_example_has_the_bits_of_the_plain_loop_also_after_it_was_resumed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    saved = run(monkeypatch, text, tmp_path / "saved", *more)
    *_, before, last = saved
    expected = plain(text, zero.MixedPrecision(torch.bfloat16) if "--bf16" in more else None)
    weights = saved[last].model_state_dict()
    for name, parameter in expected.named_parameters():
        assert_same_bits(parameter, weights[name], name)
    shutil.rmtree(tmp_path / "saved" / f"step-{last:08d}")
    resumed = run(monkeypatch, text, tmp_path / "saved", "--stage=0", *more[1:])
    assert max(resumed) == last > before
    assert resumed[last].content == saved[last].content


@pytest.mark.parametrize("other", ["--epochs=3", "--micro-batches=2"])
def test_a_run_does_not_go_on_with_other_steps_than_it_began_with(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    saved = run(monkeypatch, text, tmp_path / "saved")
    with pytest.raises(SystemExit, match=rf"has a run of {max(saved)} steps, not \d+: give the --epochs and --micro"):
        run(monkeypatch, text, tmp_path / "saved", other)


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
        assert remark == "2 ranks on this host, but 1 GPU(s): they train on the CPU, over gloo"
