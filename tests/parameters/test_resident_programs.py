"""Whatever is held, written and left, in common memory or not, every rank sees what the plain loop sees."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zero import ZeroOptimizer

from ..support.errors import error_of
from ..support.plain import assert_same_bits
from .stage3 import SLOWLY, Blocks, on_blocks, train

NUMBERS = st.integers(0, 2)
INSIDE = st.tuples(st.sampled_from(["write", "read", "leave", "forward"]), NUMBERS)
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["hold", "free", "scribble", "edit"]), NUMBERS),
    st.tuples(st.just("write"), NUMBERS, st.lists(INSIDE, max_size=3)),
    st.tuples(st.just("train")),
)


class PlannedError(Exception):
    """Raised to leave a block."""


class Trained:
    """Actions on a model: of a rank at stage 3, or of the plain loop, where nothing is edited on the quiet."""

    def __init__(self, model: Blocks, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.sharded = isinstance(optimizer, ZeroOptimizer)
        self._held: dict[int, Any] = {}

    def act(self, name: str, number: int = 0, inside: Any = ()) -> None:
        if name == "train":
            train(self.model, self.optimizer, self.model.inputs)
        elif name == "write":
            with self.optimizer.gathered(self.model.weight(number), write=True) if self.sharded else nullcontext():
                self.model.weight(number).data.mul_(0.5 + 3 * self.optimizer.rank if self.sharded else 0.5)
                for action in inside:
                    self._act_inside(*action)
        elif self.sharded:
            self._act_alone(name, number)

    def _act_alone(self, name: str, number: int) -> None:
        weight = self.model.weight(number)
        if name == "hold":
            with self.optimizer.gathered(weight):
                self._held[number] = weight.detach().numpy()
        elif name == "free":
            self._held.pop(number, None)
        elif name == "scribble" and number in self._held:
            self._held[number].fill(77)  # in common memory an edit of the parameter, elsewhere nothing
            if not self.optimizer._storage.unit_hooks.needs_gather:
                self._assert_told(number)
        elif name == "edit":
            with self.optimizer.gathered(weight):
                weight.data.mul_(2)
            self._assert_told(number)

    def _assert_told(self, number: int) -> None:
        message = error_of(self.optimizer.check_replicas)
        assert f"'{number}.weight' was edited while its unit was gathered" in message

    def _act_inside(self, name: str, number: int) -> None:
        if name == "write":
            self.act(name, number)
        elif name == "forward":
            with torch.no_grad():
                self.model(self.model.inputs)
        elif self.sharded:
            with suppress(PlannedError), self.optimizer.gathered(self.model.weight(number)):
                if name == "leave":
                    raise PlannedError

    def values(self) -> list[Tensor]:
        if self.sharded:
            self.optimizer.check_replicas()
        with self.optimizer.gathered() if self.sharded else nullcontext():
            return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.mark.hypothesis
@pytest.mark.parametrize("world", ["travel", "common"])
@given(
    width=st.sampled_from([4, 17, 40]),
    cap=st.sampled_from([1e-6, 0.005, 25.0]),
    actions=st.lists(ACTIONS, min_size=3, max_size=10),
)
@settings(max_examples=settings().max_examples // 2)
def test_after_whatever_is_done_every_rank_sees_what_the_plain_loop_sees(
    world: str, width: int, cap: float, actions: list[Any]
) -> None:
    def program(model: Blocks, optimizer: Any) -> list[list[Tensor]]:
        trained, seen = Trained(model, optimizer), []
        for number, action in enumerate(actions):
            trained.act(*action)
            if number % 2:
                seen.append(trained.values())
        return seen

    plain = Blocks(width)
    expected = program(plain, torch.optim.SGD(plain.parameters(), lr=SLOWLY))
    for seen, _ in on_blocks(world, width, program, bucket_cap_mb=cap):
        for ours, theirs in zip(seen, expected, strict=True):
            for value, other in zip(ours, theirs, strict=True):
                assert_same_bits(value, other)
