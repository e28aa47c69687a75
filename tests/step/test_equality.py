"""The comparison of states in the trial of a class."""

from __future__ import annotations

from typing import Any

import torch

from zero.step.equality import same

EQUAL: list[tuple[Any, Any]] = [
    (torch.tensor([torch.nan, -0.0]), torch.tensor([-torch.nan, -0.0])),
    (torch.tensor([1 + 2j]), torch.tensor([1 + 2j])),
    (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()),
    (torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn),) * 2,
    (torch.tensor([True]), torch.tensor([True])),
    ([1, {"a": (None, torch.nan)}], [1, {"a": (None, torch.nan)}]),
    (object(), object()),
]
UNEQUAL: list[tuple[Any, Any]] = [
    (torch.tensor([0.0]), torch.tensor([-0.0])),
    (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
    (torch.zeros(0, 3), torch.zeros(0, 5)),
    (torch.zeros(4), torch.zeros(1, 4)),
    (torch.tensor([1]), torch.tensor([2])),
    (torch.tensor([True]), torch.tensor([False])),
    (torch.tensor([1 + 2j]), torch.tensor([1 - 2j])),
    (torch.tensor([0.0], dtype=torch.float8_e5m2), torch.tensor([-0.0], dtype=torch.float8_e5m2)),
    (torch.tensor(1.0), 1.0),
    (1, True),
    (0.0, -0.0),
    ([1], (1,)),
    ([1], [1, 1]),
    ({"a": 1}, {"b": 1}),
    ({"a": 1}, {"a": 2}),
    (None, 0),
]


def test_states_are_equal_if_their_bits_are_and_nan_is_equal_to_nan() -> None:
    for one, other in EQUAL:
        assert same(one, other), one
    for one, other in UNEQUAL:
        assert not same(one, other), one
