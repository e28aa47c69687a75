"""Rows that hold each pair of values of two dials, and the programs of a row."""

from __future__ import annotations

from ..dials import DIALS
from ..dials.record import commands_of, config_of
from ..support.machine.program import Command, Config
from ..support.pairs import Row, pair_rows
from ..support.rows import ALL
from ..support.two_modes import TWO_MODES


def allowed(row: Row) -> bool:
    """Return whether the values of a row go together."""
    modes = row["class"] in TWO_MODES
    return all(dial.allows(row) for dial in DIALS) and (not modes or row["look"] == "modes")


ROWS = pair_rows({dial.name: dial.names for dial in DIALS}, allowed, most=None if ALL else 10)


def named(row: Row) -> str:
    """Return a row as the name of a case: stage, ranks, and what is not usual."""
    more = [f"{dial.name} {row[dial.name]}" for dial in DIALS if row[dial.name] != dial.usual]
    return ", ".join(more) or "usual"


def program_of(row: Row) -> tuple[Config, list[Command]]:
    return config_of(row, DIALS), commands_of(row, DIALS)
