"""On accelerators each class steps the buckets of a group in one call, with the bits of the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Transport, solo
from zero import MixedPrecision, Offload, ZeroOptimizer
from zero.step.user_optimizer import GROUPS_BESIDE_GATHERS

from ..support.loops import Several
from ..support.plain import assert_same_model, assert_same_states
from ..support.rows import rows
from .whole import Mixed, made, on_ranks, shared, train, train_plainly

STEPS = 3


class Counted(torch.optim.AdamW):
    """It counts its steps, as a class may for its own use."""

    def __init__(self, params: Any, **given: Any) -> None:
        super().__init__(params, **given)
        self.steps = 0

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


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("stage", rows([1, 3], [0, 2]))
def test_a_class_steps_a_group_of_buckets_in_one_call_with_the_bits_of_the_plain_loop(stage: int) -> None:
    plain = made(Mixed)
    matrices, rest = shared(plain)
    of_adamw = [{"params": matrices[:3], "lr": 0.01}, {"params": matrices[3:], "lr": 0.02, "weight_decay": 0.1}]
    adamw, sgd = torch.optim.AdamW(of_adamw), torch.optim.SGD([p for _, p in rest], momentum=0.9)
    train_plainly(plain, Several(adamw, sgd), range(STEPS))

    def run(model: nn.Module, transport: Transport) -> Any:
        arguments: dict[str, Any] = {"module": model, "stage": stage, "process_group": transport}
        optimizer = ZeroOptimizer(groups(model), Counted, bucket_cap_mb=0.0002, **arguments)
        train(model, optimizer, range(STEPS))
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()[f"{Counted.__module__}.Counted"]
        instances = [b.states.instance for b in optimizer._storage.buckets if b.specs[0].optimizer_class == 0]
        optimizer.close()
        return model, states, instances

    calls = GROUPS_BESIDE_GATHERS if stage in (1, 2) else 1
    for model, states, instances in on_ranks(2, run):
        assert_same_model(model, plain)
        assert_same_states(states, adamw.state_dict())
        assert len(instances) > GROUPS_BESIDE_GATHERS
        assert [instance.steps for instance in dict.fromkeys(instances)] == [STEPS] * calls


@pytest.mark.usefixtures("launched")
def test_buckets_of_offloaded_states_or_widened_gradients_are_stepped_one_by_one(tmp_path: Path) -> None:
    narrow = MixedPrecision(torch.bfloat16, accumulate_dtype=torch.bfloat16)
    for given in ({"offload": Offload(tmp_path)}, {"mixed_precision": narrow}):
        arguments: dict[str, Any] = {"process_group": solo(), "bucket_cap_mb": 0.0002, **given}
        optimizer = ZeroOptimizer(made(Mixed), torch.optim.AdamW, **arguments)
        instances = [bucket.states.instance for bucket in optimizer._storage.buckets]
        assert len(set(instances)) == len(instances) > 1
        optimizer.close()
