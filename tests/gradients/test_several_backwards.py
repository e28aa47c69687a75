"""Several backwards for one micro-batch are added up by rounds: the first ones of all ranks, then the second. Those of
an adversary pass through a model that was stepped, and count for nothing if its gradients are cleared before their next
use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer, clip_grad_norm_

from ..support.limits import BOUND
from ..support.loops import even, network, seeded
from ..support.plain import assert_same_model
from ..support.rows import rows
from ..support.sides import Side, same_as_plain

MICRO_BATCHES = 12  # in a step


def real(model: nn.Module, number: int) -> Tensor:
    inputs, targets = even(2 * MICRO_BATCHES)[number]
    return nn.functional.mse_loss(model(inputs), targets)


def fake(model: nn.Module, number: int) -> Tensor:
    inputs, targets = even(2 * MICRO_BATCHES)[number]
    return nn.functional.mse_loss(model(-inputs.flip(0)), targets * 3)


def build() -> nn.Module:
    return seeded(7, network)


def loop_of(world_size: int, apart: bool) -> Callable[[Side], None]:
    """Return a loop. ``apart``: all backwards of a micro-batch except its last are inside `no_sync`."""

    def loop(side: Side) -> None:
        for begin in range(0, 2 * MICRO_BATCHES, world_size):
            side.train(lambda model, rank, begin=begin: real(model, begin + rank), sync=not apart)  # type: ignore[misc]
            side.train(lambda model, rank, begin=begin: fake(model, begin + rank))  # type: ignore[misc]
            if begin + world_size in (MICRO_BATCHES, 2 * MICRO_BATCHES):
                side.step()
                side.clear()

    return loop


@pytest.mark.parametrize(
    ("stage", "world_size", "apart"),
    rows(
        [
            (0, 2, True),
            (2, 3, False),
        ],
        [
            (1, 2, False),
            (3, 2, False),
            (2, 2, True),
            (3, 3, True),
            (1, 1, True),
        ],
    ),
)
def test_several_backwards_of_a_micro_batch_are_added_up_by_rounds(stage: int, world_size: int, apart: bool) -> None:
    """Under `no_sync` those of a micro-batch are added up by themselves first."""
    loop, settings = loop_of(world_size, apart), {"stage": stage, "bucket_cap_mb": 0.0005}
    same_as_plain(loop, build, torch.optim.AdamW, world_size, settings=settings, divisor=MICRO_BATCHES, lr=1e-2)


# -- two models, an optimizer each ------------------------------------------------------------------------------------


class Adversaries:
    """A generator and a discriminator, and the parts of torch's DCGAN tutorial."""

    def __init__(self, clear: str, *, penalty: bool = False, frozen: bool = False) -> None:
        """``penalty``: of a WGAN, by a double backward; ``frozen``: the discriminator is, in the generator's step."""
        self.clear_by, self.penalty, self.frozen = clear, penalty, frozen
        self.made = seeded(5, lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5)))
        self.judge = seeded(6, lambda: nn.Sequential(nn.Linear(5, 9), nn.LeakyReLU(0.2), nn.Linear(9, 1)))

    def models(self) -> tuple[nn.Module, nn.Module]:
        return self.made, self.judge

    def clear(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.clear_by == "each":
            for parameter in model.parameters():
                parameter.grad = None
        else:
            (optimizer if "optimizer" in self.clear_by else model).zero_grad(set_to_none="zeros" not in self.clear_by)

    def loss(self, images: Tensor, target: float) -> Tensor:
        output = self.judge(images)
        return nn.functional.binary_cross_entropy_with_logits(output, torch.full_like(output, target))

    def loss_of_fakes(self, real: Tensor, made: Tensor) -> Tensor:
        loss = self.loss(made.detach(), 0.0)
        if self.penalty:
            between = (real * 0.25 + made.detach() * 0.75).requires_grad_()
            (slope,) = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)
            loss = loss + 10 * (slope.norm(dim=1) - 1).square().mean()
        return loss

    def train(self, optimizers: Sequence[Any], clips: Sequence[Callable[[], object]], ranks: Sequence[int]) -> None:
        """Take three steps of both models. ``clips``: before each step; ``ranks``: whose batches these are."""
        for step in range(3):
            batches = [seeded(100 * step + rank, lambda: (torch.randn(4, 5), torch.randn(4, 3))) for rank in ranks]
            self.clear(self.judge, optimizers[1])
            for real, _ in batches:
                self.loss(real, 1.0).backward()
            fakes = [self.made(noise) for _, noise in batches]
            for (real, _), made in zip(batches, fakes, strict=True):
                self.loss_of_fakes(real, made).backward()
            clips[1]()
            optimizers[1].step()
            self.clear(self.made, optimizers[0])
            self.judge.requires_grad_(not self.frozen)
            for made in fakes:
                self.loss(made, 1.0).backward()
            self.judge.requires_grad_()
            clips[0]()
            optimizers[0].step()


def plain_adversaries(world_size: int, clear: str, **more: bool) -> Adversaries:
    pair = Adversaries(clear, **more)

    def clip(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(world_size)
        clip_grad_norm_(model.parameters(), 0.1)

    clips = [lambda model=model: clip(model) for model in pair.models()]  # type: ignore[misc]
    pair.train([torch.optim.Adam(m.parameters(), lr=1e-2) for m in pair.models()], clips, range(world_size))
    return pair


@pytest.mark.parametrize(
    ("stage", "world_size", "clear", "more"),
    rows(
        [(0, 2, "optimizer", {}), (3, 2, "model, zeros", {}), (1, 3, "each", {"penalty": True})],
        [
            *((stage, 1 + stage % 3, "model", {}) for stage in range(4)),
            *((stage, 2, "optimizer, zeros", {}) for stage in range(4)),
            (0, 3, "model, zeros", {}),
            (3, 3, "optimizer", {"penalty": True}),
            (2, 2, "optimizer", {"frozen": True}),
            (3, 2, "optimizer", {"frozen": True}),
        ],
    ),
)
def test_a_generators_backward_passes_through_a_discriminator_that_was_stepped(
    stage: int, world_size: int, clear: str, more: dict[str, bool]
) -> None:
    """Its gradients there are dropped without a message, and all weights are those of the plain loop."""
    expected = plain_adversaries(world_size, clear, **more)

    def program(transport: Transport) -> Adversaries:
        pair = Adversaries(clear, **more)
        both = [
            ZeroOptimizer(model, torch.optim.Adam, stage=stage, process_group=transport, lr=1e-2)
            for model in pair.models()
        ]
        pair.train(both, [lambda each=each: each.clip_grad_norm_(0.1) for each in both], [transport.rank])
        for each in both:
            each.check_replicas()  # what no use of a gradient is may come before they are cleared
            each.close()
        return pair

    for pair in on_threads(world_size, program, timeout=BOUND):
        for ours, plain in zip(pair.models(), expected.models(), strict=True):
            assert_same_model(ours, plain)


@pytest.mark.parametrize("stage", rows([0, 3], [1, 2]))
def test_a_generators_backward_may_follow_a_step_that_a_loss_scaler_has_skipped(stage: int) -> None:
    """At stage 0 the scaler has edited p.grad, and the optimizer has not been called."""

    def loop(model: nn.Linear, optimizer: torch.optim.Optimizer) -> list[float]:
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1), list[float]()
        for step in range(3):
            optimizer.zero_grad()
            factor = torch.tensor([[1.0, float("inf") if step == 1 else 2.0]])
            scaler.scale((model(torch.ones(1, 2)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.scale(model(torch.full((1, 2), 3.0)).sum()).backward()
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    def program(transport: Transport) -> tuple[nn.Module, list[float]]:
        model = seeded(1, lambda: nn.Linear(2, 2))
        optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=transport, lr=0.5, momentum=0.5)
        scales = loop(model, optimizer)
        optimizer.close()
        return model, scales

    plain = seeded(1, lambda: nn.Linear(2, 2))
    expected = loop(plain, torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5))
    for model, scales in on_threads(2, program, timeout=BOUND):  # equal batches: two ranks take the step of one
        assert scales == expected
        assert_same_model(model, plain)


@pytest.mark.parametrize("stage", rows([0, 2], [1, 3]))
def test_a_gradient_that_only_a_dropped_backward_has_is_none_or_zero_after_clearing(stage: int) -> None:
    """The first of two layers has no gradient in the first step. ``zeros``: then weight decay applies to it."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, zeros: bool) -> None:
        model[1](torch.ones(1, 2)).sum().backward()  # type: ignore[index]
        optimizer.step()
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad(set_to_none=not zeros)
        model[1](torch.ones(1, 2)).sum().backward()  # type: ignore[index]
        optimizer.step()

    def build() -> nn.Module:
        return seeded(2, lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

    def program(transport: Transport) -> list[nn.Module]:
        found = []
        for zeros in (True, False):
            model = build()
            optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, lr=0.5)
            loop(model, optimizer, zeros)
            optimizer.close()
            found.append(model)
        return found

    for models in on_threads(2, program, timeout=BOUND):
        for ours, zeros in zip(models, (True, False), strict=True):
            plain = build()
            loop(plain, torch.optim.AdamW(plain.parameters(), lr=0.5), zeros)
            assert_same_model(ours, plain)
        first, second = (model.get_parameter("0.weight") for model in models)
        assert not torch.equal(first, second)
