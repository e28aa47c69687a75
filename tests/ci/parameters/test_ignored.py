"""Ignored experts on processes: bits on meshes of 1 to 6 ranks, inside `join`, frozen, and at another topology."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ...parameters import expert_jobs as jobs
from ...parameters.experts import assert_trained, plain_loop
from ...support.narrowed import PRECISIONS
from ...support.plain import assert_same_bits, assert_same_value
from ...support.pool import GlooPool
from ...support.sides import AsPlain


@pytest.fixture(scope="module")
def six() -> Iterator[GlooPool]:
    pool = GlooPool(size=6)
    yield pool
    pool.stop()


@pytest.mark.parametrize(
    ("ranks", "stages", "how", "more"),
    [
        (6, (3, 2), "a mesh", {}),
        (6, (0, 3), "a row", {"frozen": True}),
        (4, (2, 0), "a mesh", {"precision": PRECISIONS["bf16"]}),
        (4, (3, 3), "a group", {"sharding_factor": 2, "frozen": True}),
        (2, (3, 1), "a row", {"precision": PRECISIONS["bf16"], "frozen": True}),
        (6, (3, 3), "a mesh", {"count": 3}),
        (5, (2, 3), "a row", {"count": 5, "frozen": True}),
        (3, (3, 1), "a mesh", {"count": 3, "precision": PRECISIONS["bf16"]}),
        (1, (3, 2), "a group", {}),
    ],
    ids=lambda value: str(value).replace(" ", "") if isinstance(value, (int, tuple, str)) else "-".join(value),
)
def test_experts_on_processes_train_the_bits_of_one_plain_loop_with_one_norm(
    six: GlooPool, ranks: int, stages: tuple[int, int], how: str, more: dict[str, Any]
) -> None:
    plain, expected = plain_loop(2, more.get("precision"), frozen="frozen" in more, count=more.get("count", 2))
    for model, norms in six.run(jobs.train, ranks, stages, how, 2, more, ranks=range(6))[:ranks]:
        assert_trained(model, plain)
        for mine, theirs in zip(norms, expected, strict=True):
            assert_same_bits(mine, theirs, "norm")


def test_a_checkpoint_of_experts_goes_on_on_fewer_processes_at_other_stages(six: GlooPool, tmp_path: Path) -> None:
    plain, _ = plain_loop(3, frozen=True)
    six.run(jobs.save, tmp_path, (3, 1), 2, ranks=range(6))
    for ranks, stages, how in ((4, (1, 3), "a mesh"), (2, (2, 0), "a group")):
        found = six.run(jobs.resume, tmp_path, ranks, stages, how, range(2, 3), ranks=range(6))
        for model in found[:ranks]:
            assert_trained(model, plain)


@pytest.mark.parametrize(("stage", "counts"), [(0, (2, 0, 1)), (1, (1, 2)), (2, (0, 3, 2, 1)), (3, (1, 0, 2, 2, 1, 0))])
def test_what_nobody_trains_stays_as_it_is_inside_join_on_processes(
    six: GlooPool, stage: int, counts: tuple[int, ...]
) -> None:
    gated = jobs.Gated(0, len(counts))
    plain = AsPlain(gated, lambda _: torch.optim.AdamW(gated.layer.parameters(), lr=0.1), len(counts))
    for step in range(max(counts)):
        mine = [rank for rank, count in enumerate(counts) if step < count]
        plain.train(lambda model, rank, step=step: jobs.gated_loss(model, rank, step), ranks=mine)  # type: ignore[misc]
        plain.settle()
        for each in gated.own:
            each.weight.grad = None  # no part of the norm
        plain.clip(0.5)
        plain.step()
        plain.clear()
    for rank, (layer, weight) in enumerate(six.run(jobs.joined, stage, counts, ranks=range(len(counts)))):
        assert_same_value(layer.state_dict(), gated.layer.state_dict(), "the layer")
        assert_same_bits(weight, torch.eye(3) * (1.5 + rank), "what is ignored")
