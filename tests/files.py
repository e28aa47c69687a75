"""`python -m tests.files [FOLDER ...]`: what each file of tests proves, in its first line; by default of all folders.

`python -m tests.files --page` writes the table of folders into tests/README.md, between its two marks.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE, BEGIN, END = TESTS / "README.md", "<!-- folders -->\n", "<!-- end of folders -->\n"


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring; empty if it has none."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def folders() -> Iterator[tuple[str, str, int]]:
    """Yield each folder with tests, what its package says it is about, and the number of its files of tests."""
    for package in sorted(TESTS.rglob("__init__.py")):
        count = len(list(package.parent.glob("test_*.py")))
        if count:
            yield package.parent.relative_to(TESTS).as_posix(), first_line(package), count


def table() -> str:
    """Return the table of folders, as Markdown."""
    rows = (f"| `{folder}` | {about.rstrip('.')} | {count} |\n" for folder, about, count in folders())
    return f"| folder | what it proves | files |\n|---|---|--:|\n{''.join(rows)}"


def page() -> str:
    """Return tests/README.md with the table as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


def main(arguments: list[str]) -> None:
    if arguments == ["--page"]:
        PAGE.write_text(page())
        return
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(TESTS).as_posix()
        if not arguments or name.startswith(tuple(f"{folder.rstrip('/')}/" for folder in arguments)):
            print(f"{name}: {first_line(path)}")


if __name__ == "__main__":
    main(sys.argv[1:])
