"""Without a private name of torch the library is imported, and the name is an error where it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from collectives import torch_internals

from ...source.trees import ROOT

WITHOUT_NAMES = """
import json, pkgutil
hidden = []
def resolve_nothing(path):
    hidden.append(path.replace(":", "."))
    raise AttributeError(path)
pkgutil.resolve_name = resolve_nothing
from collectives import torch_internals
from tests.support.errors import error_of
from zero import ZeroOptimizer
found = {}
for value in vars(torch_internals).values():
    if torch_internals.missing(value) is not None:
        uses = (lambda: value(1), lambda: value.__code__, lambda: isinstance(1, value))
        errors = [error_of(use) for use in uses]
        found[next(path for path in hidden if f" has no {path}, " in errors[0])] = errors
assert found.keys() == {*hidden}
print(json.dumps(found))
"""


def test_without_every_name_the_library_is_imported_and_each_is_named_where_it_is_used() -> None:
    command = [sys.executable, "-c", WITHOUT_NAMES]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found
    for path, errors in found.items():  # of a call, an attribute and isinstance
        for error in errors:
            assert error.startswith(f"RuntimeError: torch {torch.__version__} has no {path}, which "), error
            assert f"use torch {torch_internals.TESTED_VERSION}" in error
