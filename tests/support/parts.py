"""The parts of an optimizer, for tests of the insides."""

from __future__ import annotations

from zero import ZeroOptimizer
from zero.engine import Engine
from zero.parts import Parts


def engine_of(optimizer: ZeroOptimizer) -> Engine:
    """Return what carries out an optimizer's calls."""
    return optimizer._engine


def parts_of(optimizer: ZeroOptimizer) -> Parts:
    """Return an optimizer's parts."""
    return optimizer._engine.parts
