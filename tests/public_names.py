"""Which modules of the tests use only public names of the library, so that they hold when the internals change.

It reads syntax trees: nothing is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("zero", "collectives")
INSIDES = ("benchmarks",)  # they measure internals


@cache
def public_names(package: str) -> frozenset[str]:
    """Return `__all__` of a package; that of `zero` is in its module `public`."""
    path = ROOT / package / ("public.py" if package == "zero" else "__init__.py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    raise AssertionError(f"{package} has no __all__")


@cache
def private_attributes() -> frozenset[str]:
    """Return the private attributes that some object of the packages has."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return frozenset(name for path in files for name in re.findall(r"\bself\.(_[a-z]\w*)", path.read_text()))


def absolute(node: ast.ImportFrom, folder: tuple[str, ...]) -> str:
    """Return the absolute name of the module of an import in a file."""
    parents = folder[: len(folder) - node.level + 1] if node.level else ()
    return ".".join((*parents, *([node.module] if node.module else [])))


def inside_names(source: str, folder: tuple[str, ...] = ("tests",)) -> Iterator[str]:
    """Return the non-public names of the packages that a module uses."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    bound = {n.asname or n.name for node in nodes if isinstance(node, ast.ImportFrom) for n in node.names} | imported
    yield from (name for name in imported if name.startswith((*(f"{p}." for p in PACKAGES), *INSIDES)))
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = absolute(node, folder)
            if module in PACKAGES:
                yield from (f"{module}.{n.name}" for n in node.names if n.name not in public_names(module))
            elif module.partition(".")[0] in (*PACKAGES, *INSIDES):
                yield module
        elif isinstance(node, ast.Attribute):
            of = ast.unparse(node.value)
            if of in imported and of in PACKAGES and node.attr not in {*public_names(of), "__file__"}:
                yield f"{of}.{node.attr}"
            if of not in ("self", "cls") and of.partition(".")[0] not in bound and node.attr in private_attributes():
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and re.match(r"(zero|collectives)\.\w", str(node.value)):
            yield str(node.value)  # the name of a module that is patched or run


def helpers(source: str, folder: tuple[str, ...] = ("tests",)) -> Iterator[Path]:
    """Return the tests' modules that a module imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (module := absolute(node, folder)).partition(".")[0] == "tests":
            for name in (module, *(f"{module}.{n.name}" for n in node.names)):
                path = ROOT.joinpath(*name.split("."))
                yield from (p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists())


@cache
def read(path: Path) -> tuple[frozenset[str], frozenset[Path]]:
    """Return the non-public names that a module of the tests uses, and the tests' modules that it imports."""
    source, folder = path.read_text(), path.relative_to(ROOT).parent.parts
    names = frozenset(f"{path.stem}: {name}" for name in inside_names(source, folder))
    return names, frozenset(helpers(source, folder))


def all_inside_names(path: Path) -> set[str]:
    """Return the non-public names that a module of the tests, or one that it imports, uses."""
    seen, todo, found = set[Path](), {path}, set[str]()
    while todo:
        seen |= todo
        found |= {name for file in todo for name in read(file)[0]}
        todo = {helper for file in todo for helper in read(file)[1]} - seen
    return found
