"""`python -m tests.files`: what the tests of each folder prove; with folders, what each file there does.

Both are the first lines of docstrings. With `--laws` it prints the tests of each law (mark `law`), with `--public` the
files that use only public names.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from .public_names import all_inside_names

TESTS = Path(__file__).resolve().parent


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
