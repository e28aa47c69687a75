"""What zero/TOUR.md quotes: lines of the library, the output of its step, and the source of an exercise.

A link names a definition, and perhaps a text in the first and in the last of its lines that are meant:

    [`hooks.py: __call__` from `with owner.lock` to `listener.gradient_ready`](gradients/hooks.py#L83-L93)
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from . import relay
from .step import both, drawing, step, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "zero/TOUR.md"
MOST_LINES = 300
LINK = re.compile(
    r"\[`(?P<file>[\w/]+\.py): (?P<name>[\w.]+)`(?: from `(?P<first>[^`]+)`)?(?: to `(?P<last>[^`]+)`)?\]"
    r"\((?P<path>[\w./]+)#L(?P<begin>\d+)-L(?P<end>\d+)\)"
)
YOURS = re.compile(r"( +)# yours: begin\n.*?# yours: end\n", re.DOTALL)
UNFINISHED = 'raise NotImplementedError("exercise 2: the sum of a shard, in rank order, at its owner")'


def cited(link: re.Match[str]) -> tuple[Path, int, int]:
    """Return the file of a link, and the first and the last of the lines that it names. Raises `LookupError`."""
    path = (PAGE.parent / link["path"]).resolve()
    if not path.is_file() or not path.as_posix().endswith(f"/{link['file']}"):
        raise LookupError(f"{link['path']} is not {link['file']}")
    source = path.read_text()
    node = defined(ast.parse(source), link["name"])
    assert node.end_lineno is not None
    lines, begin, end = source.splitlines(), node.lineno, node.end_lineno
    if link["first"]:
        begin = _found(lines, begin, end, link["first"])
    if link["last"]:
        end = _found(lines, begin, end, link["last"])
    return path, begin, end


def defined(tree: ast.AST, name: str) -> ast.stmt:
    """Return the class, the function or the assignment of this name, perhaps of a class: ``EvenCuts.bound``.

    Raises `LookupError` if there is none, or if there are several.
    """
    first, _, rest = name.partition(".")
    found = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and first in _names(node)]
    if len(found) != 1:
        raise LookupError(f"{first} is defined {len(found)} times")
    return defined(found[0], rest) if rest else found[0]


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _found(lines: list[str], begin: int, end: int, text: str) -> int:
    for number in range(begin, end + 1):
        if text in lines[number - 1]:
            return number
    raise LookupError(f"{text!r} is in no line from {begin} to {end}")


def links(text: str) -> Iterator[re.Match[str]]:
    return LINK.finditer(text)


def count(text: str) -> int:
    """Return how many lines of the library a page names. A line that is named twice counts once."""
    found = [cited(link) for link in links(text)]
    return len({(path, line) for path, begin, end in found for line in range(begin, end + 1)})


def unfinished() -> str:
    """Return the source of the second exercise, without the lines that a reader writes."""
    source, number = YOURS.subn(rf"\1{UNFINISHED}\n", inspect.getsource(relay))
    assert number == 1
    return source


def blocks() -> dict[str, str]:
    """Return the blocks that the page quotes, by the mark before each."""
    stages = {stage: both(stage) for stage in (2, 3)}
    return {
        "step": inspect.getsource(step),
        "owners": drawing(stages),
        "stage 2": table(stages[2]),
        "stage 3": table(stages[3], known=stages[2]),
        "relay": re.findall(r"^class Relay:\n.*?(?=\n    def all_gather)", unfinished(), re.DOTALL | re.MULTILINE)[0],
    }


def renewed(text: str) -> str:
    """Return a page with the lines and the blocks as they should be."""

    def link(old: re.Match[str]) -> str:
        _, begin, end = cited(old)
        return f"{old[0].rpartition('#')[0]}#L{begin}-L{end})"

    text = LINK.sub(link, text)
    for mark, block in blocks().items():
        begin, fence, end = f"<!-- {mark} -->\n```", "\n", "```\n"
        before, found, rest = text.partition(begin)
        assert found, f"the page has no block {mark!r}"
        language, _, rest = rest.partition(fence)
        text = f"{before}{begin}{language}{fence}{block}{end}{rest.partition(end)[2]}"
    return text
