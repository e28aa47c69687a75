"""The library imports no more than it needs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ...source.trees import ROOT

OTHERS = {"typer", "rich", "matplotlib", "safetensors", "click"}
OTHERS |= {"transformers", "accelerate", "pytorch_lightning", "lightning_fabric", "lightning"}
VERIFY = ("verify", "verify.verification", "verify.bit_diff", "console", "runner")  # what `zero.verify` needs


def modules_after(code: str) -> set[str]:
    code += "; import json, sys; print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    return set(json.loads(ended.stdout.splitlines()[-1]))


def test_importing_the_library_imports_no_command_no_planner_and_no_process_group() -> None:
    modules = modules_after("import zero, zero.verify, zero.checkpoint; zero.ZeroOptimizer")
    ours = {name for name in modules if name.startswith(("zero.commands", "zero.planning"))}
    assert ours <= {"zero.commands", *(f"zero.commands.{name}" for name in VERIFY)}
    assert "collectives.backends.gloo" not in modules
    assert not any(name.startswith(("zero.integrations", "zero.examples")) for name in modules)
    modules |= modules_after("import zero.integrations")
    assert not {name.partition(".")[0] for name in modules} & OTHERS


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["trian"], []])
def test_the_command_line_imports_no_torch_before_it_knows_the_command(words: list[str]) -> None:
    modules = modules_after(f"from zero.commands.cli import main; main({words!r})")
    assert "typer" in modules
    assert not {"torch", "numpy"} & modules
