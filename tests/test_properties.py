"""Laws of the library that a wrong number would break and that no other file asserts by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer, clip_grad_norm_
from zero.step.clip import clip_factor

from .plain import assert_same_bits, assert_same_model, assert_same_states, plain_step

ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


class Two(nn.Module):
    """``a`` is used where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(32.0))
        self.b = nn.Parameter(torch.arange(40.0) / 7)

    def forward(self, scale: float, use_a: bool = True) -> Tensor:
        loss = (self.b * scale).square().sum()
        return loss + (self.a * scale).sum() if use_a else loss


def zero(model: nn.Module, transport: Transport, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(model, torch.optim.SGD, process_group=transport, lr=0.1, **arguments)


@ALL_STAGES
@pytest.mark.parametrize("bucket_cap_mb", [1.0, 0.0001])
def test_a_missing_gradient_leaves_a_negative_zero(stage: int, bucket_cap_mb: float) -> None:
    """A rank that has no gradient of a parameter adds nothing: not even +0.0, which would turn -0.0 into 0.0. Both
    beside a gradient that it has and where it has none of the whole bucket."""

    def program(transport: Transport) -> Tensor | None:
        model = Two()
        optimizer = zero(model, transport, stage=stage, bucket_cap_mb=bucket_cap_mb)
        model(-0.0, transport.rank == 1).backward()
        return optimizer.full_grad(model.a)

    for gradient in on_threads(2, program, timeout=5):
        assert gradient is not None
        assert_same_bits(gradient, torch.full((32,), -0.0))


def plain_two(batches: list[tuple[float, bool]], divisor: float, steps: int = 1, clip: float | None = None) -> Two:
    """The plain loop over micro-batches (scale, whether ``a`` is used)."""
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        plain_step(model, optimizer, lambda m, batch: m(*batch), batches, divisor, clip)
    return model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_groups_of_one_world_train_apart(stage: int) -> None:
    """{1, 3} and {0, 2} of four, at the same time, with data, sums and norms of their own."""

    def program(transport: Transport) -> tuple[nn.Module, Tensor]:
        odd = transport.rank % 2
        group = transport.split([1, 3] if odd else [0, 2])
        model = Two()
        optimizer = zero(model, group, stage=stage, module=model)
        model(1.0 + group.rank + 10 * odd).backward()
        norm = optimizer.clip_grad_norm_(50.0)
        optimizer.step()
        optimizer.close()
        return model, norm

    for rank, (model, norm) in enumerate(on_threads(4, program, timeout=5)):
        batches = [(1.0 + group_rank + 10 * (rank % 2), True) for group_rank in range(2)]
        assert_same_model(model, plain_two(batches, 2, clip=50.0))
        unclipped = plain_two(batches, 2, steps=0)
        for batch in batches:
            (unclipped(*batch) / 2).backward()  # a power of two: the same bits
        assert_same_bits(norm, clip_grad_norm_(unclipped.parameters(), 50.0))


@ALL_STAGES
def test_a_second_optimizer_changes_nothing_of_the_first(stage: int) -> None:
    def program(transport: Transport) -> tuple[nn.Module, nn.Module]:
        one, two = Two(), Two()
        first = zero(one, transport, stage=stage, divisor=3)
        second = zero(two, transport, stage=stage, divisor=7)
        for model, optimizer in ((one, first), (two, second)):
            model(1.0 + transport.rank).backward()
            optimizer.step()
        return one, two

    batches = [(1.0, True), (2.0, True)]
    for one, two in on_threads(2, program, timeout=5):
        assert_same_model(one, plain_two(batches, 3))
        assert_same_model(two, plain_two(batches, 7))


def test_ranks_with_the_same_shapes_in_another_order_are_told() -> None:
    def program(transport: Transport) -> str:
        names = ("left", "right") if transport.rank == 0 else ("right", "left")
        with pytest.raises(ValueError, match="the ranks built different models") as caught:
            zero(nn.ModuleDict({name: nn.Linear(3, 3) for name in names}), transport)
        return str(caught.value)

    for message in on_threads(2, program, timeout=5):
        assert "rank 0 has [left.weight [3, 3]" in message
        assert "rank 1 has [right.weight [3, 3]" in message


@ALL_STAGES
def test_a_parameter_that_one_rank_alone_freezes_is_an_error_on_every_rank(stage: int) -> None:
    """Also where it shares a bucket with others, which travel as if nothing had happened."""

    def program(transport: Transport) -> str:
        model = Two()
        optimizer = zero(model, transport, stage=stage)
        model.a.requires_grad_(transport.rank == 0)
        try:
            model(1.0).backward()
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        return "nothing"

    messages = on_threads(2, program, timeout=5)
    assert all("trainable" in message for message in messages), messages
    assert any("'a'" in message for message in messages), messages


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_that_is_unfrozen_later_is_trained_from_then_on(stage: int) -> None:
    def program(transport: Transport) -> nn.Module:
        model = Two()
        model.a.requires_grad_(False)
        optimizer = zero(model, transport, stage=stage, module=model, divisor=4)
        for step in range(2):
            model.a.requires_grad_(step == 1)
            for scale in (1.0, 3.0):
                model(scale + transport.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return model

    plain = Two()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        plain.a.requires_grad_(step == 1)
        plain_step(plain, sgd, lambda m, scale: m(scale), [1.0, 2.0, 3.0, 4.0], 4)
        sgd.zero_grad()
    for model in on_threads(2, program, timeout=5):
        assert_same_model(model, plain)


class Rate(float):
    """Equal to the others' number, and of no use to a step."""

    def __neg__(self) -> float:
        raise TypeError("this rate cannot be used")


@ALL_STAGES
def test_an_error_in_one_ranks_step_is_told_to_the_others(stage: int) -> None:
    """Long before a time limit would end their waits, and with the reason."""

    def program(transport: Transport) -> str:
        model = Two()
        optimizer = zero(model, transport, stage=stage)
        model(1.0).backward()
        if transport.rank == 1:
            optimizer.param_groups[0]["lr"] = Rate(0.1)
        try:
            optimizer.step()
            optimizer.check_replicas()
        except Exception as error:
            return str(error)
        return "nothing"

    messages = on_threads(3, program, timeout=5)
    assert messages[1] != "nothing"
    for rank in (0, 2):
        assert "rank 1 failed: rank 1, in step(): TypeError" in messages[rank]


@ALL_STAGES
def test_a_rank_that_owns_nothing_takes_part(stage: int) -> None:
    """Four ranks and a single element: the other three clip, step and check, too."""

    def program(transport: Transport) -> tuple[nn.Module, Tensor]:
        model = Two()
        model.b = nn.Parameter(torch.tensor([2.0]))
        model.a.requires_grad_(False)
        optimizer = zero(model, transport, stage=stage)
        model(1.0 + transport.rank, use_a=False).backward()
        norm = optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.check_replicas()
        return model, norm

    for model, norm in on_threads(4, program, timeout=5):
        gradient = torch.tensor([sum(2 * 2.0 * (1.0 + rank) ** 2 for rank in range(4)) / 4])
        assert_same_bits(norm, gradient[0])
        assert_same_bits(model.b, 2.0 - 0.1 * (gradient * clip_factor(norm, 0.5)))


@ALL_STAGES
def test_a_parameter_that_no_rank_used_has_no_part_in_the_norm_not_even_its_dtype(stage: int) -> None:
    def program(transport: Transport) -> tuple[nn.Module, Tensor]:
        model = Two()
        model.a = nn.Parameter(torch.arange(32.0, dtype=torch.float64))
        optimizer = zero(model, transport, stage=stage)
        model(1.0 + transport.rank, use_a=False).backward()
        norm = optimizer.clip_grad_norm_(0.3)
        optimizer.step()
        optimizer.close()
        return model, norm

    plain = Two()
    plain.a = nn.Parameter(torch.arange(32.0, dtype=torch.float64))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = plain_step(plain, optimizer, lambda m, scale: m(scale, use_a=False), [1.0, 2.0], 2, max_norm=0.3)
    assert expected is not None
    assert expected.dtype is torch.float32
    for model, norm in on_threads(2, program, timeout=5):
        assert_same_bits(norm, expected)
        assert_same_model(model, plain)


def test_states_of_parameters_without_elements_are_told_apart() -> None:
    """They all lie at address 0, so an address is no name."""
    model = nn.ParameterDict({name: torch.zeros(0) for name in ("first", "second")})
    model["third"] = nn.Parameter(torch.ones(3))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss = model["third"].sum() + model["second"].sum()
        (loss + model["first"].sum() if step else loss).backward()
        optimizer.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["first", "second", "third"]
    assert [int(saved["state"][index]["step"]) for index in range(3)] == [1, 2, 2]


@ALL_STAGES
def test_a_parameter_that_was_left_out_of_a_step_keeps_its_own_count(stage: int) -> None:
    """Also beside one that was not, in one run of memory."""

    def train(model: nn.ParameterList, optimizer: torch.optim.Optimizer, scales: list[float], divisor: float) -> None:
        for step in range(4):
            optimizer.zero_grad()
            used = model if step != 1 else model[:1]
            for scale in scales:
                torch.stack([(p * scale).square().sum() for p in used]).sum().backward()
            for p in model:
                if p.grad is not None and divisor != 1:
                    p.grad.div_(divisor)
            optimizer.step()

    def build() -> nn.ParameterList:
        return nn.ParameterList([torch.arange(32.0) + number for number in range(3)])

    def program(transport: Transport) -> nn.Module:
        model = build()
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=transport, lr=0.1)
        train(model, optimizer, [1.0 + transport.rank], 1)
        return model

    plain = build()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), [1.0, 2.0], 2)
    for model in on_threads(2, program, timeout=5):
        assert_same_model(model, plain)


# -- states -----------------------------------------------------------------------------------------------------------


def adam_steps(model: Two, optimizer: Any, scales: list[float], steps: range, divisor: float = 1) -> None:
    """Steps of Adam whose learning rate falls; ``a`` is left out of the second."""
    for step in steps:
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step // 2)
        for scale in scales:
            model(scale + step, use_a=step != 1).backward()
        for p in model.parameters():
            if p.grad is not None and divisor != 1:
                p.grad.div_(divisor)
        optimizer.step()


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 3), (2, 3), (3, 3)])
def test_training_goes_on_from_a_saved_dict_as_if_it_had_not_stopped(stage: int, world_size: int) -> None:
    """In a new optimizer, to whose param groups nobody says anything but what the dict does."""

    def run(steps: range, weights: Any, states: Any) -> Any:
        def program(transport: Transport) -> Any:
            model = Two()
            if weights is not None:
                model.load_state_dict(weights)
            optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=transport, lr=9.0)
            if states is not None:
                optimizer.load_state_dict(states)
                assert optimizer.param_groups[0]["lr"] == 0.05
            adam_steps(model, optimizer, [1.0 + transport.rank], steps)
            optimizer.consolidate_state_dict(to=0)
            saved = optimizer.state_dict() if transport.rank == 0 else None
            optimizer.close()
            return model.state_dict(), saved

        return on_threads(world_size, program, timeout=5)[0]

    weights, states = run(range(3, 5), *run(range(3), None, None))
    plain = Two()
    adamw = torch.optim.AdamW(plain.parameters(), lr=9.0)
    adam_steps(plain, adamw, [1.0 + rank for rank in range(world_size)], range(5), world_size)
    for name, value in plain.state_dict().items():
        assert_same_bits(weights[name], value, name)
    assert_same_states(states, adamw.state_dict())
