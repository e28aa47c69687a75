"""The script of README trains, on two ranks, the bits of the plain loop that README says it equals."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from subprocess import run

import pytest
import torch

from ...support.loops import ROOT
from ...support.plain import assert_same_bits

LIMIT = 240  # seconds of two ranks on a busy machine
README = (ROOT / "README.md").read_text()
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

pytestmark = pytest.mark.timeout(2 * LIMIT)


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


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
    return script


def trained(script: str, folder: Path, *start: str) -> dict[str, torch.Tensor]:
    folder.mkdir()
    (folder / "script.py").write_text(script)
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *start, "script.py"]
    ended = run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, env=variables)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")  # "It prints nothing"
    return dict(torch.load(folder / "model.pt", weights_only=True))


def test_the_script_of_readme_trains_the_bits_of_the_loop_next_to_it(tmp_path: Path) -> None:
    plain = plain_loop()
    assert "ZeroOptimizer(" not in plain
    assert "dist.get_rank" not in plain
    expected, found = trained(plain, tmp_path / "plain"), trained(block("python"), tmp_path / "ranks", *RANKS)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert_same_bits(found[name], tensor)
