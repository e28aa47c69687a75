"""All dials: what a user can set, as data, which the laws of `tests/laws` combine.

A dial is a `Dial` in a module of this package. The laws are about every dial, so that a further one costs its record.
"""

from __future__ import annotations

from . import calls, cuts, loops, models, numbers, places, ranks, units
from .record import Dial

DIALS: tuple[Dial, ...] = (*ranks.DIALS, *numbers.DIALS, *cuts.DIALS, *places.DIALS, *units.DIALS, *loops.DIALS)
"""In the order in which pairs of their values are chosen; the first value of a dial is what is usual."""

ASKED: tuple[Dial, ...] = (*DIALS, *calls.DIALS, *models.DIALS)
"""And those without values, of which laws ask what is refused."""
