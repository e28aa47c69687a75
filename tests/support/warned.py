"""The warnings of a test."""

from __future__ import annotations

from collections.abc import Iterable
from warnings import WarningMessage

import pytest

_OF_GARBAGE = (ResourceWarning, pytest.PytestUnraisableExceptionWarning)


def own(warned: Iterable[WarningMessage]) -> list[WarningMessage]:
    """Return the recorded warnings but for those of objects of earlier tests, which a garbage collection found."""
    return [warning for warning in warned if not issubclass(warning.category, _OF_GARBAGE)]
