"""`python -m tests.files`: what the tests of each folder prove; with folders, what each file there does.

Both are the first lines of docstrings. With `--laws` it prints the tests of each law (mark `law`), with `--public` the
files that use only public names of the library, so that they hold when the internals change.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
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


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring; empty if it has none."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def rows(page: Path, heading: str) -> list[list[str]]:
    """Return the rows of the table that begins with a heading, as lists of cells."""
    table = page.read_text().partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def in_default_run(path: Path) -> bool:
    return not {"ci", "nightly"} & set(path.relative_to(TESTS).parts)


def laws() -> dict[str, dict[str, bool]]:
    """Return the tests of each law, and whether the default run has each. A `pytestmark` stands for its whole file."""
    found: dict[str, dict[str, bool]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        for node in ast.parse(text).body if "mark.law(" in text else ():
            test = f"{path.relative_to(TESTS)}{f'::{node.name}' if isinstance(node, ast.FunctionDef) else ''}"
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.law":
                    by_default = in_default_run(path) and "pytest.mark.first(0)" not in ast.unparse(node)
                    found.setdefault(ast.literal_eval(call.args[0]), {})[test] = by_default
    return found


def main(arguments: list[str]) -> None:
    if arguments == ["--laws"]:
        tests = laws()
        for law, promise in rows(TESTS / "README.md", "law"):
            print(f"{law}: {promise}", *tests[law], sep="\n    ")
        return
    public = arguments == ["--public"]
    folders = [TESTS] if public else [TESTS / folder for folder in arguments]
    chosen = [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    for path in chosen or sorted(TESTS.rglob("__init__.py")):
        if not (public and all_inside_names(path)) and (chosen or any(path.parent.glob("test_*.py"))):
            print(f"{(path if chosen else path.parent).relative_to(TESTS)}: {first_line(path)}")


if __name__ == "__main__":
    main(sys.argv[1:])
