"""Mutants: patches of the source, and the patched source trees.

Knows: patches of text. Does not know: which mutants there are, or how tests run.
"""

from __future__ import annotations

import ast
import functools
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = ("zero", "collectives", "tests", "benchmarks")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class PatchError(Exception):
    """A patch does not fit the source."""


@dataclass(frozen=True)
class Edit:
    """A replacement of ``old`` by ``new`` in the source of ``place``, in which ``old`` must occur exactly once.

    A place is a module, a class or a function, by its dotted name: "zero.step.clip" or "zero.step.clip.clip_factor".
    """

    place: str
    old: str
    new: str


@dataclass(frozen=True)
class Wrap:
    """A function or a method, by the dotted name of ``place``, replaced by ``wrong(place)``.

    ``wrong`` is defined at the top level of a module of this package. It is called once, when the module of ``place``
    has been imported, with what ``place`` is bound to (of a property, that is the property itself).
    """

    place: str
    wrong: Callable[[Any], Any]


@dataclass(frozen=True)
class Mutant:
    """A small bug.

    ``entries``: the entries that it stands for. ``wrong``: the consequence of the bug. ``tests``: node ids below
    ``tests/`` of fast tests, the first of which should catch it.
    """

    name: str
    entries: tuple[str, ...]
    wrong: str
    edits: tuple[Edit | Wrap, ...]
    tests: tuple[str, ...]


def patched(mutant: Mutant, root: Path = ROOT) -> dict[str, str]:
    """Return the changed files and their new text. Raise `PatchError` if an edit does not fit or changes no code."""
    texts: dict[str, str] = {}
    for edit in mutant.edits:
        file, definition = _located(edit.place, root)
        text = texts.get(file) or (root / file).read_text()
        spans = _spans(text, file, definition)
        if not spans:
            raise PatchError(f"{mutant.name}: there is no {edit.place}, since {file} does not define {definition}")
        if isinstance(edit, Wrap):
            texts[file] = text + _replacement(definition, edit.wrong)
            continue
        found = sum(text.count(edit.old, *span) for span in spans)
        if found != 1:
            raise PatchError(f"{mutant.name}: its old text occurs {found} times in {edit.place}, not once")
        begin = max(text.find(edit.old, *span) for span in spans)
        texts[file] = text[:begin] + edit.new + text[begin + len(edit.old) :]
    for file, text in texts.items():
        if tree(text, file) == tree((root / file).read_text(), file):
            raise PatchError(f"{mutant.name}: its patch of {file} changes no code")
    return texts


def _replacement(definition: str, wrong: Callable[[Any], Any]) -> str:
    """Return the lines that replace a definition of a module, to stand at its end."""
    owner, _, name = definition.rpartition(".")
    real = f"{owner}.__dict__[{name!r}]" if owner else name
    return f"\nfrom {wrong.__module__} import {wrong.__name__} as _wrong\n\n{definition} = _wrong({real})\n"


def _located(place: str, root: Path) -> tuple[str, str]:
    """Return the file of the module with which a place begins, and the qualified name behind it, which may be empty."""
    parts = place.split(".")
    for count in range(len(parts), 0, -1):
        module = Path(*parts[:count])
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if (root / file).is_file():
                return file.as_posix(), ".".join(parts[count:])
    raise PatchError(f"there is no module {place}")


def _spans(text: str, file: str, definition: str) -> list[tuple[int, int]]:
    """Return where the lines of a definition begin and end in the text, decorators included.

    A name that is defined several times, as a property and its setter, has several spans. An empty name is the module.
    """
    if not definition:
        return [(0, len(text))]
    starts = [0, *(newline.end() for newline in re.finditer("\n|$", text))]
    return [
        (starts[min(part.lineno for part in (node, *node.decorator_list)) - 1], starts[node.end_lineno or 0])
        for name, node in _definitions(_parsed(text, file))
        if name == definition
    ]


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield every class and function below a node with its qualified name, also those under an ``if`` or ``try``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.expr):
            yield from _definitions(child, prefix)


@functools.cache
def tree(text: str, file: str) -> str:
    """Return the syntax tree as text, without positions. Raise `PatchError` if the text has a syntax error."""
    return ast.dump(_parsed(text, file))


@functools.cache
def _parsed(text: str, file: str) -> ast.Module:
    try:
        return ast.parse(text, file)
    except SyntaxError as error:
        raise PatchError(f"{file}, line {error.lineno}: {error.msg}") from error


def copy_tree(folder: Path, mutant: Mutant | None, root: Path = ROOT) -> None:
    """Copy all files that the tests need into ``folder``, and apply the mutant's patch."""
    for name in COPIED:
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", folder)
    if mutant is not None:
        for file, text in patched(mutant, root).items():
            (folder / file).write_text(text)
