"""The bugs of ``zoo.csv``, and how each gets into a live function.

A bug is text of a function, as `ast.unparse` writes it, and what stands there instead. If the function has that text
not exactly once, the bug is stale; without such text, the new one comes first in the function.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from . import live

TABLE = Path(__file__).with_name("zoo.csv")


@dataclass(frozen=True)
class Bug:
    """A bug that some library had, or could have: a row of the table.

    Attributes:
        published: links to reports, or the library in whose source it was read.
        seam: the dotted name of the function that is wrong.
        before, after: text of the function, and what stands there instead.
        killer: the test that must fail, below ``tests/``.
        wrong: the consequence.
    """

    name: str
    published: str
    seam: str
    before: str
    after: str
    killer: str
    wrong: str


def bugs() -> dict[str, Bug]:
    with TABLE.open(newline="") as file:
        return {row["name"]: Bug(**row) for row in csv.DictReader(file)}


def apply(name: str) -> None:
    """Make the bug of this name in the live functions of this process. Raises `StaleError` if it does not fit."""
    made = bugs()[name]
    live.rewrite(made.seam, made.before, made.after)
