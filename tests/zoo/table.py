"""The tables of tests/zoo/README.md: a run writes them, or compares them with its own.

Knows: Markdown between marker lines. Does not know: how mutants are run.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..tiers import of_every_test
from .catalogue import MUTANTS
from .entries import ENTRIES, Entry, link
from .runner import Outcome

README = Path(__file__).with_name("README.md")
MUTANTS_BEGIN, MUTANTS_END = "<!-- mutants: written by python -m tests.zoo --write -->", "<!-- end of mutants -->"
ENTRIES_BEGIN, ENTRIES_END = "<!-- entries: written by python -m tests.zoo --write -->", "<!-- end of entries -->"


def rows(outcomes: Sequence[Outcome], tiers: Mapping[str, str]) -> list[str]:
    """Return the table of mutants, a line each.

    The last columns, how and the seconds, depend on the run. ``tiers``: the tier of each test, by name.
    """
    lines = ["| entry | mutant | what would be wrong | caught by | tier | how | s |", "|---|---|---|---|---|---|--:|"]
    for outcome in outcomes:
        mutant = outcome.mutant
        test = outcome.test.replace("|", "\\|")
        caught = (f"`{test}`", tiers[outcome.test], outcome.how, f"{outcome.seconds:.0f}")
        lines.append(f"| {' | '.join((' '.join(mutant.entries), f'`{mutant.name}`', mutant.wrong, *caught))} |")
    return lines


def entry_rows() -> list[str]:
    """Return the table of entries, a line each."""
    covered: dict[str, list[str]] = {}
    for mutant in MUTANTS:
        for name in mutant.entries:
            covered.setdefault(name, []).append(f"`{mutant.name}`")
    lines = ["| entry | what happened, or what is promised | here |", "|---|---|---|"]
    for name, entry in ENTRIES.items():
        sources = f" ({', '.join(link(source) for source in entry.sources)})" if entry.sources else ""
        lines.append(f"| {name} | {entry.text}{sources} | {', '.join(covered.get(name, [])) or _why_not(entry)} |")
    return lines


def _why_not(entry: Entry) -> str:
    return f"waits for {entry.waits}" if entry.waits else f"cannot be expressed: {entry.impossible}"


def between(text: str, begin: str, end: str) -> list[str]:
    """Return the lines between two marker lines."""
    lines = text.splitlines()
    return lines[lines.index(begin) + 1 : lines.index(end)]


def write(outcomes: Sequence[Outcome]) -> None:
    """Write both tables into the README."""
    text = README.read_text()
    for begin, end, table in (
        (MUTANTS_BEGIN, MUTANTS_END, rows(outcomes, of_every_test())),
        (ENTRIES_BEGIN, ENTRIES_END, entry_rows()),
    ):
        before, rest = text.split(f"{begin}\n")
        after = rest[rest.index(end) :]
        text = "\n".join([f"{before}{begin}", *table, after])
    README.write_text(text)


def difference(outcomes: Sequence[Outcome]) -> str:
    """Return a diff between the README's tables and those of a run, or an empty string.

    How each mutant was caught (whose error came first) and the seconds are not compared, nor are the rows of mutants
    that the run left out.
    """
    text = README.read_text()
    left_out = {mutant.name for mutant in MUTANTS} - {outcome.mutant.name for outcome in outcomes}
    ours = [*(_lasting(row) for row in rows(outcomes, of_every_test())), *entry_rows()]
    theirs = [
        *(
            _lasting(row)
            for row in between(text, MUTANTS_BEGIN, MUTANTS_END)
            if not any(f" | `{name}` | " in row for name in left_out)
        ),
        *between(text, ENTRIES_BEGIN, ENTRIES_END),
    ]
    return "\n".join(difflib.unified_diff(theirs, ours, "README.md", "this run", lineterm="", n=0))


def _lasting(row: str) -> str:
    return row.rstrip("|").rsplit("|", 2)[0]
