"""A mean gradient that all ranks take away stays away. That others are replaced as in the plain loop is a law."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer, clip_grad_norm_

from ..support.built_kernels import built_kernels, put_in
from ..support.plain import assert_same_bits, assert_same_model
from ..support.rows import rows


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(30)), nn.Parameter(torch.tensor([1.0, -0.0]).repeat(20))

    def forward(self, one: float, two: float) -> Tensor:
        return (self.one * one).sum() + (self.two * two).sum()


@pytest.mark.parametrize(("stage", "world_size", "by_kernels"), [(1, 1, False), (2, 2, False), (2, 2, True)])
def test_a_clip_by_nan_leaves_a_parameter_without_a_gradient_as_it_is(
    stage: int, world_size: int, by_kernels: bool, request: pytest.FixtureRequest
) -> None:
    """Its place holds -0.0, to which a later gradient is added, where gradients are zeroed and not cleared."""

    def loop(model: Scaled, optimizer: Any, forget: Callable[[], object], clip: Callable[[], object]) -> None:
        for step, factor in enumerate((float("nan"), -0.0, 3.0)):
            model(factor, -0.0 if step == 1 else 2.0).backward()
            if step == 0:
                forget()
            clip()
            if step:
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    def program(transport: Transport) -> nn.Module:
        model = Scaled()
        ours = ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=transport, lr=0.5)
        loop(model, ours, lambda: ours.set_full_grad(model.two, None), lambda: ours.clip_grad_norm_(1.0))
        ours.close()
        return model

    plain, launched = Scaled(), list[str]()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    loop(plain, optimizer, lambda: setattr(plain.two, "grad", None), lambda: clip_grad_norm_(plain.parameters(), 1.0))
    assert all(bool(parameter.isfinite().all()) for parameter in plain.parameters())
    if by_kernels:
        request.getfixturevalue("unseen")
    with put_in(built_kernels(launched.append)) if by_kernels else nullcontext():
        for model in on_threads(world_size, program):
            assert_same_model(model, plain)
    assert ("scale" in launched) is by_kernels


@pytest.mark.parametrize("stage", rows([2], [1, 3]))
@pytest.mark.parametrize("divisor", [-2.0, 1e-300])
def test_a_division_leaves_a_parameter_without_a_gradient_as_it_is(divisor: float, stage: int) -> None:
    """Also by a number that would turn -0.0 into 0.0, or, where it is rounded to fp32, into NaN."""

    def program(transport: Transport) -> Tensor | None:
        model = Scaled()
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, divisor=divisor)
        model(1.0, 1.0).backward()
        model.two.grad = None
        optimizer.clip_grad_norm_(1.0)
        optimizer.zero_grad(set_to_none=False)
        optimizer.divisor = 1
        model(1.0, -0.0).backward()
        return optimizer.full_grad(model.two)

    for gradient in on_threads(2, program):
        assert gradient is not None
        assert_same_bits(gradient, torch.full((40,), -0.0))
