"""The stage table is that of the paper, and bytes and traffic of a step are those counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from zero.core.buckets import build
from zero.core.formulas import KeptStates, formula_bytes, formula_traffic
from zero.core.layout import Layout
from zero.core.stage import STAGES, stage_of

from .drawn import spec

# by stage: who holds parameters, gradients and states; passes of 1, 2 and 3 reductions; gathers of 1 and 3 backwards
TABLE = [
    (0, ("whole", "whole", "whole"), [2, 4, 6], [0, 0]),
    (1, ("whole", "whole", "shard"), [2, 3, 4], [0, 0]),
    (2, ("whole", "shard", "shard"), [2, 3, 4], [0, 0]),
    (3, ("shard", "shard", "shard"), [1, 2, 3], [2, 6]),
]


def test_the_stage_table_is_that_of_the_paper() -> None:
    for number, placed, passes, gathers in TABLE:
        stage = stage_of(number)
        assert stage.number == number
        assert (stage.parameters.value, stage.gradients.value, stage.states.value) == placed
        assert stage.keeps_full_grads == (placed[1] == "whole")
        assert stage.grads_replicated == (number == 0)
        assert stage.parameters_are_gathered == (number in (1, 2))
        bucket = build([spec("a", (100,))], 2, 1000).buckets[0]
        assert stage.update_interval(bucket, 1) == ((0, 112) if number == 0 else (48, 112))
        assert [sum(stage.passes(synchronised).values()) for synchronised in (1, 2, 3)] == passes
        assert [stage.gathers(backwards) for backwards in (1, 3)] == gathers
    assert sorted(STAGES) == [0, 1, 2, 3]
    wrong: list[Any] = [4, -1, True, False, "2", None, 1.5]
    for number in wrong:
        with pytest.raises(ValueError, match=r"stage must be one of \[0, 1, 2, 3\]"):
            stage_of(number)


def worked_example(world_size: int = 4) -> Layout:
    """Return a layout in fp32: 20 + 100 trainable elements in a bucket of 32 + 112, 10 frozen ones in a bucket of
    16."""
    return build([spec("a", (100,)), spec("frozen", (10,), trainable=False), spec("b", (4, 5))], world_size, 10**6)


def test_bytes_and_traffic_of_a_rank_by_hand() -> None:
    """The last of four ranks owns three of nine blocks of 16 elements, and the one block of the frozen bucket."""
    layout = worked_example()
    for number, parameters, gradients, optimizer in [
        (0, (144 + 16) * 4, (144 + 48) * 4, 2 * 144 * 4),
        (1, (144 + 16) * 4, 144 * 4, 2 * 48 * 4),
        (2, (144 + 16) * 4, 48 * 4, 2 * 48 * 4),
        (3, (48 + 16) * 4, 48 * 4, 2 * 48 * 4),
    ]:
        assert formula_bytes(layout, stage_of(number), 3, lambda bucket: KeptStates(8 if bucket.index else 0)) == {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer": optimizer,
            "gathered_peak": 0 if number < 3 else (144 + 16) * 4,
            "scratch_peak": 3 * 144 * 4,
        }
    for number, backwards, synchronised, passes in [(0, 1, 1, 2), (1, 3, 3, 4), (2, 3, 1, 2)]:
        found = formula_traffic(layout, stage_of(number), backwards, synchronised)
        assert found == passes * 3 * (32 + 112) * 4, "frozen parameters are not sent; padding is"


def test_traffic_of_stage_3_by_hand() -> None:
    """Every unit is gathered for each forward, and again for each backward except the two that are still gathered.

    Gradients are sent as at stage 2. With padding: unit 0 has 16 elements and 16 frozen ones, unit 1 has 48, unit 2 has
    32, of a parameter that is not updated, and unit 3 has 112.
    """
    listed = [
        spec("a", (10,), unit=0),
        spec("b", (10,), trainable=False, unit=0),
        spec("c", (40,), unit=1),
        spec("d", (100,), unit=3),
    ]
    layout, rest = build(listed, 3, 10**6), build([spec("e", (20,), unit=2)], 3, 10**6)
    everything, here, trainable = 16 + 16 + 48 + 32 + 112, 16 + 16 + 112, 16 + 48 + 112
    for backwards, synchronised in ((1, 1), (3, 3), (3, 1)):
        expected = synchronised * trainable + 2 * backwards * everything - backwards * here
        assert formula_traffic(layout, stage_of(3), backwards, synchronised, rest) == 2 * 4 * expected
    found = [formula_bytes(layout, stage_of(3), rank, lambda _: KeptStates(), rest) for rank in range(3)]
    assert {each["gathered_peak"] for each in found} == {4 * (16 + 16 + 112 + 48)}
    assert sum(each["parameters"] for each in found) == 4 * everything
