"""Private names of torch: one module has all; without one the library is imported, and names it where it is used."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import pool as memory
from collectives import torch_internals
from collectives.pool import Pool

from ...source.trees import ROOT, trees


def test_this_torch_has_every_name_and_errors_name_the_torch_that_the_constraints_install() -> None:
    assert torch_internals.missing(*vars(torch_internals).values()) is None
    assert f"\ntorch=={torch_internals.TESTED_VERSION}." in (ROOT / "constraints.txt").read_text()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_paths(tree: ast.Module) -> Iterator[str]:
    """Return the private names that are reached from torch, or imported from it."""
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname or a.name.partition(".")[0]: a.name for a in node.names if a.name.startswith("torch")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    yield from (path for path in aliases.values() if "._" in path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root, _, rest = ast.unparse(node).partition(".")
            if root in aliases:
                yield f"{aliases[root]}.{rest}"


def test_private_names_are_in_one_module_and_private_attributes_are_listed_there() -> None:
    for source, names in {
        "import torch\ntorch._C.f()": ["torch._C"],
        "import torch._guards": ["torch._guards"],
        "from torch.utils._device import D": ["torch.utils._device.D"],
        "from torch import nn\nnn.Module._call_impl": ["torch.nn.Module._call_impl"],
        "from torch import Tensor\nTensor.__repr__, torch.ones(1).add_(1), self._x": [],
    }.items():
        assert list(private_paths(ast.parse(source))) == names
    found = {module: list(private_paths(tree)) for module, tree in trees().items()}
    assert not any(found.values()), {module: paths for module, paths in found.items() if paths}
    weight = torch.ones(1)
    objects = (weight, weight.untyped_storage(), nn.Linear(1, 1), torch.optim.SGD([weight]), dist.ProcessGroup)
    of_torch = {name for each in objects for name in dir(each) if is_private(name)} | {"_timeout"}
    read = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in read if ast.unparse(node.value) not in ("self", "cls")} & of_torch
    listed = set(
        re.findall(r"^    (_\w+)", ast.get_docstring(trees()["collectives.torch_internals"]) or "", re.MULTILINE)
    )
    assert used, "if there are none, this reader is blind"
    assert used <= listed, f"{used - listed} are read, but not listed"


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


@pytest.mark.parametrize(
    "wrong",
    [lambda count: count - 1, lambda count: count + 1, lambda count: 1, lambda count: min(count, 2)],
    ids=["one less", "one more", "always one", "views are not counted"],
)
def test_a_use_count_that_means_something_else_is_an_error_before_memory_is_used_again(
    wrong: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch_internals.storage_use_count
    monkeypatch.setattr(memory, "storage_use_count", lambda address: wrong(right(address)))
    with pytest.raises(RuntimeError, match=r"counts the holders of a storage as .* memory in use could be handed out"):
        Pool()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_the_use_count_is_right_in_every_mode(mode: Callable[[], Any]) -> None:
    with mode():
        pool = Pool()
    taken = pool.take(3, torch.float32, torch.device("cpu"))
    address, view = taken.data_ptr(), taken[1:]
    del taken
    other: Tensor = pool.take(3, torch.float32, torch.device("cpu"))
    assert view.untyped_storage().data_ptr() == address != other.data_ptr()
