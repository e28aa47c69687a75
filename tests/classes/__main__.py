"""`python -m tests.classes [LIBRARY | LIBRARY.CLASS ...]`: a line for each class, by default of all six libraries.

At last it prints the table of `zero/recipes/optimizers.md`. Libraries that are not installed are left out. Exit code 1:
bits of a class differ, it is built and then fails, or it is refused for another reason than is known.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from ..support.pool import GlooPool, stop_forkserver
from ..support.processor import spare_matrix_unit
from .uses import LIBRARIES, PACKAGES, names_of, reason_of
from .verdicts import Verdict, verdict_on

KINDS = ("elements", "blocks", "parameter", "refused", "fails")


def is_wrong(found: Verdict) -> bool:
    """Return whether bits differ, a class fails, or it is refused otherwise than is known."""
    reason = reason_of(found.name)
    expected = (found.kind == "refused") == (reason is not None) and (reason or "") in found.why
    return bool(found.differs) or found.kind == "fails" or not expected


def line_of(found: Verdict) -> str:
    bits = "" if found.kind in ("refused", "fails") else f", {found.differs or 'same bits'}"
    saved = f", states are not saved: {found.unsaved}" if found.unsaved else ""
    return f"{'WRONG ' * is_wrong(found)}{found.name}: {found.kind}{bits}{saved}. {found.why}"


def table(verdicts: list[Verdict]) -> str:
    """Return a Markdown table of the numbers of classes of each kind, by library."""
    lines = [f"| library | {' | '.join(KINDS[:4])} |", "|---|--:|--:|--:|--:|"]
    for library in LIBRARIES:
        kinds = [found.kind for found in verdicts if found.name.startswith(f"{library}.")]
        try:
            release = version(PACKAGES.get(library, library))
        except PackageNotFoundError:
            release = "?"
        if kinds:
            lines.append(f"| {library} {release} | {' | '.join(str(kinds.count(kind)) for kind in KINDS[:4])} |")
    return "\n".join(lines)


def main(chosen: list[str]) -> int:
    spare_matrix_unit()
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    found = [each for each in chosen or LIBRARIES if importlib.util.find_spec(LIBRARIES[each.partition(".")[0]])]
    names = [name for each in found for name in (names_of(each) if each in LIBRARIES else [each])]
    pool, verdicts = GlooPool(), list[Verdict]()
    try:
        for name in names:
            verdicts.append(verdict_on(pool, name))
            print(line_of(verdicts[-1]), flush=True)
    finally:
        pool.stop()
        stop_forkserver()
    print(table(verdicts))
    return int(any(map(is_wrong, verdicts)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
