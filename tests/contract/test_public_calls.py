"""The optimizer is a `torch.optim.Optimizer`: groups, schedulers, hooks, closures and classes work as in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import ZeroOptimizer

from ..support.models import build, odd_batches, odd_loss
from ..support.plain import assert_same_bits, assert_same_model
from ..support.rows import rows
from ..support.sides import OnRank, Side, same_as_plain
from ..support.small import TwoVectors


@pytest.mark.parametrize("stage", rows([2], [0]))
def test_schedulers_hooks_and_closures_work_as_in_torch(stage: int) -> None:
    def loop(side: Side) -> list[str]:
        events = list[str]()
        assert isinstance(side.optimizer, torch.optim.Optimizer)
        side.optimizer.register_step_pre_hook(lambda *_: events.append("pre"))
        side.optimizer.register_step_post_hook(lambda *_: events.append("post"))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(side.optimizer, 0.1, total_steps=5)
        for step in range(4):

            def closure(step: int = step) -> Tensor:
                side.clear()
                side.train(lambda model, rank: odd_loss(model, odd_batches(3, step)[rank]))
                return torch.zeros(())

            if isinstance(side, OnRank):
                assert isinstance(side.optimizer.step(closure), Tensor)
            else:
                closure()
                side.step()
            scheduler.step()
        return events

    same_as_plain(loop, build, torch.optim.AdamW, 3, settings={"stage": stage, "partition": "element"})


def test_construction_copies_rank_0s_parameters_and_buffers() -> None:
    def program(transport: Transport) -> nn.Module:
        model = build(transport.rank)
        model.count = nn.Buffer(torch.tensor(transport.rank))
        ZeroOptimizer(list(model.last.parameters()), module=model, process_group=transport)
        assert model.count == 0
        return model

    for model in on_threads(3, program):
        assert_same_bits(model.offset, build(0).offset)
        assert_same_model(model, build(0))


class Counting(torch.optim.SGD):
    """Counts the steps of each group with a gradient, and edits a tensor among its options."""

    always = False  # also of those without

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if self.always or any(p.grad is not None for p in group["params"]):
                group["k"] = group.get("k", 0) + 1
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad * (group["decay"] / group["k"]))
                group["decay"].mul_(0.5)


Always = type("Always", (Counting,), {"always": True})


@pytest.mark.parametrize(("stage", "ranks", "cls"), rows([(0, 1, Counting), (2, 8, Always)], [(2, 1, Counting)]))
def test_what_a_class_counts_it_counts_once_in_a_step(stage: int, ranks: int, cls: Any) -> None:
    """Also on ranks and in groups that hold nothing: there are more ranks than some groups have shards."""

    def groups(model: TwoVectors) -> Any:
        return [{"params": [p], "decay": torch.tensor(0.1)} for p in (model.a, model.b)]

    def loop(side: Side) -> list[Any]:
        for step in range(3):
            side.clear()
            side.train(lambda model, _, step=step: model(1.0 + step, step != 1))  # type: ignore[misc]
            side.step()
        return [(group.get("k"), group.get("decay")) for group in side.optimizer.param_groups]

    settings = {"stage": stage, "bucket_cap_mb": 1e-6}
    same_as_plain(loop, TwoVectors, cls, ranks, groups=groups, settings=settings, lr=0.1)


def test_parameters_without_dimensions_are_promoted_as_torch_promotes_them() -> None:
    def loop(side: Side) -> None:
        for step in range(20):
            side.clear()
            side.train(lambda model, _, step=step: model[0].sin() * (step + 1) / 3)  # type: ignore[misc]
            side.step()

    def scalar() -> nn.Module:
        return nn.ParameterList([torch.tensor(0.3)])

    rate = torch.tensor(0.1, dtype=torch.float64)
    same_as_plain(loop, scalar, torch.optim.AdamW, 1, settings={"partition": "element"}, lr=rate)


def test_modules_without_a_length_and_classes_with_required_arguments_are_taken() -> None:
    class Empty(TwoVectors):
        def __len__(self) -> int:
            return 0

    class Required(torch.optim.SGD):
        def __init__(self, params: Any, *, lr: float) -> None:
            super().__init__(params, lr=lr)

    module = Empty()
    assert ZeroOptimizer(module, Required, process_group=solo(), lr=0.1).describe().buckets[0].names == ("b", "a")
    module.offset = nn.Buffer(torch.zeros(1).expand(4))
    with pytest.raises(ValueError, match="buffer 'offset' overlaps itself"):
        ZeroOptimizer(module)
