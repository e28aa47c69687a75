"""A mean gradient that all ranks replace: the plain loop's bits, where `p.grad` is assigned after the division."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import MixedPrecision, ZeroOptimizer, clip_grad_norm_

from ..support.errors import error_of
from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_bits, assert_same_model
from ..support.programs import locked_build
from ..support.rows import rows
from ..support.sides import AsPlain, Loop, Side, same_as_plain
from ..support.sockets import on_sockets

ADAMW = torch.optim.AdamW
NEVER_USED = "unused"


def gradient_of(side: Side, name: str) -> Tensor | None:
    """Return a copy of a mean gradient."""
    parameter = side.model.get_parameter(name)
    if not isinstance(side, AsPlain):
        found: Tensor | None = side.optimizer.full_grad(parameter)
        return found
    side.settle()
    gradient = side.held[_place(side, parameter)].grad
    return None if gradient is None else gradient.clone()


def set_gradient(side: Side, name: str, gradient: Tensor | None) -> None:
    """Replace a mean gradient. Only rank 0's values count."""
    parameter = side.model.get_parameter(name)
    if isinstance(side, AsPlain):
        side.replace(_place(side, parameter), gradient)
        return
    if gradient is not None and side.optimizer.rank:
        gradient = torch.full_like(gradient, float("nan"))
    side.optimizer.set_full_grad(parameter, gradient)


def _place(side: AsPlain, parameter: Tensor) -> int:
    return next(place for place, known in enumerate(side.parameters) if known is parameter)


def noise(like: Tensor, seed: int) -> Tensor:
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn / 8).to(like.dtype)


def dtype_of(precision: MixedPrecision | None) -> torch.dtype:
    return torch.float32 if precision is None else precision.accumulate_dtype


def surgery(precision: MixedPrecision | None) -> Loop:
    """Return a loop of steps whose gradients are masked, noised, removed, made, and made before any backward."""

    def loop(side: Side) -> list[Any]:
        found: list[Any] = []
        for step in range(5):
            if step != 3:
                for turn in range(2):
                    side.train(
                        lambda model, rank, n=10 * step + turn: odd_loss(model, odd_batches(1, 100 * n + rank)[0]),  # type: ignore[misc]
                        sync=turn > 0 or step == 1,
                    )
            if step == 4:
                side.divisor = 7.5
            if step == 1:
                found.append(side.clip(0.5))
            for number, name in enumerate(("first.weight", "turned", "scale", "empty")):
                before = gradient_of(side, name)
                like = side.model.get_parameter(name)
                if before is None:
                    before = torch.zeros(like.shape, dtype=dtype_of(precision))
                set_gradient(side, name, before + noise(before, 10 * step + number))
            set_gradient(side, "last.bias", None)
            if step == 0:
                made = torch.ones(19, dtype=dtype_of(precision))
                set_gradient(side, NEVER_USED, made)
                found.append(gradient_of(side, NEVER_USED))
            found += [gradient_of(side, "last.bias"), gradient_of(side, "turned"), side.clip(0.1)]
            if step == 4:
                set_gradient(side, "one", -torch.ones(1, dtype=dtype_of(precision)))
            side.step()
            side.clear("zeros" if step == 0 else "zero_grad")
        return found

    return loop


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("stage", "ranks", "precision", "run", "more"),
    rows(
        [
            pytest.param(0, 3, None, on_threads, {}, id="0-3"),
            pytest.param(1, 2, PRECISIONS["bf16"], on_threads, {}, id="1-2-bf16"),
            pytest.param(2, 4, None, on_threads, {"sharding_factor": 2}, id="2-4-factor"),
            pytest.param(3, 3, PRECISIONS["bf16"], on_sockets, {}, id="3-3-bf16-sockets"),
        ],
        [
            pytest.param(0, 2, PRECISIONS["bf16, sent in fp32"], on_threads, {}, id="0-2-bf16"),
            pytest.param(1, 5, None, on_threads, {}, id="1-5"),
            pytest.param(2, 6, PRECISIONS["bf16, added up in bf16"], on_threads, {}, id="2-6-bf16"),
            pytest.param(3, 4, None, on_threads, {"partition": "parameter"}, id="3-4-parameter"),
            pytest.param(2, 1, None, on_threads, {}, id="2-1"),
            pytest.param(0, 1, None, on_threads, {}, id="0-1"),
        ],
    ),
)
def test_masks_noise_none_and_gradients_that_no_backward_made(
    stage: int, ranks: int, precision: MixedPrecision | None, run: Any, more: dict[str, Any]
) -> None:
    """Behind and before a clip, in a step with no backward, with a divisor, and added to zeros that are left."""
    settings = {"stage": stage, "bucket_cap_mb": 0.0005, "partition": "element", **more}
    loop = surgery(precision)
    same_as_plain(loop, locked_build, ADAMW, ranks, run=run, precision=precision, settings=settings, lr=0.01)


def small() -> nn.Module:
    return nn.Linear(3, 2)


def test_inside_join_a_rank_without_batches_takes_part_and_gives_nothing() -> None:
    """Also rank 0: the first rank that gives a gradient decides."""

    def loop(side: Side) -> None:
        counts = (1, 3, 2)
        with side.join():
            for step in range(max(counts[rank] for rank in side.ranks)):
                mine = [rank for rank in side.ranks if step < counts[rank]]
                side.train(lambda model, rank, n=step: model(torch.full((1, 3), 1.0 + rank + n)).sum(), ranks=mine)  # type: ignore[misc]
                parameter = side.model.weight
                if isinstance(side, AsPlain):
                    side.replace(0, torch.full((2, 3), 2.0 + step))
                    side.replace(1, None)
                else:
                    side.optimizer.set_full_grad(parameter, torch.full((2, 3), 2.0 + step))
                    side.optimizer.set_full_grad(side.model.bias, None)
                side.clip(1.0)
                side.step()
                side.clear()

    for stage in (0, 2, 3):
        same_as_plain(loop, _seeded, ADAMW, 3, settings={"stage": stage})


def _seeded() -> nn.Module:
    model = small()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(noise(parameter, number))
    return model


def test_a_loss_scale_is_taken_out_of_it_and_it_may_overflow() -> None:
    def program(transport: Transport, stage: int) -> list[Tensor]:
        model = _seeded()
        optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, process_group=transport, lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        found = []
        for value in (2.0, float("inf"), 6.0):
            scaler.scale(model(torch.ones(1, 3)).sum()).backward()
            optimizer.set_full_grad(model.weight, torch.full((2, 3), value))
            scaler.unscale_(optimizer)
            found.append(optimizer.full_grad(model.weight))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0
        return [gradient for gradient in found if gradient is not None]

    for stage in (0, 2):
        for first, _, third in on_threads(2, lambda transport, stage=stage: program(transport, stage)):  # type: ignore[misc]
            assert first.eq(0.5).all()
            assert third.eq(3.0).all()


Given = Callable[[Any, int], tuple[Tensor, Any]]  # of a model and a rank: a parameter, and its gradient
WRONG: list[tuple[Given, str]] = [
    (
        lambda m, _: (m.weight, torch.ones(3, 2)),
        "has shape (3, 2), the parameter (2, 3): give a whole gradient",
    ),
    (lambda m, _: (m.weight, torch.ones(2, 3).double()), "is torch.float64, and full_grad returns torch.float32"),
    (lambda m, _: (m.weight, torch.ones(2, 3).to_sparse()), "the gradient is torch.sparse_coo: give a dense one"),
    (
        lambda m, rank: (m.weight, [1.0] if rank else torch.ones(2, 3)),
        "rank 1: set_full_grad of 'weight': the gradient i",
    ),
    (lambda m, rank: (m.weight, torch.ones(2, 3) if rank else None), "rank 0 gives None, and rank 1 a gradient"),
    (lambda m, rank: (m.weight, torch.ones(2, 2 + rank)), "rank 0: set_full_grad of 'weight': the gradient has"),
    (lambda m, _: (m.bias, torch.ones(2)), "of 'bias': the parameter is frozen: unfreeze it, or give None"),
    (lambda m, _: (nn.Parameter(torch.ones(2)), None), "is not one of this optimizer's parameters"),
]


@pytest.mark.parametrize("stage", [0, 3])
def test_what_does_not_fit_is_an_error_on_every_rank_and_changes_nothing(stage: int) -> None:
    def program(transport: Transport) -> list[str]:
        model = _seeded()
        optimizer = ZeroOptimizer(model, ADAMW, stage=stage, process_group=transport, lr=0.1)
        model.bias.requires_grad_(False)
        model(torch.ones(1, 3)).sum().backward()
        found = [error_of(optimizer.set_full_grad, *given(model, transport.rank)) for given, _ in WRONG]
        with optimizer.no_sync():
            found.append(error_of(optimizer.set_full_grad, model.weight, None))
        model(torch.ones(1, 3)).sum().backward()  # gradients may still be added
        gradient = optimizer.full_grad(model.weight)
        assert gradient is not None
        assert gradient.eq(2.0).all()
        optimizer.set_full_grad(model.weight, gradient)
        model(torch.ones(1, 3)).sum().backward()
        found.append(error_of(optimizer.step))
        return found

    said = [*(words for _, words in WRONG), "set_full_grad of 'weight' inside no_sync()"]
    said.append("backward() after set_full_grad of 'weight' without zero_grad()")
    for messages in on_threads(2, program):
        for message, words in zip(messages, said, strict=True):
            assert words in message


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(30)), nn.Parameter(torch.tensor([1.0, -0.0]).repeat(20))

    def forward(self, one: float, two: float) -> Tensor:
        return (self.one * one).sum() + (self.two * two).sum()


@pytest.mark.parametrize(("stage", "world_size"), rows([(1, 1), (2, 2), (3, 4)], [(0, 2), (1, 2), (3, 1), (2, 4)]))
def test_a_clip_by_nan_leaves_a_parameter_without_a_gradient_as_it_is(stage: int, world_size: int) -> None:
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

    plain = Scaled()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    loop(plain, optimizer, lambda: setattr(plain.two, "grad", None), lambda: clip_grad_norm_(plain.parameters(), 1.0))
    assert all(bool(parameter.isfinite().all()) for parameter in plain.parameters())
    for model in on_threads(world_size, program):
        assert_same_model(model, plain)


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
