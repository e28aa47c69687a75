"""Fixtures of the tests of the commands: a text, a run of `zero train` that many tests read."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from zero.commands import cli

ROOT = Path(__file__).parents[2]
LIMIT = 100  # seconds for a command; it takes about ten
LAUNCHER = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")


@dataclass(frozen=True)
class RunOutput:
    """What a run of `zero train` has left and printed. ``record``: the content of run.json."""

    out: Path
    record: dict[str, Any]
    shown: str
    checkpoints: Path


def flags(text: Path, out: Path, *more: str) -> list[str]:
    """Return the flags of a tiny run of `zero train`."""
    sizes = ("--preset=tiny", "--steps=3", "--micro-batches=4", "--batch=2", "--sequence=24")
    return [*sizes, f"--data={text}", f"--out={out}", *more]


def run_json(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the root of the repository."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(300)))
    return path


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the variables of a launcher, and restore the number of threads."""
    import torch

    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no pictures, which takes longer than the training."""
    from zero.commands.train import report

    monkeypatch.setattr(report, "can_draw", lambda: False)


@pytest.fixture(scope="session")
def one_rank(text: Path, tmp_path_factory: pytest.TempPathFactory) -> RunOutput:
    """Return a run on one rank at stage 2, with a checkpoint after steps 2 and 3."""
    import torch

    folder, shown, threads = tmp_path_factory.mktemp("one"), io.StringIO(), torch.get_num_threads()
    more = ("--ranks=1", f"--checkpoint={folder / 'checkpoints'}", "--checkpoint-every=2")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown):
        for name in LAUNCHER:
            patch.delenv(name, raising=False)
        assert cli.main(flags(text, folder / "deep" / "out", *more), "train") == 0
    torch.set_num_threads(threads)
    out = folder / "deep" / "out"
    return RunOutput(out, run_json(out), shown.getvalue(), folder / "checkpoints")
