"""The example `zero.examples.train` has the same checkpoints on one rank, on two, and resumed on three."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import zero
from tests.commands.conftest import LIMIT, ROOT, command

pytestmark = pytest.mark.timeout(3 * LIMIT)
SIZES = ("-m", "zero.examples.train", "--device=cpu", "--epochs=2", "--batch=8", "--save-every=3")


def contents(text: Path, folder: Path, ranks: int, *more: str) -> dict[str, str]:
    """Run the example as a user starts it. Return the content of its checkpoints, by step."""
    start = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    ended = command(*start, *SIZES, f"--data={text}", f"--checkpoint={folder}", f"--out={folder}.pt", *more)
    assert ended.returncode == 0, ended.stderr
    assert "epoch 2: validation loss" in ended.stdout
    return {path.name: zero.open_checkpoint(path).content for path in sorted(folder.glob("step-*"))}


def test_the_example_has_the_same_checkpoints_at_any_stage_and_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four micro-batches in a step: two ranks have two each, and of three one has two."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    text = tmp_path / "text"
    text.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(400)))
    alone = contents(text, tmp_path / "alone", 1)
    assert contents(text, tmp_path / "two", 2, "--stage=3") == alone
    *_, middle, last = alone
    for name in (middle, last):
        shutil.rmtree(tmp_path / "two" / name)
    assert contents(text, tmp_path / "two", 3, "--stage=1") == alone
