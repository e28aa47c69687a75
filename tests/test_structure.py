"""Which module may know which, read from the syntax trees of `zero` and `collectives`: nothing is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("collectives", "zero")
ALGORITHMS = {"algorithms.pairwise", "algorithms.ring"}
"""Those that every installation has; whatever else `collectives` names an algorithm is found by `_algorithms`."""

ORDER = (
    ("core.layout",),
    ("core.stages",),
    ("step.flat_states",),
    ("step.inner",),
    ("step.trial",),
    ("step.elementwise",),
    ("gradients.accumulator", "gradients.hooks", "parameters.storage", "parameters.unit_buffer"),
    ("gradients.grad_slots", "parameters.unit_manager", "gradients.backward_schedule"),
    ("parameters.saved_tensor_hooks",),
    ("gradients.grad_access",),
    ("gradients.reducer", "parameters.unit_hooks"),
    ("parameters.sharded", "step.update"),
    ("setup",),
    ("optimizer",),
)
"""The spine of `zero`, from what knows least: each imports from the ones before, siblings never from each other."""

MAY_IMPORT_DISTRIBUTED = {"collectives.backends.gloo", "zero.commands.runner", "zero.commands.sweep.baselines"}
COMMAND = {
    *(
        "commands.cli",
        "commands.train.settings",
        "commands.train.data",
        "commands.runner",
        "commands.train.loop",
        "commands.train.memory_stats",
        "commands.train.model",
        "commands.sweep.baselines",
        "commands.train.plots",
        "commands.train.report",
        "commands.sweep.command",
        "commands.sweep.rank",
    ),
    *("commands.train.command", "verify", "commands.console"),
}
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
    """Every import of a module, with relative names resolved and names of submodules told from names inside one."""
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
    """The modules of the two packages that a module imports; ``lazy``: also inside functions."""
    return {found.target for found in _at_run_time(module) if found.target in TREES and (lazy or not found.lazy)}


def _reachable(start: str, *, lazy: bool) -> set[str]:
    seen, open_ = set(), [start]
    while open_:
        module = open_.pop()
        if module not in seen:
            seen.add(module)
            open_ += _own(module, lazy=lazy)
    return seen


def _algorithms() -> set[str]:
    """Modules of `collectives.algorithms` that define a class with both collectives, but not the protocol of one."""
    methods = {"reduce_scatter", "all_gather"}
    found = set()
    for name, tree in TREES.items():
        for node in ast.walk(tree) if name.startswith("collectives.algorithms.") else ():
            if isinstance(node, ast.ClassDef) and not any(
                isinstance(b, ast.Name) and b.id == "Protocol" for b in node.bases
            ):
                defined = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                if methods <= defined:
                    found.add(name.partition(".")[2])
    return found


# -- the reader itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.distributed as dist", Import("torch.distributed", 1)),
        ("from torch import distributed", Import("torch.distributed", 1)),
        ("from torch.distributed import isend", Import("torch.distributed", 1)),
        ("from .core import stages", Import("zero.core.stages", 1)),
        ("from . import ZeroOptimizer", Import("zero", 1)),
        ("from .core.stages import Stage", Import("zero.core.stages", 1)),
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
    known = {"zero", "zero.core.layout", "zero.core.stages", "collectives", "collectives.algorithms.ring"}
    assert _imports("zero.example", ast.parse(source), known) == [expected]


def test_the_reader_found_both_packages() -> None:
    assert {"collectives", "collectives.transport", "zero", "zero.core.layout", "zero.core.stages"} <= set(TREES)
    assert _own("zero.core.stages") == {"zero.core.layout"}, (
        "if this is empty, every other test here would pass on nothing"
    )


# -- collectives -------------------------------------------------------------------------------------------------------


def test_collectives_have_never_heard_of_an_optimizer() -> None:
    for module in TREES:
        if module.partition(".")[0] == "collectives":
            foreign = {found.target for found in IMPORTS[module] if found.target.partition(".")[0] == "zero"}
            assert not foreign, f"{module} imports {foreign}"


def test_inside_collectives_imports_run_from_messages_to_transport_to_algorithms() -> None:
    allowed = {
        "torch_internals": set[str](),
        "pool": {"torch_internals"},
        "messages": set[str](),
        "backend": set[str](),
        "peer_links": {"backend", "messages"},
        "messenger": {"backend", "peer_links", "messages"},
        "exposed_buffers": {"messenger", "peer_links", "messages"},
        "transport": {"backend", "messenger", "exposed_buffers", "pool", "messages"},
        "algorithms.ordered_sum": set[str](),
        "backends.threads": {"backend", "transport", "messages"},
        "queue": {"messages"},
        "algorithms.process_group": {"backend", "messages", "transport", "algorithms.ordered_sum"},
        "backends.gloo": {"backend", "messages", "transport", "backends.threads"},
        "backends.arena": set[str](),
        "algorithms.plans": set[str](),
        "algorithms.shared": {"transport", "messages", "algorithms.ordered_sum", "exposed_buffers"},
        "algorithms.hierarchical": {
            "transport",
            "messages",
            "algorithms.ordered_sum",
            "exposed_buffers",
            "algorithms.plans",
        },
        "backends.shared_memory": {"backend", "backends.arena", "messages"},
        "backends.hybrid": {"backend", "backends.shared_memory"},
        "backends.rendezvous": {"backends.arena", "backends.shared_memory", "messages", "transport"},
        "topology": {
            "algorithms.base",
            "algorithms.hierarchical",
            "algorithms.pairwise",
            "algorithms.process_group",
            "algorithms.hybrid_sharding",
            "algorithms.shared",
        }
        | {
            "backend",
            "backends.shared_memory",
            "backends.threads",
            "messages",
            "backends.rendezvous",
            "backends.hybrid",
            "transport",
        },
    }
    common = {"transport", "messages", "pool", "algorithms.base", "algorithms.ordered_sum"}
    for module in TREES:
        package, _, name = module.partition(".")
        if package == "collectives" and name:
            imported = {target.partition(".")[2] for target in _own(module)}
            assert imported <= allowed.get(name, common), f"{module} imports {imported}"


def test_algorithms_never_import_each_other() -> None:
    algorithms = _algorithms()
    assert algorithms >= ALGORITHMS | {"algorithms.process_group"}
    for name in algorithms:
        others = _own(f"collectives.{name}") & {f"collectives.{other}" for other in algorithms - {name}}
        assert not others, f"{name} imports {others}"


def test_importing_collectives_imports_no_torch_distributed() -> None:
    assert "collectives.backends.gloo" not in _reachable("collectives", lazy=True)


# -- zero --------------------------------------------------------------------------------------------------------------


def test_zero_is_a_spine_from_layout_to_optimizer() -> None:
    height = {f"zero.{name}": number for number, names in enumerate(ORDER) for name in names}
    assert set(height) <= set(TREES)
    for module, own in height.items():
        for target in _own(module) & set(height):
            assert height[target] < own, f"{module} imports {target}"


@pytest.mark.parametrize("name", ["core.layout", "core.stages", "planner"])
def test_geometry_and_the_stage_table_need_no_ranks(name: str) -> None:
    module = f"zero.{name}"
    if module not in TREES:
        assert name == "planner", "only the planner may be missing"
        return
    pure = {"zero.core.layout", "zero.core.stages", "zero.planner"}
    assert _own(module) <= pure - {module}, f"{module} imports {_own(module)}"
    for found in IMPORTS[module]:
        assert not found.target.startswith(("collectives", "torch.distributed")), f"{module}:{found.line}"


def test_the_library_knows_nothing_of_the_command_line() -> None:
    """But for the launcher, which `zero.verify` imports when it is called."""
    commands = {f"zero.{name}" for name in COMMAND}
    assert not _reachable("zero", lazy=False) & commands
    reached = _reachable("zero", lazy=True)
    assert reached & commands == {"zero.commands.runner"}, "`import zero` or a function of it leads to these"
    assert {module for module in reached if "zero.commands.runner" in _own(module)} == {
        "zero.commands.verify.verification"
    }


def test_the_loops_of_a_proof_run_in_processes_of_their_own() -> None:
    assert not [module for module in TREES if "zero.commands.verify.ranks" in _own(module)]


def test_importing_the_library_needs_nothing_but_torch() -> None:
    for module in _reachable("zero", lazy=False):
        for found in _at_run_time(module):
            top = found.target.partition(".")[0]
            known = top in sys.stdlib_module_names or top in {"torch", *PACKAGES}
            assert known or found.lazy, f"{module}:{found.line} imports {top}"


# -- both --------------------------------------------------------------------------------------------------------------


def _uses_of_distributed(module: str) -> Iterator[int]:
    yield from (found.line for found in _at_run_time(module) if found.target.startswith("torch.distributed"))
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno


def test_torch_distributed_is_touched_in_two_modules_only() -> None:
    touching = {module: list(_uses_of_distributed(module)) for module in TREES}
    assert {module for module, lines in touching.items() if lines} == MAY_IMPORT_DISTRIBUTED, touching


def test_from_zero_the_seam_is_reached_only_when_it_is_needed() -> None:
    """A module-level import of it would make `import zero` need torch.distributed."""
    assert "collectives.backends.gloo" not in _reachable("zero", lazy=False)
    lazily = [
        m for m in TREES if any(f.target == "collectives.backends.gloo" for f in _at_run_time(m)) and m != "collectives"
    ]
    assert lazily == ["zero.setup"]


def test_there_is_no_cycle_among_module_level_imports() -> None:
    graph = {module: _own(module, lazy=False) - {module} for module in TREES}
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
    """Where functions rebind a global, store into one, delete from one, or call a method that changes one."""
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


def test_every_module_says_what_it_knows() -> None:
    silent = [module for module, tree in TREES.items() if not ast.get_docstring(tree)]
    assert not silent, f"no docstring at the head of {silent}"
