"""Each stage, number of ranks, precision and collective is ordered on each pattern of streams."""

from __future__ import annotations

from typing import Any

import pytest

from ...runtime.towers import PATTERNS, Training, check, watch
from ...support.narrowed import PRECISIONS

BF16, WIDE = ({"mixed_precision": PRECISIONS[name]} for name in ("bf16", "bf16, sent in fp32"))
ROWS: list[tuple[str, int, int, dict[str, Any]]] = [  # pattern, ranks, stage, options
    ("each part", 1, 1, WIDE),
    ("each part", 2, 2, {"collective": "native"}),
    ("two towers", 1, 0, BF16),
    ("two towers", 2, 1, {"collective": "pairwise"}),
    ("two towers", 1, 3, WIDE),
    ("side stream", 1, 2, BF16),
    ("side stream", 2, 0, WIDE),
    ("side stream", 2, 3, {"collective": "native"}),
    ("in turn", 2, 0, {"collective": "native"}),
    ("in turn", 1, 1, {}),
    ("in turn", 2, 2, WIDE),
    ("in turn", 2, 3, {"collective": "pairwise"}),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_parts_of_a_step_are_ordered_on_whatever_streams_they_are(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, world_size, stage, options = row
    watch(monkeypatch)

    def program(training: Training) -> None:
        training.steps(PATTERNS[pattern], PATTERNS["each part"], PATTERNS[pattern])

    check(world_size, stage, program, **options)
