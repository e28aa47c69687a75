"""The script of README and the examples have the bits of one rank, or of the plain loop, at any number of ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from subprocess import run

import pytest
import torch

from tests.commands.conftest import LIMIT, ROOT
from tests.support.plain import assert_same_value

pytestmark = [pytest.mark.timeout(4 * LIMIT), pytest.mark.usefixtures("alone")]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def shown_by(folder: Path, ranks: int, *words: str) -> str:
    """Run a script in a folder as a user starts it, under torchrun if there are several ranks."""
    start = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    command = [sys.executable, *start, *words]
    ended = run(command, cwd=folder, capture_output=True, text=True, timeout=2 * LIMIT)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return str(found)


def plain_loop() -> str:
    """Return README's script without the lines that its diff adds, and with those that it removes."""
    script, lines = block("python"), block("diff").splitlines(keepends=True)
    removed = added = ""
    for line in [*lines, " "]:
        if added and not line.startswith("+"):
            assert script.count(added) == 1
            script, removed, added = script.replace(added, removed), "", ""
        removed += line[1:] * line.startswith("-")
        added += line[1:] * line.startswith("+")
    assert "ZeroOptimizer(" not in script
    return script


def test_the_script_of_readme_trains_the_bits_of_the_loop_next_to_it(tmp_path: Path) -> None:
    trained = []
    for ranks, script in ((1, plain_loop()), (2, block("python"))):
        (tmp_path / "script.py").write_text(script)
        assert shown_by(tmp_path, ranks, "script.py") == "", "it prints nothing"
        trained.append(torch.load(tmp_path / "model.pt", weights_only=True))
    assert_same_value(trained[1], trained[0], "the model")


def test_the_loop_of_accelerate_has_the_same_hash_at_any_stage_and_number_of_ranks_and_resumed(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    hashes = []
    for ranks, arguments in (
        (2, "--stage 3 --epochs 2"),
        (2, "--stage 2 --epochs 1 --folder run"),
        (1, "--stage 3 --epochs 2 --resume run"),
    ):
        shown = shown_by(tmp_path, ranks, "-m", "zero.examples.accelerate_loop", *arguments.split())
        hashes += re.findall(r"^SHA-256 (\w{64})$", shown, re.MULTILINE)
    whole, half, resumed = hashes
    assert whole == resumed != half
