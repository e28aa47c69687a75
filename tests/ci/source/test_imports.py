"""The library imports no more than it needs."""

from __future__ import annotations

import json
import subprocess
import sys

from ...source.trees import ROOT


def test_importing_the_library_imports_no_command_no_planner_and_no_process_group() -> None:
    """But for the entry of `zero.verify`, which is a function of the library."""
    code = "import json, sys, zero; print(json.dumps(sorted(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    modules = set(json.loads(ended.stdout))
    verify = {"zero.commands", "zero.commands.verify"} | {f"zero.commands.verify.{m}" for m in ("verification", "spec")}
    ours = {name for name in modules if name.startswith(("zero.commands", "zero.planning"))}
    assert ours - {"zero.commands.verify.bit_diff"} <= verify
    assert "collectives.backends.gloo" not in modules
    tops = {name.partition(".")[0] for name in modules}
    assert not tops & {"typer", "rich", "matplotlib", "safetensors", "click"}
    assert not tops & {"transformers", "accelerate", "pytorch_lightning", "lightning_fabric", "lightning"}
    assert not any(name.startswith(("zero.integrations", "zero.examples")) for name in modules)
