"""The page names definitions that exist, and quotes the step that is taken and what its ranks hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .page import blocks

PAGE = Path(__file__).resolve().parents[2] / "zero/TOUR.md"
TEXT = PAGE.read_text()


def definitions(node: ast.AST, of: str = "") -> Iterator[str]:
    """Yield the classes, the functions and the assigned names of a module, such as ``.EvenCuts.bound``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
            yield f"{of}.{child.name}"
            yield from definitions(child, f"{of}.{child.name}")
        elif isinstance(child, (ast.Assign, ast.AnnAssign)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from (f"{of}.{ast.unparse(target)}" for target in targets)


def test_each_link_names_one_definition_of_its_file() -> None:
    links = re.findall(r"\[`([\w.]+): ([\w.]+)`\]\(([\w./]+)\)", TEXT)
    assert len(links) == TEXT.count(".py: ") > 0, "a link that is not read names nothing for sure"
    for file, name, path in links:
        assert Path(path).name == file
        tree = ast.parse((PAGE.parent / path).read_text())
        assert [found.endswith(f".{name}") for found in definitions(tree)].count(True) == 1, f"{path}: {name}"


def test_the_page_has_the_blocks_of_now() -> None:
    for block in blocks():
        assert f"\n{block}```\n" in TEXT, "`python -m tests.tour` prints the blocks of the page"
