"""Tiny runs of `zero train`, the plain loop beside them, and processes that are not."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zero.commands import cli, runner
from zero.commands.train import command as train_command
from zero.commands.train import report
from zero.commands.verify import ranks as verify_ranks
from zero.commands.verify import verification
from zero.job import save

from ..support.example import plain_example

ROOT = Path(__file__).parents[2]
STEPS, MICRO_BATCHES, BATCH, WIDTH, LAYERS = 3, 4, 2, 32, 1
Train = Callable[..., dict[str, Any]]
LAUNCHER = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")


def flags(text: Path, out: Path, *more: str) -> list[str]:
    sizes = (f"--steps={STEPS}", f"--micro-batches={MICRO_BATCHES}", f"--batch={BATCH}")
    return [f"--width={WIDTH}", f"--layers={LAYERS}", *sizes, f"--data={text}", f"--out={out}", *more]


def run_json(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


def plain_sha256(text: Path, **changes: Any) -> str:
    sizes = {"width": WIDTH, "layers": LAYERS}
    return train_command.parameters_sha256(plain_example(text, STEPS, MICRO_BATCHES, BATCH, **sizes, **changes))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(100)))
    return path


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the variables of a launcher, and restore the number of threads."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def trained(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Return a function that trains on one rank in this process, and returns the record of the run. It draws no
    pictures, which takes longer than the training."""
    monkeypatch.setattr(report, "can_draw", lambda: False)

    def run(*more: str, code: int = 0) -> dict[str, Any]:
        assert cli.main(flags(text, tmp_path / "out", "--ranks=1", *more), "train") == code
        return {} if code else run_json(tmp_path / "out")

    return run


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (verification, train_command):
        monkeypatch.setattr(module, "launch_ranks", lambda *_: pytest.fail("processes were started"))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run the program of a single launched process here; its error is returned as a launcher would."""

    def run(module: str, settings: dict[str, str], ranks: int) -> None:
        assert (module, ranks) == ("zero.commands.verify.ranks", 1)
        error_file, file = (tmp_path / f"{name}-{settings['loop']}" for name in ("error", "settings"))
        save(settings, file)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
                patch.setenv(name, value)
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
            patch.setattr(sys, "argv", ["", str(file), *sys.path])
            patch.setattr(sys, "path", list(sys.path))
            code = runner.run_rank(verify_ranks.work)
        assert code == error_file.exists()
        if code:
            details = json.loads(error_file.read_text())["message"]["extraInfo"]
            raise runner.RankError(0, details["line"], details["py_callstack"])

    monkeypatch.setattr(verification, "launch_ranks", run)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Give processes a folder of temporary files, which must be empty in the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    assert not list(folder.iterdir()), "left behind"
