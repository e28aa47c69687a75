"""Fixtures of the tests of the commands: a text, a run of `zero train` that many tests read, processes that are not."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from zero.commands import cli, runner

from .runs import ROOT, STEPS, RunOutput, Train, flags, run_json

LAUNCHER = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(300)))
    return path


@pytest.fixture(autouse=True)
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


@pytest.fixture
def trained(text: Path, tmp_path: Path, bare: None) -> Train:
    """Return a function that trains on one rank in this process, and returns the record of the run."""

    def run(*more: str, steps: int = STEPS) -> dict[str, Any]:
        out = tmp_path / "out"
        assert cli.main(flags(text, out, "--ranks=1", f"--steps={steps}", *more), "train") == 0
        return run_json(out)

    return run


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from zero.commands.train import command as train

    for module in (runner, train):
        monkeypatch.setattr(module, "launch_ranks", lambda *_: pytest.fail("processes were started"))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run the program of a single launched process here; its error is returned as a launcher would."""
    from zero.commands.verify import ranks as verify_ranks

    def run(module: str, settings: dict[str, str], ranks: int) -> None:
        assert (module, ranks) == ("zero.commands.verify.ranks", 1)
        error_file = tmp_path / f"error-{settings['loop']}.json"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
                patch.setenv(name, value)
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
            patch.setattr(sys, "argv", ["", json.dumps(settings)])
            patch.setattr(sys, "path", list(sys.path))
            code = runner.run_rank(verify_ranks.work)
        assert code == error_file.exists()
        if code:
            details = json.loads(error_file.read_text())["message"]["extraInfo"]
            raise runner.RankError(0, details["line"], details["py_callstack"])

    monkeypatch.setattr(runner, "launch_ranks", run)


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
