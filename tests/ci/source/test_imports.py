"""The library imports no more than it needs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ...source.trees import ROOT


def modules_after(code: str) -> set[str]:
    """Return the modules that a new process has imported after these lines."""
    code += "; import json, sys; print(json.dumps(sorted(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    found: set[str] = set(json.loads(ended.stdout.splitlines()[-1]))
    return found


def test_importing_the_library_imports_no_command_no_planner_and_no_process_group() -> None:
    """But for `zero.verify`, which is a function of the library, and what starts its processes."""
    modules = modules_after("import zero; zero.ZeroOptimizer")
    verify = {"zero.commands", "zero.commands.verify", "zero.commands.verify.verification"}
    verify |= {"zero.commands.console", "zero.commands.runner"}
    ours = {name for name in modules if name.startswith(("zero.commands", "zero.planning"))}
    assert ours - {"zero.commands.verify.bit_diff"} <= verify
    assert "collectives.backends.gloo" not in modules
    tops = {name.partition(".")[0] for name in modules}
    assert not tops & {"typer", "rich", "matplotlib", "safetensors", "click"}
    assert not tops & {"transformers", "accelerate", "pytorch_lightning", "lightning_fabric", "lightning"}
    assert not any(name.startswith(("zero.integrations", "zero.examples")) for name in modules)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["trian"], []])
def test_the_command_line_imports_no_torch_before_it_knows_the_command(words: list[str]) -> None:
    modules = modules_after(f"from zero.commands.cli import main; main({words!r})")
    assert "typer" in modules
    assert not {"torch", "numpy"} & modules
