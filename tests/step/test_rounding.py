"""Stochastic rounding: what a class keeps, errors, and trainings that go on with master weights or without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import solo
from zero import MixedPrecision, StochasticRounding, ZeroOptimizer

from ..support.errors import assert_in_order, error_of
from ..support.models import seeded
from ..support.narrowed import BF16
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states
from ..support.sides import OnRank
from .optimizers import Momentum, every_second, narrow
from .whole import Place, Training, train

ROUNDING = StochasticRounding(7)


def net() -> nn.Module:
    return seeded(0, lambda: nn.Sequential(nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(33, 5)).bfloat16())


def net_loss(model: nn.Module, number: int) -> Tensor:
    loss: Tensor = model(torch.full((3, 7), 0.1 * number + 0.5, dtype=BF16)).square().sum()
    return loss


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    """Take a step, which a plain loop rounds."""
    net_loss(model, number).backward()
    optimizer.step() if isinstance(optimizer, ZeroOptimizer) else ROUNDING.step(optimizer)
    optimizer.zero_grad()


@pytest.mark.parametrize("masters_first", [True, False])
def test_a_training_with_masters_goes_on_without_and_the_other_way_round(masters_first: bool, tmp_path: Path) -> None:
    """With the same bits at every topology: what has fp32 numbers is rounded to the nearest once, at the load."""
    kinds: list[dict[str, Any]] = [
        {"mixed_precision": MixedPrecision(BF16), "rounding": each} for each in (None, ROUNDING)
    ]
    before, after = kinds if masters_first else reversed(kinds)

    def first(model: nn.Module, optimizer: ZeroOptimizer) -> None:
        train(OnRank(model, optimizer), range(2))
        zero.save(tmp_path / "saved", optimizer)

    def second(model: nn.Module, optimizer: ZeroOptimizer) -> None:
        zero.load(tmp_path / "saved", optimizer, rng=False)
        train(OnRank(model, optimizer), range(2, 4))

    Training().on(Place(2, 2, before), first)
    ((alone, states),) = Training().on(Place(1, 0, after), second)
    assert states["param_groups"][0].get("rounding_steps", 0) == 2
    for model, found in Training().on(Place(3, 3, after), second):
        assert_same_model(model, alone)
        assert_same_states(found, states)


def test_a_dict_without_a_number_of_steps_begins_at_the_first() -> None:
    model = net()
    optimizer = ZeroOptimizer(model, process_group=solo(), rounding=ROUNDING)
    step(model, optimizer)
    states = optimizer.state_dict()
    assert states["param_groups"][0].pop("rounding_steps") == 1
    optimizer.load_state_dict(states)
    assert "rounding_steps" not in optimizer.param_groups[0]
    step(model, optimizer)
    assert optimizer.param_groups[0]["rounding_steps"] == 1


@pytest.mark.parametrize("kept", [narrow, every_second])
def test_states_that_the_class_replaces_or_drops_are_those_that_it_left(kept: Any) -> None:
    model = net()
    optimizer = Momentum(model.parameters(), kept)
    for number in range(2):
        before = {p: {k: v.float() for k, v in optimizer.state[p].items()} for p in model.parameters()}
        net_loss(model, number).backward()
        for p, state in before.items():
            wide = p.detach().float()
            wide.grad = p.grad.float()  # type: ignore[union-attr]
            kept(state, wide)
        ROUNDING.step(optimizer)
        optimizer.zero_grad()
        for p, state in before.items():
            assert optimizer.state[p].keys() == state.keys()
            if kept is narrow:
                assert_same_bits(optimizer.state[p]["momentum"], state["momentum"])


def row_major(state: Any, p: Any) -> None:
    state["momentum"] = state.get("momentum", torch.zeros(p.shape)) * 0.9 + p.grad


def test_a_state_in_another_memory_order_is_refused() -> None:
    """The plain loop would round it."""
    model = nn.Linear(5, 3, bias=False, dtype=BF16)
    model.weight = nn.Parameter(torch.ones(5, 3, dtype=BF16).t())
    given: dict[str, Any] = {"process_group": solo(), "rounding": ROUNDING, "partition": "parameter", "kept": row_major}
    optimizer = ZeroOptimizer(model, Momentum, **given)
    model(torch.ones(2, 5, dtype=BF16)).sum().backward()
    assert "the state 'momentum' of 'weight' has another memory order" in error_of(optimizer.step)


class Fails(torch.optim.SGD):
    """Fails as asked, after it has changed the weights."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if self.param_groups[0]["lr"] == 0.5:
            raise ArithmeticError("as asked")


@pytest.mark.parametrize("sharded", [True, False])
def test_a_step_that_fails_leaves_weights_and_states_in_16_bits(sharded: bool) -> None:
    model = net()
    given: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    ours = {"process_group": solo(), "rounding": ROUNDING}
    optimizer: Any = ZeroOptimizer(model, Fails, **ours, **given) if sharded else Fails(model.parameters(), **given)
    step(model, optimizer)
    before, states = values(model), optimizer.state_dict()["state"]
    optimizer.param_groups[0]["lr"] = 0.5
    net_loss(model, 1).backward()
    gradients = [None if sharded else p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    assert "as asked" in error_of(optimizer.step if sharded else lambda: ROUNDING.step(optimizer))
    assert optimizer.param_groups[0]["rounding_steps"] == 1
    for index, (p, value, gradient) in enumerate(zip(model.parameters(), before, gradients, strict=True)):
        assert_same_bits(p, value)
        assert optimizer.state[p]["momentum_buffer"].dtype is BF16
        if gradient is not None:
            assert optimizer.state[p]["momentum_buffer"] is states[index]["momentum_buffer"]
            assert_same_bits(p.grad, gradient)  # type: ignore[arg-type]


def test_the_plain_step_needs_a_used_parameter_with_a_dimension() -> None:
    """Of a single number, a step count has its parameter's shape, too."""
    scale, matrix = nn.Parameter(torch.ones((), dtype=BF16)), nn.Parameter(torch.ones(2, 2, dtype=BF16))
    optimizer = torch.optim.AdamW([scale, matrix])
    scale.square().backward()  # type: ignore[no-untyped-call]
    assert "every parameter that was used has 0 dimensions" in error_of(ROUNDING.step, optimizer)
    assert not optimizer.state
    (matrix * scale).sum().backward()
    for _ in range(2):
        ROUNDING.step(optimizer)
        matrix.grad = None
    assert optimizer.state[scale]["exp_avg"].dtype is BF16


def frozen_in_fp16() -> Any:
    """Return parameters of which one, in fp16, may be trained later."""
    model = net()
    model.get_submodule("0").requires_grad_(False).half()
    return model.parameters()


WEIGHT = nn.Parameter(torch.ones(2, 2, dtype=BF16))
PLAIN: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": net()}, "TypeError: … is for a plain optimizer, not a"),
    ({"gradients": {"weight": torch.ones(2, 2)}}, "a mapping by parameter, and not by name"),
    ({"gradients": [torch.ones(2, 2)]}, "gradients are a mapping by parameter"),
    ({"among": []}, "ValueError: … among lacks a parameter of the optimizer"),
    ({"optimizer": torch.optim.AdamW(frozen_in_fp16())}, "TypeError: … parameter 0 is in fp16"),
]


def test_wrong_arguments_of_the_plain_step_are_refused_and_nothing_is_stepped() -> None:
    optimizer: Any = torch.optim.SGD([WEIGHT], lr=1.0)
    WEIGHT.grad = torch.ones_like(WEIGHT)
    for arguments, words in PLAIN:
        assert_in_order(words, error_of(ROUNDING.step, **{"optimizer": optimizer, **arguments}))
    assert_same_bits(WEIGHT, torch.ones(2, 2, dtype=BF16))
    optimizer = ZeroOptimizer(net(), process_group=solo(), rounding=ROUNDING)
    assert_in_order("not a ZeroOptimizer: … rounds in its own step()", error_of(ROUNDING.step, optimizer))
    assert "rounds fp32 to bf16, not <class 'list'>" in error_of(ROUNDING.round, [1.0])
