"""The default run includes every row of the contract and every law."""

from __future__ import annotations

import fnmatch
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from .tiers import COLLECTED, assign

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = {"matrix"}  # commands, which are in no tier


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the table that begins with a heading, as lists of cells."""
    after = (ROOT / page).read_text().partition(f"\n| {heading} |")[2].splitlines()[2:]
    table = itertools.takewhile(lambda line: line.startswith("|"), after)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


@pytest.fixture
def collected(pytestconfig: pytest.Config) -> dict[str, str]:
    """Return the tier of each test of this run's files, by ``file::function``. Of several cases the first counts."""
    tiers: dict[str, str] = {}
    for name, tier in sorted(pytestconfig.stash[COLLECTED].items(), key=lambda pair: pair[1] != "default"):
        file, _, function = name.removesuffix("]").partition("::")
        tiers.setdefault(f"{Path(file).stem}::{function.partition('[')[0]}", tier)
    return tiers


def by_default(collected: dict[str, str], names: list[str]) -> bool:
    """Return whether the default run takes a test that a name matches: a file or ``file::function``, with *.

    Also return True if the files are not in this run.
    """
    for name in names:
        assert list((ROOT / "tests").rglob(f"{name.partition('::')[0]}.py")), f"there is no {name}"
    files = {name.partition("::")[0] for name in collected}
    patterns = [name if "::" in name else f"{name}::*" for name in names]
    if not any(fnmatch.filter(files, pattern.partition("::")[0]) for pattern in patterns):
        return True
    return any(collected[name] == "default" for pattern in patterns for name in fnmatch.filter(collected, pattern))


@pytest.mark.parametrize("case", ["few", "many"])
@pytest.mark.by_default("few", "many")
def test_a_run_of_one_case_needs_no_other(case: str, request: pytest.FixtureRequest) -> None:
    """A run may take single cases. In a run of all cases a named one that does not exist is an error."""
    config = SimpleNamespace(args=[request.node.nodeid], stash={})
    assign(cast(pytest.Config, config), [request.node])
    assert list(config.stash[COLLECTED].values()) == ["default"], case
    config.args = ["tests"]
    with pytest.raises(pytest.UsageError, match="no case is called"):
        assign(cast(pytest.Config, config), [request.node])


def test_the_default_run_asserts_every_row_of_the_contract(collected: dict[str, str]) -> None:
    table = rows("zero/CONTRACT.md", "what varies")
    assert len(table) > 10
    for _, _, where in table:
        names = [name for name in re.findall(r"`([^`]+)`", where) if name not in ELSEWHERE]
        assert by_default(collected, names), where
        assert names or not where, "the default run asserts nothing of it"


def test_the_default_run_asserts_every_law(collected: dict[str, str]) -> None:
    table = rows("tests/README.md", "law")
    assert len(table) > 20
    for law, where in table:
        names = re.findall(r"`([^`]+)`", where)
        file = ""
        for number, name in enumerate(names):
            file = name.partition("::")[0] or file
            names[number] = file + name if name.startswith("::") else name
        assert by_default(collected, names), law
