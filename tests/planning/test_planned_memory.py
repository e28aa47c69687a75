"""What is planned is what ranks hold and send, to the byte, for each pair of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..support.pairs import pair_rows
from .planned import SETTINGS, check, there_is


@pytest.mark.parametrize("row", pair_rows(SETTINGS, there_is))
def test_a_rank_holds_and_sends_what_is_planned(row: dict[str, Any], tmp_path: Path) -> None:
    check(row, tmp_path)
