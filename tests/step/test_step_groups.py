"""On accelerators each class steps the buckets of a group in one call, with the bits of the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collectives import solo
from zero import MixedPrecision, Offload, ZeroOptimizer
from zero.step.user_optimizer import GROUPS_BESIDE_GATHERS

from ..support.rows import rows
from ..support.sides import OnRank
from .whole import Mixed, Place, Training, assert_same, made, shared, train

pytestmark = pytest.mark.usefixtures("launched")
SMALL = {"bucket_cap_mb": 0.0002}


class Counted(torch.optim.AdamW):
    """It counts its steps, as a class may for its own use."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        super().step()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices, rest = shared(model)
    return [
        {"params": matrices[:3], "lr": 0.01},
        {"params": rest, "optimizer_class": torch.optim.SGD, "momentum": 0.9},
        {"params": matrices[3:], "lr": 0.02, "weight_decay": 0.1},
    ]


def instances_of(optimizer: ZeroOptimizer) -> list[Any]:
    """Return the optimizer of torch that steps each bucket."""
    return [bucket.states.instance for bucket in optimizer._storage.buckets if not bucket.specs[0].optimizer_class]


@pytest.mark.parametrize("stage", rows([1, 3], [0, 2]))
def test_a_class_steps_a_group_of_buckets_in_one_call_with_the_bits_of_the_plain_loop(stage: int) -> None:
    training = Training(Mixed, groups, Counted)
    plain = training.plain()
    train(plain)

    def run(model: nn.Module, optimizer: ZeroOptimizer) -> Any:
        train(OnRank(model, optimizer))
        optimizer.consolidate_state_dict(None)
        return (model, optimizer.state_dict()), instances_of(optimizer)

    calls = GROUPS_BESIDE_GATHERS if stage in (1, 2) else 1
    for found, instances in training.on(Place(2, stage, SMALL), run):
        assert_same([found], plain)
        assert len(instances) > GROUPS_BESIDE_GATHERS
        assert [instance.steps for instance in dict.fromkeys(instances)] == [3] * calls


def test_buckets_of_offloaded_states_or_widened_gradients_are_stepped_one_by_one(tmp_path: Path) -> None:
    narrow = MixedPrecision(torch.bfloat16, accumulate_dtype=torch.bfloat16)
    for given in ({"offload": Offload(tmp_path)}, {"mixed_precision": narrow}):
        arguments: dict[str, Any] = {"process_group": solo(), **SMALL, **given}
        optimizer = ZeroOptimizer(made(Mixed), torch.optim.AdamW, **arguments)
        assert len(set(instances_of(optimizer))) == len(instances_of(optimizer)) > 1
        optimizer.close()
