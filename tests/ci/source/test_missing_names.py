"""Without a private name of torch the library is imported, and the name is an error where it is used."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import torch

from collectives import torch_internals
from tests.source.trees import ROOT, TREES

from .hidden import COMPARED_AT, NEEDED_AT

MODULE = "collectives.torch_internals"
NAMES = [
    node.args[0].value
    for node in ast.walk(TREES[MODULE])
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "_find" and isinstance(node.args[0], ast.Constant)
]


def errors(mode: str, names: Iterable[object]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.ci.source.hidden", mode, *map(str, names)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def complaint(path: object) -> str:
    return f"torch {torch.__version__} has no {str(path).replace(':', '.')}, which "


def test_without_every_name_the_library_is_imported_and_each_is_named_where_it_is_used() -> None:
    found = errors("all", NAMES)
    assert found.keys() == set(NAMES)
    for path, told in found.items():
        assert len(told) == 3, "a call, an attribute and isinstance"
        for error in told:
            assert error.startswith(f"RuntimeError: {complaint(path)}"), error
            assert f"use torch {torch_internals.TESTED_VERSION}" in error


def test_without_one_name_training_that_needs_it_names_it() -> None:
    names = NEEDED_AT.keys() | COMPARED_AT.keys()
    assert names <= set(NAMES)
    for path, error in errors("each", names).items():
        named = error.startswith("RuntimeError: ") and complaint(path) in error  # perhaps behind rank and parameter
        assert named if path in NEEDED_AT else not error, (path, error)
