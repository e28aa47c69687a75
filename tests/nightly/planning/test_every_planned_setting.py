"""What is planned is what ranks hold and send, to the byte, under every setting of two to eight ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ...planning.planned import CAPS, SETTINGS, check, there_is

RANKS = {"world_size": (2, 3, 8), "sharding_factor": (None, 1, 2, 4), "reshard_after_forward": (True, False, 2, 4)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", CAPS)
def test_a_rank_holds_and_sends_what_is_planned(model: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, **RANKS, "model": (model,)}
    for values in itertools.product(*settings.values()):
        row = dict(zip(settings, values, strict=True))
        if there_is(row):
            check(row, tmp_path)
