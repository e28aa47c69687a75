"""A call at a wrong moment is refused with the remedy on every rank, and the next steps have the plain loop's bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ..dials import ASKED
from ..dials.loops import steps
from ..dials.record import Moment, config_with
from ..support.machine.hosts import ThreadsOnHosts
from ..support.machine.program import Wrong
from ..support.machine.run import run
from ..support.rows import rows

pytestmark = pytest.mark.usefixtures("copied_from_the_host")


def chosen(stages: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the stage that the default run takes, 2 if it is one, and the others."""
    first = 2 if 2 in stages else stages[-1]
    return [first], [stage for stage in stages if stage != first]


CASES = [
    pytest.param(stage, moment, id=f"{dial.name}, stage {stage}: {next(iter(moment.calls))}")
    for dial in ASKED
    for moment in rows(dial.moments[::5], [each for n, each in enumerate(dial.moments) if n % 5])
    for stage in rows(*chosen(moment.stages))
]


@pytest.mark.law("exceptions")
@pytest.mark.law("refused calls")
@pytest.mark.parametrize(("stage", "moment"), CASES)
def test_a_call_at_a_wrong_moment_changes_nothing(stage: int, moment: Moment, request: pytest.FixtureRequest) -> None:
    if moment.unseen:
        request.getfixturevalue("unseen")
    config = config_with({"stage": stage, "world_size": 2, **moment.changes})
    wrong = [Wrong(*call) for call in moment.calls.items()]
    run(config, *moment.before, *wrong, *moment.after, *steps(2), backend=ThreadsOnHosts())
