"""`python -m tests.files`: what the tests of each folder prove; with folders, what each file there does.

Both are the first lines of docstrings.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring; empty if it has none."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def main(folders: list[str]) -> None:
    chosen = [path for folder in folders for path in sorted((TESTS / folder).rglob("test_*.py"))]
    for path in chosen or sorted(TESTS.rglob("__init__.py")):
        if chosen or any(path.parent.glob("test_*.py")):
            print(f"{(path if chosen else path.parent).relative_to(TESTS)}: {first_line(path)}")


if __name__ == "__main__":
    main(sys.argv[1:])
