"""Which module may import which, read from the syntax trees of `zero` and `collectives`: nothing is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("collectives", "zero")
SEAM = "collectives.backends.gloo"
MAY_IMPORT_DISTRIBUTED = {
    SEAM,
    "zero.commands.checkpoint.export",
    "zero.commands.runner",
    "zero.runtime.process_group",
}

BASE = {"collectives", "collectives.torch_internals"}
SHARED = {*BASE, "zero.core", "zero.config", "zero.consistency"}
ROOMS = {"zero.gradients", "zero.parameters", "zero.runtime", "zero.step"}
MAY_IMPORT: dict[str, set[str]] = {
    "collectives.torch_internals": set(),
    "collectives.algorithms": {"collectives"},
    "collectives.backends": {"collectives"},
    "collectives.topology": {"collectives", "collectives.algorithms", "collectives.backends"},
    "collectives": {*BASE, "collectives.algorithms", "collectives.backends", "collectives.topology"},
    "zero.core": {"collectives.torch_internals"},
    "zero.planning": {*BASE, "collectives.algorithms", "zero.config", "zero.core"},
    "zero.config": {*BASE, "collectives.backends", "zero.core"},  # a user's process group needs a backend
    "zero.consistency": {"collectives", "zero.config", "zero.core"},
    "zero.runtime": SHARED,
    "zero.gradients": SHARED | {"zero.runtime"},
    "zero.parameters": SHARED | {"zero.runtime"},
    "zero.step": SHARED | {"zero.runtime"},
    "zero.state": SHARED | ROOMS,
    "zero.parts": SHARED | ROOMS,
    "zero.setup": SHARED | ROOMS | {"zero.parts"},
    "zero.engine": SHARED | ROOMS | {"zero.parts", "zero.state"},
    "zero.optimizer": SHARED | ROOMS | {"zero.engine", "zero.setup", "zero.state"},
    "zero.checkpoint": SHARED | ROOMS | {"zero.engine", "zero.optimizer", "zero.state"},
    "zero.commands": SHARED | ROOMS | {"zero", "zero.checkpoint", "zero.optimizer", "zero.planning", "zero.state"},
    "zero.train": {"zero.commands"},
    "zero.verify": {"zero.commands"},
    "zero": SHARED | ROOMS | {"zero.checkpoint", "zero.commands", "zero.optimizer", "zero.state"},
}
"""Which room may import which: a package of this table with all that is below it, or one module."""

MUTATORS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem"),
    *("popleft", "remove", "reverse", "setdefault", "sort", "update", "difference_update", "intersection_update"),
}


@dataclass(frozen=True)
class Import:
    """One imported module. ``lazy``: inside a function; ``typing_only``: under ``if TYPE_CHECKING``."""

    target: str
    line: int
    lazy: bool = False
    typing_only: bool = False


def _read() -> dict[str, ast.Module]:
    trees = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            trees[name] = ast.parse(path.read_text(), str(path))
    return trees


TREES = _read()


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _imports(module: str, tree: ast.Module, known: set[str]) -> list[Import]:
    """Return every import of a module.

    Relative names are resolved, and submodules are distinguished from names inside a module.
    """
    package = module if module in PACKAGES else module.rpartition(".")[0]

    def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        base = node.module or ""
        if node.level:
            parent = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
            base = f"{parent}.{base}" if base else parent
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield full if full in known or base == "torch" else base

    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (Import(target, node.lineno, lazy, typing_only) for target in targets(node))
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for inside in node.body:
                yield from walk(inside, lazy, True)
            for inside in node.orelse:
                yield from walk(inside, lazy, typing_only)
            return
        lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy, typing_only)

    return list(walk(tree, False, False))


IMPORTS = {name: _imports(name, tree, set(TREES)) for name, tree in TREES.items()}


def _at_run_time(module: str) -> list[Import]:
    return [found for found in IMPORTS[module] if not found.typing_only]


def _own(module: str, *, lazy: bool = True) -> set[str]:
    """Return the modules of the two packages that a module imports; ``lazy``: also inside functions."""
    return {found.target for found in _at_run_time(module) if found.target in TREES and (lazy or not found.lazy)}


def _reachable(start: str, *, lazy: bool) -> set[str]:
    seen, open_ = set(), [start]
    while open_:
        module = open_.pop()
        if module not in seen:
            seen.add(module)
            open_ += _own(module, lazy=lazy)
    return seen


def _room(module: str) -> str:
    while module not in MAY_IMPORT:
        module = module.rpartition(".")[0]
    return module


# -- the reader itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.distributed as dist", Import("torch.distributed", 1)),
        ("from torch import distributed", Import("torch.distributed", 1)),
        ("from torch.distributed import isend", Import("torch.distributed", 1)),
        ("from .core import stage", Import("zero.core.stage", 1)),
        ("from . import ZeroOptimizer", Import("zero", 1)),
        ("from .core.stage import Stage", Import("zero.core.stage", 1)),
        ("from collectives import Tag", Import("collectives", 1)),
        ("from collectives.algorithms.ring import Ring", Import("collectives.algorithms.ring", 1)),
        ("def f():\n import zero.core.layout", Import("zero.core.layout", 2, lazy=True)),
        ("class C:\n def f(self):\n  if x:\n   import zero.core.layout", Import("zero.core.layout", 4, lazy=True)),
        ("try:\n import zero.core.layout\nexcept ImportError:\n pass", Import("zero.core.layout", 2)),
        ("if TYPE_CHECKING:\n from torch.distributed import P", Import("torch.distributed", 2, typing_only=True)),
        ("if typing.TYPE_CHECKING:\n pass\nelse:\n import zero.core.layout", Import("zero.core.layout", 4)),
    ],
)
def test_the_reader_sees_every_form_of_import(source: str, expected: Import) -> None:
    known = {"zero", "zero.core.layout", "zero.core.stage", "collectives", "collectives.algorithms.ring"}
    assert _imports("zero.example", ast.parse(source), known) == [expected]


def test_the_reader_found_both_packages() -> None:
    assert {"collectives", "collectives.transport", "zero", "zero.core.layout", "zero.core.stage"} <= set(TREES)
    assert _own("zero.core.stage") == {"zero.core.layout"}, (
        "if this is empty, every other test here would pass on nothing"
    )


# -- directions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", sorted(TREES))
def test_every_room_imports_from_those_below_it_alone(module: str) -> None:
    own = _room(module)
    for found in IMPORTS[module]:
        if found.target in TREES and _room(found.target) not in {own, *MAY_IMPORT[own]}:
            raise AssertionError(f"{module}:{found.line} imports {found.target}")


def test_no_room_is_below_itself() -> None:
    """Except `collectives` and `zero`, whose public names come from packages that import their modules."""
    below = {room: others - {room, "collectives", "zero"} for room, others in MAY_IMPORT.items()}
    below["collectives"] = below["zero"] = set()
    while leaves := {room for room, others in below.items() if not others}:
        below = {room: others - leaves for room, others in below.items() if room not in leaves}
    assert not below


def test_geometry_needs_no_ranks() -> None:
    for module in TREES:
        if _room(module) == "zero.core":
            assert not [found for found in IMPORTS[module] if found.target.startswith("torch.distributed")], module


def test_no_algorithm_imports_another() -> None:
    parts = {"base", "ordered_sum", "plans", "running"}  # modules that algorithms use
    algorithms = {name for name in TREES if name.startswith("collectives.algorithms.")}
    algorithms -= {f"collectives.algorithms.{part}" for part in parts}
    assert len(algorithms) > 4
    for name in algorithms:
        assert not _own(name) & algorithms - {name}, name


def test_the_library_knows_nothing_of_the_commands() -> None:
    """Except for `zero.verify`, which is a function of the library, and the launcher, which it imports when called."""
    commands = {name for name in TREES if name.startswith("zero.commands.")}
    verify = {f"zero.commands.verify.{name}" for name in ("verification", "spec", "bit_diff")}
    assert _reachable("zero", lazy=False) & commands <= verify
    assert _reachable("zero", lazy=True) & commands <= verify | {"zero.commands.runner"}


def test_the_number_of_a_stage_is_known_to_the_stage_table_alone() -> None:
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if module != "zero.core.stage" and isinstance(node, ast.Compare):
                sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
                assert not (any(side.endswith("stage") for side in sides) and any(map(str.isdigit, sides))), module


def test_the_loops_of_a_proof_run_in_processes_of_their_own() -> None:
    assert not [module for module in TREES if "zero.commands.verify.ranks" in _own(module)]


def test_importing_collectives_imports_no_torch_distributed() -> None:
    assert SEAM not in _reachable("collectives", lazy=False)


def test_importing_the_library_needs_nothing_but_torch_and_numpy() -> None:
    for module in _reachable("zero", lazy=False):
        for found in _at_run_time(module):
            top = found.target.partition(".")[0]
            known = top in sys.stdlib_module_names or top in {"torch", "numpy", *PACKAGES}
            assert known or found.lazy, f"{module}:{found.line} imports {top}"


def _uses_of_distributed(module: str) -> Iterator[int]:
    yield from (found.line for found in _at_run_time(module) if found.target.startswith("torch.distributed"))
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno


def test_torch_distributed_is_touched_in_few_modules_only() -> None:
    touching = {module: list(_uses_of_distributed(module)) for module in TREES}
    assert {module for module, lines in touching.items() if lines} == MAY_IMPORT_DISTRIBUTED, touching


def test_from_zero_the_seam_is_reached_only_when_it_is_needed() -> None:
    """A module-level import of it would make `import zero` need torch.distributed."""
    assert SEAM not in _reachable("zero", lazy=False)
    lazily = [name for name in TREES if SEAM in _own(name) and name != "collectives"]
    assert lazily == ["zero.config"]


def test_there_is_no_cycle_of_imports() -> None:
    """Also counting imports under ``TYPE_CHECKING``.

    The package of a module is imported with it, and does not count.
    """
    packages = {name for name in TREES if any(other.startswith(f"{name}.") for other in TREES)}
    graph = {
        module: {found.target for found in IMPORTS[module] if found.target in TREES} - {module} - packages
        for module in TREES
        if module not in packages
    }
    while leaves := {module for module, targets in graph.items() if not targets}:
        graph = {module: targets - leaves for module, targets in graph.items() if module not in leaves}
    assert not graph, f"these import each other, or hang on what does: {graph}"


def _module_names(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def _mutations(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the places where functions change a global.

    They rebind it, store into it, delete from it, or call a method that changes it.
    """
    found: list[tuple[int, str]] = []
    outer = _module_names(tree)

    def root(node: ast.expr) -> str | None:
        while isinstance(node, (ast.Subscript, ast.Attribute)):
            node = node.value
        return node.id if isinstance(node, ast.Name) else None

    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        names = [n for n in ast.walk(function) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
        arguments = {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}
        shared = outer - {n.id for n in names} - arguments
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                found += [(node.lineno, name) for name in node.names]
            elif isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
                found += [(node.lineno, name) for name in shared & {root(node)}]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                found += [(node.lineno, name) for name in shared & {root(node.func.value)}]
    return found


@pytest.mark.parametrize(
    "body", ["global A", "A[0] = 1", "A.b = 1", "A[0].b += 1", "del A[0]", "A.append(1)", "A[0].update(b=1)"]
)
def test_the_reader_sees_every_change_of_a_global(body: str) -> None:
    assert _mutations(ast.parse(f"A: list = []\ndef f():\n {body}")) == [(3, "A")]


def test_no_function_changes_a_global_of_its_module() -> None:
    found = {module: _mutations(tree) for module, tree in TREES.items()}
    assert not any(found.values()), {module: places for module, places in found.items() if places}


def test_the_library_leaves_the_warning_filters_alone() -> None:
    """They are of all threads: while one thread has other filters, another's warning is lost."""
    library = {module: tree for module, tree in TREES.items() if not module.startswith("zero.commands")}
    names = ("catch_warnings", "simplefilter", "filterwarnings", "resetwarnings")
    found = {module: [name for name in names if name in ast.unparse(tree)] for module, tree in library.items()}
    assert not any(found.values()), {module: names for module, names in found.items() if names}


def test_every_module_says_what_it_knows() -> None:
    silent = [module for module, tree in TREES.items() if not ast.get_docstring(tree)]
    assert not silent, f"no docstring at the head of {silent}"
