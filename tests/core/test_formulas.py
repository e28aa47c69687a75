"""The stage table is that of the paper, and bytes and traffic of a step are those counted by hand."""

from __future__ import annotations

from zero.core.buckets import build
from zero.core.formulas import KeptStates, formula_bytes, formula_traffic
from zero.core.stage import stage_of

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


def test_bytes_and_traffic_of_a_rank_by_hand() -> None:
    """The last of four ranks owns three of nine blocks of 16 elements, and the one block of the frozen bucket."""
    layout = build([spec("a", (100,)), spec("frozen", (10,), trainable=False), spec("b", (4, 5))], 4, 10**6)
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
