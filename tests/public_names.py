"""Which modules of the tests use only public names of the library, so that they hold when the internals change."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = {package: frozenset(importlib.import_module(package).__all__) for package in ("zero", "collectives")}
INSIDES = (*PUBLIC, "benchmarks")  # the last measures internals


@cache
def private_attributes() -> frozenset[str]:
    """Return the private attributes that some object of the packages has."""
    files = (path for package in PUBLIC for path in (ROOT / package).rglob("*.py"))
    return frozenset(name for path in files for name in re.findall(r"\bself\.(_[a-z]\w*)", path.read_text()))


def is_private_read(node: ast.AST) -> bool:
    """Return whether a node of a test's syntax tree is a private attribute of an object of the packages."""
    own = isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
    return isinstance(node, ast.Attribute) and node.attr in private_attributes() and not own


@cache
def read(path: Path) -> tuple[frozenset[str], frozenset[Path]]:
    """Return the non-public names that a module of the tests uses, and the tests' modules that it imports."""
    found, helpers, folder = set[str](), set[Path](), path.relative_to(ROOT).parent.parts
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    bound = {n.asname or n.name for node in nodes if isinstance(node, ast.ImportFrom) for n in node.names} | imported
    found |= {name for name in imported if name not in PUBLIC and name.partition(".")[0] in INSIDES}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            parents = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join((*parents, *([node.module] if node.module else [])))
            names = [f"{module}.{n.name}" for n in node.names]
            if module in PUBLIC:
                found |= {name for name in names if name.rpartition(".")[2] not in PUBLIC[module]}
            elif module.partition(".")[0] in INSIDES:
                found.add(module)
            elif module.partition(".")[0] == "tests":
                files = [ROOT.joinpath(*name.split(".")) for name in (module, *names)]
                helpers |= {p for file in files for p in (file.with_suffix(".py"), file / "__init__.py") if p.exists()}
        elif isinstance(node, ast.Attribute):
            of = ast.unparse(node.value)
            if of in imported and of in PUBLIC and node.attr not in {*PUBLIC[of], "__file__", "__all__"}:
                found.add(f"{of}.{node.attr}")
            if is_private_read(node) and of.partition(".")[0] not in bound:
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and re.match(r"(zero|collectives)\.\w", str(node.value)):
            found.add(str(node.value))  # the name of a module that is patched or run
    return frozenset(f"{path.stem}: {name}" for name in found), frozenset(helpers)


def all_inside_names(path: Path) -> set[str]:
    """Return the non-public names that a module of the tests, or one that it imports, uses."""
    seen, todo, found = set[Path](), {path}, set[str]()
    while todo:
        seen |= todo
        found |= {name for file in todo for name in read(file)[0]}
        todo = {helper for file in todo for helper in read(file)[1]} - seen
    return found
