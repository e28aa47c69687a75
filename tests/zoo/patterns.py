"""Six changes of a function's syntax tree, each at one place that an identifier names.

    drop       a call, or an assignment, does not happen
    swap       an identifier is another one
    constant   what is assigned to a name, or passed by keyword, is a constant
    decide     a condition has one outcome, or the other one
    first_of   of what is iterated over the first item alone is taken
    unguarded  what must happen in any case happens unless there is an exception

A name is the last part of a dotted one. If it occurs at several places, ``nth`` says at which, from 0.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from .live import Place, StaleError

Pattern = Callable[[ast.FunctionDef], None]


def drop(name: str, nth: int | None = None) -> Pattern:
    """Leave out the statement, or the item of a ``with``, that calls or assigns ``name``."""

    def is_it(node: ast.AST) -> bool:
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            return any(_last(each) == name for each in getattr(node, "targets", None) or [node.target])  # type: ignore[union-attr]
        value = getattr(node, "value", None) if isinstance(node, ast.Expr) else getattr(node, "context_expr", None)
        return isinstance(value, ast.Call) and _last(value.func) == name

    def change(place: Place) -> None:
        if isinstance(place.node, ast.withitem):
            place.node.context_expr = _expression("__import__('contextlib').nullcontext()")
        else:
            place.put(ast.Pass())

    return _once(is_it, change, f"no call or assignment of {name}", nth)


def swap(name: str, other: str, nth: int | None = None) -> Pattern:
    """Let an identifier, or the name of an argument, be ``other``."""

    def change(place: Place) -> None:
        for field in ("id", "attr", "arg"):
            if hasattr(place.node, field):
                setattr(place.node, field, other)

    return _once(
        lambda node: isinstance(node, (ast.Name, ast.Attribute, ast.keyword)) and _last(node) == name,
        change,
        f"no {name}",
        nth,
    )


def constant(name: str, value: object, nth: int | None = None) -> Pattern:
    """Let what is assigned to ``name``, or passed as ``name=``, be ``value``. "return" is the whole function."""
    if name == "return":
        return lambda function: function.body.__setitem__(slice(None), [ast.Return(_expression(repr(value)))])

    def is_it(node: ast.AST) -> bool:
        if isinstance(node, ast.Assign):
            return any(_last(target) == name for target in node.targets)
        return isinstance(node, ast.keyword) and node.arg == name

    def change(place: Place) -> None:
        place.node.value = _expression(repr(value))  # type: ignore[attr-defined]

    return _once(is_it, change, f"nothing is assigned to {name}", nth)


def decide(name: str, outcome: bool | None, nth: int | None = None) -> Pattern:
    """Let the smallest condition that mentions ``name`` be ``outcome``, or, if that is None, its opposite."""

    def change(place: Place) -> None:
        condition = place.node
        assert isinstance(condition, ast.expr)
        place.put(ast.UnaryOp(ast.Not(), condition) if outcome is None else ast.Constant(outcome))

    def run(function: ast.FunctionDef) -> None:
        found = [place for place in _places(function) if _is_condition(place) and _mentions(place.node, name)]
        inside = [place for place in found if not any(_contains(place, other) for other in found)]
        change(_chosen(inside, f"no condition mentions {name}", nth))

    return run


def first_of(name: str, nth: int | None = None) -> Pattern:
    """Let a loop, also inside an expression, take the first of the items that an expression with ``name`` gives."""

    def change(place: Place) -> None:
        loop = place.node
        assert isinstance(loop, (ast.For, ast.comprehension))
        loop.iter = ast.Subscript(
            ast.Call(ast.Name("list", ast.Load()), [loop.iter], []),
            ast.Slice(None, ast.Constant(1), None),
            ast.Load(),
        )

    return _once(
        lambda node: isinstance(node, (ast.For, ast.comprehension)) and _mentions(node.iter, name),
        change,
        f"no loop over {name}",
        nth,
    )


def unguarded(nth: int | None = None) -> Pattern:
    """Let what stands in a ``finally`` be skipped by an exception."""

    def change(place: Place) -> None:
        guarded = place.node
        assert isinstance(guarded, ast.Try)
        guarded.orelse, guarded.finalbody = guarded.orelse + guarded.finalbody, []
        if not guarded.handlers:
            place.put(ast.If(ast.Constant(True), guarded.body + guarded.orelse, []))

    return _once(lambda node: isinstance(node, ast.Try) and bool(node.finalbody), change, "no finally", nth)


def _once(is_it: Callable[[ast.AST], bool], change: Callable[[Place], None], problem: str, nth: int | None) -> Pattern:
    def run(function: ast.FunctionDef) -> None:
        change(_chosen([place for place in _places(function) if is_it(place.node)], problem, nth))

    return run


def _chosen(found: list[Place], problem: str, nth: int | None) -> Place:
    found.sort(key=lambda place: (getattr(place.node, "lineno", 0), getattr(place.node, "col_offset", 0)))
    if not found or (nth or 0) >= len(found) or (nth is None and len(found) > 1):
        raise StaleError(f"{problem}, or not once: {len(found)} times")
    return found[nth or 0]


def _places(node: ast.AST) -> Iterator[Place]:
    """Yield every node of the statements below a definition, with where it lies."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                yield Place(node, field, index, child)
                yield from _places(child)


def _last(node: ast.AST) -> str | None:
    """Return the last part of a name."""
    return next((getattr(node, field) for field in ("id", "attr", "arg") if hasattr(node, field)), None)


def _mentions(node: ast.AST, name: str) -> bool:
    return any(_last(each) == name for each in ast.walk(node))


def _is_condition(place: Place) -> bool:
    parent, node = place.parent, place.node
    if isinstance(parent, (ast.BoolOp, ast.UnaryOp)):
        return isinstance(node, ast.expr) and (isinstance(parent, ast.BoolOp) or isinstance(parent.op, ast.Not))
    return place.field == "test" or (isinstance(parent, ast.comprehension) and place.field == "ifs")


def _contains(place: Place, other: Place) -> bool:
    return other.node is not place.node and any(node is other.node for node in ast.walk(place.node))


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
