"""Every law and every row of the contract has a test in the default run."""

from __future__ import annotations

import ast
import re

from .. import files

CONTRACT = files.TESTS.parent / "zero/CONTRACT.md"
COMMANDS = {"matrix"}  # are in no tier
ROOMS = {"core", "checkpoint", "collectives"}  # whose tests are about the inside: geometry, norm, manifest, wire
PRIVATE_READS = 57  # may only become fewer


def test_the_default_run_asserts_every_law() -> None:
    laws = files.laws()
    assert laws.keys() == {law for law, _ in files.rows(files.TESTS / "README.md", "law")}
    for law, tests in laws.items():
        assert any(tests.values()), f"nothing in the default run asserts: {law}"


def test_every_row_of_the_contract_names_files_and_the_default_run_has_one() -> None:
    default: dict[str, bool] = {}
    for path in files.TESTS.rglob("test_*.py"):
        default[path.stem] = default.get(path.stem, False) or files.in_default_run(path)
    table = files.rows(CONTRACT, "what varies")
    assert table
    for varies, _, asserted in table:
        named = [default[name] for name in re.findall(r"`(\w+)`", asserted) if name not in COMMANDS]
        assert not asserted or any(named), f"nothing in the default run asserts: {varies}"


def test_the_net_runs_against_other_insides() -> None:
    """`python -m tests.net` runs this tree's programs on the packages of another commit."""
    for file in ("side.py", "__main__.py"):
        assert not files.all_inside_names(files.TESTS / "net" / file)


def test_tests_read_no_more_private_attributes_of_the_library() -> None:
    found = []
    for path in files.TESTS.rglob("*.py"):
        nodes = [] if ROOMS & {*path.relative_to(files.TESTS).parts[:-1]} else ast.walk(ast.parse(path.read_text()))
        found += [f"{path.name}: {ast.unparse(node)}" for node in nodes if files.is_private_read(node)]
    assert len(found) <= PRIVATE_READS, found
