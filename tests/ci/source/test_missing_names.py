"""Without a private name of torch the library is imported, and the name is an error where it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from collectives import torch_internals
from tests.source.trees import ROOT


def test_without_every_name_the_library_is_imported_and_each_is_named_where_it_is_used() -> None:
    command = [sys.executable, "-m", "tests.ci.source.hidden"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found
    for path, told in found.items():
        assert len(told) == 3, "a call, an attribute and isinstance"
        for error in told:
            assert error.startswith(f"RuntimeError: torch {torch.__version__} has no {path}, which "), error
            assert f"use torch {torch_internals.TESTED_VERSION}" in error
