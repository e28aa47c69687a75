"""The tables of `test_released` on two ranks with common memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ..support.sockets import on_sockets
from .test_released import ACTIONS, EDITS, KEPT, MOMENTS, OF_KEPT, SCENES, UNCHANGED, WHOLE, expected, program_of
from .wrong_moments import OUTSIDE, Forks


def play(name: str) -> Any:
    """Run an action in a process of its own."""
    return on_sockets(2, program_of(name), timeout=5)


OUTCOMES: dict[str, Any] = {
    **{name: expected(outcome, MOMENTS)[1] for name, (outcome, _) in ACTIONS.items()},
    **{name: expected("raises", OUTSIDE)[1] for name in WHOLE},
    **{name: expected("right", OUTSIDE)[1] for name in UNCHANGED},
    **{name: expected(outcome)[1] for name, (outcome, _) in SCENES.items()},
    **{name: expected(several)[1] for name, (several, _, _) in EDITS.items()},
    **{name: expected(OF_KEPT)[1] for name in KEPT},
}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks(__name__)
    yield made
    made.stop()


@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.by_default(
    "p + 1",
    "p.mul_()",
    "torch.tensor(p)",
    "model.state_dict()",
    "a scripted p.zero_()",
    "array *= 2 in gathered()",
    "an array from a forward, after a step",
)
def test_a_wrong_moment_has_its_outcome_in_common_memory(forks: Forks, name: str) -> None:
    assert forks.play(name) == OUTCOMES[name]
