"""Whether a failed test has caught a mutant.

Knows: exceptions and their tracebacks. Does not know: mutants, or how a verdict is used.

    caught        a test's own assertion          AssertionError outside of `zero` and `collectives`, `pytest.fail`
                  a documented error              ValueError, TypeError or RuntimeError by a ``raise`` of the library
                  a time limit                    pytest's, the library's or that of the pool of processes
    not caught    anything else                   ImportError, NameError, AttributeError, IndexError, KeyError, errors
                                                  of torch, the library's own ``assert``, an error before a test

If several ranks failed, only those count that failed by themselves, not those that received another rank's failure.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

from _pytest.outcomes import Failed

PACKAGES = ("zero", "collectives")
TOLD = "PeerError"  # the class of the error that a rank raises when another one failed
_LATE = re.compile(r"no answer from rank .*(time limit of|Timed out)", re.DOTALL)  # from a Loopback, or from gloo
_LAST_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)


class How(Enum):
    """How a test failed."""

    ASSERTION = "assertion"
    ERROR = "error"
    TIME_LIMIT = "time limit"
    OTHER = "not a kill"


@dataclass(frozen=True)
class Failure:
    """An exception as data. ``place``: file and line of the innermost frame of Python code."""

    kinds: tuple[str, ...]
    message: str
    place: tuple[str, int] | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        place = None
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            place = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
            trace = trace.tb_next
        return cls(tuple(kind.__name__ for kind in type(error).__mro__), str(error), place)


def judge(error: BaseException, root: Path, ranks: Sequence[BaseException] = ()) -> How:
    """Return the verdict on a test's error. ``ranks``: the errors of all threads of its group."""
    group = getattr(error, "exceptions", None)  # Hypothesis may report several failures
    if isinstance(group, tuple):
        return _common(judge(each, root, ranks) for each in group)
    if type(error).__name__ == "ProgramError" and hasattr(error, "errors"):
        return _most_telling([_of_process(name, text) for name, text in _by_rank(error)], root)
    hidden = error.__context__
    if isinstance(error, AssertionError) and hidden is not None and "Regex pattern did not match" in str(error):
        return How.ASSERTION if judge(hidden, root) is not How.OTHER else How.OTHER  # another error, of any origin
    return _most_telling([Failure.of(each) for each in ranks or [error]], root)


def verdict(failure: Failure, root: Path) -> How:
    """Return the verdict on one exception."""
    kinds, inside = failure.kinds, _is_ours(failure.place, root)
    if Failed.__name__ in kinds:
        return How.TIME_LIMIT if "pytest-timeout" in failure.message else How.ASSERTION
    if "TimeoutError" in kinds and "did not answer within" in failure.message:
        return How.TIME_LIMIT
    if "AssertionError" in kinds:
        return How.OTHER if inside else How.ASSERTION
    if "NotElementwiseError" in kinds:  # also if `tests/trials.py` raises again what it remembers
        return How.ERROR
    documented = {"ValueError", "TypeError", "RuntimeError"} & set(kinds) and "NotImplementedError" not in kinds
    if documented and inside and _is_raise(failure.place):
        late = TOLD in kinds and _LATE.search(failure.message) is not None
        return How.TIME_LIMIT if late else How.ERROR
    return How.OTHER


def _most_telling(failures: Sequence[Failure], root: Path) -> How:
    """Return the verdict on several ranks. Ranks that only received another rank's failure do not count."""
    own = [failure for failure in failures if TOLD not in failure.kinds]
    late = [failure for failure in failures if verdict(failure, root) is How.TIME_LIMIT]
    return _common(verdict(failure, root) for failure in own or late or failures)


def _common(verdicts: Iterator[How]) -> How:
    """Combine several verdicts into one: all must be kills."""
    found = set(verdicts)
    return next(how for how in (How.OTHER, How.ASSERTION, How.ERROR, How.TIME_LIMIT) if how in found or not found)


def _is_ours(place: tuple[str, int] | None, root: Path) -> bool:
    """Return True if a place lies in the library."""
    return place is not None and any(Path(place[0]).is_relative_to(root / name) for name in PACKAGES)


def _is_raise(place: tuple[str, int] | None) -> bool:
    """Return True if a line belongs to a ``raise`` statement."""
    assert place is not None
    tree = ast.parse(Path(place[0]).read_text())
    raises = (node for node in ast.walk(tree) if isinstance(node, ast.Raise))
    return any(node.lineno <= place[1] <= (node.end_lineno or node.lineno) for node in raises)


def _by_rank(error: Any) -> Iterator[tuple[str, str]]:
    """Yield (class, traceback) of each rank of a gloo program."""
    texts = re.split(r"^rank \d+:$", str(error), flags=re.MULTILINE)[1:]
    for (name, _), text in zip(error.errors.values(), texts, strict=True):
        yield name, text


def _of_process(name: str, text: str) -> Failure:
    """Return the failure of a process, from its traceback."""
    frames = _LAST_FRAME.findall(text)
    kinds = {"CollectiveError": ("RuntimeError",), "MismatchError": ("RuntimeError",), TOLD: ("RuntimeError",)}
    place = (frames[-1][0], int(frames[-1][1])) if frames else None
    return Failure((name, *kinds.get(name, ())), text, place)
