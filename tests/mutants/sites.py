"""The mutants that can be drawn: one change of one place inside a function.

compare   < and <=, > and >=, == and !=, is and is not, in and not in
operator  + and -, * and //, / and *, % and +
and-or    `and` and `or`
not       without `not`
constant  an integer plus 1, True and False
drop      a call whose result is not used, an assignment such as +=
always, never   a branch
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..zoo.live import ROOT, StaleError, compile_into_live_functions, parsed

PACKAGES = ("zero", "collectives")
LEFT_OUT = ("zero/commands/", "zero/planning/")
_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}
_COMPARE |= {other: one for one, other in _COMPARE.items()}
_OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Add,
}
_LOGS = {"debug", "info", "warning", "error", "exception", "log", "warn", "warn_caller"}


@dataclass(frozen=True)
class Site:
    """One mutant: the first character of what it changes, and how."""

    file: str
    line: int
    column: int
    kind: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}:{self.kind}"

    @classmethod
    def of(cls, text: str) -> Site:
        file, line, column, kind = text.rsplit(":", 3)
        return cls(file, int(line), int(column), kind)


@dataclass
class Place:
    """A node of a syntax tree: the attribute, or the item of a list, of its parent, inside functions."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST
    functions: list[ast.FunctionDef]  # from the outermost one

    def put(self, new: ast.AST) -> None:
        ast.copy_location(new, self.node)
        if self.index is None:
            setattr(self.parent, self.field, new)
        else:
            getattr(self.parent, self.field)[self.index] = new


def sites() -> Iterator[Site]:
    """Yield all mutants of the library, in order, but for those of commands and of the planner."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            if not file.startswith(LEFT_OUT):
                yield from dict.fromkeys(site for site, _ in _found(file, parsed(str(path))))


def apply(text: str) -> None:
    """Change the live functions of this process. ``text``: of a `Site`."""
    site = Site.of(text)
    tree = parsed(str(ROOT / site.file))
    place = _place(site, tree)
    place.put(_changed(place.node, site.kind))
    compile_into_live_functions(tree, str(ROOT / site.file), place.functions)


def describe(site: Site) -> str:
    node = _place(site, parsed(str(ROOT / site.file))).node
    both = (node, _changed(node, site.kind))
    return " -> ".join(ast.unparse(each.test if isinstance(each, ast.If) else each) for each in both)


def changed_lines(commit: str) -> dict[str, set[int]]:
    """Return the lines of the functions that are not as in a commit, by file. One that has only moved is as before."""
    listed = _git("diff", "--name-only", "--no-renames", commit, "--", *PACKAGES).split()
    before = {key for file in listed if file.endswith(".py") for key, _ in _functions(_at(commit, file))}
    found: dict[str, set[int]] = {}
    for file in listed:
        if file.endswith(".py") and (ROOT / file).is_file():
            for key, node in _functions((ROOT / file).read_text()):
                if key not in before:
                    found.setdefault(file, set()).update(range(node.lineno, (node.end_lineno or 0) + 1))
    return found


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _at(commit: str, file: str) -> str:
    found = subprocess.run(["git", "show", f"{commit}:{file}"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout  # nothing, if there was no such file


def _functions(text: str) -> Iterator[tuple[tuple[str, str], ast.FunctionDef]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            yield (node.name, ast.dump(node)), node


def _place(site: Site, tree: ast.Module) -> Place:
    for found, place in _found(site.file, tree):
        if found == site:
            return place
    raise StaleError(f"there is no {site}")


def _found(file: str, tree: ast.Module) -> Iterator[tuple[Site, Place]]:
    for place in _places(tree, []):
        for kind in _kinds(place.node):
            yield Site(file, place.node.lineno, place.node.col_offset, kind), place  # type: ignore[attr-defined]


def _places(node: ast.AST, functions: Sequence[ast.FunctionDef]) -> Iterator[Place]:
    """Yield what lies inside functions, without errors, logs, annotations and default values."""
    inside = [*functions, node] if isinstance(node, ast.FunctionDef) else [*functions]
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            skipped = (ast.Raise, ast.Assert, ast.JoinedStr, ast.AsyncFunctionDef)
            if not isinstance(child, ast.AST) or isinstance(child, skipped) or _is_log(child):
                continue
            if inside:
                yield Place(node, field, index, child, inside)
            yield from _places(child, inside)


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and (getattr(node.func, "attr", "") or getattr(node.func, "id", "")) in _LOGS


def _kinds(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        yield "compare"
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATOR and not isinstance(node.left, ast.JoinedStr):
        yield "operator"
    elif isinstance(node, ast.BoolOp):
        yield "and-or"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield "constant"
    elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or isinstance(node, ast.AugAssign):
        yield "drop"
    elif isinstance(node, ast.If):
        yield from ("always", "never")


def _changed(node: Any, kind: str) -> ast.AST:
    match kind:
        case "compare":
            return ast.Compare(node.left, [_COMPARE[type(node.ops[0])]()], node.comparators)
        case "operator":
            return ast.BinOp(node.left, _OPERATOR[type(node.op)](), node.right)
        case "and-or":
            return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case "not":
            return node.operand  # type: ignore[no-any-return]
        case "constant":
            return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
        case "drop":
            return ast.Pass()
    return ast.If(ast.Constant(kind == "always"), node.body, node.orelse)
