"""What a mutant is, and how it becomes a source tree.

Knows: patches of text. Does not know: which mutants there are, or how tests run.
"""

from __future__ import annotations

import ast
import functools
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = ("zero", "collectives", "tests", "benchmarks")


class PatchError(Exception):
    """A patch does not fit the source any more."""


@dataclass(frozen=True)
class Edit:
    """Replace ``old``, which occurs exactly once in ``file``, by ``new``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A small bug. ``entries``: what it stands for; ``wrong``: what would be wrong with it; ``tests``: node ids below
    ``tests/`` of fast tests, the first of which should notice it."""

    name: str
    entries: tuple[str, ...]
    wrong: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


def patched(mutant: Mutant, root: Path = ROOT) -> dict[str, str]:
    """The changed files and their new text. Raises `PatchError` where one does not fit or changes no code."""
    texts: dict[str, str] = {}
    for edit in mutant.edits:
        text = texts.get(edit.file) or (root / edit.file).read_text()
        found = text.count(edit.old)
        if found != 1:
            raise PatchError(f"{mutant.name}: its old text occurs {found} times in {edit.file}, not once")
        texts[edit.file] = text.replace(edit.old, edit.new)
    for file, text in texts.items():
        if tree(text, file) == tree((root / file).read_text(), file):
            raise PatchError(f"{mutant.name}: its patch of {file} changes no code")
    return texts


@functools.cache
def tree(text: str, file: str) -> str:
    """The syntax tree as text, without positions; `PatchError` where there is none."""
    try:
        return ast.dump(ast.parse(text, file))
    except SyntaxError as error:
        raise PatchError(f"{file}, line {error.lineno}: {error.msg}") from error


def copy_tree(folder: Path, mutant: Mutant | None, root: Path = ROOT) -> None:
    """Everything that the tests need, in ``folder``, with the mutant's patch applied."""
    for name in COPIED:
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", folder)
    if mutant is not None:
        for file, text in patched(mutant, root).items():
            (folder / file).write_text(text)
