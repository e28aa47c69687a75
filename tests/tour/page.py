"""The blocks that zero/TOUR.md quotes: its step, what the two ranks hold, and the source of an exercise."""

from __future__ import annotations

import inspect
import re

from . import relay
from .step import both, drawing, step, table

YOURS = re.compile(r"( +)# yours: begin\n.*?# yours: end\n", re.DOTALL)
UNFINISHED = 'raise NotImplementedError("exercise 2: the sum of a shard, in rank order, at its owner")'


def unfinished() -> str:
    """Return the source of the second exercise, without the lines that a reader writes."""
    source, number = YOURS.subn(rf"\1{UNFINISHED}\n", inspect.getsource(relay))
    assert number == 1
    return source


def blocks() -> list[str]:
    stages = {stage: both(stage) for stage in (2, 3)}
    exercise = unfinished().partition("\nclass Relay:")[2].partition("\n    def all_gather")[0]
    tables = (drawing(stages), table(stages[2]), table(stages[3], known=stages[2]))
    return [inspect.getsource(step), *tables, f"class Relay:{exercise}"]
