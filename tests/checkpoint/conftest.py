"""An optimizer that many tests of this folder save."""

from __future__ import annotations

import pytest

from zero import ZeroOptimizer

from .saved import Training


@pytest.fixture(scope="module")
def optimizer() -> ZeroOptimizer:
    """Return an optimizer of one rank that has taken a step."""
    training = Training(None, 0)
    training.step(0)
    return training.optimizer
