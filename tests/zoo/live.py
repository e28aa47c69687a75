"""Wrong code on live functions: all that refer to a function run it from then on, in this process.

A function's ``__code__`` is replaced, so that it does not matter who has imported the function, or what was decorated
with it. The new code notes that it was entered.
"""

from __future__ import annotations

import ast
import csv
import functools
import gc
import importlib
import inspect
import json
import mmap
import os
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
CARRIED = "TESTS_MUTANT"  # for spawned processes: a function, as "module:name", and its argument
NOTED = "TESTS_MUTANT_ENTERED"  # a file of one byte, which is 1 once wrong code was entered
_NOTE = "__mutant_entered__"
TABLE = Path(__file__).with_name("zoo.csv")


class StaleError(Exception):
    pass


def function_at(place: str) -> FunctionType:
    """Return the function of a dotted name: of a property its getter, of a decorated function what was decorated."""
    try:
        found: Any = pkgutil.resolve_name(place)
    except (ImportError, AttributeError) as error:
        raise StaleError(f"there is no {place}") from error
    for attribute in ("fget", "func", "__func__"):
        found = getattr(found, attribute, None) or found
    found = inspect.unwrap(found) if callable(found) else found
    if not isinstance(found, FunctionType):
        raise StaleError(f"{place} is no function")
    return found


def rewrite(place: str, before: str, after: str) -> None:
    """Change the text of the function of a dotted name, as `ast.unparse` writes it.

    ``before``: what ``after`` replaces, and what must stand there exactly once; empty: ``after`` comes first.
    """
    code = function_at(place).__code__
    tree = parsed(code.co_filename)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and _key(node) == (code.co_name, code.co_firstlineno):
            text = ast.unparse(node)
            if before and text.count(before) != 1:
                raise StaleError(f"{place} has {before!r} {text.count(before)} times")
            changed = ast.parse(text.replace(before, after) if before else text).body[0]
            assert isinstance(changed, ast.FunctionDef)
            node.body = changed.body if before else [*ast.parse(after).body, *changed.body]
            compile_into_live_functions(tree, code.co_filename, [node])
            return
    raise StaleError(f"the source of {place} was not found")


def compile_into_live_functions(tree: ast.Module, file: str, changed: list[ast.FunctionDef]) -> None:
    """Give the functions of a file the code of a changed tree. ``changed``: a definition, behind those around it."""
    body = changed[-1].body
    body.insert(ast.get_docstring(changed[-1]) is not None, *ast.parse(f"{_NOTE}[0] = 1").body)
    codes = _by_key(compile(ast.fix_missing_locations(tree), file, "exec"))
    places = {_key(node) for node in changed}
    count = 0
    gc.unfreeze()  # `get_objects` leaves out what is frozen
    objects = gc.get_objects()
    gc.freeze()
    for function in objects:
        if type(function) is FunctionType and function.__code__.co_filename == file:
            key = (function.__code__.co_name, function.__code__.co_firstlineno)
            if key in places and codes[key].co_freevars == function.__code__.co_freevars:
                function.__globals__[_NOTE] = note()
                function.__code__ = codes[key]
                count += 1
    if not count:
        raise StaleError(f"no function lives that {file}, line {changed[0].lineno}, defines")


@functools.cache
def note() -> mmap.mmap:
    """Return the memory in which wrong code notes that it was entered."""
    with open(os.environ[NOTED], "r+b") as file:
        return mmap.mmap(file.fileno(), 1)


def apply(function: str, argument: Any) -> None:
    """Call a function that changes live ones, "module:name", and let processes that are started call it too."""
    os.environ[CARRIED] = json.dumps([function, argument])
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(argument)


def apply_what_is_carried() -> None:
    """Call what the environment says: programs that tests start, and that may run wrong code, begin with this."""
    if CARRIED in os.environ:
        apply(*json.loads(os.environ[CARRIED]))


def parsed(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(), file)


def _key(node: ast.FunctionDef) -> tuple[str, int]:
    return node.name, min(part.lineno for part in (node, *node.decorator_list))


def _inner(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _by_key(code: CodeType) -> dict[tuple[str, int], CodeType]:
    found = {(each.co_name, each.co_firstlineno): each for each in _inner(code)}
    for each in _inner(code):
        found.update(_by_key(each))
    return found


@dataclass(frozen=True)
class Bug:
    """A bug that some library had, or could have: a row of the table."""

    name: str
    published: str  # links to reports, or the library in whose source it was read
    seam: str  # the dotted name of the function that is wrong
    before: str  # text of the function
    after: str  # what stands there instead
    killer: str  # the test that must fail, below ``tests/``
    wrong: str  # the consequence


def bugs() -> dict[str, Bug]:
    with TABLE.open(newline="") as file:
        return {row["name"]: Bug(**row) for row in csv.DictReader(file)}


def make(name: str) -> None:
    """Make the bug of this name in the live functions of this process. Raises `StaleError` if it does not fit."""
    made = bugs()[name]
    rewrite(made.seam, made.before, made.after)
