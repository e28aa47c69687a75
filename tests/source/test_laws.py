"""Every row of the contract and every law names tests that exist, one of which is in the default run."""

from __future__ import annotations

import ast
import fnmatch
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import files

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {"matrix"}  # are in no tier


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the table that begins with a heading, as lists of cells."""
    after = (ROOT / page).read_text().partition(f"\n| {heading} |")[2].splitlines()[2:]
    table = itertools.takewhile(lambda line: line.startswith("|"), after)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


@cache
def defined() -> dict[str, bool]:
    """Return ``file::function`` of each test, and whether the default run has it."""
    found: dict[str, bool] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        default = not {"ci", "nightly"} & set(path.relative_to(ROOT).parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = f"{path.stem}::{node.name}"
                left_out = any(ast.unparse(mark) == "pytest.mark.first(0)" for mark in node.decorator_list)
                found[name] = found.get(name, False) or (default and not left_out)
    return found


def named(cell: str) -> Iterator[list[bool]]:
    """Yield, for each test or file that a cell names, whether the default run has it; several if a name has a *."""
    file = ""
    for name in re.findall(r"`([^`]+)`", cell):
        if name not in COMMANDS:
            file = name.partition("::")[0] or file
            pattern = f"{file}::*" if "::" not in name else f"{file}::{name.partition('::')[2]}"
            known = [defined()[test] for test in fnmatch.filter(defined(), pattern)]
            assert known, f"there is no {pattern}"
            yield known


@pytest.mark.parametrize(
    ("page", "heading", "least"), [("zero/CONTRACT.md", "what varies", 10), ("tests/README.md", "law", 20)]
)
def test_the_default_run_asserts_every_row_of_a_table(page: str, heading: str, least: int) -> None:
    table = rows(page, heading)
    assert len(table) > least
    for row in table:
        asserted = list(named(row[-1]))
        assert not row[-1] or any(itertools.chain(*asserted)), f"nothing in the default run asserts: {row[0]}"


def test_every_file_says_in_a_line_what_it_proves() -> None:
    """`python -m tests.files` prints these lines."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert 0 < len(files.first_line(path)) <= 120, path
