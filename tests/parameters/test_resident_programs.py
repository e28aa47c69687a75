"""Whatever is held, written and left, in common memory or not, every rank sees what the plain loop sees."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from collectives import Transport, on_threads

from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.plain import assert_same_bits
from ..support.sockets import on_sockets
from .stage3 import SLOWLY, Blocks, train, zero

RANKS = {"travel": on_threads, "common": on_sockets}
NUMBERS = st.integers(0, 2)
INSIDE = st.tuples(st.sampled_from(["write", "read", "leave", "forward"]), NUMBERS)
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["hold", "free", "scribble", "edit"]), NUMBERS),
    st.tuples(st.just("write"), NUMBERS, st.lists(INSIDE, max_size=3)),
    st.tuples(st.just("train")),
)


class PlannedError(Exception):
    """Raised to leave a block."""


class Plain:
    """The actions on a model that always has its parameters. Equal batches of all ranks are one."""

    def __init__(self, width: int) -> None:
        self.model = Blocks(width)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=SLOWLY)

    def act(self, name: str, number: int = 0, inside: Any = ()) -> None:
        if name == "train":
            train(self.model, self._optimizer, self.model.inputs)
        elif name == "write":
            self.model.weight(number).data.mul_(0.5)
            for action in inside:
                self.act(*action)

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


class Sharded:
    """The same actions on one rank at stage 3."""

    def __init__(self, transport: Transport, width: int, cap: float) -> None:
        self.model = Blocks(width)
        self._optimizer = zero(self.model, transport, lr=SLOWLY, bucket_cap_mb=cap)
        self._held: dict[int, Any] = {}

    def act(self, name: str, number: int = 0, inside: Any = ()) -> None:
        weight = self.model.weight(number)
        if name == "train":
            train(self.model, self._optimizer, self.model.inputs)
        elif name == "hold":
            with self._optimizer.gathered(weight):
                self._held[number] = weight.detach().numpy()
        elif name == "free":
            self._held.pop(number, None)
        elif name == "scribble" and number in self._held:
            self._held[number].fill(77)  # in common memory an edit of the parameter, elsewhere nothing
            if not self._optimizer._storage.unit_hooks.needs_gather:
                self._assert_told(number)
        elif name == "edit":
            with self._optimizer.gathered(weight):
                weight.data.mul_(2)
            self._assert_told(number)
        elif name == "write":
            with self._optimizer.gathered(weight, write=True):
                weight.data.mul_(0.5 + 3 * self._optimizer.rank)
                for action in inside:
                    self._act_inside(*action)

    def _assert_told(self, number: int) -> None:
        message = error_of(self._optimizer.check_replicas)
        assert f"'{number}.weight' was edited while its unit was gathered" in message

    def _act_inside(self, name: str, number: int) -> None:
        if name == "write":
            self.act(name, number)
        elif name == "forward":
            with torch.no_grad():
                self.model(self.model.inputs)
        else:
            with suppress(PlannedError), self._optimizer.gathered(self.model.weight(number)):
                if name == "leave":
                    raise PlannedError

    def values(self) -> list[Tensor]:
        self._optimizer.check_replicas()
        with self._optimizer.gathered():
            return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.mark.hypothesis
@pytest.mark.parametrize("world", RANKS)
@given(
    width=st.sampled_from([4, 17, 40]),
    cap=st.sampled_from([1e-6, 0.005, 25.0]),
    actions=st.lists(ACTIONS, min_size=3, max_size=10),
)
@settings(max_examples=settings().max_examples // 2)
def test_after_whatever_is_done_every_rank_sees_what_the_plain_loop_sees(
    world: str, width: int, cap: float, actions: list[Any]
) -> None:
    def program(trained: Plain | Sharded) -> list[list[Tensor]]:
        seen = []
        for number, action in enumerate(actions):
            trained.act(*action)
            if number % 2:
                seen.append(trained.values())
        return seen

    expected = program(Plain(width))
    for seen in RANKS[world](2, lambda transport: program(Sharded(transport, width, cap)), timeout=2 * BOUND):
        for ours, theirs in zip(seen, expected, strict=True):
            for value, other in zip(ours, theirs, strict=True):
                assert_same_bits(value, other)
