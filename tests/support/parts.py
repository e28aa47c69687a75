"""The parts of an optimizer, for tests of the insides."""

from __future__ import annotations

from zero import ZeroOptimizer
from zero.parts import Parts


def parts_of(optimizer: ZeroOptimizer) -> Parts:
    return optimizer._engine.parts
