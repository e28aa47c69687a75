"""What several files of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def accelerator_class() -> Iterator[Any]:
    """Yield `ZeroAccelerator`, and let accelerate forget the process afterwards."""
    state = pytest.importorskip("accelerate.state")
    from zero.integrations.accelerate import ZeroAccelerator

    yield ZeroAccelerator
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
